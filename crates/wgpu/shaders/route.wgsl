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

const THREADS: u32 = 256u;
const LEAST: f32 = -3.4028235e38;

var<workgroup> probabilities: array<f32, 1024>;
// What experts are selected by.
var<workgroup> ranks: array<f32, 1024>;
// The selected experts, the best first.
var<workgroup> selected: array<u32, 1024>;
var<workgroup> is_open: array<u32, 256>;

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

// Selects experts by how many are better: the lower one among equals. Where ranks are no numbers,
// any expert will do.
fn select_experts(thread: u32) {
    let experts = param(EXPERTS);
    for (var e = thread; e < experts; e += THREADS) {
        let rank = ranks[e];
        var better = 0u;
        for (var other = 0u; other < experts; other++) {
            let is_better = ranks[other] > rank || (ranks[other] == rank && other < e);
            better += select(0u, 1u, is_better);
        }
        if better < param(USED) {
            selected[better] = e;
        }
    }
}

// The weight of a selected expert, before it is divided.
fn weight_of(i: u32, largest: f32) -> f32 {
    let p = probabilities[selected[i]];
    return select(p, exp(p - largest), param(GATING) == SOFTMAX_OF_CHOSEN);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let experts = param(EXPERTS);
    let used = param(USED);
    let row = id.x;
    for (var e = thread; e < experts; e += THREADS) {
        probabilities[e] = input[row * experts + e];
        selected[e] = experts - 1u;
    }
    workgroupBarrier();
    let gating = param(GATING);
    var sum = 0.0;
    if gating == SOFTMAX {
        var largest = LEAST;
        for (var e = 0u; e < experts; e++) {
            largest = max(largest, probabilities[e]);
        }
        for (var e = thread; e < experts; e += THREADS) {
            ranks[e] = exp(probabilities[e] - largest);
        }
        workgroupBarrier();
        for (var e = 0u; e < experts; e++) {
            sum += ranks[e];
        }
        workgroupBarrier();
    }
    for (var e = thread; e < experts; e += THREADS) {
        var p = probabilities[e];
        switch gating {
            case SOFTMAX: { p = ranks[e] / sum; }
            case SIGMOID_GATING: { p = sigmoid(p); }
            case SQRT_SOFTPLUS: { p = sqrt(softplus(p)); }
            default: {}
        }
        probabilities[e] = p;
        ranks[e] = p + select(0.0, bias[e], param(HAS_BIAS) != 0u);
    }
    workgroupBarrier();
    if param(GROUPS_USED) < param(GROUPS) {
        if thread == 0u {
            open_groups();
        }
        workgroupBarrier();
        for (var e = thread; e < experts; e += THREADS) {
            if is_open[e / (experts / param(GROUPS))] == 0u {
                ranks[e] = LEAST;
            }
        }
        workgroupBarrier();
    }
    if param(IS_CHOSEN) != 0u {
        for (var i = thread; i < used; i += THREADS) {
            selected[i] = min(u32(chosen[row * used + i]), experts - 1u);
        }
    } else {
        select_experts(thread);
    }
    workgroupBarrier();
    var largest = LEAST;
    for (var i = 0u; i < used; i++) {
        largest = max(largest, probabilities[selected[i]]);
    }
    sum = 0.0;
    for (var i = 0u; i < used; i++) {
        sum += weight_of(i, largest);
    }
    var divisor = 1.0;
    if gating == SOFTMAX_OF_CHOSEN {
        divisor = sum;
        sum = 1.0;
    }
    if param(NORMALIZE) != 0u {
        divisor *= max(sum, 1.0 / 16384.0);
    }
    let out = row * 2u * used;
    for (var i = thread; i < used; i += THREADS) {
        output[out + i] = weight_of(i, largest) / divisor * param_f32(SCALE);
        output[out + used + i] = f32(selected[i]);
        atomicAdd(&counts[param(COUNTS_AT) + selected[i]], 1u);
    }
}
