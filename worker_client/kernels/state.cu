// Forgets hot rows: by host block (KernelBackend.invalidate) and by request slot (reset).
//
// Compiled with HS_THREADS.
#include "common.cuh"

constexpr i32 kThreads = HS_THREADS;
constexpr u32 kSetSlots = 8192;
constexpr i32 kBlocksAtOnce = 4096;  // half of the set's slots
constexpr u32 kNoBlock = 0;          // the null block is never in the set

struct InvalidateArgs {
    i64* host_rows;
    i32* last_use;
    u64* counters;
    const i32* host_blocks;
    i64 num_slots;
    i64 num_host_blocks;
    i32 block_size;
    i32 block_shift;
};

struct ResetArgs {
    i64* host_rows;
    i32* last_use;
    i32* clock;
    const i32* request_slots;
    i32 hot_rows;
    i32 max_num_reqs;
};

static_assert(sizeof(InvalidateArgs) == HS_SIZEOF_INVALIDATE, "mirrored in launches.py");
static_assert(sizeof(ResetArgs) == HS_SIZEOF_RESET, "mirrored in launches.py");

__device__ __forceinline__ u32 set_home(u32 block) {
    return __umulhi(mix32(block), kSetSlots);
}

__device__ __forceinline__ void add_block(u32* set, i32 block) {
    if (block < 1) return;
    u32 at = set_home(block);
    while (true) {
        const u32 old = atomicCAS(&set[at], kNoBlock, (u32)block);
        if (old == kNoBlock || old == (u32)block) return;
        at = (at + 1) % kSetSlots;
    }
}

__device__ __forceinline__ bool has_block(const u32* set, u32 block) {
    for (u32 at = set_home(block);; at = (at + 1) % kSetSlots) {
        if (set[at] == block) return true;
        if (set[at] == kNoBlock) return false;
    }
}

extern "C" __global__ void __launch_bounds__(HS_THREADS)
hs_invalidate(const __grid_constant__ InvalidateArgs a) {
    __shared__ u32 set[kSetSlots];
    u32 forgotten = 0;
    for (i64 first = 0; first < a.num_host_blocks; first += kBlocksAtOnce) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < kSetSlots; i += kThreads) set[i] = kNoBlock;
        __syncthreads();
        const i64 last = min(first + kBlocksAtOnce, a.num_host_blocks);
        for (i64 i = first + threadIdx.x; i < last; i += kThreads) add_block(set, a.host_blocks[i]);
        __syncthreads();
        for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < a.num_slots;
             i += (i64)gridDim.x * kThreads) {
            const i64 row = a.host_rows[i];
            if (row < 0) continue;
            const i64 block = block_of(row, a.block_size, a.block_shift);
            if (block < 1 || block > 0x7fffffff || !has_block(set, (u32)block)) continue;
            a.host_rows[i] = -1;
            a.last_use[i] = 0;
            ++forgotten;
        }
    }
    forgotten = warp_sum(forgotten);
    if (threadIdx.x % 32 == 0 && forgotten) {
        atomicAdd(&a.counters[kInvalidatedRows], (u64)forgotten);
    }
}

extern "C" __global__ void __launch_bounds__(HS_THREADS)
hs_reset(const __grid_constant__ ResetArgs a) {
    const i32 slot = a.request_slots[blockIdx.x];
    if (slot < 0 || slot >= a.max_num_reqs) return;
    const i64 first = (i64)slot * a.hot_rows;
    for (i32 i = threadIdx.x; i < a.hot_rows; i += kThreads) {
        a.host_rows[first + i] = -1;
        a.last_use[first + i] = 0;
    }
    if (threadIdx.x == 0) a.clock[slot] = 0;
}
