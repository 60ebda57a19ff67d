// Barriers in shared memory, and copies that run by themselves until one of them counts their bytes: Hopper's alone.
// All are named by their addresses in shared memory.
#pragma once
#include "device.cuh"

#if __CUDA_ARCH__ >= 900

// Makes a barrier that so many arrivals complete. Copies know of it once `show_barriers` follows.
DEVICE void make_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void show_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives, and lets the barrier wait for so many bytes as well.
DEVICE void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until a barrier has left the phase of this parity.
DEVICE void wait_phase(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether it has.
DEVICE bool has_passed(u32 barrier, u32 parity) {
    u32 has;
    asm volatile("{.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;}"
                 : "=r"(has) : "r"(barrier), "r"(parity) : "memory");
    return has != 0;
}

// Asks for memory to come to shared memory.
DEVICE void copy_bulk(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same of what nobody reads later in a step, as weights, keys and values: the first that the second-level cache
// gives up, so that what blocks wait for from each other stays there.
DEVICE void copy_once(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("{.reg .b64 policy;\n"
                 "createpolicy.fractional.L2::evict_first.b64 policy;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], policy;}" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

#endif
