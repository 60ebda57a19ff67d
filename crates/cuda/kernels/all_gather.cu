// What the devices of a tensor-parallel group do together: each stores its columns of some values in
// the memory of all others, then waits for theirs.
#include "device.cuh"

#define MAX_WAIT 10000000000u // nanoseconds until a device gives up

DEVICE void store_system(u32 *to, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Stores columns at the same place on all other devices, in units of `T`.
template <class T> DEVICE void store_columns(const AllGather &p, const OwnColumns &own) {
    u32 units = own.bytes / sizeof(T);
    u64 count = (u64)p.rows * units;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        u64 row = i / units;
        u8 *at = own.at + row * own.stride + (i - row * units) * sizeof(T);
        T x = *(const T *)at;
        for (u32 peer = 0; peer < p.peers; peer++) *(T *)(at + __ldg(p.peer_offsets + peer)) = x;
    }
}

// An all-gather, and a barrier: behind it, all devices have all columns, and none reads what was in
// their place any more. Grid: any number of blocks, the last of which waits for the other devices.
KERNEL all_gather(const __grid_constant__ AllGather p) {
    __shared__ bool is_last;
    u32 t = threadIdx.x;
    launch_dependents();
    grid_dependency_wait();
    for (u32 i = 0; i < p.value_count; i++) {
        const OwnColumns &own = p.values[i];
        bool is_aligned = ((u64)own.at | own.stride | own.bytes) % sizeof(uint4) == 0;
        if (is_aligned) store_columns<uint4>(p, own);
        else store_columns<u16>(p, own);
    }
    if (gridDim.x > 1) {
        __threadfence_system();
        __syncthreads();
        if (t == 0) is_last = atomicAdd(p.finished_blocks, 1) + 1 == gridDim.x;
        __syncthreads();
        if (!is_last) return;
        if (t == 0) *p.finished_blocks = 0;
    } else if (p.value_count > 0) {
        __syncthreads();
    }
    if (t >= p.peers) return;
    // The load and the fence take their time together.
    u32 number = p.expected[t] + 1;
    __threadfence_system();
    store_system((u32 *)p.arrivals[t], number);
    p.expected[t] = number;
    u64 start = nanoseconds();
    while ((int)(load_acquire_system(p.reached + t) - number) < 0) {
        if (nanoseconds() - start > MAX_WAIT) asm volatile("trap;");
    }
}
