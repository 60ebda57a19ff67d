// Products of a warp group (`wgmma`) on Hopper: d += a * b over 16 columns of a, whose 64 rows are in
// registers or in shared memory. Matrix b is in shared memory.
//
// Matrices in shared memory have rows of 128 bytes with the 128-byte swizzle: piece `i` of sixteen
// bytes of row `r` is at `i ^ r % 8`; or rows of 64 bytes with the 64-byte swizzle, `i ^ r / 2 % 4`. Wider
// rows are cut into columns of such rows.
#pragma once
#include "packed.cuh"

#if __CUDA_ARCH__ >= 900

// The descriptor of a K-major matrix: its stride offset is that of eight rows, its leading offset unused.
template <u32 LINE = 128> DEVICE u64 wgmma_matrix(u32 at) {
    return (u64)(LINE == 128 ? 1 : 2) << 62 | (u64)(8 * LINE >> 4) << 32 | 1 << 16 | at >> 4;
}

// The descriptor of an MN-major matrix, of which a line has 64 columns of a row of K: its stride offset is
// that of eight rows, `leading_bytes` that of 64 columns.
DEVICE u64 wgmma_mn_major(u32 at, u32 leading_bytes) {
    return (u64)1 << 62 | (u64)(8 * 128 >> 4) << 32 | (u64)(leading_bytes >> 4) << 16 | at >> 4;
}

// Operands of some accumulators.
#define SUMS_8(d, i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_16(d, i) SUMS_8(d, i), SUMS_8(d, i + 8)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                                                     \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                     \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "    \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 "

// With a in registers; b is K-major or MN-major.
template <bool MN_MAJOR> DEVICE void wgmma(float (&d)[8], const Fragment &a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %13, 0;\n"
                 WGMMA(16) "{" NAMES_8 "}, {%8, %9, %10, %11}, %12, adds, 1, 1, %14;}"
                 : SUMS_8(d, 0)
                 : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "l"(b), "r"((u32)adds), "n"(MN_MAJOR));
}
template <bool MN_MAJOR> DEVICE void wgmma(float (&d)[16], const Fragment &a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %21, 0;\n"
                 WGMMA(32) "{" NAMES_16 "}, {%16, %17, %18, %19}, %20, adds, 1, 1, %22;}"
                 : SUMS_16(d, 0)
                 : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "l"(b), "r"((u32)adds), "n"(MN_MAJOR));
}
template <bool MN_MAJOR> DEVICE void wgmma(float (&d)[32], const Fragment &a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %37, 0;\n"
                 WGMMA(64) "{" NAMES_32 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, %38;}"
                 : SUMS_32(d, 0)
                 : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "l"(b), "r"((u32)adds), "n"(MN_MAJOR));
}
template <bool MN_MAJOR> DEVICE void wgmma(float (&d)[64], const Fragment &a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %69, 0;\n"
                 WGMMA(128) "{" NAMES_64 "}, {%64, %65, %66, %67}, %68, adds, 1, 1, %70;}"
                 : SUMS_32(d, 0), SUMS_32(d, 32)
                 : "r"(a.a[0]), "r"(a.a[1]), "r"(a.a[2]), "r"(a.a[3]), "l"(b), "r"((u32)adds), "n"(MN_MAJOR));
}

// With a in shared memory; both are K-major.
DEVICE void wgmma(float (&d)[32], u64 a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %34, 0;\n"
                 WGMMA(64) "{" NAMES_32 "}, %32, %33, adds, 1, 1, 0, 0;}"
                 : SUMS_32(d, 0)
                 : "l"(a), "l"(b), "r"((u32)adds));
}
DEVICE void wgmma(float (&d)[64], u64 a, u64 b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
                 WGMMA(128) "{" NAMES_64 "}, %64, %65, adds, 1, 1, 0, 0;}"
                 : SUMS_32(d, 0), SUMS_32(d, 32)
                 : "l"(a), "l"(b), "r"((u32)adds));
}

// Ordering of a warp group's asynchronous products.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps uses of results behind a wait.
template <int N> DEVICE void wgmma_results(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Waits until at most `PENDING` committed groups are incomplete.
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#endif
