// Transaction barriers (mbarrier) in shared memory and bulk asynchronous copies that complete on
// them: Hopper only. Barriers are named by their shared-memory addresses.
#pragma once
#include "device.cuh"

#if __CUDA_ARCH__ >= 900

// A position in a ring of stages: a slot, and the parity of the phase of its barriers.
template <u32 DEPTH> struct RingPosition {
    u32 slot, parity;

    __device__ __forceinline__ void advance() {
        slot++;
        if (slot == DEPTH) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// Initialises a barrier for `arrivals` arrivals. Bulk copies see it after `fence_proxy_async`.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes a thread's stores to shared memory visible to bulk copies and `wgmma`.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and adds `bytes` to the transaction count of the phase.
DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity is complete.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// Waits for up to `nanoseconds`; whether the phase with this parity is complete.
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity, u32 nanoseconds) {
    u32 has;
    asm volatile("{.reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%1], %2, %3;\n"
                 "selp.u32 %0, 1, 0, done;}"
                 : "=r"(has) : "r"(barrier), "r"(parity), "r"(nanoseconds) : "memory");
    return has != 0;
}

// Whether the phase with this parity is complete.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
    u32 has;
    asm volatile("{.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;}"
                 : "=r"(has) : "r"(barrier), "r"(parity) : "memory");
    return has != 0;
}

// Copies global memory to shared memory; the barrier counts the bytes.
DEVICE void bulk_copy(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Copies with an evict-first L2 policy what is read once per step (weights, keys, values). So the
// values that blocks poll stay in L2.
DEVICE void bulk_copy_evict_first(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("{.reg .b64 policy;\n"
                 "createpolicy.fractional.L2::evict_first.b64 policy;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], policy;}" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

#endif
