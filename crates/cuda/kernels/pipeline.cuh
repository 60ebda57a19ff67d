// A warp's ring of stages in shared memory, filled by asynchronous copies and consumed in order. On
// Hopper one lane issues a bulk copy per stage, completed by a full mbarrier; elsewhere every lane
// copies sixteen bytes at a time (cp.async groups). The same warp produces and consumes, so there
// are no empty barriers.
#pragma once
#include "mbarrier.cuh"

#if __CUDA_ARCH__ >= 900

template <u32 SLOT, u32 DEPTH> struct Pipeline {
    u32 slots, barriers; // addresses in shared memory
    u32 to;
    RingPosition<DEPTH> from;

    __device__ __forceinline__ void begin(const u8 *start, const u8 *barrier) {
        slots = shared_address(start);
        barriers = shared_address(barrier);
        to = 0;
        from = {};
        if (threadIdx.x % 32 == 0) {
            for (u32 i = 0; i < DEPTH; i++) mbarrier_init(barriers + 8 * i, 1);
            fence_proxy_async();
        }
        __syncwarp();
    }

    // Fills the next slot: `bytes` of each of `PARTS` sources.
    template <int PARTS> __device__ __forceinline__ void fill(const u8 *const (&at)[PARTS], u32 bytes) {
        if (threadIdx.x % 32 == 0) {
            u32 barrier = barriers + 8 * to;
            mbarrier_expect_tx(barrier, PARTS * bytes);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                bulk_copy_evict_first(slots + to * SLOT + i * (SLOT / PARTS), at[i], bytes, barrier);
            }
        }
        to = to + 1 == DEPTH ? 0 : to + 1;
    }

    __device__ __forceinline__ void produce_nothing() {}

    // Waits for the oldest slot and returns its offset.
    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(barriers + 8 * from.slot, from.parity);
        return from.slot * SLOT;
    }

    // Frees the oldest slot.
    __device__ __forceinline__ void release() {
        __syncwarp();
        from.advance();
    }
};

#else

template <u32 SLOT, u32 DEPTH> struct Pipeline {
    u32 slots, to, from;

    __device__ __forceinline__ void begin(const u8 *start, const u8 *) {
        slots = shared_address(start);
        to = from = 0;
    }

    template <int PARTS> __device__ __forceinline__ void fill(const u8 *const (&at)[PARTS], u32 bytes) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            for (u32 piece = 16 * (threadIdx.x % 32); piece < bytes; piece += 512) {
                u32 place = slots + to * SLOT + i * (SLOT / PARTS) + piece;
                copy_async(place, at[i] + piece);
            }
        }
        to = to + 1 == DEPTH ? 0 : to + 1;
        produce_nothing();
    }

    // Commits an empty group, so that group counts stay in step at the end of the weights.
    __device__ __forceinline__ void produce_nothing() { asm volatile("cp.async.commit_group;"); }

    __device__ __forceinline__ u32 wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        __syncwarp();
        return from * SLOT;
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        from = from + 1 == DEPTH ? 0 : from + 1;
    }
};

#endif
