// Products of many rows: a workgroup computes a tile of 64 rows of the weight by 64 rows of the
// list, a thread four by four of them. Each sum goes over the columns in order.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

// As in gemv.wgsl.
const INPUT_WIDTH: u32 = 12u;
const OUTPUT_WIDTH: u32 = 13u;
const LIST: u32 = 14u;
const HAS_BIAS: u32 = 15u;

const TILE: u32 = 64u;

var<workgroup> w_tile: array<vec4<f32>, 512>;
var<workgroup> x_tile: array<vec4<f32>, 512>;

// Puts eight columns of row `i` into a tile of `[32 columns, 64 rows]`.
fn at(column: u32, i: u32) -> u32 {
    return column * 16u + i / 4u;
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = linear_id(id, groups) * TILE;
    let rows = param(PART_ROWS);
    let list = batch[LISTS + 2u * param(LIST)];
    let count = batch[LISTS + 2u * param(LIST) + 1u];
    let first_x = id.z * TILE;
    if first >= rows {
        return;
    }
    // Each thread brings one octet of a row of both tiles.
    let mine = thread / 4u;
    let octet = thread % 4u;
    let w_row = min(first + mine, rows - 1u);
    let x_row = batch[list + 2u * min(first_x + mine, count - 1u)] * param(INPUT_WIDTH);
    let m = 4u * (thread / 16u);
    let n = 4u * (thread % 16u);
    var sums = array<vec4<f32>, 4>();
    for (var group = 0u; group < param(GROUPS); group++) {
        let w = weights8(w_row, 4u * group + octet);
        let x = input8(x_row, 4u * group + octet);
        for (var j = 0u; j < 4u; j++) {
            w_tile[at(8u * octet + j, mine)][mine % 4u] = w.low[j];
            w_tile[at(8u * octet + 4u + j, mine)][mine % 4u] = w.high[j];
            x_tile[at(8u * octet + j, mine)][mine % 4u] = x.low[j];
            x_tile[at(8u * octet + 4u + j, mine)][mine % 4u] = x.high[j];
        }
        workgroupBarrier();
        for (var k = 0u; k < 32u; k++) {
            let a = w_tile[at(k, m)];
            let b = x_tile[at(k, n)];
            for (var i = 0u; i < 4u; i++) {
                sums[i] += a * b[i];
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        if first_x + n + i >= count {
            break;
        }
        let out_row = batch[list + 2u * (first_x + n + i) + 1u];
        for (var j = 0u; j < 4u; j++) {
            let row = first + m + j;
            if row < rows {
                var y = sums[i][j] * factor(row);
                if param(HAS_BIAS) != 0u {
                    y += bias[param(FIRST_ROW) + row];
                }
                output[out_row * param(OUTPUT_WIDTH) + param(FIRST_ROW) + row] = y;
            }
        }
    }
}
