// Preparation of GEMM inputs: the expert permutation of grouped GEMMs, and the swizzled input of
// `gemm_wgmma`.
#include "matmul.cuh"

// Exclusive prefix sum over the lanes.
DEVICE u32 warp_before(u32 x) {
    u32 sum = x;
    for (u32 i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, i);
        if (threadIdx.x % 32 >= i) sum += other;
    }
    return sum - x;
}

// Groups the pairs of row and expert by expert. An expert's rows begin at a multiple of eight, in
// any order; a group has up to `group_rows` rows of one expert. Grid: one block. Shared memory: a
// counter for each expert.
KERNEL permute_experts(const __grid_constant__ PermuteExperts p) {
    extern __shared__ u32 counts[]; // rows of each expert, then its next free place
    u32 t = threadIdx.x, pairs = p.rows * p.experts_used;
    launch_dependents();
    grid_dependency_wait();
    auto expert_of = [&](u32 pair) {
        u32 row = pair / p.experts_used, i = pair % p.experts_used;
        u32 expert = p.route ? (u32)p.route[(u64)row * p.route_stride + p.experts_used + i] : i;
        return min(expert, p.experts - 1);
    };
    for (u32 i = t; i < p.experts; i += blockDim.x) counts[i] = 0;
    for (u32 i = t; i < p.max_groups; i += blockDim.x) p.groups[i] = make_uint4(0, 0, 0, 0);
    for (u32 i = t; i < p.permuted_rows; i += blockDim.x) p.permutation[i] = NO_ROW;
    __syncthreads();
    for (u32 i = t; i < pairs; i += blockDim.x) atomicAdd(&counts[expert_of(i)], 1);
    __syncthreads();
    if (t < 32) {
        u32 placed = 0, blocks = 0;
        for (u32 first = 0; first < p.experts; first += 32) {
            u32 expert = first + t, count = expert < p.experts ? counts[expert] : 0;
            u32 padded = (count + 7) / 8 * 8, groups = (count + p.group_rows - 1) / p.group_rows;
            u32 place = placed + warp_before(padded), block = blocks + warp_before(groups);
            for (u32 i = 0; i < groups; i++) {
                u32 start = i * p.group_rows;
                p.groups[block + i] = make_uint4(expert, place + start, min(p.group_rows, count - start), 0);
            }
            if (expert < p.experts) counts[expert] = place;
            placed = __shfl_sync(~0u, place + padded, 31);
            blocks = __shfl_sync(~0u, block + groups, 31);
        }
    }
    __syncthreads();
    for (u32 i = t; i < pairs; i += blockDim.x) p.permutation[atomicAdd(&counts[expert_of(i)], 1)] = i;
}

// Writes input rows in the layout of wgmma's shared-memory operand. A warp takes a chunk of eight
// rows; lane 4 g + c has columns 16 c to 16 c + 15 of row g. Grid: (eights of chunks, eights of
// rows); bound by memory.
KERNEL swizzle_input(const __grid_constant__ SwizzleInput p) {
    launch_dependents();
    u32 lane = threadIdx.x % 32, c = lane % 4, chunk = blockIdx.x * 8 + threadIdx.x / 32;
    u32 row = blockIdx.y * 8 + lane / 4;
    grid_dependency_wait();
    if (row >= p.rows || chunk >= p.chunks) return;
    u32 result_row = p.permutation ? p.permutation[row] : 0;
    if (result_row == NO_ROW) return;
    u64 from = p.permutation ? result_row / p.outputs_per_input
             : p.gathers_outputs ? StepMetadata{p.metadata}.output(row) : row;
    const uint4 *x = (const uint4 *)(p.input + from * p.stride + chunk * CHUNK_COLS + 16 * c);
    uint4 both[2] = {x[0], x[1]};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u64 at = swizzled_at(p.chunks, p.panel_rows, row, chunk * CHUNK_COLS + 16 * c + 2 * i);
        *(u32 *)(p.out + 2 * at) = word(both[i / 4], i % 4);
    }
}
