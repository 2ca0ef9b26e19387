// Translates one step's top-k of each request and plans its misses: KernelBackend.resolve.
//
// One thread block a request, one launch a step. The hash holds the *wanted* rows of this step (at
// most top_k * query rows), not the hot rows: the hot map is then read once, coalesced, and nothing
// has to be kept up to date between steps. A bucket is one 16-byte load, four slots stand for each
// wanted row where shared memory allows: a search is one load, and a thread's searches overlap.
//
// Compiled with
//   HS_THREADS        threads of a block (512 or 1024)
//   HS_BLOCKS_PER_SM  blocks that must fit a multiprocessor at once
//   HS_WIDE_KEYS      1 where a host row may need more than 32 bits
//   HS_GLOBAL_HASH    1 where the step's rows do not fit in shared memory: tables in the workspace
//   HS_PROFILE        1 to note the clock at each phase in the workspace, 16 words a request
#include "common.cuh"

#if HS_PROFILE
#define HS_STAMP(i) \
    if (threadIdx.x == 0) ((i64*)a.workspace)[blockIdx.x * 16 + (i)] = clock64()
#else
#define HS_STAMP(i)
#endif

#if HS_WIDE_KEYS
using Key = u64;
constexpr Key kEmptyKey = 0xffffffffffffffffull;
#else
using Key = u32;
constexpr Key kEmptyKey = 0xffffffffu;
#endif

constexpr i32 kThreads = HS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kSlotBatch = 4;                // hot slots a thread loads at once
constexpr i32 kLaneBatch = 2048 / kThreads;  // top-k lanes a thread loads at once
constexpr i32 kMaxRows = 8;                  // limits.MAX_SPECULATIVE_ROWS
constexpr u32 kNone = 0xffffffffu;           // lane that is answered already
constexpr u32 kHit = 0x80000000u;            // value of an entry: its hot slot is known
constexpr u32 kNoLane = 0x7fffffffu;
// Age classes of a hot slot. Victims are taken from the highest class down.
constexpr i32 kUsed = 0;       // holds a row of this step
constexpr i32 kOldAge = 254;   // this age and above: ordered by last_use itself
constexpr i32 kEmptyAge = 255; // last_use 0

struct ResolveArgs {
    i64* host_rows;
    i32* last_use;
    i32* clock;
    u64* counters;
    const i32* source;
    const i32* resident;
    const i32* hot;
    const i32* positions;
    const i32* request_slots;
    const i32* table_rows;
    const i32* query_starts;
    void* physical_rows;
    i32* valid_counts;
    i64* miss_source_rows;
    i64* miss_device_rows;
    i32* miss_counts;
    u8* workspace;
    i64 workspace_stride;
    i64 source_stride;
    i64 resident_stride;
    i64 hot_stride;
    i64 positions_stride;
    i64 block_stride_rows;
    i64 num_source_blocks;
    i64 num_device_blocks;
    i32 source_pages;
    i32 resident_pages;
    i32 hot_blocks;
    i32 cached_hot_blocks;
    i32 block_size;
    i32 block_shift;
    i32 hot_rows;
    i32 max_num_reqs;
    i32 num_requests;
    i32 num_query_rows;
    i32 max_num_requests;
    i32 top_k;
    i32 max_misses;
    i32 max_lanes;
    i32 table_slots;
    i32 wide_rows;
};
static_assert(sizeof(ResolveArgs) == HS_SIZEOF_ARGS, "mirrored in cuda.py");

struct __align__(16) Small {
    u32 age_counts[256];
    u32 warp_first[32];
    u32 warp_misses[32];
    u32 warp_victims[32];
    u32 row_valid[kMaxRows];
    u32 lane_counts[3];  // resident, hot, invalid
};

// Entries are written by atomics: a plain load from global memory could see an old L1 line.
#if HS_GLOBAL_HASH
template <typename T> __device__ __forceinline__ T peek(const T* p) { return __ldcg(p); }
#else
template <typename T> __device__ __forceinline__ T peek(const T* p) { return *p; }
#endif

constexpr u32 kWays = 16 / sizeof(Key);  // slots of a bucket

__device__ __forceinline__ u32 home_of(Key key, u32 buckets) {
#if HS_WIDE_KEYS
    const u32 hash = mix32((u32)key ^ (u32)(key >> 32) * 0x85ebca6bu);
#else
    const u32 hash = mix32(key);
#endif
    return __umulhi(hash, buckets);
}

struct Tables {
    Key* keys;
    u32* values;      // least lane that wants the row, or kHit | slot
    u32* lane_entry;  // entry of each lane, kNone once it is answered
    u16* victims;     // slot of each victim, ascending
    u8* ages;         // age class of each hot slot
    i32* hot_table;   // first `cached_hot_blocks` entries of the request's hot table
};

__device__ __forceinline__ u8* take(u8*& at, i64 bytes) {
    u8* start = at;
    at += (bytes + 15) / 16 * 16;
    return start;
}

__device__ __forceinline__ Tables place_tables(const ResolveArgs& a, u8* shared, i32 slot) {
    Tables t;
    u8* in_shared = shared;
#if HS_GLOBAL_HASH
    u8* big = a.workspace + slot * a.workspace_stride;
#else
    u8*& big = in_shared;
    (void)slot;
#endif
    t.keys = (Key*)take(big, (i64)a.table_slots * sizeof(Key));
    t.values = (u32*)take(big, (i64)a.table_slots * 4);
    t.lane_entry = (u32*)take(big, (i64)a.max_lanes * 4);
    t.victims = (u16*)take(big, (i64)a.max_lanes * 2);
    t.ages = take(in_shared, a.hot_rows);
    t.hot_table = (i32*)take(in_shared, (i64)a.cached_hot_blocks * 4);
    return t;
}

__device__ __forceinline__ void write_row(const ResolveArgs& a, i64 row, i32 column, i64 value) {
    const i64 index = row * a.top_k + column;
    if (a.wide_rows) {
        ((i64*)a.physical_rows)[index] = value;
    } else {
        ((i32*)a.physical_rows)[index] = (i32)value;
    }
}

__device__ __forceinline__ void write_padding(const ResolveArgs& a, i64 row) {
    for (i32 column = threadIdx.x; column < a.top_k; column += kThreads) {
        write_row(a, row, column, -1);
    }
    if (threadIdx.x == 0) a.valid_counts[row] = 0;
}

union Bucket {
    uint4 raw;
    Key way[kWays];
};

__device__ __forceinline__ Bucket load_bucket(const Tables& t, u32 bucket) {
    Bucket found;
    found.raw = peek((const uint4*)t.keys + bucket);
    return found;
}

__device__ __forceinline__ u32 next_bucket(u32 bucket, u32 buckets) {
    ++bucket;
    return bucket == buckets ? 0 : bucket;
}

// A bucket is filled in the order of its ways before the next one is used. `seen` may be older than
// the bucket: then the exchange fails and the next way is tried.
__device__ __forceinline__ u32 insert(
    const Tables& t, u32 buckets, Key key, u32 lane, u32 bucket, Bucket seen
) {
    while (true) {
#pragma unroll
        for (u32 way = 0; way < kWays; ++way) {
            const u32 entry = bucket * kWays + way;
            Key old = seen.way[way];
            if (old == kEmptyKey) {
                old = atomicCAS(&t.keys[entry], kEmptyKey, key);
                if (old == kEmptyKey) old = key;
            }
            if (old == key) {
                atomicMin(&t.values[entry], lane);
                return entry;
            }
        }
        bucket = next_bucket(bucket, buckets);
        seen = load_bucket(t, bucket);
    }
}

__device__ __forceinline__ u32 find(
    const Tables& t, u32 buckets, Key key, u32 bucket, Bucket seen
) {
    while (true) {
        u32 entry = kNone;
#pragma unroll
        for (u32 way = 0; way < kWays; ++way) {
            if (seen.way[way] == key) entry = bucket * kWays + way;
        }
        if (entry != kNone || seen.way[kWays - 1] == kEmptyKey) return entry;
        bucket = next_bucket(bucket, buckets);
        seen = load_bucket(t, bucket);
    }
}

struct Request {
    i32 slot;
    i32 table_row;
    i64 first_row;
    i32 rows;
    i32 lanes;
    i32 lanes_per_warp;
    i32 slots_per_warp;
    const i32* hot_table;
};

__device__ __forceinline__ i64 physical_of_slot(
    const ResolveArgs& a, const Tables& t, const Request& r, i32 slot
) {
    const i32 index = block_of(slot, a.block_size, a.block_shift);
    const i64 block = index < a.cached_hot_blocks ? t.hot_table[index] : r.hot_table[index];
    return block * a.block_stride_rows + (slot - index * a.block_size);
}

// Row and column of a lane of the transaction.
__device__ __forceinline__ void lane_place(
    const ResolveArgs& a, const Request& r, i32 lane, i64& row, i32& column
) {
    const i32 in_request = r.rows == 1 ? 0 : lane / a.top_k;
    row = r.first_row + in_request;
    column = lane - in_request * a.top_k;
}

__device__ __forceinline__ void count_valid(
    const ResolveArgs& a, const Request& r, Small& s, i32 lane, bool valid
) {
    if (r.rows == 1) {
        const u32 mask = __ballot_sync(kFullWarp, valid);
        if ((threadIdx.x & 31) == 0 && mask) atomicAdd(&s.row_valid[0], __popc(mask));
    } else if (valid) {
        atomicAdd(&s.row_valid[lane / a.top_k], 1u);
    }
}

struct LaneBatch {
    i32 position[kLaneBatch];
    i32 device_block[kLaneBatch];
    i32 host_block[kLaneBatch];
};

// Reads positions and both tables: two loads that depend on each other, for all lanes at once.
__device__ __forceinline__ void load_lanes(
    const ResolveArgs& a, const Request& r, i32 base, i32 end, LaneBatch& batch
) {
    const i32* source = a.source + r.table_row * a.source_stride;
    const i32* resident = a.resident + r.slot * a.resident_stride;
#pragma unroll
    for (i32 u = 0; u < kLaneBatch; ++u) {
        const i32 lane = base + u * 32 + threadIdx.x % 32;
        batch.position[u] = -1;
        if (lane < end) {
            i64 row;
            i32 column;
            lane_place(a, r, lane, row, column);
            batch.position[u] = a.positions[row * a.positions_stride + column];
        }
    }
#pragma unroll
    for (i32 u = 0; u < kLaneBatch; ++u) {
        const i32 page = block_of(batch.position[u], a.block_size, a.block_shift);
        const bool wanted = batch.position[u] >= 0;
        batch.device_block[u] = wanted && page < a.resident_pages ? resident[page] : 0;
        batch.host_block[u] = wanted && page < a.source_pages ? source[page] : 0;
    }
}

// Answers resident lanes and enters the others into the table of wanted rows.
__device__ __forceinline__ bool enter_lanes(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 base, i32 end,
    bool has_hot, const LaneBatch& batch
) {
    u32 num_resident = 0, num_invalid = 0;
    bool any = false;
    const u32 buckets = a.table_slots / kWays;
    Key keys[kLaneBatch];
    Bucket seen[kLaneBatch];
    bool resident[kLaneBatch], wanted[kLaneBatch];
#pragma unroll
    for (i32 u = 0; u < kLaneBatch; ++u) {
        const i32 device_block = batch.device_block[u], host_block = batch.host_block[u];
        const i32 page = block_of(batch.position[u], a.block_size, a.block_shift);
        const i32 offset = batch.position[u] - page * a.block_size;
        // A block past the end would be read or written outside the pool: the lane is invalid.
        resident[u] = device_block > 0 && device_block < a.num_device_blocks;
        wanted[u] =
            !resident[u] && has_hot && host_block > 0 && host_block < a.num_source_blocks;
        keys[u] = (Key)((i64)host_block * a.block_size + offset);
        if (wanted[u]) seen[u] = load_bucket(t, home_of(keys[u], buckets));
    }
#pragma unroll
    for (i32 u = 0; u < kLaneBatch; ++u) {
        const i32 lane = base + u * 32 + threadIdx.x % 32;
        if (base + u * 32 >= end) break;
        if (lane < end) {
            u32 entry = kNone;
            if (wanted[u]) {
                entry = insert(t, buckets, keys[u], lane, home_of(keys[u], buckets), seen[u]);
                any = true;
            } else {
                const i32 position = batch.position[u];
                const i32 page = block_of(position, a.block_size, a.block_shift);
                const i64 physical = (i64)batch.device_block[u] * a.block_stride_rows +
                                     (position - page * a.block_size);
                i64 row;
                i32 column;
                lane_place(a, r, lane, row, column);
                write_row(a, row, column, resident[u] ? physical : -1);
                num_resident += resident[u];
                num_invalid += position >= 0 && !resident[u];
            }
            t.lane_entry[lane] = entry;
        }
        count_valid(a, r, s, lane, resident[u] || wanted[u]);
    }
    num_resident = warp_sum(num_resident);
    num_invalid = warp_sum(num_invalid);
    if (threadIdx.x % 32 == 0) {
        if (num_resident) atomicAdd(&s.lane_counts[0], num_resident);
        if (num_invalid) atomicAdd(&s.lane_counts[2], num_invalid);
    }
    return any;
}

struct SlotBatch {
    i64 host_row[kSlotBatch];
    i32 last_use[kSlotBatch];
};

__device__ __forceinline__ void load_slots(
    const ResolveArgs& a, const Request& r, i32 base, i32 end, SlotBatch& batch
) {
    const i64 first = (i64)r.slot * a.hot_rows;
#pragma unroll
    for (i32 u = 0; u < kSlotBatch; ++u) {
        const i32 slot = base + u * 32 + threadIdx.x % 32;
        batch.host_row[u] = -1;
        batch.last_use[u] = 0;
        if (slot < end) {
            batch.host_row[u] = a.host_rows[first + slot];
            batch.last_use[u] = a.last_use[first + slot];
        }
    }
}

// Marks the slots that hold wanted rows; the others get their age class.
__device__ __forceinline__ void match_slots(
    const ResolveArgs& a, const Tables& t, const Request& r, i32 clock, i32 base, i32 end,
    const SlotBatch& batch
) {
    const i64 first = (i64)r.slot * a.hot_rows;
    const u32 buckets = a.table_slots / kWays;
    // The searches of a thread overlap: all first buckets are loaded before any is looked at.
    Bucket seen[kSlotBatch];
#pragma unroll
    for (i32 u = 0; u < kSlotBatch; ++u) {
        seen[u] = load_bucket(t, home_of((Key)batch.host_row[u], buckets));
    }
#pragma unroll
    for (i32 u = 0; u < kSlotBatch; ++u) {
        const i32 slot = base + u * 32 + threadIdx.x % 32;
        if (slot >= end) break;
        const i64 host_row = batch.host_row[u];
        const bool in_range = host_row >= 0 && (u64)host_row < (u64)kEmptyKey;
        const Key key = (Key)host_row;
        const u32 entry =
            in_range ? find(t, buckets, key, home_of(key, buckets), seen[u]) : kNone;
        if (entry != kNone) {
            t.values[entry] = kHit | (u32)slot;
            a.last_use[first + slot] = clock;
            t.ages[slot] = kUsed;
        } else {
            const u32 age = (u32)clock - (u32)batch.last_use[u];
            t.ages[slot] = batch.last_use[u] == 0 ? kEmptyAge : min(age, (u32)kOldAge);
        }
    }
}

// Answers lanes whose row is hot; counts this warp's misses and first appearances of a missing row.
__device__ __forceinline__ void answer_hits(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const i32 begin = warp * r.lanes_per_warp;
    const i32 end = min(begin + r.lanes_per_warp, r.lanes);
    u32 hits = 0, misses = 0, firsts = 0;
    for (i32 lane = begin + thread; lane < end; lane += 32) {
        const u32 entry = t.lane_entry[lane];
        if (entry == kNone) continue;
        const u32 value = peek(&t.values[entry]);
        if (value & kHit) {
            i64 row;
            i32 column;
            lane_place(a, r, lane, row, column);
            write_row(a, row, column, physical_of_slot(a, t, r, value & ~kHit));
            t.lane_entry[lane] = kNone;
            ++hits;
        } else {
            ++misses;
            firsts += value == (u32)lane;
        }
    }
    hits = warp_sum(hits);
    misses = warp_sum(misses);
    firsts = warp_sum(firsts);
    if (thread == 0) {
        s.warp_first[warp] = firsts;
        s.warp_misses[warp] = misses;
        if (hits) atomicAdd(&s.lane_counts[1], hits);
    }
}

__device__ __forceinline__ void count_ages(const Tables& t, Small& s, i32 begin, i32 end) {
    for (i32 base = begin; base < end; base += 32) {
        const i32 slot = base + threadIdx.x % 32;
        const u32 age = slot < end ? t.ages[slot] : kUsed;
        // Few classes occur at once: one atomic for each, not 32 on the same address.
        const u32 peers = __match_any_sync(kFullWarp, age);
        if (age != kUsed && (peers & lanes_below()) == 0) {
            atomicAdd(&s.age_counts[age], __popc(peers));
        }
    }
}

struct Cut {
    i32 age;       // classes above are victims whole
    i32 last_use;  // in class kOldAge: slots used before are victims, those used then are tied
    u32 take;      // victims among the tied, by slot number
};

// Finds the highest bin at which `wanted` slots are reached, going down from bin 255.
__device__ __forceinline__ i32 find_bin(const u32* counts, u32 wanted, u32& take, u32& in_bin) {
    const i32 thread = threadIdx.x % 32;
    // Two 16-byte loads: single words at this stride would meet in four banks.
    const uint4 high = ((const uint4*)counts)[63 - 2 * thread];
    const uint4 low = ((const uint4*)counts)[62 - 2 * thread];
    const u32 bins[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    u32 sum = 0, total;
#pragma unroll
    for (i32 i = 0; i < 8; ++i) sum += bins[i];
    u32 before = warp_exclusive_scan(sum, total);
    const bool here = before < wanted && wanted <= before + sum;
    i32 bin = 0;
    u32 left = 0, size = 0;
    if (here) {
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
            if (size == 0 && before + bins[i] >= wanted) {
                bin = 255 - thread * 8 - i;
                left = wanted - before;
                size = bins[i];
            }
            before += bins[i];
        }
    }
    const i32 owner = __ffs(__ballot_sync(kFullWarp, here)) - 1;
    take = __shfl_sync(kFullWarp, left, owner);
    in_bin = __shfl_sync(kFullWarp, size, owner);
    return __shfl_sync(kFullWarp, bin, owner);
}

// Exact order among slots not used for 254 steps: four passes of a radix selection by last_use.
// Returns the last_use of the tied in the low half, how many of them to take in the high half. Rare:
// not inlined, so that its registers do not count.
__device__ __noinline__ u64 refine_old(
    const i32* last_use, const u8* ages, u32* age_counts, i32 begin, i32 end, u32 wanted
) {
    u32 prefix = 0, mask = 0;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (i32 i = threadIdx.x; i < 256; i += kThreads) age_counts[i] = 0;
        __syncthreads();
        for (i32 slot = begin + threadIdx.x % 32; slot < end; slot += 32) {
            if (ages[slot] != kOldAge) continue;
            const u32 value = last_use[slot];
            // The least last_use goes first: the highest bin.
            if ((value & mask) == prefix) {
                atomicAdd(&age_counts[255 - (value >> shift & 255)], 1u);
            }
        }
        __syncthreads();
        u32 take, in_bin;
        const i32 bin = find_bin(age_counts, wanted, take, in_bin);
        wanted = take;
        prefix |= (u32)(255 - bin) << shift;
        mask |= 255u << shift;
    }
    return (u64)wanted << 32 | prefix;
}

__device__ __forceinline__ void classify(
    const ResolveArgs& a, const Tables& t, const Request& r, const Cut& cut, i32 slot, i32 end,
    u32& sure, u32& tied
) {
    const i32 age = slot < end ? t.ages[slot] : kUsed;
    bool is_sure = age > cut.age, is_tied = age == cut.age && age != kUsed;
    if (cut.last_use >= 0 && is_tied) {
        const i32 last_use = a.last_use[(i64)r.slot * a.hot_rows + slot];
        is_sure = last_use < cut.last_use;
        is_tied = last_use == cut.last_use;
    }
    sure = __ballot_sync(kFullWarp, is_sure);
    tied = __ballot_sync(kFullWarp, is_tied);
}

// Lists the victims by slot number.
__device__ __forceinline__ void choose_victims(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 clock, u32 num_misses
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const i32 begin = warp * r.slots_per_warp;
    const i32 end = min(begin + r.slots_per_warp, a.hot_rows);
    count_ages(t, s, begin, end);
    __syncthreads();
    HS_STAMP(6);
    Cut cut;
    u32 in_bin;
    cut.age = find_bin(s.age_counts, num_misses, cut.take, in_bin);
    cut.last_use = -1;
    if (cut.age == kOldAge && cut.take < in_bin) {
        const u64 refined = refine_old(
            a.last_use + (i64)r.slot * a.hot_rows, t.ages, s.age_counts, begin, end, cut.take);
        cut.last_use = (i32)(u32)refined;
        cut.take = (u32)(refined >> 32);
    }
    u32 num_sure = 0, num_tied = 0, sure, tied;
    for (i32 base = begin; base < end; base += 32) {
        classify(a, t, r, cut, base + thread, end, sure, tied);
        num_sure += __popc(sure);
        num_tied += __popc(tied);
    }
    if (thread == 0) s.warp_victims[warp] = num_sure | num_tied << 16;
    HS_STAMP(7);
    __syncthreads();
    HS_STAMP(8);
    u32 total;
    const u32 packed = thread < kWarps ? s.warp_victims[thread] : 0;
    const u32 before = __shfl_sync(kFullWarp, warp_exclusive_scan(packed, total), warp);
    u32 sure_before = before & 0xffff, tied_before = before >> 16;
    for (i32 base = begin; base < end; base += 32) {
        const i32 slot = base + thread;
        classify(a, t, r, cut, slot, end, sure, tied);
        const u32 my_sure = sure_before + __popc(sure & lanes_below());
        const u32 my_tied = tied_before + __popc(tied & lanes_below());
        const bool victim = (sure >> thread & 1) || ((tied >> thread & 1) && my_tied < cut.take);
        if (victim) {
            t.victims[my_sure + min(my_tied, cut.take)] = (u16)slot;
            a.last_use[(i64)r.slot * a.hot_rows + slot] = clock;
        }
        sure_before += __popc(sure);
        tied_before += __popc(tied);
    }
}

// Miss i, in order of first appearance, takes victim i.
__device__ __forceinline__ void plan_misses(
    const ResolveArgs& a, const Tables& t, const Request& r, u32 rank
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const i32 begin = warp * r.lanes_per_warp;
    const i32 end = min(begin + r.lanes_per_warp, r.lanes);
    const i64 list = (i64)blockIdx.x * a.max_misses;
    for (i32 base = begin; base < end; base += 32) {
        const i32 lane = base + thread;
        const u32 entry = lane < end ? t.lane_entry[lane] : kNone;
        const bool first = entry != kNone && peek(&t.values[entry]) == (u32)lane;
        const u32 mask = __ballot_sync(kFullWarp, first);
        if (first) {
            const u32 index = rank + __popc(mask & lanes_below());
            const i32 slot = peek(&t.victims[index]);
            const i64 host_row = (i64)peek(&t.keys[entry]);
            const i64 physical = physical_of_slot(a, t, r, slot);
            i64 row;
            i32 column;
            lane_place(a, r, lane, row, column);
            write_row(a, row, column, physical);
            a.miss_source_rows[list + index] = host_row;
            a.miss_device_rows[list + index] = physical;
            a.host_rows[(i64)r.slot * a.hot_rows + slot] = host_row;
            t.values[entry] = kHit | (u32)slot;
            t.lane_entry[lane] = kNone;
        }
        rank += __popc(mask);
    }
}

__device__ __forceinline__ void answer_duplicates(
    const ResolveArgs& a, const Tables& t, const Request& r
) {
    const i32 begin = threadIdx.x / 32 * r.lanes_per_warp;
    const i32 end = min(begin + r.lanes_per_warp, r.lanes);
    for (i32 lane = begin + threadIdx.x % 32; lane < end; lane += 32) {
        const u32 entry = t.lane_entry[lane];
        if (entry == kNone) continue;
        i64 row;
        i32 column;
        lane_place(a, r, lane, row, column);
        write_row(a, row, column, physical_of_slot(a, t, r, peek(&t.values[entry]) & ~kHit));
    }
}

__device__ __forceinline__ void finish(
    const ResolveArgs& a, const Request& r, const Small& s, i32 clock, u32 miss_lanes,
    u32 miss_rows
) {
    if (threadIdx.x < r.rows) {
        a.valid_counts[r.first_row + threadIdx.x] = s.row_valid[threadIdx.x];
    }
    if (threadIdx.x != 0) return;
    a.clock[r.slot] = clock;
    a.miss_counts[blockIdx.x] = miss_rows;
    const u32 values[] = {
        s.lane_counts[0], s.lane_counts[1], miss_lanes, miss_rows, s.lane_counts[2], 1u};
#pragma unroll
    for (i32 i = 0; i < 6; ++i) {
        if (values[i]) atomicAdd(&a.counters[i], (u64)values[i]);
    }
}

// Rows of no request, requests of no step: -1 and 0 on every launch, so that a replay has no leftovers.
__device__ __forceinline__ void write_leftovers(const ResolveArgs& a, i64 used) {
    for (i64 row = used + blockIdx.x; row < a.num_query_rows; row += gridDim.x) {
        write_padding(a, row);
    }
    for (i64 i = a.num_requests + (i64)blockIdx.x * kThreads + threadIdx.x;
         i < a.max_num_requests; i += (i64)gridDim.x * kThreads) {
        a.miss_counts[i] = 0;
    }
}

__device__ __forceinline__ void clear_shared(const ResolveArgs& a, const Tables& t, Small& s) {
    // Entries are a multiple of four: 16-byte stores.
    constexpr i32 kKeysPerStore = 16 / sizeof(Key);
    const uint4 empty = make_uint4(~0u, ~0u, ~0u, ~0u);
    const uint4 no_lane = make_uint4(kNoLane, kNoLane, kNoLane, kNoLane);
    for (i32 i = threadIdx.x; i < a.table_slots / kKeysPerStore; i += kThreads) {
        ((uint4*)t.keys)[i] = empty;
    }
    for (i32 i = threadIdx.x; i < a.table_slots / 4; i += kThreads) {
        ((uint4*)t.values)[i] = no_lane;
    }
    for (i32 i = threadIdx.x; i < 256; i += kThreads) s.age_counts[i] = 0;
    if (threadIdx.x < kMaxRows) s.row_valid[threadIdx.x] = 0;
    if (threadIdx.x < 3) s.lane_counts[threadIdx.x] = 0;
}

// Everything about a step whose wanted rows are in the table: hits, victims, plan.
__device__ __forceinline__ void resolve_wanted(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 clock, u32& num_misses,
    u32& miss_lanes
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    answer_hits(a, t, r, s);
    __syncthreads();
    HS_STAMP(5);
    const u32 firsts = thread < kWarps ? s.warp_first[thread] : 0;
    const u32 rank = __shfl_sync(kFullWarp, warp_exclusive_scan(firsts, num_misses), warp);
    miss_lanes = warp_sum(thread < kWarps ? s.warp_misses[thread] : 0);
    if (num_misses == 0) return;
    choose_victims(a, t, r, s, clock, num_misses);
    __syncthreads();
    HS_STAMP(9);
    plan_misses(a, t, r, rank);
    HS_STAMP(10);
    if (miss_lanes > num_misses) {
        __syncthreads();
        answer_duplicates(a, t, r);
    }
}

__device__ __forceinline__ bool load_request(const ResolveArgs& a, Request& r) {
    r.slot = a.request_slots[blockIdx.x];
    r.table_row = a.table_rows[blockIdx.x];
    r.first_row = a.query_starts[blockIdx.x];
    r.rows = a.query_starts[blockIdx.x + 1] - (i32)r.first_row;
    r.lanes = r.rows * a.top_k;
    r.lanes_per_warp = ((r.lanes + kWarps - 1) / kWarps + 31) / 32 * 32;
    r.slots_per_warp = ((a.hot_rows + kWarps - 1) / kWarps + 31) / 32 * 32;
    r.hot_table = a.hot + r.table_row * a.hot_stride;
    return r.slot >= 0 && r.slot < a.max_num_reqs && r.rows > 0 && r.rows <= kMaxRows &&
           r.lanes <= a.max_lanes;
}

__device__ __forceinline__ void resolve_request(
    const ResolveArgs& a, const Request& r, u8* shared, Small& s
) {
    const i32 warp = threadIdx.x / 32;
    const Tables t = place_tables(a, shared, r.slot);
    // In flight while the table is cleared: the first batch of hot slots and of lanes.
    const i32 slot_begin = warp * r.slots_per_warp;
    const i32 slot_end = min(slot_begin + r.slots_per_warp, a.hot_rows);
    const i32 lane_begin = warp * r.lanes_per_warp;
    const i32 lane_end = min(lane_begin + r.lanes_per_warp, r.lanes);
    SlotBatch slots;
    LaneBatch lanes;
    load_slots(a, r, slot_begin, slot_end, slots);
    load_lanes(a, r, lane_begin, lane_end, lanes);
    const i32 clock = a.clock[r.slot] + 1;
    const bool has_hot = r.hot_table[0] > 0;
    for (i32 i = threadIdx.x; i < a.cached_hot_blocks; i += kThreads) {
        t.hot_table[i] = r.hot_table[i];
    }
    HS_STAMP(1);
    clear_shared(a, t, s);
    __syncthreads();
    HS_STAMP(2);
    bool any = enter_lanes(a, t, r, s, lane_begin, lane_end, has_hot, lanes);
    for (i32 base = lane_begin + 32 * kLaneBatch; base < lane_end; base += 32 * kLaneBatch) {
        load_lanes(a, r, base, lane_end, lanes);
        any |= enter_lanes(a, t, r, s, base, lane_end, has_hot, lanes);
    }
    u32 num_misses = 0, miss_lanes = 0;
    const bool none = !__syncthreads_or(any);
    HS_STAMP(3);
    if (!none) {
        match_slots(a, t, r, clock, slot_begin, slot_end, slots);
        for (i32 base = slot_begin + 32 * kSlotBatch; base < slot_end; base += 32 * kSlotBatch) {
            load_slots(a, r, base, slot_end, slots);
            match_slots(a, t, r, clock, base, slot_end, slots);
        }
        __syncthreads();
        HS_STAMP(4);
        resolve_wanted(a, t, r, s, clock, num_misses, miss_lanes);
    }
    finish(a, r, s, clock, miss_lanes, num_misses);
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_resolve(const __grid_constant__ ResolveArgs a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Small s;
    const i64 used_rows = a.query_starts[a.num_requests];
    HS_STAMP(0);
    if ((i32)blockIdx.x < a.num_requests) {
        Request r;
        if (load_request(a, r)) {
            resolve_request(a, r, shared, s);
        } else {
            for (i32 i = 0; i < r.rows; ++i) write_padding(a, r.first_row + i);
            if (threadIdx.x == 0) a.miss_counts[blockIdx.x] = 0;
        }
    }
    write_leftovers(a, used_rows);
    HS_STAMP(11);
}
