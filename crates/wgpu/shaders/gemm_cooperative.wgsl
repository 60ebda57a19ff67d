// Matmuls of many rows with cooperative matrices: a workgroup computes a tile of 32 * W_BLOCKS rows
// of the weight by 64 * X_BLOCKS rows of the list, each of its eight subgroups half of the rows of
// the weight by a quarter of those of the list. Each sum goes over the columns in order, sixteen at
// once, so that it does not depend on the tile. A step multiplies the columns of STEP_GROUPS groups,
// those behind a row's end as zeros.

const TILE: u32 = 64u * X_BLOCKS;
const W_TILE: u32 = 32u * W_BLOCKS;
// Vectors of four columns in a step, and from one row in shared memory to the next: two more keep
// rows in different banks.
const STEP_QUADS: u32 = 8u * STEP_GROUPS;
const STRIDE: u32 = STEP_QUADS + 2u;
// Scales are up to 2^11 and codes up to 2^8, more than halves hold.
const SCALED: f32 = 1.0 / f32(LARGEST_SCALE);

var<workgroup> w_tile: array<vec4<f16>, STRIDE * W_TILE>;
var<workgroup> x_tile: array<vec4<f16>, STRIDE * TILE>;
// Sixteen by sixteen sums of each subgroup.
var<workgroup> sums: array<f32, 8 * 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    //@ weight rows
    let first = begin + (id.y + id.z * groups.y) * W_TILE;
    let groups_of_row = params[GROUPS >> 2u][GROUPS & 3u];
    let steps = (groups_of_row + STEP_GROUPS - 1u) / STEP_GROUPS;
    let first_x = tile_start(id.x);
    let end_x = tile_end(id.x);
    if first >= rows {
        return;
    }
    // Each thread brings some columns of a row of both tiles, all of one group.
    let w_mine = thread * W_QUADS / STEP_QUADS;
    let w_quad = thread * W_QUADS % STEP_QUADS;
    let w_row = weight_row(min(first + w_mine, rows - 1u)) * row_chunks() + w_quad / QUADS;
    let w_to = w_mine * STRIDE + w_quad;
    let x_mine = thread * X_QUADS / STEP_QUADS;
    let x_quad = thread * X_QUADS % STEP_QUADS;
    let x_row = half_row(min(first_x + x_mine, end_x - 1u)) * input_stride() + x_quad;
    let x_to = x_mine * STRIDE + x_quad;
    // The rows of this subgroup.
    let m = subgroup / 4u * (W_TILE / 2u);
    let n = subgroup % 4u * (TILE / 4u);
    //@ for i W_BLOCKS
    //@ for j X_BLOCKS
    var sum{i}_{j} = coop_mat16x16<f32, C>();
    //@ end
    //@ end
    // The columns of the next step are read while those of one are multiplied.
    //@ for c CHUNKS
    var next_w{c} = chunk(w_row + {c}u);
    //@ end
    //@ for q X_QUADS
    var next_x{q} = input[x_row + {q}u];
    //@ end
    for (var step = 0u; step < steps; step++) {
        let w_is_in = STEP_GROUPS == 1u || step * STEP_GROUPS + w_quad / 8u < groups_of_row;
        //@ for c CHUNKS
        //@ for q CHUNK_QUADS
        let w{c}_{q} = vec4<f16>(quad(next_w{c}, (w_quad + {q}u) % QUADS) * SCALED);
        w_tile[w_to + {c}u * CHUNK_QUADS + {q}u] = select(vec4<f16>(), w{c}_{q}, w_is_in);
        //@ end
        //@ end
        let x_is_in = STEP_GROUPS == 1u || step * STEP_GROUPS + x_quad / 8u < groups_of_row;
        //@ for q X_QUADS
        x_tile[x_to + {q}u] = select(vec4<f16>(), next_x{q}, x_is_in);
        //@ end
        workgroupBarrier();
        let next = min(step + 1u, steps - 1u);
        //@ for c CHUNKS
        next_w{c} = chunk(w_row + next * (STEP_QUADS / QUADS) + {c}u);
        //@ end
        //@ for q X_QUADS
        next_x{q} = input[x_row + next * STEP_QUADS + {q}u];
        //@ end
        //@ for k STEP_BLOCKS
        //@ for j X_BLOCKS
        let b{k}_{j} = coopLoad<coop_mat16x16<f16, B>>(
            &x_tile[(n + 16u * {j}u) * STRIDE + 4u * {k}u], STRIDE);
        //@ end
        //@ for i W_BLOCKS
        let a{k}_{i} = coopLoadT<coop_mat16x16<f16, A>>(
            &w_tile[(m + 16u * {i}u) * STRIDE + 4u * {k}u], STRIDE);
        //@ for j X_BLOCKS
        sum{i}_{j} = coopMultiplyAdd(a{k}_{i}, b{k}_{j}, sum{i}_{j});
        //@ end
        //@ end
        //@ end
        workgroupBarrier();
    }
    // A lane finishes half of the rows of the weight for a row of the list.
    //@ for j X_BLOCKS
    let token{j} = first_x + n + 16u * {j}u + lane / 2u;
    var out_row{j} = 0u;
    var factor{j} = 0.0;
    if token{j} < end_x {
        out_row{j} = output_row(token{j});
        factor{j} = input_factor(half_row(token{j})) * f32(LARGEST_SCALE);
    }
    //@ for i W_BLOCKS
    coopStore(sum{i}_{j}, &sums[subgroup * 256u], 16u);
    workgroupBarrier();
    //@ for p 4
    let row{i}_{j}_{p} = first + m + 16u * {i}u + 8u * (lane % 2u) + 2u * {p}u;
    if token{j} < end_x && row{i}_{j}_{p} < rows {
        let at = subgroup * 256u + 8u * lane + 2u * {p}u;
        let pair = vec2(sums[at], sums[at + 1u]) * factor{j};
        finish(row{i}_{j}_{p}, out_row{j}, pair, finish_of(row{i}_{j}_{p}, out_row{j}));
    }
    //@ end
    workgroupBarrier();
    //@ end
    //@ end
}
