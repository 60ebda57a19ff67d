// Products with the matrices of a token's experts: a workgroup computes four rows of one expert for
// one token, in the order of gemv.wgsl.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;
@group(0) @binding(5) var<storage, read> route: array<f32>;

// Columns of an input row; rows of an expert's matrix; experts of a token; whether all experts are
// used; whether there is a bias.
const INPUT_WIDTH: u32 = 12u;
const EXPERT_ROWS: u32 = 13u;
const USED: u32 = 14u;
const IS_ROUTED: u32 = 15u;
const HAS_BIAS: u32 = 16u;

const THREADS: u32 = 64u;

var<workgroup> partial: array<f32, 256>;
var<workgroup> sums_of_16: array<f32, 16>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let used = param(USED);
    let expert_rows = param(EXPERT_ROWS);
    let tiles = (expert_rows + 3u) / 4u;
    let i = linear_id(id, groups);
    let slot = i / tiles;
    let first = (i % tiles) * 4u;
    let token = id.z;
    if slot >= used {
        return;
    }
    var expert = slot;
    if param(IS_ROUTED) != 0u {
        expert = u32(route[token * 2u * used + used + slot]);
    }
    // A weight may be divided into parts of whole experts.
    let first_expert = param(FIRST_ROW) / expert_rows;
    if expert < first_expert || (expert - first_expert) * expert_rows >= param(PART_ROWS) {
        return;
    }
    let matrix = (expert - first_expert) * expert_rows;
    var at = token * param(INPUT_WIDTH);
    if param(INPUT_WIDTH) != param(COLS) {
        at += slot * param(COLS);
    }
    var sums = array<f32, 4>();
    let octets = (param(COLS) + 7u) / 8u;
    for (var octet = thread; octet < octets; octet += THREADS) {
        let x = input8(at, octet);
        for (var m = 0u; m < 4u; m++) {
            let w = weights8(matrix + min(first + m, expert_rows - 1u), octet);
            sums[m] += dot(w.low, x.low) + dot(w.high, x.high);
        }
    }
    for (var m = 0u; m < 4u; m++) {
        partial[m * THREADS + thread] = sums[m];
    }
    workgroupBarrier();
    if thread < 16u {
        var sum = 0.0;
        for (var j = 0u; j < 16u; j++) {
            sum += partial[16u * thread + j];
        }
        sums_of_16[thread] = sum;
    }
    workgroupBarrier();
    if thread < 4u && first + thread < expert_rows {
        let q = 4u * thread;
        let all = (sums_of_16[q] + sums_of_16[q + 1u]) + (sums_of_16[q + 2u] + sums_of_16[q + 3u]);
        var y = all * factor(matrix + first + thread);
        if param(HAS_BIAS) != 0u {
            y += bias[expert * expert_rows + first + thread];
        }
        output[(token * used + slot) * expert_rows + first + thread] = y;
    }
}
