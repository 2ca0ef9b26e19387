// Copies between host memory and the device in 16-byte lanes: gather, stage, mirror, restore.
//
// The link is the limit, and two things keep it busy. Rows in flight: about 1 MB of them, more only
// queue. And host addresses in order: rows of 656 bytes in random order over 16 GiB stop at 19 to 21
// GB/s; sorted by address, each multiprocessor in a range of its own, at 30 to 44, more the denser the
// rows lie (benchmarks/gpu/bench_kernels.py). It behaves as misses of address translation would; no
// counter was read. So a long list of short rows is split among the thread blocks into ranges of host
// addresses with about equally many rows, and each block walks up through its range.
//
// Compiled with HS_COPY_UNROLL, HS_THREADS, HS_BLOCKS_PER_SM, HS_LIST_CAPACITY and HS_POW2.
#include "common.cuh"

constexpr i32 kThreads = HS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kUnroll = HS_COPY_UNROLL;
constexpr i32 kListCapacity = HS_LIST_CAPACITY;
constexpr i32 kWarpCapacity = kListCapacity / kWarps;
constexpr i32 kBins = 2048;
constexpr i32 kScanUnroll = 8;
static_assert(kThreads == 1024 || kThreads == 512 || kThreads == 256, "block scan");

struct RowArgs {
    u64 host[HS_MAX_LAYERS];
    u64 device[HS_MAX_LAYERS];
    const i64* host_rows;    // [num_lists, list_stride]
    const i64* device_rows;  // the same shape; null: entry i is row i
    const i32* counts;       // [num_lists]; null: one list of `fixed_count`
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
    i32 bin_shift;           // log2 of the bytes of host memory in one bin: at most kBins bins
    i32 sort_min_rows;       // shorter lists are copied in their order
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

static_assert(sizeof(RowArgs) == HS_SIZEOF_ROWS, "mirrored in cuda.py");
static_assert(sizeof(BlockArgs) == HS_SIZEOF_BLOCKS, "mirrored in cuda.py");

enum Direction { kToDevice, kToHost };

// Host memory is read once: nothing is kept in L1.
__device__ __forceinline__ uint4 load_lane(u64 address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_lane(u64 address, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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
                data[u] = load_lane(D == kToDevice ? at_host : at_device);
                to[u] = D == kToDevice ? at_device : at_host;
            }
        }
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            if (to[u] != 0) store_lane(to[u], data[u]);
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
    u32 starts[1025];  // entries of lists before, in this group of lists
    u32 warp_sums[32];
    u32 low;
    u32 high;
    u32 bins[kBins];
    // From here on only where entries are sorted: a launch that never sorts has less shared memory,
    // which need not be set aside on every multiprocessor before it starts.
    u32 entries[kListCapacity];  // a region for each warp
    u16 bin_of[kListCapacity];
    u16 order[kListCapacity];  // index in `entries`, by bin
};
static_assert(sizeof(Lists) <= HS_LIST_BYTES, "dynamic shared memory, see cuda.py");
static_assert(kBins % kThreads == 0, "bins of a thread");

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
    for (i32 i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    if (threadIdx.x == 0) {
        s.starts[lists] = total;
        s.low = kBins;
        s.high = 0;
    }
    __syncthreads();
    return total;
}

constexpr i32 kFewUnroll = 8;

// A few rows: one a warp, and the addresses within a row are ready before the row ids arrive. The ids
// are read before it is known whether there are so many. Returns whether that was all.
template <Direction D>
__device__ __forceinline__ bool copy_few(const RowArgs& a) {
    if (a.counts == nullptr || a.num_lists > 32) return false;
    const i32 thread = threadIdx.x % 32;
    const u32 lists = a.num_lists, step = gridDim.x * kWarps / lists;
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
    const u32 mine = __shfl_sync(kFullWarp, count, list);
    while (index < mine) {
        uint4 data[kFewUnroll];
        if (host < 0 || device < 0) break;
#pragma unroll
        for (i32 u = 0; u < kFewUnroll; ++u) {
            if (u * 32 + thread < lanes) {
                data[u] = load_lane(D == kToDevice ? at_host[u] + host : at_device[u] + device);
            }
        }
#pragma unroll
        for (i32 u = 0; u < kFewUnroll; ++u) {
            if (u * 32 + thread < lanes) {
                store_lane(D == kToDevice ? at_device[u] + device : at_host[u] + host, data[u]);
            }
        }
        index += step;
        if (index < mine) entry_offsets(a, list * a.list_stride + index, host, device);
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

constexpr u32 kSegment = 32 * kScanUnroll;

__device__ __forceinline__ u32 segments_of(const RowArgs& a) {
    return (u32)((a.list_stride + kSegment - 1) / kSegment);
}

__device__ __forceinline__ u32 bin_of(const RowArgs& a, i64 offset) {
    return min((u32)(offset >> a.bin_shift), (u32)kBins - 1);
}

// Counts every eighth entry by bin: enough to share the rows out.
__device__ __forceinline__ void count_bins(const RowArgs& a, Lists& s, i32 first, i32 lists) {
    const i32 thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 segments = segments_of(a);
    const u64 items = (u64)segments * lists;
    const i64* rows = a.host_rows + (i64)first * a.list_stride;
#pragma unroll 1
    for (u64 base = warp; base < items; base += kWarps * kScanUnroll) {
        i64 row[kScanUnroll];
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            const u64 item = base + u * kWarps;
            row[u] = -1;
            if (item >= items) continue;
            const u32 list = (u32)item / segments;
            const u32 index = ((u32)item - list * segments) * kSegment + thread * kScanUnroll;
            if (index < s.starts[list + 1] - s.starts[list]) {
                row[u] = rows[(u64)list * a.list_stride + index];
            }
        }
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            if (row[u] >= 0) atomicAdd(&s.bins[bin_of(a, host_offset(a, row[u]))], 1u);
        }
    }
    __syncthreads();
}

// Sums before each bin, in place; returns the sum of all.
__device__ __forceinline__ u32 scan_bins(Lists& s) {
    constexpr i32 kEach = kBins / kThreads;
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32 counts[kEach], sum = 0, total;
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        counts[i] = s.bins[threadIdx.x * kEach + i];
        sum += counts[i];
    }
    const u32 before = warp_exclusive_scan(sum, total);
    if (thread == 0) s.warp_sums[warp] = total;
    __syncthreads();
    const u32 of_warp = thread < kWarps ? s.warp_sums[thread] : 0;
    u32 at = before + __shfl_sync(kFullWarp, warp_exclusive_scan(of_warp, total), warp);
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        s.bins[threadIdx.x * kEach + i] = at;
        at += counts[i];
    }
    __syncthreads();
    return total;
}

// Gives each thread block a run of bins with about the same number of rows: a bin belongs to the block
// that its first counted row falls to. Every block counts for itself: none waits for another. A bin
// with no counted row goes with the one before it.
__device__ __forceinline__ void choose_range(
    const RowArgs& a, Lists& s, i32 first, i32 lists, u32& low, u32& high
) {
    count_bins(a, s, first, lists);
    const u32 total = max(scan_bins(s), 1u);
    for (u32 i = threadIdx.x; i < kBins; i += kThreads) {
        const u32 owner = min((u32)((u64)s.bins[i] * gridDim.x / total), gridDim.x - 1);
        if (owner == blockIdx.x) {
            atomicMin(&s.low, i);
            atomicMax(&s.high, i + 1);
        }
    }
    __syncthreads();
    low = s.low;
    high = s.high;
}

// Puts entries of this block's range into the warp's region until it may not hold the next segment.
// Returns how many; `item` is the segment to go on with.
__device__ __forceinline__ u32 collect_entries(
    const RowArgs& a, Lists& s, i32 first, i32 lists, u32 low, u32 high, u64& item
) {
    const i32 thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 segments = segments_of(a);
    const u64 items = (u64)segments * lists;
    const i64* rows = a.host_rows + (i64)first * a.list_stride;
    const i64 begin = (i64)low << a.bin_shift;
    // 2,048 finer bins over the range.
    const i32 shift = max(0, a.bin_shift - 11 + (high - low > 1 ? 32 - __clz(high - low - 1) : 0));
    u32 length = 0;
#pragma unroll 1
    for (; item < items && length + kSegment <= kWarpCapacity; item += kWarps) {
        const u32 list = (u32)(item / segments);
        const u32 from = ((u32)item - list * segments) * kSegment;
        const u32 count = s.starts[list + 1] - s.starts[list];
        if (from >= count) continue;
        const u32 entry = list * (u32)a.list_stride + from + thread;
        i64 row[kScanUnroll];
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            row[u] = from + u * 32 + thread < count ? rows[entry + u * 32] : -1;
        }
#pragma unroll
        for (i32 u = 0; u < kScanUnroll; ++u) {
            const i64 offset = row[u] < 0 ? 0 : host_offset(a, row[u]);
            const u32 coarse = bin_of(a, offset);
            const bool mine = row[u] >= 0 && low <= coarse && coarse < high;
            const u32 mask = __ballot_sync(kFullWarp, mine);
            if (mine) {
                const u32 fine = (u32)min((offset - begin) >> shift, (i64)kBins - 1);
                const u32 at = warp * kWarpCapacity + length + __popc(mask & lanes_below());
                s.entries[at] = entry + u * 32;
                s.bin_of[at] = (u16)fine;
                atomicAdd(&s.bins[fine], 1u);
            }
            length += __popc(mask);
        }
    }
    return length;
}

// Fills `order` with the next entries of this block's range, by bin. Returns how many.
__device__ __forceinline__ u32 next_entries(
    const RowArgs& a, Lists& s, i32 first, i32 lists, u32 low, u32 high, u64& item
) {
    for (i32 i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    const u32 length = collect_entries(a, s, first, lists, low, high, item);
    __syncthreads();
    const u32 total = scan_bins(s);
    const u32 region = threadIdx.x / 32 * kWarpCapacity;
    for (u32 i = region + threadIdx.x % 32; i < region + length; i += 32) {
        s.order[atomicAdd(&s.bins[s.bin_of[i]], 1u)] = (u16)i;
    }
    __syncthreads();
    return total;
}

// Copies the entries of up to kThreads lists.
template <Direction D>
__device__ __forceinline__ void copy_some_lists(
    const RowArgs& a, Lists& s, i32 first, i32 lists
) {
    const i32 thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 total = sum_counts(a, s, first, lists);
    const bool sorted = total >= (u32)a.sort_min_rows;
    u32 low = 0, high = 0;
    u64 item = warp;
    if (sorted) choose_range(a, s, first, lists, low, high);
    // Layers that lie apart in host memory are walked through one after the other.
    const i32 layers = a.adjacent || !sorted ? a.num_layers : 1;
    const u32 warps = sorted ? kWarps : gridDim.x * kWarps;
    const u32 my_warp = sorted ? warp : warp * gridDim.x + blockIdx.x;
    bool more = false;
    do {
        if (sorted) {
            total = next_entries(a, s, first, lists, low, high, item);
            more = item < (u64)segments_of(a) * lists;
        }
        const u32 rows = batch_rows(a, layers, total, warps);
        for (i32 layer = 0; layer < a.num_layers; layer += layers) {
#pragma unroll 1
            for (u32 base = my_warp * rows; base < total; base += warps * rows) {
                const u32 count = min(rows, total - base);
                i64 host = -1, device = -1;
                if (thread < (i32)count) {
                    const i64 entry =
                        sorted ? (i64)first * a.list_stride + s.entries[s.order[base + thread]]
                               : entry_in_order(a, s, first, lists, base + thread);
                    entry_offsets(a, entry, host, device);
                }
                copy_rows<D>(a, host, device, count, layer, layers);
            }
        }
    } while (__syncthreads_or(more));
}

template <Direction D>
__device__ __forceinline__ void copy_lists(const RowArgs& a) {
    extern __shared__ __align__(16) u8 shared[];
    Lists& s = *(Lists*)shared;
    if (copy_few<D>(a)) return;
#pragma unroll 1
    for (i32 first = 0; first < a.num_lists; first += kThreads) {
        copy_some_lists<D>(a, s, first, min(kThreads, a.num_lists - first));
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
                data[u] = load_lane(D == kToDevice ? at_host : at_device);
                to[u] = D == kToDevice ? at_device : at_host;
            }
        }
#pragma unroll
        for (i32 u = 0; u < kUnroll; ++u) {
            if (to[u] != 0) store_lane(to[u], data[u]);
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
