// One warp's memory on its way to shared memory: slots that are filled and emptied in turn. On
// Hopper a single lane asks for a whole slot; elsewhere every lane asks for sixteen bytes at once.
#pragma once
#include "barrier.cuh"

#if __CUDA_ARCH__ >= 900

template <u32 SLOT, u32 DEPTH> struct Pipe {
    u32 slots, barriers; // addresses in shared memory
    u32 to, from, phase;

    __device__ __forceinline__ void begin(const u8 *start, const u8 *barrier) {
        slots = shared_address(start);
        barriers = shared_address(barrier);
        to = from = phase = 0;
        if (threadIdx.x % 32 == 0) {
            for (u32 i = 0; i < DEPTH; i++) make_barrier(barriers + 8 * i, 1);
            show_barriers();
        }
        __syncwarp();
    }

    // Asks for the next slot: for `bytes` of each of `PARTS` parts that lie apart.
    template <int PARTS> __device__ __forceinline__ void fill(const u8 *const (&at)[PARTS], u32 bytes) {
        if (threadIdx.x % 32 == 0) {
            u32 barrier = barriers + 8 * to;
            expect(barrier, PARTS * bytes);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                copy_once(slots + to * SLOT + i * (SLOT / PARTS), at[i], bytes, barrier);
            }
        }
        to = to + 1 == DEPTH ? 0 : to + 1;
    }

    __device__ __forceinline__ void fill_nothing() {}

    // Waits for the oldest slot and gives its place.
    __device__ __forceinline__ u32 wait() const {
        wait_phase(barriers + 8 * from, phase);
        return from * SLOT;
    }

    // The oldest slot has been read.
    __device__ __forceinline__ void release() {
        __syncwarp();
        from++;
        if (from == DEPTH) {
            from = 0;
            phase ^= 1;
        }
    }
};

#else

template <u32 SLOT, u32 DEPTH> struct Pipe {
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
        fill_nothing();
    }

    // Keeps count of slots where there is nothing left to ask for.
    __device__ __forceinline__ void fill_nothing() { asm volatile("cp.async.commit_group;"); }

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
