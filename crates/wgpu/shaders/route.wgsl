// Selects each token's experts: their weights, then their numbers. A workgroup routes a row.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> chosen: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;
@group(0) @binding(5) var<storage, read_write> counts: array<atomic<u32>>;

const EXPERTS: u32 = 0u;
const USED: u32 = 1u;
const GATING: u32 = 2u;
const GROUPS: u32 = 3u;
const GROUPS_USED: u32 = 4u;
const NORMALIZE: u32 = 5u;
const SCALE: u32 = 6u;
const HAS_BIAS: u32 = 7u;
const IS_CHOSEN: u32 = 8u;
// The first counter of the layer.
const COUNTS_AT: u32 = 9u;

const SOFTMAX: u32 = 0u;
const SIGMOID_GATING: u32 = 1u;
const SOFTMAX_OF_CHOSEN: u32 = 2u;
const SQRT_SOFTPLUS: u32 = 3u;

const THREADS: u32 = 64u;
const LEAST: f32 = -3.4028235e38;

var<workgroup> probabilities: array<f32, 1024>;
// What experts are selected by.
var<workgroup> ranks: array<f32, 1024>;
// Whether an expert is selected already, or not in an open group.
var<workgroup> is_out: array<u32, 1024>;
var<workgroup> is_open: array<u32, 256>;
var<workgroup> best_rank: array<f32, 64>;
var<workgroup> best_expert: array<u32, 64>;

// The best expert that is left; the lower one among equals.
fn next_expert(thread: u32) -> u32 {
    var rank = LEAST;
    var expert = 0xffffffffu;
    for (var e = thread; e < param(EXPERTS); e += THREADS) {
        if is_out[e] == 0u && (expert == 0xffffffffu || ranks[e] > rank) {
            rank = ranks[e];
            expert = e;
        }
    }
    best_rank[thread] = rank;
    best_expert[thread] = expert;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            let other = best_expert[thread + half];
            let other_rank = best_rank[thread + half];
            let is_better = other_rank > best_rank[thread]
                || (other_rank == best_rank[thread] && other < best_expert[thread]);
            if other != 0xffffffffu && (best_expert[thread] == 0xffffffffu || is_better) {
                best_rank[thread] = other_rank;
                best_expert[thread] = other;
            }
        }
        workgroupBarrier();
    }
    // Where no rank is a number, any expert will do.
    let best = min(best_expert[0], param(EXPERTS) - 1u);
    workgroupBarrier();
    if thread == 0u {
        is_out[best] = 1u;
    }
    workgroupBarrier();
    return best;
}

// Opens the groups with the largest sums of two ranks; one thread does.
fn open_groups() {
    let in_group = param(EXPERTS) / param(GROUPS);
    for (var g = 0u; g < param(GROUPS); g++) {
        is_open[g] = 0u;
    }
    for (var n = 0u; n < param(GROUPS_USED); n++) {
        var best = 0xffffffffu;
        var best_sum = 0.0;
        for (var g = 0u; g < param(GROUPS); g++) {
            var first = LEAST;
            var second = LEAST;
            for (var i = 0u; i < in_group; i++) {
                let rank = ranks[g * in_group + i];
                if rank > first {
                    second = first;
                    first = rank;
                } else if rank > second {
                    second = rank;
                }
            }
            let sum = first + select(second, 0.0, in_group == 1u);
            if is_open[g] == 0u && (best == 0xffffffffu || sum > best_sum) {
                best = g;
                best_sum = sum;
            }
        }
        is_open[best] = 1u;
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let experts = param(EXPERTS);
    let used = param(USED);
    let row = id.x;
    let at = row * experts;
    let gating = param(GATING);
    var largest = LEAST;
    var sum = 0.0;
    if gating == SOFTMAX {
        for (var e = 0u; e < experts; e++) {
            largest = max(largest, input[at + e]);
        }
        for (var e = 0u; e < experts; e++) {
            sum += exp(input[at + e] - largest);
        }
    }
    for (var e = thread; e < experts; e += THREADS) {
        let score = input[at + e];
        var p = score;
        switch gating {
            case SOFTMAX: { p = exp(score - largest) / sum; }
            case SIGMOID_GATING: { p = sigmoid(score); }
            case SQRT_SOFTPLUS: { p = sqrt(softplus(score)); }
            default: {}
        }
        probabilities[e] = p;
        is_out[e] = 0u;
        ranks[e] = p + select(0.0, bias[e], param(HAS_BIAS) != 0u);
    }
    workgroupBarrier();
    if param(GROUPS_USED) < param(GROUPS) {
        if thread == 0u {
            open_groups();
        }
        workgroupBarrier();
        for (var e = thread; e < experts; e += THREADS) {
            is_out[e] = 1u - is_open[e / (experts / param(GROUPS))];
        }
        workgroupBarrier();
    }
    let out = row * 2u * used;
    for (var i = 0u; i < used; i++) {
        var expert = 0u;
        if param(IS_CHOSEN) != 0u {
            expert = min(u32(chosen[row * used + i]), experts - 1u);
        } else {
            expert = next_expert(thread);
        }
        if thread == 0u {
            output[out + used + i] = f32(expert);
            atomicAdd(&counts[param(COUNTS_AT) + expert], 1u);
        }
    }
    workgroupBarrier();
    if thread == 0u {
        weigh(out, used);
    }
}

// Writes the weights of the experts whose numbers are written.
fn weigh(out: u32, used: u32) {
    var largest = LEAST;
    for (var i = 0u; i < used; i++) {
        largest = max(largest, probabilities[u32(output[out + used + i])]);
    }
    var sum = 0.0;
    for (var i = 0u; i < used; i++) {
        var w = probabilities[u32(output[out + used + i])];
        if param(GATING) == SOFTMAX_OF_CHOSEN {
            w = exp(w - largest);
        }
        output[out + i] = w;
        sum += w;
    }
    var divisor = 1.0;
    if param(GATING) == SOFTMAX_OF_CHOSEN {
        divisor = sum;
        sum = 1.0;
    }
    if param(NORMALIZE) != 0u {
        divisor *= max(sum, 1.0 / 16384.0);
    }
    for (var i = 0u; i < used; i++) {
        output[out + i] = output[out + i] / divisor * param_f32(SCALE);
    }
}
