// Matmuls of many rows: a workgroup computes a tile of 64 * HALVES rows of the weight by as many
// rows of the list, a thread four by four of each half of both. Each sum goes over the columns in
// order, so that it does not depend on the tile.

const TILE: u32 = 64u * HALVES;
// Columns that are in shared memory at once.
const DEPTH: u32 = 16u;

// `[DEPTH, TILE]`, four rows in a vector.
var<workgroup> w_tile: array<vec4<f32>, 4 * TILE>;
var<workgroup> x_tile: array<vec4<f32>, 4 * TILE>;

fn put_w(column: u32, row: u32, x: vec4<f32>) {
    //@ for c 4
    w_tile[(column + {c}u) * (TILE / 4u) + row / 4u][row % 4u] = x[{c}];
    //@ end
}

fn put_x(column: u32, row: u32, x: vec4<f32>) {
    //@ for c 4
    x_tile[(column + {c}u) * (TILE / 4u) + row / 4u][row % 4u] = x[{c}];
    //@ end
}

fn scaled_quad(row: u32, i: u32) -> vec4<f32> {
    return quad(chunk(row + i / QUADS), i % QUADS);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    //@ weight rows
    let first = begin + linear_id(id, groups) * TILE;
    let first_x = tile_start(id.x);
    let end_x = tile_end(id.x);
    if first >= rows {
        return;
    }
    // Each thread brings one or two times four columns of a row of both tiles.
    let mine = thread % TILE;
    let w_row = weight_row(min(first + mine, rows - 1u)) * row_chunks();
    let x_row = input_row(min(first_x + mine, end_x - 1u)) * param(INPUT_STRIDE);
    let m = thread / 16u;
    let n = thread % 16u;
    //@ for h HALVES
    //@ for t HALVES
    //@ for i 4
    var sum{h}_{t}_{i} = vec4<f32>();
    //@ end
    //@ end
    //@ end
    // The columns of the next step are read while those of one are multiplied.
    let last_step = 2u * param(GROUPS) - 1u;
    //@ for h HALVES
    let quad{h} = HALVES * (thread / TILE) + {h}u;
    var next_w{h} = scaled_quad(w_row, quad{h});
    var next_x{h} = input4(x_row, quad{h});
    //@ end
    for (var step = 0u; step <= last_step; step++) {
        //@ for h HALVES
        put_w(4u * quad{h}, mine, next_w{h});
        put_x(4u * quad{h}, mine, next_x{h});
        //@ end
        workgroupBarrier();
        //@ for h HALVES
        next_w{h} = scaled_quad(w_row, 4u * min(step + 1u, last_step) + quad{h});
        next_x{h} = input4(x_row, 4u * min(step + 1u, last_step) + quad{h});
        //@ end
        for (var k = 0u; k < DEPTH; k += 4u) {
            //@ for j 4
            //@ for h HALVES
            let w{j}_{h} = w_tile[(k + {j}u) * (TILE / 4u) + {h}u * 16u + m];
            let x{j}_{h} = x_tile[(k + {j}u) * (TILE / 4u) + {h}u * 16u + n];
            //@ end
            //@ for h HALVES
            //@ for t HALVES
            //@ for i 4
            sum{h}_{t}_{i} = fma(w{j}_{h}, vec4(x{j}_{t}[{i}]), sum{h}_{t}_{i});
            //@ end
            //@ end
            //@ end
            //@ end
        }
        workgroupBarrier();
    }
    //@ for t HALVES
    //@ for i 4
    let token{t}_{i} = first_x + 64u * {t}u + 4u * n + {i}u;
    if token{t}_{i} < end_x {
        let out_row = output_row(token{t}_{i});
        //@ for h HALVES
        let row{h} = first + 64u * {h}u + 4u * m;
        if row{h} < rows {
            finish(row{h}, out_row, sum{h}_{t}_{i}.xy, finish_of(row{h}, out_row));
        }
        if row{h} + 2u < rows {
            let next{h} = row{h} + 2u;
            finish(next{h}, out_row, sum{h}_{t}_{i}.zw, finish_of(next{h}, out_row));
        }
        //@ end
    }
    //@ end
    //@ end
}
