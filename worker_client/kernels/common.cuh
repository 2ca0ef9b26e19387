// Types and helpers of all kernels. Compiled by NVRTC: no standard headers.
//
// Row and byte arithmetic is 64-bit everywhere (a pool may hold more than 2^31 rows). Argument
// structures are mirrored in launches.py; their sizes are asserted on both sides.
#pragma once

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u16 = unsigned short;
using u8 = unsigned char;

static_assert(sizeof(i64) == 8 && sizeof(void*) == 8, "64-bit rows and addresses");

#define HS_MAX_LAYERS 32
constexpr u32 kFullWarp = 0xffffffffu;

// Index into HotState.counters: interface.Counter.
enum Counter {
    kResidentLanes = 0,
    kHotLanes,
    kMissLanes,
    kMissRows,
    kInvalidLanes,
    kTransactions,
    kInvalidatedRows,
};

// row / size. HS_POW2: every size is a power of two, shift its log2. The kernels run through their
// code once a launch, so its length counts: the division is left out where it is not needed.
template <typename Row> __device__ __forceinline__ Row block_of(Row row, i32 size, i32 shift) {
#if HS_POW2
    (void)size;
    return row >> shift;
#else
    (void)shift;
    return row / size;
#endif
}

__device__ __forceinline__ u32 warp_sum(u32 value) {
    return __reduce_add_sync(kFullWarp, value);
}

// Sum of the values of lower lanes; `total` gets the sum of all.
__device__ __forceinline__ u32 warp_exclusive_scan(u32 value, u32& total) {
    const u32 lane = threadIdx.x & 31;
    u32 sum = value;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
    }
    total = __shfl_sync(kFullWarp, sum, 31);
    return sum - value;
}

__device__ __forceinline__ u32 lanes_below() {
    return (1u << (threadIdx.x & 31)) - 1;
}

__device__ __forceinline__ u32 mix32(u32 key) {
    key ^= key >> 15;
    return key * 0x9e3779b1u;
}
