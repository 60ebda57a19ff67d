// Products of few rows: a workgroup computes four rows of the weight for N rows of the list.
// The sum of a product has the same order whatever is beside it: each thread adds its octets, every
// 64th, then sixteen threads are added in order, then the four sums of these.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

// Columns of an input row and of an output row; the list of rows; whether there is a bias.
const INPUT_WIDTH: u32 = 12u;
const OUTPUT_WIDTH: u32 = 13u;
const LIST: u32 = 14u;
const HAS_BIAS: u32 = 15u;

const THREADS: u32 = 64u;
const M: u32 = 4u;

var<workgroup> partial: array<f32, 256 * N>;
var<workgroup> quarters: array<f32, 64>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = linear_id(id, groups) * M;
    let rows = param(PART_ROWS);
    let list = batch[LISTS + 2u * param(LIST)];
    let count = min(batch[LISTS + 2u * param(LIST) + 1u] - id.z * N, N);
    if first >= rows {
        return;
    }
    var at = array<u32, N>();
    for (var n = 0u; n < N; n++) {
        at[n] = batch[list + 2u * (id.z * N + min(n, count - 1u))] * param(INPUT_WIDTH);
    }
    var sums = array<array<f32, N>, 4>();
    let octets = (param(COLS) + 7u) / 8u;
    for (var octet = thread; octet < octets; octet += THREADS) {
        var w = array<Octet, 4>();
        for (var m = 0u; m < M; m++) {
            w[m] = weights8(min(first + m, rows - 1u), octet);
        }
        for (var n = 0u; n < N; n++) {
            let x = input8(at[n], octet);
            for (var m = 0u; m < M; m++) {
                sums[m][n] += dot(w[m].low, x.low) + dot(w[m].high, x.high);
            }
        }
    }
    for (var m = 0u; m < M; m++) {
        for (var n = 0u; n < N; n++) {
            partial[(N * m + n) * THREADS + thread] = sums[m][n];
        }
    }
    workgroupBarrier();
    if thread < 16u * N {
        var sum = 0.0;
        for (var i = 0u; i < 16u; i++) {
            sum += partial[16u * thread + i];
        }
        quarters[thread] = sum;
    }
    workgroupBarrier();
    let m = thread / N;
    let n = thread % N;
    if thread < M * N && n < count && first + m < rows {
        let row = first + m;
        let q = 4u * thread;
        let all = (quarters[q] + quarters[q + 1u]) + (quarters[q + 2u] + quarters[q + 3u]);
        var y = all * factor(row);
        if param(HAS_BIAS) != 0u {
            y += bias[param(FIRST_ROW) + row];
        }
        let out_row = batch[list + 2u * (id.z * N + n) + 1u];
        output[out_row * param(OUTPUT_WIDTH) + param(FIRST_ROW) + row] = y;
    }
}
