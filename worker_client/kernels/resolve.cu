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
//   HS_WIDE_ROWS      1 where physical rows are int64
//   HS_POW2           1 where the block size is a power of two
//   HS_PROFILE        1 to note the clock at each phase, 16 words a request
#include "common.cuh"

#if HS_PROFILE
#define HS_STAMP(i) \
    if (threadIdx.x == 0) a.profile[blockIdx.x * 16 + (i)] = clock64()
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
constexpr i32 kLanes = 2048 / kThreads;  // consecutive lanes of one thread
constexpr i32 kSlots = 4;                // consecutive hot slots of one thread
constexpr i32 kMaxRows = 8;              // limits.MAX_SPECULATIVE_ROWS
constexpr u32 kNone = 0xffffffffu;       // lane that is answered already
constexpr u32 kFirst = 0x40000000u;      // lane at which a missing row appears first
constexpr u32 kHit = 0x80000000u;        // value of an entry: its hot slot is known
constexpr u32 kNoLane = 0x7fffffffu;
// Age classes of a hot slot, one byte each. Victims are taken from the highest class down.
constexpr u32 kUsed = 0;       // holds a row of this step
constexpr u32 kOldAge = 62;    // this age and above: ordered by last_use itself
constexpr u32 kEmptyAge = 63;  // last_use 0
constexpr u32 kClasses = 64;
constexpr i32 kHintBytes = 16;

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
    u8* workspace;     // a request: the hint, then (HS_GLOBAL_HASH) the tables
    i64* profile;
    i64 workspace_stride;
    i64 source_stride;
    i64 resident_stride;
    i64 hot_stride;
    i64 positions_stride;
    i64 block_stride_rows;
    i32 num_source_blocks;
    i32 num_device_blocks;
    i32 source_pages;
    i32 resident_pages;
    i32 hot_blocks;
    i32 cached_hot_blocks;
    i32 cached_pages;  // all pages, or 0 where they do not fit in shared memory
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
    i32 padded_lanes;  // entries of lane_entry: max_lanes rounded up for every warp
    i32 table_slots;
    i32 wide_rows;
    i32 rows_guess;    // query rows of each request, where all have the same
    i32 vector_slots;  // 1 where four hot slots can be loaded at once
};
static_assert(sizeof(ResolveArgs) == HS_SIZEOF_ARGS, "mirrored in launches.py");

struct __align__(16) Small {
    u32 age_counts[256];  // kClasses of them, 256 bins when old slots are told apart
    u32 warp_first[32];
    u32 warp_victims[32];
    u32 row_valid[kMaxRows];
    u32 lane_counts[4];  // resident, hot, invalid, missing
};

// Entries are written by atomics: a plain load from global memory could see an old L1 line.
#if HS_GLOBAL_HASH
template <typename T> __device__ __forceinline__ T peek(const T* p) { return __ldcg(p); }
#else
template <typename T> __device__ __forceinline__ T peek(const T* p) { return *p; }
#endif

struct Tables {
    Key* keys;
    u32* values;      // least lane that wants the row, or kHit | slot
    u32* lane_entry;  // entry of each lane, kNone once it is answered
    u16* victims;     // slot of each victim, ascending
    u16* missing;     // entry of each miss, in order of first appearance
    u32* ages;        // age classes of four hot slots
    i32* hot_table;   // first `cached_hot_blocks` entries of the request's hot table
    i32* places;      // place_of_page of the first `cached_pages` pages
};

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

__device__ __forceinline__ i32 share_of_warp(i32 count, i32 step) {
    return ((count + kWarps - 1) / kWarps + step - 1) / step * step;
}

__device__ __forceinline__ u8* take(u8*& at, i64 bytes) {
    u8* start = at;
    at += (bytes + 15) / 16 * 16;
    return start;
}

__device__ __forceinline__ Tables place_tables(const ResolveArgs& a, u8* shared, i32 slot) {
    Tables t;
    u8* in_shared = shared;
#if HS_GLOBAL_HASH
    u8* big = a.workspace + max(slot, 0) * a.workspace_stride + kHintBytes;
#else
    u8*& big = in_shared;
    (void)slot;
#endif
    t.keys = (Key*)take(big, (i64)a.table_slots * sizeof(Key));
    t.values = (u32*)take(big, (i64)a.table_slots * 4);
    t.lane_entry = (u32*)take(big, (i64)a.padded_lanes * 4);
    t.victims = (u16*)take(big, (i64)a.max_lanes * 2);
    t.missing = (u16*)take(big, (i64)a.max_lanes * 2);
    t.ages = (u32*)take(in_shared, share_of_warp(a.hot_rows, 32 * kSlots) * kWarps);
    t.hot_table = (i32*)take(in_shared, (i64)a.cached_hot_blocks * 4);
    t.places = (i32*)take(in_shared, (i64)a.cached_pages * 4);
    return t;
}

// --- the table of wanted rows --------------------------------------------------------------------

constexpr u32 kWays = 16 / sizeof(Key);  // slots of a bucket

union Bucket {
    uint4 raw;
    Key way[kWays];
};

__device__ __forceinline__ u32 hash_of(Key key) {
#if HS_WIDE_KEYS
    return mix32((u32)key ^ (u32)(key >> 32) * 0x85ebca6bu);
#else
    return mix32(key);
#endif
}

__device__ __forceinline__ Bucket load_bucket(const Tables& t, u32 bucket) {
    Bucket found;
    found.raw = peek((const uint4*)t.keys + bucket);
    return found;
}

__device__ __forceinline__ u32 next_bucket(u32 bucket, u32 buckets) {
    ++bucket;
    return bucket == buckets ? 0 : bucket;
}

// Tries the ways of a bucket, from any, before the next bucket. What follows the first try is rare, and
// kept out of the way.
__device__ __noinline__ u32 insert_slowly(Key* keys, u32 slots, Key key, u32 entry) {
    u32 bucket = entry / kWays, way = entry % kWays;
    while (true) {
        for (u32 i = 1; i < kWays; ++i) {
            way = (way + 1) % kWays;
            const Key old = atomicCAS(&keys[bucket * kWays + way], kEmptyKey, key);
            if (old == kEmptyKey || old == key) return bucket * kWays + way;
        }
        bucket = next_bucket(bucket, slots / kWays);
        const Key old = atomicCAS(&keys[bucket * kWays + way], kEmptyKey, key);
        if (old == kEmptyKey || old == key) return bucket * kWays + way;
    }
}

__device__ __noinline__ u32 find_slowly(const Key* keys, u32 slots, Key key, u32 bucket) {
    while (true) {
        bucket = next_bucket(bucket, slots / kWays);
        bool full = true;
        for (u32 way = 0; way < kWays; ++way) {
            const Key found = peek(&keys[bucket * kWays + way]);
            if (found == key) return bucket * kWays + way;
            full &= found != kEmptyKey;
        }
        if (!full) return kNone;
    }
}

__device__ __forceinline__ u32 find(
    const Tables& t, u32 slots, Key key, u32 bucket, const Bucket& seen
) {
    u32 entry = kNone;
    bool full = true;
#pragma unroll
    for (u32 way = 0; way < kWays; ++way) {
        if (seen.way[way] == key) entry = bucket * kWays + way;
        full &= seen.way[way] != kEmptyKey;
    }
    if (entry == kNone && full) entry = find_slowly(t.keys, slots, key, bucket);
    return entry;
}

// --- output --------------------------------------------------------------------------------------

__device__ __forceinline__ void write_lane(
    const ResolveArgs& a, const Request& r, i32 lane, i64 value
) {
    const i64 index = r.first_row * a.top_k + lane;
#if HS_WIDE_ROWS
    ((i64*)a.physical_rows)[index] = value;
#else
    ((i32*)a.physical_rows)[index] = (i32)value;
#endif
}

__device__ __forceinline__ void write_padding(const ResolveArgs& a, i64 row) {
    Request r;
    r.first_row = row;
#pragma unroll 1
    for (i32 column = threadIdx.x; column < a.top_k; column += kThreads) {
        write_lane(a, r, column, -1);
    }
    if (threadIdx.x == 0) a.valid_counts[row] = 0;
}

__device__ __forceinline__ i64 physical_of_slot(
    const ResolveArgs& a, const Tables& t, const Request& r, i32 slot
) {
    const i32 index = block_of(slot, a.block_size, a.block_shift);
    const i64 block = a.cached_hot_blocks ? t.hot_table[index] : r.hot_table[index];
    return block * a.block_stride_rows + (slot - index * a.block_size);
}

// --- lanes ---------------------------------------------------------------------------------------

struct Positions {
    i32 of[kLanes];
};

template <i32 N> struct Vector;
template <> struct Vector<2> { using Type = int2; };
template <> struct Vector<4> { using Type = int4; };

// One by one: strided rows, lanes past the end, addresses that are not aligned.
__device__ __noinline__ Positions load_positions_slowly(
    const i32* from, i32 skipped_a_row, i32 top_k, i32 lane, i32 end
) {
    Positions p;
#pragma unroll
    for (i32 v = 0; v < kLanes; ++v) {
        p.of[v] = -1;
        if (lane + v < end) p.of[v] = from[v + (i64)((lane + v) / top_k) * skipped_a_row];
    }
    return p;
}

// Positions of the thread's lanes; -1 past the end.
__device__ __forceinline__ Positions load_positions(
    const ResolveArgs& a, i64 first_row, i32 rows, i32 lane, i32 end
) {
    const i32 skipped = rows == 1 ? 0 : (i32)(a.positions_stride - a.top_k);
    const i32* from = a.positions + first_row * a.positions_stride + lane;
    if (skipped || lane + kLanes > end || ((u64)from & (4 * kLanes - 1))) {
        return load_positions_slowly(from, skipped, a.top_k, lane, end);
    }
    Positions p;
    *(Vector<kLanes>::Type*)p.of = *(const Vector<kLanes>::Type*)from;
    return p;
}

__device__ __forceinline__ void count_valid(
    const ResolveArgs& a, const Request& r, Small& s, i32 base, const bool (&valid)[kLanes]
) {
    const i32 lane = base + threadIdx.x % 32 * kLanes;
    if (r.rows == 1 || a.top_k % (32 * kLanes) == 0) {
        u32 count = 0;
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) count += valid[v];
        count = warp_sum(count);
        if (threadIdx.x % 32 == 0 && count) {
            atomicAdd(&s.row_valid[r.rows == 1 ? 0 : base / a.top_k], count);
        }
    } else {
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) {
            if (valid[v]) atomicAdd(&s.row_valid[(lane + v) / a.top_k], 1u);
        }
    }
}

// Where the rows of a page are: a device block, a host block below zero, or 0. A block past the end
// would be read or written outside the pool: it counts as none.
__device__ __forceinline__ i32 place_of_page(const ResolveArgs& a, const Request& r, i32 page) {
    const i32 device = page < a.resident_pages ? a.resident[r.slot * a.resident_stride + page] : 0;
    const i32 host = page < a.source_pages ? a.source[r.table_row * a.source_stride + page] : 0;
    if ((u32)(device - 1) < (u32)(a.num_device_blocks - 1)) return device;
    if (device == 0 && (u32)(host - 1) < (u32)(a.num_source_blocks - 1)) return -host;
    return 0;
}

// Answers resident lanes and enters the others into the table of wanted rows.
__device__ __forceinline__ bool enter_lanes(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 base, i32 end,
    bool has_hot, const Positions& positions
) {
    const i32 lane = base + threadIdx.x % 32 * kLanes;
    i32 place[kLanes], offset[kLanes];
#pragma unroll
    for (i32 v = 0; v < kLanes; ++v) {
        const i32 position = positions.of[v];
        const i32 page = block_of(position, a.block_size, a.block_shift);
        offset[v] = position - page * a.block_size;
        place[v] = 0;
        if (position < 0) continue;
        // Random words: from L1 one line after the other, from shared memory most at once.
        if (a.cached_pages) {
            if (page < a.cached_pages) place[v] = t.places[page];
        } else {
            place[v] = place_of_page(a, r, page);
        }
    }
    u32 counts = 0, entry[kLanes];
    Key keys[kLanes], old[kLanes];
    bool valid[kLanes];
#pragma unroll
    for (i32 v = 0; v < kLanes; ++v) {
        if (place[v] < 0 && !has_hot) place[v] = 0;
        keys[v] = old[v] = (Key)((i64)-place[v] * a.block_size + offset[v]);
        entry[v] = kNone;
        valid[v] = place[v] != 0;
        if (place[v] < 0) {
            entry[v] = __umulhi(hash_of(keys[v]), a.table_slots);
            old[v] = atomicCAS(&t.keys[entry[v]], kEmptyKey, keys[v]);
        } else if (lane + v < end) {
            const i64 physical = (i64)place[v] * a.block_stride_rows + offset[v];
            write_lane(a, r, lane + v, valid[v] ? physical : -1);
            counts += valid[v] ? 1 : positions.of[v] >= 0 ? 1 << 16 : 0;
        }
    }
    bool any = false;
#pragma unroll
    for (i32 v = 0; v < kLanes; ++v) {
        if (entry[v] != kNone) {
            if (old[v] != kEmptyKey && old[v] != keys[v]) {
                entry[v] = insert_slowly(t.keys, a.table_slots, keys[v], entry[v]);
            }
            atomicMin(&t.values[entry[v]], (u32)(lane + v));
            any = true;
        }
        t.lane_entry[lane + v] = entry[v];
    }
    count_valid(a, r, s, base, valid);
    if (__any_sync(kFullWarp, counts)) {
        counts = warp_sum(counts);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&s.lane_counts[0], counts & 0xffff);
            atomicAdd(&s.lane_counts[2], counts >> 16);
        }
    }
    return any;
}

// --- hot slots -----------------------------------------------------------------------------------

struct __align__(16) SlotBatch {
    i64 host_row[kSlots];
    i32 last_use[kSlots];
};

__device__ __forceinline__ SlotBatch load_slots(
    const ResolveArgs& a, const Request& r, i32 slot, i32 end
) {
    SlotBatch batch;
    const i64 at = (i64)r.slot * a.hot_rows + slot;
    if (a.vector_slots && slot < end) {
        *(longlong2*)&batch.host_row[0] = *(const longlong2*)(a.host_rows + at);
        *(longlong2*)&batch.host_row[2] = *(const longlong2*)(a.host_rows + at + 2);
        *(int4*)batch.last_use = *(const int4*)(a.last_use + at);
        return batch;
    }
#pragma unroll
    for (i32 v = 0; v < kSlots; ++v) {
        batch.host_row[v] = slot + v < end ? a.host_rows[at + v] : -1;
        batch.last_use[v] = slot + v < end ? a.last_use[at + v] : 0;
    }
    return batch;
}

// Marks the slots that hold wanted rows; the others get their age class.
__device__ __forceinline__ void match_slots(
    const ResolveArgs& a, const Tables& t, const Request& r, i32 clock, i32 slot, i32 end,
    const SlotBatch& batch
) {
    // The searches of a thread overlap: all first buckets are loaded before any is looked at.
    Bucket seen[kSlots];
    u32 home[kSlots];
#pragma unroll
    for (i32 v = 0; v < kSlots; ++v) {
        home[v] = __umulhi(hash_of((Key)batch.host_row[v]), a.table_slots) / kWays;
        seen[v] = load_bucket(t, home[v]);
    }
    i32* last_use = a.last_use + (i64)r.slot * a.hot_rows + slot;
    int4 uses = *(const int4*)batch.last_use;
    u32 ages = 0;
    bool any = false;
#pragma unroll
    for (i32 v = 0; v < kSlots; ++v) {
        const i64 host_row = batch.host_row[v];
        const bool in_range = host_row >= 0 && (u64)host_row < (u64)kEmptyKey;
        const u32 entry = in_range ? find(t, a.table_slots, (Key)host_row, home[v], seen[v]) : kNone;
        const u32 age = min((u32)clock - (u32)batch.last_use[v], kOldAge);
        u32 age_class = batch.last_use[v] == 0 ? kEmptyAge : age;
        if (entry != kNone) {
            t.values[entry] = kHit | (u32)(slot + v);
            if (!a.vector_slots) last_use[v] = clock;
            (&uses.x)[v] = clock;
            any = true;
            age_class = kUsed;
        }
        if (slot + v >= end) age_class = kUsed;  // no slot
        ages |= age_class << (8 * v);
    }
    // One store for four slots: nobody else writes this request's.
    if (any && a.vector_slots) *(int4*)last_use = uses;
    t.ages[slot / kSlots] = ages;
}

// Answers lanes whose row is hot; marks and counts the first appearances of a missing row.
__device__ __forceinline__ void answer_hits(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 begin, i32 end
) {
    u32 counts = 0, firsts = 0;
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kLanes) {
        const i32 lane = base + threadIdx.x % 32 * kLanes;
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) {
            const u32 entry = t.lane_entry[lane + v];
            if (entry == kNone) continue;
            const u32 value = peek(&t.values[entry]);
            if (value & kHit) {
                write_lane(a, r, lane + v, physical_of_slot(a, t, r, value & ~kHit));
                t.lane_entry[lane + v] = kNone;
                counts += 1;
            } else {
                counts += 1 << 16;
                if (value == (u32)(lane + v)) {
                    t.lane_entry[lane + v] = entry | kFirst;
                    ++firsts;
                }
            }
        }
    }
    counts = warp_sum(counts);
    firsts = warp_sum(firsts);
    if (threadIdx.x % 32 == 0) {
        s.warp_first[threadIdx.x / 32] = firsts;
        if (counts & 0xffff) atomicAdd(&s.lane_counts[1], counts & 0xffff);
        if (counts >> 16) atomicAdd(&s.lane_counts[3], counts >> 16);
    }
}

// Lists the misses in order of first appearance; `rank` is the number in the warps before.
__device__ __forceinline__ void list_misses(const Tables& t, i32 begin, i32 end, u32 rank) {
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kLanes) {
        const i32 lane = base + threadIdx.x % 32 * kLanes;
        u32 entries[kLanes], count = 0, total;
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) {
            entries[v] = t.lane_entry[lane + v];
            if (entries[v] == kNone) entries[v] = 0;
            count += (entries[v] & kFirst) != 0;
        }
        if (!__any_sync(kFullWarp, count)) continue;
        u32 index = rank + warp_exclusive_scan(count, total);
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) {
            if (entries[v] & kFirst) t.missing[index++] = (u16)(entries[v] & ~kFirst);
        }
        rank += total;
    }
}

// --- victims -------------------------------------------------------------------------------------

// Histogram of age classes. Thread i of a warp counts classes i and i + 32 from ballots of the bits:
// no two threads meet at an address, and a class that all slots share costs nothing more.
__device__ __forceinline__ void count_ages(const Tables& t, Small& s, i32 begin, i32 end) {
    const u32 thread = threadIdx.x % 32;
    u32 low = 0, high = 0, flip[5];
#pragma unroll
    for (u32 bit = 0; bit < 5; ++bit) flip[bit] = thread >> bit & 1 ? 0 : kFullWarp;
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kSlots) {
        const u32 ages = t.ages[base / kSlots + thread];
#pragma unroll
        for (u32 v = 0; v < kSlots; ++v) {
            const u32 age = ages >> (8 * v);
            u32 same = kFullWarp;
#pragma unroll
            for (u32 bit = 0; bit < 5; ++bit) {
                const u32 votes = __ballot_sync(kFullWarp, age >> bit & 1);
                same &= votes ^ flip[bit];
            }
            const u32 upper = __ballot_sync(kFullWarp, age & 32);
            low += __popc(same & ~upper);
            high += __popc(same & upper);
        }
    }
    if (low && thread != kUsed) atomicAdd(&s.age_counts[thread], low);
    if (high) atomicAdd(&s.age_counts[32 + thread], high);
}

struct Cut {
    u32 age;       // classes above are victims whole
    i32 last_use;  // in class kOldAge: slots used before are victims, those used then are tied
    u32 take;      // victims among the tied, by slot number
};

// Finds the highest of N bins at which `wanted` slots are reached, going down from the last.
template <i32 N>
__device__ __forceinline__ u32 find_bin(const u32* counts, u32 wanted, u32& take, u32& in_bin) {
    constexpr i32 kEach = N / 32;
    const i32 top = N - 1 - threadIdx.x % 32 * kEach;
    u32 bins[kEach], sum = 0, total;
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        bins[i] = counts[top - i];
        sum += bins[i];
    }
    u32 before = warp_exclusive_scan(sum, total);
    const bool here = before < wanted && wanted <= before + sum;
    u32 bin = 0, left = 0, size = 0;
#pragma unroll
    for (i32 i = 0; i < kEach; ++i) {
        if (here && size == 0 && before + bins[i] >= wanted) {
            bin = top - i;
            left = wanted - before;
            size = bins[i];
        }
        before += bins[i];
    }
    const i32 owner = __ffs(__ballot_sync(kFullWarp, here)) - 1;
    take = __shfl_sync(kFullWarp, left, owner);
    in_bin = __shfl_sync(kFullWarp, size, owner);
    return __shfl_sync(kFullWarp, bin, owner);
}

// Exact order among old slots: four passes of a radix selection by last_use. Returns the last_use of
// the tied in the low half, how many of them to take in the high half. Not inlined, so that its
// registers do not count.
__device__ __noinline__ u64 refine_old(
    const i32* last_use, const u32* ages, u32* counts, i32 begin, i32 end, u32 wanted
) {
    u32 prefix = 0, mask = 0;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (i32 i = threadIdx.x; i < 256; i += kThreads) counts[i] = 0;
        __syncthreads();
        for (i32 slot = begin + threadIdx.x % 32 * kSlots; slot < end; slot += 32 * kSlots) {
            for (i32 v = 0; v < kSlots; ++v) {
                if ((ages[slot / kSlots] >> (8 * v) & 255) != kOldAge) continue;
                const u32 value = last_use[slot + v];
                // The least last_use goes first: the highest bin.
                if ((value & mask) == prefix) atomicAdd(&counts[255 - (value >> shift & 255)], 1u);
            }
        }
        __syncthreads();
        u32 take, in_bin;
        const u32 bin = find_bin<256>(counts, wanted, take, in_bin);
        wanted = take;
        prefix |= (255 - bin) << shift;
        mask |= 255u << shift;
    }
    return (u64)wanted << 32 | prefix;
}

// Bit v of the low half: slot v is a victim; of the high half: it is tied.
__device__ __forceinline__ u32 classify(
    const i32* last_use, const Tables& t, const Cut& cut, i32 slot
) {
    const u32 ages = t.ages[slot / kSlots];
    u32 result = 0;
#pragma unroll
    for (i32 v = 0; v < kSlots; ++v) {
        const u32 age = ages >> (8 * v) & 255;
        bool sure = age > cut.age, tied = age == cut.age;
        if (cut.last_use >= 0 && tied) {
            sure = last_use[slot + v] < cut.last_use;
            tied = last_use[slot + v] == cut.last_use;
        }
        result |= (sure ? 1u << v : 0) | (tied ? 1u << (16 + v) : 0);
    }
    return result;
}

__device__ __forceinline__ u32 count_classified(u32 flags) {
    return __popc(flags & 0xffff) | __popc(flags >> 16) << 16;
}

// Counts sure and tied victims in each warp; returns the sums of the warps before and of all. One
// barrier inside.
__device__ __forceinline__ u32 count_victims(
    const i32* last_use, const Tables& t, Small& s, const Cut& cut, i32 begin, i32 end, u32& total
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32 count = 0;
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kSlots) {
        count += count_classified(classify(last_use, t, cut, base + thread * kSlots));
    }
    count = warp_sum(count);
    if (thread == 0) s.warp_victims[warp] = count;
    __syncthreads();
    const u32 packed = thread < kWarps ? s.warp_victims[thread] : 0;
    return __shfl_sync(kFullWarp, warp_exclusive_scan(packed, total), warp);
}

// Lists the victims by slot number. The class at which they were cut in the last step is tried first:
// where requests go on as before it is right, and there is no histogram to make.
__device__ __forceinline__ void choose_victims(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 clock, u32 num_misses,
    u32 hint, i32 begin, i32 end
) {
    const i32 thread = threadIdx.x % 32;
    i32* last_use = a.last_use + (i64)r.slot * a.hot_rows;
    Cut cut;
    cut.last_use = -1;
    u32 before = 0, total, in_bin;
    bool found = false;
    if (hint != kUsed && hint != kOldAge) {
        cut.age = hint;
        before = count_victims(last_use, t, s, cut, begin, end, total);
        cut.take = num_misses - (total & 0xffff);
        found = (total & 0xffff) <= num_misses && cut.take <= total >> 16;
        HS_STAMP(6);
    }
    if (!found) {
        count_ages(t, s, begin, end);
        __syncthreads();
        cut.age = find_bin<kClasses>(s.age_counts, num_misses, cut.take, in_bin);
        if (cut.age == kOldAge && cut.take < in_bin) {
            const u64 refined = refine_old(last_use, t.ages, s.age_counts, begin, end, cut.take);
            cut.last_use = (i32)(u32)refined;
            cut.take = (u32)(refined >> 32);
        }
        HS_STAMP(7);
        before = count_victims(last_use, t, s, cut, begin, end, total);
        if (threadIdx.x == 0 && a.workspace) {
            *(u32*)(a.workspace + r.slot * a.workspace_stride) = cut.age;
        }
    }
    HS_STAMP(8);
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kSlots) {
        const i32 slot = base + thread * kSlots;
        const u32 flags = classify(last_use, t, cut, slot);
        const u32 mine = before + warp_exclusive_scan(count_classified(flags), total);
        u32 sure = mine & 0xffff, tied = mine >> 16;
#pragma unroll
        for (i32 v = 0; v < kSlots; ++v) {
            const bool is_sure = flags >> v & 1, is_tied = flags >> (16 + v) & 1;
            if (is_sure || (is_tied && tied < cut.take)) {
                t.victims[sure + min(tied, cut.take)] = (u16)(slot + v);
                last_use[slot + v] = clock;
            }
            sure += is_sure;
            tied += is_tied;
        }
        before += total;
    }
}

// Miss i, in order of first appearance, takes victim i.
__device__ __forceinline__ void plan_misses(
    const ResolveArgs& a, const Tables& t, const Request& r, u32 num_misses
) {
    const i64 list = (i64)blockIdx.x * a.max_misses;
#pragma unroll 1
    for (u32 index = threadIdx.x; index < num_misses; index += kThreads) {
        const u32 entry = peek(&t.missing[index]);
        const i32 slot = peek(&t.victims[index]);
        const i32 lane = peek(&t.values[entry]);
        const i64 host_row = (i64)peek(&t.keys[entry]);
        const i64 physical = physical_of_slot(a, t, r, slot);
        a.miss_source_rows[list + index] = host_row;
        a.miss_device_rows[list + index] = physical;
        a.host_rows[(i64)r.slot * a.hot_rows + slot] = host_row;
        write_lane(a, r, lane, physical);
        t.values[entry] = kHit | (u32)slot;
    }
}

__device__ __forceinline__ void answer_duplicates(
    const ResolveArgs& a, const Tables& t, const Request& r, i32 begin, i32 end
) {
#pragma unroll 1
    for (i32 base = begin; base < end; base += 32 * kLanes) {
        const i32 lane = base + threadIdx.x % 32 * kLanes;
#pragma unroll
        for (i32 v = 0; v < kLanes; ++v) {
            const u32 entry = t.lane_entry[lane + v];
            if (entry == kNone || (entry & kFirst)) continue;
            write_lane(a, r, lane + v, physical_of_slot(a, t, r, peek(&t.values[entry]) & ~kHit));
        }
    }
}

// --- one request ---------------------------------------------------------------------------------

__device__ __forceinline__ void finish(
    const ResolveArgs& a, const Request& r, const Small& s, i32 clock, u32 miss_rows
) {
    if (threadIdx.x < r.rows) {
        a.valid_counts[r.first_row + threadIdx.x] = s.row_valid[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        a.clock[r.slot] = clock;
        a.miss_counts[blockIdx.x] = miss_rows;
    }
    // By another warp: thread 0 has enough to do.
    const i32 counter = (i32)threadIdx.x - 32;
    if (counter < 0 || counter >= kInvalidatedRows) return;
    u32 value = 1;  // transactions
    if (counter == kResidentLanes) value = s.lane_counts[0];
    if (counter == kHotLanes) value = s.lane_counts[1];
    if (counter == kInvalidLanes) value = s.lane_counts[2];
    if (counter == kMissLanes) value = s.lane_counts[3];
    if (counter == kMissRows) value = miss_rows;
    if (value) atomicAdd(&a.counters[counter], (u64)value);
}

// Rows of no request, requests of no step: -1 and 0 on every launch, so that a replay has no leftovers.
__device__ __forceinline__ void write_leftovers(
    const ResolveArgs& a, i64 used, i64 pad_from, i64 pad_to
) {
    // First the rows of this block's own request if it is padding.
    const bool own = pad_from < pad_to;
#pragma unroll 1
    for (i64 row = own ? pad_from : used + blockIdx.x; row < a.num_query_rows;) {
        write_padding(a, row);
        if (row < pad_to) {
            row = row + 1 < pad_to ? row + 1 : used + blockIdx.x;
        } else {
            row += gridDim.x;
        }
    }
#pragma unroll 1
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
#pragma unroll 4
    for (i32 i = threadIdx.x; i < a.table_slots / kKeysPerStore; i += kThreads) {
        ((uint4*)t.keys)[i] = empty;
    }
#pragma unroll 4
    for (i32 i = threadIdx.x; i < a.table_slots / 4; i += kThreads) {
        ((uint4*)t.values)[i] = no_lane;
    }
    if (threadIdx.x < kClasses) s.age_counts[threadIdx.x] = 0;
    if (threadIdx.x < kMaxRows) s.row_valid[threadIdx.x] = 0;
    if (threadIdx.x < 4) s.lane_counts[threadIdx.x] = 0;
}

// Everything about a step whose wanted rows are in the table. Returns the misses.
__device__ __forceinline__ u32 resolve_wanted(
    const ResolveArgs& a, const Tables& t, const Request& r, Small& s, i32 clock, u32 hint,
    i32 lane_begin, i32 lane_end, i32 slot_begin, i32 slot_end
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    answer_hits(a, t, r, s, lane_begin, lane_end);
    __syncthreads();
    HS_STAMP(5);
    u32 num_misses;
    const u32 firsts = thread < kWarps ? s.warp_first[thread] : 0;
    const u32 rank = __shfl_sync(kFullWarp, warp_exclusive_scan(firsts, num_misses), warp);
    if (num_misses == 0) return 0;
    list_misses(t, lane_begin, lane_end, rank);
    choose_victims(a, t, r, s, clock, num_misses, hint, slot_begin, slot_end);
    __syncthreads();
    HS_STAMP(9);
    plan_misses(a, t, r, num_misses);
    HS_STAMP(10);
    if (s.lane_counts[3] > num_misses) {
        __syncthreads();
        answer_duplicates(a, t, r, lane_begin, lane_end);
    }
    return num_misses;
}

__device__ __forceinline__ void resolve_request(
    const ResolveArgs& a, const Request& r, const Tables& t, Small& s, Positions positions
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const i32 slot_begin = warp * r.slots_per_warp;
    const i32 slot_end = min(slot_begin + r.slots_per_warp, a.hot_rows);
    const i32 lane_begin = warp * r.lanes_per_warp;
    const i32 lane_end = min(lane_begin + r.lanes_per_warp, r.lanes);
    // In flight while the lanes are translated.
    SlotBatch slots = load_slots(a, r, slot_begin + thread * kSlots, slot_end);
    const i32 clock = a.clock[r.slot] + 1;
    const u32 hint = a.workspace ? *(const u32*)(a.workspace + r.slot * a.workspace_stride) : kUsed;
    const bool has_hot = r.hot_table[0] > 0;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < a.cached_hot_blocks; i += kThreads) {
        t.hot_table[i] = r.hot_table[i];
    }
#pragma unroll 1
    for (i32 i = threadIdx.x; i < a.cached_pages; i += kThreads) t.places[i] = place_of_page(a, r, i);
    __syncthreads();
    HS_STAMP(2);
    bool any = false;
#pragma unroll 1
    for (i32 base = lane_begin; base < lane_end; base += 32 * kLanes) {
        const i32 lane = base + thread * kLanes;
        if (base > lane_begin) {
            positions = load_positions(a, r.first_row, r.rows, lane, lane_end);
        }
        any |= enter_lanes(a, t, r, s, base, lane_end, has_hot, positions);
    }
    u32 num_misses = 0;
    const bool none = !__syncthreads_or(any);
    HS_STAMP(3);
    if (!none) {
#pragma unroll 1
        for (i32 base = slot_begin; base < slot_end; base += 32 * kSlots) {
            const i32 slot = base + thread * kSlots;
            if (base > slot_begin) slots = load_slots(a, r, slot, slot_end);
            match_slots(a, t, r, clock, slot, slot_end, slots);
        }
        __syncthreads();
        HS_STAMP(4);
        num_misses =
            resolve_wanted(a, t, r, s, clock, hint, lane_begin, lane_end, slot_begin, slot_end);
    }
    finish(a, r, s, clock, num_misses);
}

extern "C" __global__ void __launch_bounds__(HS_THREADS, HS_BLOCKS_PER_SM)
hs_resolve(const __grid_constant__ ResolveArgs a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Small s;
    HS_STAMP(0);
    const i64 used_rows = a.query_starts[a.num_requests];
    i64 pad_from = 0, pad_to = 0;
    if ((i32)blockIdx.x < a.num_requests) {
        Request r;
        r.slot = a.request_slots[blockIdx.x];
        r.table_row = a.table_rows[blockIdx.x];
        r.first_row = a.query_starts[blockIdx.x];
        r.rows = a.query_starts[blockIdx.x + 1] - (i32)r.first_row;
        // The positions are read where they lie if all requests have as many rows: one load less
        // that waits for another.
        const i64 guess = (i64)blockIdx.x * a.rows_guess;
        const i32 guess_lanes = a.rows_guess * a.top_k;
        const i32 share = share_of_warp(guess_lanes, 32 * kLanes);
        const i32 begin = threadIdx.x / 32 * share, thread = threadIdx.x % 32;
        Positions positions = load_positions(
            a, guess, a.rows_guess, begin + thread * kLanes, min(begin + share, guess_lanes));
#if HS_GLOBAL_HASH
        const Tables t = place_tables(a, shared, min(r.slot, a.max_num_reqs - 1));
#else
        const Tables t = place_tables(a, shared, 0);
#endif
        clear_shared(a, t, s);
        HS_STAMP(1);
        r.lanes = r.rows * a.top_k;
        r.lanes_per_warp = share_of_warp(r.lanes, 32 * kLanes);
        r.slots_per_warp = share_of_warp(a.hot_rows, 32 * kSlots);
        r.hot_table = a.hot + r.table_row * a.hot_stride;
        if (r.slot >= 0 && r.slot < a.max_num_reqs && r.rows > 0 && r.rows <= kMaxRows &&
            r.lanes <= a.max_lanes) {
            if (r.first_row != guess || r.rows != a.rows_guess) {
                const i32 first = threadIdx.x / 32 * r.lanes_per_warp;
                positions = load_positions(
                    a, r.first_row, r.rows, first + thread * kLanes,
                    min(first + r.lanes_per_warp, r.lanes));
            }
            resolve_request(a, r, t, s, positions);
        } else {
            pad_from = r.first_row;
            pad_to = r.first_row + r.rows;
            if (threadIdx.x == 0) a.miss_counts[blockIdx.x] = 0;
        }
    }
    write_leftovers(a, used_rows, pad_from, pad_to);
    HS_STAMP(11);
}
