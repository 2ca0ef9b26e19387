// Copies between host memory and the device in 16-byte lanes: gather, stage, mirror, restore.
//
// The link is the limit, and four things keep it busy (benchmarks/gpu/translation.py):
//  - Rows in flight: 0.2 to 0.4 MB of them; more only queue.
//  - Host addresses in order. A row of 656 bytes lies on a page or two of its own, and its translation is
//    a line of page table. In random order the upper levels of the table miss as well: 16 GiB of rows
//    then stop at 19 to 24 GB/s. So a long list of short rows is put in order first, and each thread
//    block walks up through a range of it.
//  - Room for the page tables in the second-level cache (8 bytes for 4 KiB of host memory). What is
//    copied passes through once and is marked to leave first: 34 GB/s became 42. Few thread blocks: more
//    of them have more of it in the cache at once.
//  - Even work. Multiprocessors share their paths in groups, and the hardware puts the first thread
//    blocks into few groups: some are half as fast as others. A warp whose range is done takes rows from
//    the range with the most left.
//
// Compiled with HS_COPY_UNROLL, HS_THREADS, HS_BLOCKS_PER_SM, HS_SORTS and HS_POW2.
#include "common.cuh"

constexpr i32 kThreads = HS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kUnroll = HS_COPY_UNROLL;
constexpr i32 kBins = 8192;
constexpr i32 kScanUnroll = kThreads == 1024 || __CUDA_ARCH__ >= 1000 ? 5 : 9;
constexpr i32 kMaxRanges = 32;
constexpr i32 kOwn = 768;
static_assert(kThreads == 1024 || kThreads == 512 || kThreads == 256, "block scan");

struct RowArgs {
    u64 host[HS_MAX_LAYERS];
    u64 device[HS_MAX_LAYERS];
    const i64* host_rows;    // [num_lists, list_stride]
    const i64* device_rows;  // the same shape; null: entry i is row i
    const i32* counts;       // [num_lists]; null: one list of `fixed_count`
    u8* sorted;              // a SortedRow for each entry of the lists
    u8* control;             // SortControl, all zero before and after a launch
    i64 list_stride;
    i64 fixed_count;
    i64 host_block_bytes;
    i64 host_row_bytes;      // from one row to the next
    i64 device_block_bytes;
    i64 device_block_rows;   // 0: device rows are contiguous, whatever their block
    i32 num_lists;
    i32 num_layers;
    i32 row_lanes;           // 16-byte lanes of one layer's row
    i32 block_size;
    i32 block_shift;
    u32 bin_scale;           // a host block's bin is the high word of the product with it
    i32 sort_min_rows;       // shorter lists are copied in their order
    u32 sorting_blocks;      // at most so many thread blocks work where rows are sorted
    i32 adjacent;            // 1 where the layers of a row lie side by side in host memory
};

struct BlockArgs {
    u64 host[HS_MAX_LAYERS];
    u64 device[HS_MAX_LAYERS];
    const i32* host_blocks;
    const i32* device_blocks;
    i64 num_pairs;
    i64 host_block_bytes;
    i64 host_row_bytes;
    i64 device_block_bytes;
    i32 num_layers;
    i32 row_lanes;
    i32 block_size;
    i32 adjacent_layers;     // layers whose rows lie side by side in host memory: all, or 1
};

static_assert(sizeof(RowArgs) == HS_SIZEOF_ROWS, "mirrored in launches.py");
static_assert(sizeof(BlockArgs) == HS_SIZEOF_BLOCKS, "mirrored in launches.py");

enum Direction { kToDevice, kToHost };

// Leaves the second-level cache before anything else does.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Marked to leave the cache first (kOnce), or like anything else.
enum Caching { kOnce, kUsual };

template <Caching C> __device__ __forceinline__ uint4 load_lane(u64 address) {
    uint4 v;
    if (C == kOnce) {
        asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(address), "l"(evict_first()) : "memory");
    } else {
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    }
    return v;
}

template <Caching C> __device__ __forceinline__ void store_lane(u64 address, uint4 v) {
    if (C == kOnce) {
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                     :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(evict_first())
                     : "memory");
    } else {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
}

__device__ __forceinline__ i64 host_offset(const RowArgs& a, i64 row) {
    const i64 block = block_of(row, a.block_size, a.block_shift);
    return block * a.host_block_bytes + (row - block * a.block_size) * a.host_row_bytes;
}

__device__ __forceinline__ i64 device_offset(const RowArgs& a, i64 row) {
    const i64 row_bytes = (i64)a.row_lanes * 16;
    if (a.device_block_rows == 0) return row * row_bytes;
    const i64 block = row / a.device_block_rows;
    return block * a.device_block_bytes + (row - block * a.device_block_rows) * row_bytes;
}

// Copies the rows of lanes 0 .. count - 1 of the warp, in these layers, as one run of 16-byte lanes.
template <Direction D>
__device__ __forceinline__ void copy_rows(
    const RowArgs& a, i64 host, i64 device, i32 count, i32 first_layer, i32 layers
) {
    const i32 thread = threadIdx.x % 32;
    const i32 lanes_a_row = layers * a.row_lanes;
    const i32 total = count * lanes_a_row;
#pragma unroll 1
    for (i32 base = 0; base < total; base += 32 * kUnroll) {
        uint4 data[kUnroll];
        u64 to[kUnroll];
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            const i32 q = base + u * 32 + thread;
            const i32 row = min(q / lanes_a_row, count - 1);
            const i32 in_row = q - row * lanes_a_row;
            const i64 from_host = __shfl_sync(kFullWarp, host, row);
            const i64 on_device = __shfl_sync(kFullWarp, device, row);
            to[u] = 0;
            if (q < total && from_host >= 0 && on_device >= 0) {
                const i32 layer = in_row / a.row_lanes;
                const i64 in_layer = (i64)(in_row - layer * a.row_lanes) * 16;
                const u64 at_host = a.host[first_layer + layer] + from_host + in_layer;
                const u64 at_device = a.device[first_layer + layer] + on_device + in_layer;
                data[u] = load_lane<D == kToDevice ? kOnce : kUsual>(D == kToDevice ? at_host : at_device);
                to[u] = D == kToDevice ? at_device : at_host;
            }
        }
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            if (to[u] != 0) store_lane<D == kToDevice ? kOnce : kUsual>(to[u], data[u]);
        }
    }
}

// Offsets of one entry; negative for padding.
__device__ __forceinline__ void entry_offsets(
    const RowArgs& a, i64 entry, i64& host, i64& device
) {
    const i64 host_row = a.host_rows[entry];
    const i64 device_row = a.device_rows ? a.device_rows[entry] : entry;
    host = host_row < 0 ? -1 : host_offset(a, host_row);
    device = device_row < 0 ? -1 : device_offset(a, device_row);
}

struct Lists {
    u32 starts[1025];  // entries of lists before
    u32 warp_sums[32];
    u32 low;   // first bin of this thread block
    u32 high;  // past its last one
    // Only where entries are sorted: a launch that never sorts has less shared memory, which need not
    // be set aside on every multiprocessor before it starts.
    u32 bins[kBins + 1];  // entries in bins before; the next free place of a bin while they are placed
    u32 own[kWarps][kOwn];  // entries of this block's bins, found by a warp and not placed yet
};
static_assert(sizeof(Lists) <= HS_LIST_BYTES, "dynamic shared memory, see launches.py");
static_assert(kBins % kThreads == 0, "bins of a thread");

// Where a row is copied from and to, in bytes from the start of a layer's pages.
struct __align__(16) SortedRow {
    i64 host;
    i64 device;
};

// What the thread blocks of one launch tell each other. The last one to end leaves zeros.
struct SortControl {
    u64 ranges[kMaxRanges];  // first sorted row of a block, and 1 + their number << 32 once they are there
    u32 cursors[kMaxRanges];  // units of a range that somebody has taken
    u32 ended;
};
static_assert(sizeof(SortControl) <= HS_CONTROL_BYTES, "see launches.py");

__device__ __forceinline__ i32 batch_rows(const RowArgs& a, i32 layers, i64 rows, i64 warps) {
    const i32 most = min(32, max(1, 32 * kUnroll / (layers * a.row_lanes)));
    return (i32)min((i64)most, max((i64)1, (rows + warps - 1) / warps));
}

// Counts of up to kThreads lists, summed: starts[i + 1] - starts[i] is list i's.
__device__ __forceinline__ u32 sum_counts(const RowArgs& a, Lists& s, i32 first, i32 lists) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32 count = 0;
    if ((i32)threadIdx.x < lists) {
        count = a.counts ? a.counts[first + threadIdx.x] : (u32)a.fixed_count;
        count = min(count, (u32)a.list_stride);
    }
    u32 total;
    const u32 before = warp_exclusive_scan(count, total);
    if (thread == 0) s.warp_sums[warp] = total;
    __syncthreads();
    const u32 of_warp = thread < kWarps ? s.warp_sums[thread] : 0;
    const u32 base = __shfl_sync(kFullWarp, warp_exclusive_scan(of_warp, total), warp);
    s.starts[threadIdx.x] = base + before;
    if (threadIdx.x == 0) s.starts[lists] = total;
    __syncthreads();
    return total;
}

constexpr i32 kFewUnroll = 8;

// A few rows: one a warp, and the addresses within a row are ready before the row ids arrive. The ids
// are read before it is known whether there are so many. Returns whether that was all. Two warps a row
// are slower by a tenth: both wait for the row's translation.
template <Direction D>
__device__ __forceinline__ bool copy_few(const RowArgs& a) {
    const u32 lists = a.num_lists, step = gridDim.x * kWarps / max(lists, 1u);
    if (a.counts == nullptr || lists > 32 || step == 0) return false;
    const i32 thread = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const u32 list = warp % lists;
    u32 index = warp / lists;
    const u32 count = thread < (i32)lists ? a.counts[thread] : 0;
    i64 host = -1, device = -1;
    if (index < a.list_stride) entry_offsets(a, list * a.list_stride + index, host, device);
    const i32 lanes = a.num_layers * a.row_lanes;
    u64 at_host[kFewUnroll], at_device[kFewUnroll];
#pragma unroll
    for (i32 u = 0; u < kFewUnroll; ++u) {
        const i32 q = min(u * 32 + thread, lanes - 1), layer = q / a.row_lanes;
        const i64 in_layer = (i64)(q - layer * a.row_lanes) * 16;
        at_host[u] = a.host[layer] + in_layer;
        at_device[u] = a.device[layer] + in_layer;
    }
    if (warp_sum(count) > gridDim.x * kWarps || lanes > 32 * kFewUnroll) return false;
    const u32 rows = __shfl_sync(kFullWarp, count, list);
    while (index < rows) {
        uint4 data[kFewUnroll];
        const i32 lanes_left = host < 0 || device < 0 ? 0 : lanes - thread;
#pragma unroll
        for (i32 u = 0; u < kFewUnroll; ++u) {
            if (u * 32 < lanes_left) {
                data[u] = load_lane<kUsual>(D == kToDevice ? at_host[u] + host : at_device[u] + device);
            }
        }
#pragma unroll
        for (i32 u = 0; u < kFewUnroll; ++u) {
            if (u * 32 < lanes_left) {
                store_lane<kUsual>(D == kToDevice ? at_device[u] + device : at_host[u] + host, data[u]);
            }
        }
        index += step;
        if (index < rows) entry_offsets(a, list * a.list_stride + index, host, device);
    }
    return true;
}

// The entry at a place of all lists in their order.
__device__ __forceinline__ i64 entry_in_order(
    const RowArgs& a, const Lists& s, i32 first, i32 lists, u32 index
) {
    i32 low = 0, high = lists;  // the last list that starts at or before index
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        if (s.starts[middle] <= index) low = middle; else high = middle;
    }
    return (i64)(first + low) * a.list_stride + (index - s.starts[low]);
}

// Bins are runs of host blocks, in the order of addresses.
__device__ __forceinline__ u32 bin_of(const RowArgs& a, i64 row) {
    const u32 block = (u32)block_of(row, a.block_size, a.block_shift);
    return min(__umulhi(block, a.bin_scale), (u32)kBins - 1);
}

// One warp's part of a list, U rows of a thread in flight.
template <i32 U> struct Batch {
    i64 row[U];
    u32 entry;  // of row[0]
    u32 count;  // entries from the warp's first row[0] on
};

// Loads the next batch that is not empty, from `item` on. Lists are dealt out before their parts: all
// may be as short as one batch. Returns whether there was one.
template <i32 U>
__device__ __forceinline__ bool load_batch(
    const RowArgs& a, const Lists& s, u32 items, u32& item, Batch<U>& batch
) {
    const u32 lists = a.num_lists, thread = threadIdx.x % 32;
#pragma unroll 1
    for (; item < items; item += kWarps) {
        const u32 part = item / lists, list = item - part * lists;
        const u32 count = s.starts[list + 1] - s.starts[list];
        const u32 from = part * 32 * U;
        if (from >= count) continue;
        batch.entry = list * (u32)a.list_stride + from + thread;
        batch.count = count - from;
#pragma unroll
        for (i32 u = 0; u < U; ++u) {
            batch.row[u] = -1;
            if (u * 32 + thread < batch.count) batch.row[u] = a.host_rows[batch.entry + u * 32];
        }
        item += kWarps;
        return true;
    }
    return false;
}

// Calls visit(batch) for all entries, each warp for its own. The next batch is in flight meanwhile.
template <i32 U, typename Visit>
__device__ __forceinline__ void for_each_batch(const RowArgs& a, const Lists& s, Visit visit) {
    const u32 items = (u32)((a.list_stride + 32 * U - 1) / (32 * U)) * a.num_lists;
    u32 item = threadIdx.x / 32;
    Batch<U> next;
    bool more = load_batch<U>(a, s, items, item, next);
#pragma unroll 1
    while (more) {
        const Batch<U> now = next;
        more = load_batch<U>(a, s, items, item, next);
        visit(now);
    }
}

__device__ __forceinline__ void count_bins(const RowArgs& a, Lists& s) {
    for (i32 i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    if (threadIdx.x == 0) {
        s.low = kBins;
        s.high = 0;
    }
    __syncthreads();
    for_each_batch<kScanUnroll>(a, s, [&](const Batch<kScanUnroll>& batch) {
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            if (u * 32 >= batch.count) break;
            if (batch.row[u] >= 0) atomicAdd(&s.bins[bin_of(a, batch.row[u])], 1u);
        }
    });
    __syncthreads();
}

// Sums before each bin, in place, and the bins of this thread block: a bin belongs to the block that
// its first row falls to when rows are shared out evenly. Every block counts for itself: none waits.
__device__ __forceinline__ void share_bins(Lists& s, u32 blocks) {
    constexpr i32 kEach = kBins / kThreads;
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32* bins = s.bins + warp * 32 * kEach + thread;
    u32 counts[kEach], before[kEach], of_warp = 0, total;
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        counts[i] = bins[i * 32];
        before[i] = of_warp + warp_exclusive_scan(counts[i], total);
        of_warp += total;
    }
    if (thread == 0) s.warp_sums[warp] = of_warp;
    __syncthreads();
    of_warp = thread < kWarps ? s.warp_sums[thread] : 0;
    const u32 base = __shfl_sync(kFullWarp, warp_exclusive_scan(of_warp, total), warp);
    const u64 begin = (u64)blockIdx.x * total, end = begin + total;
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        const u32 bin = (warp * kEach + i) * 32 + thread, at = base + before[i];
        bins[i * 32] = at;
        const u64 place = (u64)at * blocks;
        if (counts[i] && begin <= place && place < end) {
            // A plain test first: few threads have an end of the range.
            if (bin < s.low) atomicMin(&s.low, bin);
            if (bin >= s.high) atomicMax(&s.high, bin + 1);
        }
    }
    if (threadIdx.x == kThreads - 1) s.bins[kBins] = total;
    __syncthreads();
}

// Puts the entries that a warp has found where the sums say, as rows.
__device__ __forceinline__ void place_entries(
    const RowArgs& a, Lists& s, const u32* own, u32 count
) {
    constexpr i32 kAtOnce = 4;
    SortedRow* sorted = (SortedRow*)a.sorted;
#pragma unroll 1
    for (u32 base = threadIdx.x % 32; base < count; base += 32 * kAtOnce) {
        i64 row[kAtOnce], device_row[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            if (base + i * 32 >= count) continue;
            const u32 entry = own[base + i * 32];
            row[i] = a.host_rows[entry];
            device_row[i] = a.device_rows ? a.device_rows[entry] : entry;
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
            if (base + i * 32 >= count) continue;
            const u32 place = atomicAdd(&s.bins[bin_of(a, row[i])], 1u);
            sorted[place] = SortedRow{
                host_offset(a, row[i]), device_row[i] < 0 ? -1 : device_offset(a, device_row[i])};
        }
    }
}

// Puts the rows of this block's bins where the sums say. A few lanes of each batch have one: they are
// gathered first, for what follows takes as long for one lane as for all.
__device__ __forceinline__ void place_rows(const RowArgs& a, Lists& s) {
    const u32 low = s.low, high = s.high;
    u32* own = s.own[threadIdx.x / 32];
    u32 held = 0;
    for_each_batch<kScanUnroll>(a, s, [&](const Batch<kScanUnroll>& batch) {
        if (held > kOwn - 32 * kScanUnroll) {
            __syncwarp();
            place_entries(a, s, own, held);
            __syncwarp();
            held = 0;
        }
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            if (u * 32 >= batch.count) break;
            const u32 bin = batch.row[u] < 0 ? kBins : bin_of(a, batch.row[u]);
            const bool mine = low <= bin && bin < high;
            const u32 mask = __ballot_sync(kFullWarp, mine);
            if (mine) own[held + __popc(mask & lanes_below())] = batch.entry + u * 32;
            held += __popc(mask);
        }
    });
    __syncwarp();
    place_entries(a, s, own, held);
}

// One range of sorted rows, in units: so many rows of one layer, or of all where they are adjacent.
struct Range {
    u32 index;
    u32 start;
    u32 count;
    u32 units_a_layer;
    u32 units;
};

__device__ __forceinline__ Range make_range(const RowArgs& a, u32 index, u64 packed, u32 rows) {
    Range r;
    r.index = index;
    r.start = (u32)packed;
    r.count = packed ? (u32)(packed >> 32) - 1 : 0;
    r.units_a_layer = (r.count + rows - 1) / rows;
    r.units = r.units_a_layer * (a.adjacent ? 1 : a.num_layers);
    return r;
}

__device__ __forceinline__ u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

constexpr i32 kMaxPolls = 64;

// The range with the most units left; without units where all are taken. While others still sort, asks
// for some 50 us: they need not even run yet, and would copy their rows themselves.
__device__ __forceinline__ Range fullest_range(
    const RowArgs& a, SortControl* control, u32 blocks, u32 rows
) {
    const u32 thread = threadIdx.x % 32;
#pragma unroll 1
    for (i32 poll = 0; poll < kMaxPolls; ++poll) {
        u64 packed = 1ull << 32;
        u32 taken = 0;
        if (thread < blocks) {
            packed = load_acquire(&control->ranges[thread]);
            taken = __ldcg(&control->cursors[thread]);
        }
        const u32 units = make_range(a, thread, packed, rows).units;
        const u32 left = units > taken ? units - taken : 0;
        const u32 most = __reduce_max_sync(kFullWarp, left);
        if (most) {
            const u32 best = __ffs(__ballot_sync(kFullWarp, left == most)) - 1;
            return make_range(a, best, __shfl_sync(kFullWarp, packed, best), rows);
        }
        if (__all_sync(kFullWarp, packed != 0)) break;
    }
    return make_range(a, 0, 0, rows);
}

__device__ __forceinline__ u32 take_unit(SortControl* control, const Range& r) {
    u32 unit = 0;
    if (threadIdx.x % 32 == 0) unit = atomicAdd(&control->cursors[r.index], 1u);
    return unit;  // of the first lane
}

// Copies units of this block's range, then of the others.
template <Direction D>
__device__ __forceinline__ void copy_sorted_rows(
    const RowArgs& a, SortControl* control, u32 blocks, u64 packed
) {
    const i32 thread = threadIdx.x % 32;
    const i32 layers = a.adjacent ? a.num_layers : 1;
    const u32 rows = min(32, max(1, 32 * kUnroll / (layers * a.row_lanes)));
    Range r = make_range(a, blockIdx.x, packed, rows);
    u32 taken = packed ? take_unit(control, r) : 0;  // without a range of its own: 0 of 0 units
    while (true) {
        const u32 unit = __shfl_sync(kFullWarp, taken, 0);
        if (unit >= r.units) {
            r = fullest_range(a, control, blocks, rows);
            if (r.units == 0) break;
            taken = take_unit(control, r);
            continue;
        }
        taken = take_unit(control, r);  // on its way while this one is copied
        const u32 layer = unit / r.units_a_layer, first = (unit - layer * r.units_a_layer) * rows;
        const i32 count = min(rows, r.count - first);
        SortedRow row{-1, -1};
        if (thread < count) {
            const longlong2 v = __ldcg((const longlong2*)a.sorted + r.start + first + thread);
            row = SortedRow{v.x, v.y};
        }
        copy_rows<D>(a, row.host, row.device, count, layer, layers);
    }
}

// Puts this block's rows in order and tells the others. Returns what it told them.
__device__ __forceinline__ u64 sort_rows(
    const RowArgs& a, Lists& s, SortControl* control, u32 blocks
) {
    count_bins(a, s);
    share_bins(s, blocks);
    u64 packed = 1ull << 32;
    if (s.low < s.high) {
        const u32 start = s.bins[s.low];
        packed = ((u64)(s.bins[s.high] - start) + 1) << 32 | start;
    }
    __syncthreads();
    place_rows(a, s);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch(&control->ranges[blockIdx.x], packed);
    }
    return packed;
}

// Copies the entries of up to kThreads lists by host address.
template <Direction D>
__device__ __forceinline__ void copy_sorted(const RowArgs& a, Lists& s) {
    SortControl* control = (SortControl*)a.control;
    const u32 blocks = min(gridDim.x, a.sorting_blocks);
    if (blockIdx.x >= blocks) return;
    const u64 packed = sort_rows(a, s, control, blocks);
    copy_sorted_rows<D>(a, control, blocks, packed);
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&control->ended, 1u) == blocks - 1) {
        for (i32 i = 0; i < kMaxRanges; ++i) {
            control->ranges[i] = 0;
            control->cursors[i] = 0;
        }
        control->ended = 0;
    }
}

// Copies the entries of up to kThreads lists in their order.
template <Direction D>
__device__ __forceinline__ void copy_in_order(
    const RowArgs& a, const Lists& s, i32 first, i32 lists, u32 total
) {
    const i32 thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 warps = gridDim.x * kWarps, rows = batch_rows(a, a.num_layers, total, warps);
#pragma unroll 1
    for (u32 base = (warp * gridDim.x + blockIdx.x) * rows; base < total; base += warps * rows) {
        const u32 count = min(rows, total - base);
        i64 host = -1, device = -1;
        if (thread < (i32)count) {
            const i64 entry = entry_in_order(a, s, first, lists, base + thread);
            entry_offsets(a, entry, host, device);
        }
        copy_rows<D>(a, host, device, count, 0, a.num_layers);
    }
}

template <Direction D>
__device__ __forceinline__ void copy_lists(const RowArgs& a) {
    extern __shared__ __align__(16) u8 shared[];
    Lists& s = *(Lists*)shared;
    if (copy_few<D>(a)) return;
#pragma unroll 1
    for (i32 first = 0; first < a.num_lists; first += kThreads) {
        const i32 lists = min(kThreads, a.num_lists - first);
        const u32 total = sum_counts(a, s, first, lists);
#if HS_SORTS
        if (a.control && total >= (u32)a.sort_min_rows) {
            copy_sorted<D>(a, s);
            return;
        }
#endif
        copy_in_order<D>(a, s, first, lists, total);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_rows_to_device(const __grid_constant__ RowArgs a) {
    copy_lists<kToDevice>(a);
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_rows_to_host(const __grid_constant__ RowArgs a) {
    copy_lists<kToHost>(a);
}

// Whole blocks. Lanes go in the order of host addresses: a warp moves 512 contiguous bytes at once.
template <Direction D>
__device__ __forceinline__ void copy_blocks(const BlockArgs& a) {
    const i32 thread = threadIdx.x % 32;
    const i32 lanes_a_row = a.adjacent_layers * a.row_lanes;
    const i32 lanes = a.block_size * lanes_a_row;
    const i32 chunks = (lanes + 32 * kUnroll - 1) / (32 * kUnroll);
    const i32 parts = a.num_layers / a.adjacent_layers;
    const i64 row_bytes = (i64)a.row_lanes * 16;
    const i64 total = a.num_pairs * parts * chunks;
    for (i64 item = (i64)blockIdx.x * kWarps + threadIdx.x / 32; item < total;
         item += (i64)gridDim.x * kWarps) {
        const i64 page = item / chunks;
        const i64 pair = page / parts;
        const i32 part = (i32)(page - pair * parts);
        const i64 host_block = a.host_blocks[pair], device_block = a.device_blocks[pair];
        if (host_block < 1 || device_block < 1) continue;
        const i32 base = (i32)(item - page * chunks) * 32 * kUnroll + thread;
        const u64 host = a.host[part] + host_block * a.host_block_bytes;
        const i64 device = device_block * a.device_block_bytes;
        uint4 data[kUnroll];
        u64 to[kUnroll];
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            const i32 q = base + u * 32;
            const i32 row = q / lanes_a_row, in_row = q - row * lanes_a_row;
            const i32 inner = in_row / a.row_lanes, lane = in_row - inner * a.row_lanes;
            to[u] = 0;
            if (q < lanes) {
                const u64 at_host = host + row * a.host_row_bytes + (i64)in_row * 16;
                const u64 at_device =
                    a.device[part + inner] + device + row * row_bytes + (i64)lane * 16;
                data[u] = load_lane<D == kToDevice ? kOnce : kUsual>(D == kToDevice ? at_host : at_device);
                to[u] = D == kToDevice ? at_device : at_host;
            }
        }
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            if (to[u] != 0) store_lane<D == kToDevice ? kOnce : kUsual>(to[u], data[u]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_blocks_to_device(const __grid_constant__ BlockArgs a) {
    copy_blocks<kToDevice>(a);
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_blocks_to_host(const __grid_constant__ BlockArgs a) {
    copy_blocks<kToHost>(a);
}
