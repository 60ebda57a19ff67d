// The order of rows before products of many: which rows meet an expert together, and where `wide`
// finds its input.
#include "product.cuh"

// The sum of the lanes before.
DEVICE u32 warp_before(u32 x) {
    u32 sum = x;
    for (u32 i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, i);
        if (threadIdx.x % 32 >= i) sum += other;
    }
    return sum - x;
}

// Puts the pairs of rows and experts in order, expert by expert, each of which begins at a multiple of
// eight; columns of blocks take up to `width` of one expert's. The order of an expert's rows is any:
// they do not meet. One block.
KERNEL group(const __grid_constant__ PermuteExperts p) {
    extern __shared__ u32 counts[]; // of each expert; then where its next row goes
    u32 t = threadIdx.x, pairs = p.rows * p.experts_used;
    let_next_start();
    wait_for_inputs();
    auto expert_of = [&](u32 pair) {
        u32 row = pair / p.experts_used, i = pair % p.experts_used;
        u32 expert = p.route ? (u32)p.route[(u64)row * p.route_stride + p.experts_used + i] : i;
        return min(expert, p.experts - 1);
    };
    for (u32 i = t; i < p.experts; i += blockDim.x) counts[i] = 0;
    for (u32 i = t; i < p.max_groups; i += blockDim.x) p.groups[i] = make_uint4(0, 0, 0, 0);
    for (u32 i = t; i < p.permuted_rows; i += blockDim.x) p.permutation[i] = NOBODY;
    __syncthreads();
    for (u32 i = t; i < pairs; i += blockDim.x) atomicAdd(&counts[expert_of(i)], 1);
    __syncthreads();
    if (t < 32) {
        u32 places = 0, blocks = 0;
        for (u32 first = 0; first < p.experts; first += 32) {
            u32 expert = first + t, count = expert < p.experts ? counts[expert] : 0;
            u32 own = (count + 7) / 8 * 8, own_blocks = (count + p.group_rows - 1) / p.group_rows;
            u32 place = places + warp_before(own), block = blocks + warp_before(own_blocks);
            for (u32 i = 0; i < own_blocks; i++) {
                u32 start = i * p.group_rows;
                p.groups[block + i] = make_uint4(expert, place + start, min(p.group_rows, count - start), 0);
            }
            if (expert < p.experts) counts[expert] = place;
            places = __shfl_sync(~0u, place + own, 31);
            blocks = __shfl_sync(~0u, block + own_blocks, 31);
        }
    }
    __syncthreads();
    for (u32 i = t; i < pairs; i += blockDim.x) p.permutation[atomicAdd(&counts[expert_of(i)], 1)] = i;
}

// Puts rows of input in the order in which `wide` reads them. A warp takes a chunk of eight rows, of
// which lane 4 g + c has the columns 16 c to 16 c + 15 of row g. Step s of `mma` is to find four of
// each c in pieces 2 s and 2 s + 1, of 16 bytes, which change places as the row says: so the tensor
// cores want it, and so the rows of a piece share no bank of shared memory.
KERNEL interleave(const __grid_constant__ SwizzleInput p) {
    let_next_start();
    u32 lane = threadIdx.x % 32, c = lane % 4, chunk = blockIdx.x * 8 + threadIdx.x / 32;
    u32 row = blockIdx.y * 8 + lane / 4;
    wait_for_inputs();
    if (row >= p.rows || chunk >= p.chunks) return;
    u32 member = p.permutation ? p.permutation[row] : 0;
    if (member == NOBODY) return;
    u64 from = p.permutation ? member / p.outputs_per_input : p.gathers_outputs ? Feed{p.metadata}.output(row) : row;
    const uint4 *x = (const uint4 *)(p.input + from * p.stride + chunk * CHUNK_COLS + 16 * c);
    uint4 both[2] = {x[0], x[1]};
    u64 place = ((u64)(row / p.panel_rows) * p.chunks + chunk) * p.panel_rows + row % p.panel_rows;
    u8 *out = p.out + place * ROW_BYTES;
#pragma unroll
    for (u32 piece = 0; piece < 8; piece++) {
        *(u32 *)(out + (piece ^ row % 8) * 16 + 4 * c) = word(both[piece / 4], piece % 4);
    }
}
