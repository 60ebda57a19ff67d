// A warp's ring of DEPTH slots of SLOT bytes in shared memory, filled by asynchronous copies and
// read in order. On Hopper one lane issues bulk copies, completed by a full mbarrier; elsewhere
// every lane copies sixteen bytes at a time (cp.async groups). The same warp fills and reads, so there are
// no empty barriers: before each `wait` exactly DEPTH calls of `fill` or `commit` are not yet read.
// So begin with DEPTH of them, and call one after each `release`.
#pragma once
#include "mbarrier.cuh"

#if __CUDA_ARCH__ >= 900

template <u32 SLOT, u32 DEPTH> struct Pipeline {
    u32 slots, barriers; // addresses in shared memory
    u32 write_slot;
    RingPosition<DEPTH> read;

    __device__ __forceinline__ void begin(const u8 *start, const u8 *barrier) {
        slots = shared_address(start);
        barriers = shared_address(barrier);
        write_slot = 0;
        read = {};
        if (threadIdx.x % 32 == 0) {
            for (u32 i = 0; i < DEPTH; i++) mbarrier_init(barriers + 8 * i, 1);
            fence_proxy_async();
        }
        __syncwarp();
    }

    // Fills the next slot: `bytes` of each of `PARTS` sources, which have equal shares of the slot.
    template <int PARTS> __device__ __forceinline__ void fill(const u8 *const (&sources)[PARTS], u32 bytes) {
        if (threadIdx.x % 32 == 0) {
            u32 barrier = barriers + 8 * write_slot;
            mbarrier_expect_tx(barrier, PARTS * bytes);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                bulk_copy_evict_first(slots + write_slot * SLOT + i * (SLOT / PARTS), sources[i], bytes, barrier);
            }
        }
        write_slot = write_slot + 1 == DEPTH ? 0 : write_slot + 1;
    }

    // In the place of a fill at the end of the weights: here nothing counts.
    __device__ __forceinline__ void commit() {}

    // Waits for the oldest slot and returns its offset.
    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(barriers + 8 * read.slot, read.parity);
        return read.slot * SLOT;
    }

    // Frees the oldest slot.
    __device__ __forceinline__ void release() {
        __syncwarp();
        read.advance();
    }
};

#else

template <u32 SLOT, u32 DEPTH> struct Pipeline {
    u32 slots, write_slot, read_slot;

    __device__ __forceinline__ void begin(const u8 *start, const u8 *) {
        slots = shared_address(start);
        write_slot = read_slot = 0;
    }

    template <int PARTS> __device__ __forceinline__ void fill(const u8 *const (&sources)[PARTS], u32 bytes) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            for (u32 piece = 16 * (threadIdx.x % 32); piece < bytes; piece += 512) {
                u32 destination = slots + write_slot * SLOT + i * (SLOT / PARTS) + piece;
                copy_async(destination, sources[i] + piece);
            }
        }
        write_slot = write_slot + 1 == DEPTH ? 0 : write_slot + 1;
        commit();
    }

    // Makes the copies since the last call a group: an empty one at the end of the weights, so that
    // `wait` can count groups.
    __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

    __device__ __forceinline__ u32 wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        __syncwarp();
        return read_slot * SLOT;
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        read_slot = read_slot + 1 == DEPTH ? 0 : read_slot + 1;
    }
};

#endif
