// Updates the cache of a layer's experts behind a routing. All experts are in memory of the host;
// some also have a slot on the device. The scores of all experts decay in each step, and those that
// rows of the step have chosen get one more. Chosen experts without a slot take those that no expert
// has yet, then those of experts that are not chosen and have a lower score. `expert_fill.wgsl`
// copies them there. One workgroup does it.

@group(0) @binding(1) var<storage, read> counts: array<u32>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>;

// Experts and slots of the layer, where its counts and its cache begin, and by what scores decay.
const EXPERTS: u32 = 0u;
const SLOTS: u32 = 1u;
const COUNTS_AT: u32 = 2u;
const CACHE_AT: u32 = 3u;
const DECAY: u32 = 4u;

const THREADS: u32 = 256u;
const NO_EXPERT: u32 = 0xffffffffu;

var<workgroup> scores: array<f32, MAX_EXPERTS>;
var<workgroup> slots: array<u32, MAX_EXPERTS>;
var<workgroup> are_chosen: array<u32, MAX_EXPERTS>;
var<workgroup> hits: atomic<u32>;
var<workgroup> misses: atomic<u32>;
var<workgroup> fills: atomic<u32>;
// Chosen experts without a slot, that with the highest score first; experts with a slot that are not
// chosen, that with the lowest score first.
var<workgroup> entering: array<u32, MAX_FILLS>;
var<workgroup> leaving: array<u32, MAX_FILLS>;

// Whether an expert may get a slot; if it is not chosen, whether it may lose one.
fn is_candidate(e: u32, is_chosen: u32) -> bool {
    return are_chosen[e] == is_chosen && (slots[e] == NO_SLOT) == (is_chosen == 1u);
}

// Puts an expert in its place among the candidates of its kind, if it is one of the first `wanted`.
// Of equal scores the lower expert counts, so that runs repeat.
fn rank(e: u32, wanted: u32) {
    let is_chosen = are_chosen[e];
    if !is_candidate(e, is_chosen) {
        return;
    }
    let score = scores[e];
    var before = 0u;
    for (var other = 0u; other < param(EXPERTS) && before < wanted; other++) {
        let is_better = select(scores[other] < score, scores[other] > score, is_chosen == 1u);
        let is_before = is_better || (scores[other] == score && other < e);
        before += select(0u, 1u, is_before && is_candidate(other, is_chosen));
    }
    if before >= wanted {
        return;
    }
    if is_chosen == 1u {
        entering[before] = e;
    } else {
        leaving[before] = e;
    }
}

// Gives a slot to the expert in place `i` of those that enter. If it gets none, those behind it get
// none either.
fn fill(i: u32, used: u32) {
    let expert = entering[i];
    if expert == NO_EXPERT {
        return;
    }
    let free = param(SLOTS) - used;
    var slot = used + i;
    if i >= free {
        let evicted = leaving[i - free];
        if evicted == NO_EXPERT || scores[expert] <= scores[evicted] {
            return;
        }
        slot = slots[evicted];
        cache[param(CACHE_AT) + evicted] = NO_SLOT;
    }
    cache[param(CACHE_AT) + expert] = slot;
    let at = param(CACHE_AT) + EXPERT_WORDS * param(EXPERTS) + COUNTERS + 2u * i;
    cache[at] = expert;
    cache[at + 1u] = slot;
    atomicAdd(&fills, 1u);
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    let experts = param(EXPERTS);
    let at = param(CACHE_AT);
    if thread == 0u {
        atomicStore(&hits, 0u);
        atomicStore(&misses, 0u);
        atomicStore(&fills, 0u);
    }
    if thread < MAX_FILLS {
        entering[thread] = NO_EXPERT;
        leaving[thread] = NO_EXPERT;
    }
    workgroupBarrier();
    for (var e = thread; e < experts; e += THREADS) {
        let count = counts[param(COUNTS_AT) + e];
        let is_chosen = select(0u, 1u, count != cache[at + 2u * experts + e]);
        let score = bitcast<f32>(cache[at + experts + e]) * param_f32(DECAY) + f32(is_chosen);
        cache[at + experts + e] = bitcast<u32>(score);
        cache[at + 2u * experts + e] = count;
        scores[e] = score;
        slots[e] = cache[at + e];
        are_chosen[e] = is_chosen;
        if is_chosen == 1u && slots[e] == NO_SLOT {
            atomicAdd(&misses, 1u);
        } else if is_chosen == 1u {
            atomicAdd(&hits, 1u);
        }
    }
    workgroupBarrier();
    // No more experts can enter than are missing, nor can more leave.
    let wanted = min(atomicLoad(&misses), MAX_FILLS);
    for (var e = thread; e < experts; e += THREADS) {
        rank(e, wanted);
    }
    let counters = at + EXPERT_WORDS * experts;
    let used = cache[counters];
    workgroupBarrier();
    if thread < MAX_FILLS {
        fill(thread, used);
    }
    workgroupBarrier();
    if thread == 0u {
        let filled = atomicLoad(&fills);
        cache[counters] = min(used + filled, param(SLOTS));
        cache[counters + 1u] += atomicLoad(&hits);
        cache[counters + 2u] += atomicLoad(&misses);
        cache[counters + 3u] += filled;
        cache[counters + 4u] = filled;
    }
}
