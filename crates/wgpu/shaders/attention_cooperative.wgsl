// Attention of a head of 64 rows of a list with cooperative matrices: keys and values are halves,
// and entries are tokens. The entries are read in blocks that begin at multiples of 32, in two
// passes: pass 0 finds the largest score of each row, pass 1 the result, so that a row's result does
// not depend on the rows beside it. Each subgroup has 16 rows, and two of its lanes share one. Lines
// in a loop over `{pass}` are those of pass 1 alone.

@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> kv: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read> sinks: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

const ROWS: u32 = 64u;
const BLOCK: u32 = 32u;
const THREADS: u32 = 128u;
const LEAST: f32 = -3.4028235e38;
// What probabilities are multiplied with, so that halves hold small ones; the sum has it too.
const UNIT: f32 = 16384.0;
const LARGEST_HALF: f32 = 65504.0;

// Vectors of four columns of a key and of a value, and of half of a query.
const KEY_QUADS: u32 = 4u * KEY_BLOCKS;
const VALUE_QUADS: u32 = 4u * VALUE_BLOCKS;
const HALF_QUADS: u32 = 4u * HALF_BLOCKS;
// Vectors from one row in shared memory to the next; two more keep rows in different banks.
const KEY_STRIDE: u32 = KEY_QUADS + 2u;
const VALUE_STRIDE: u32 = VALUE_QUADS + 2u;
const QUERY_STRIDE: u32 = HALF_QUADS + 2u;
const PROBABILITY_STRIDE: u32 = 10u;
// Scores of sixteen entries of a subgroup's rows, with a gap of sixteen between the banks of two
// such: the first two gaps say of each entry of the block whether its value has a column that is NaN
// or infinite, the third whether any has. (With an array of their own for that, results were wrong
// on an NVIDIA GPU.)
const SCORES: u32 = 272u;
const GAP: u32 = 256u;

// Half of the queries, the keys of a block, or its values.
var<workgroup> tile: array<vec4<f16>, TILE_QUADS>;
var<workgroup> scores: array<f32, 8 * SCORES>;
var<workgroup> probabilities: array<vec4<f16>, 64 * PROBABILITY_STRIDE>;
var<workgroup> parts: array<f32, 128>;

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let heads = param(HEADS);
    let head = id.y;
    let kv_head = head / (heads / param(KV_HEADS));
    let list = batch[LISTS + 4u * param(LIST)];
    let first = id.x * ROWS;
    let end = min(first + ROWS, batch[LISTS + 4u * param(LIST) + 1u]);
    let half = lane % 2u;
    let tile_row = 16u * subgroup + lane / 2u;
    // This lane among all, and the other one of its row.
    let own = 32u * subgroup + lane;
    let other = own ^ 1u;
    let mine = first + tile_row;
    let row = batch[list + 2u * min(mine, end - 1u)];
    let range = seen(row);

    // Queries become halves, divided by a power of two that brings their largest below 2^14.
    let query = (row * heads + head) * KEY_QUADS;
    var most = vec4<f32>();
    for (var c = half; c < KEY_QUADS; c += 2u) {
        most = max(most, abs(q[query + c]));
    }
    parts[own] = max(max(most.x, most.y), max(most.z, most.w));
    workgroupBarrier();
    let exponent = exponent_of(max(parts[own], parts[other]));
    let divisor = bitcast<f32>(u32(127 - exponent) << 23u);
    //@ for r 2
    for (var c = half; c < HALF_QUADS; c += 2u) {
        tile[tile_row * QUERY_STRIDE + c] = vec4<f16>(q[query + {r}u * HALF_QUADS + c] * divisor);
    }
    workgroupBarrier();
    //@ for k HALF_BLOCKS
    let q{r}_{k} = coopLoadT<coop_mat16x16<f16, A>>(
        &tile[16u * subgroup * QUERY_STRIDE + 4u * {k}u], QUERY_STRIDE);
    //@ end
    workgroupBarrier();
    //@ end
    let scale = scale_at(row_position(row)) * bitcast<f32>(u32(127 + exponent) << 23u);
    let cap = param_f32(SOFTCAP);

    var largest = LEAST;
    var sum = 0.0;
    //@ for n VALUE_BLOCKS
    var result{n} = coop_mat16x16<f32, C>();
    //@ end
    //@ for pass 2
    var i{pass} = first;
    while i{pass} < end {
        // The rows of the list that are of the same span.
        let span_first = batch[list + 2u * i{pass}];
        let span = row_span(span_first);
        let stop = min(end, i{pass} + span_row(span) + span_len(span) - span_first);
        let start = seen(span_first).x / BLOCK * BLOCK;
        let to = seen(batch[list + 2u * (stop - 1u)]).y;
        let mine_to = select(0u, range.y, mine >= i{pass} && mine < stop);
        i{pass} = stop;
        var page = page_of(span, param(WINDOW_INDEX), start);
        // A thread brings some columns of the keys, and later of the values.
        //@ for l KEY_BLOCKS
        let key_entry{l} = (thread + {l}u * THREADS) / KEY_QUADS;
        let key_quad{l} = (thread + {l}u * THREADS) % KEY_QUADS;
        var next{l} = kv[((page * param(PAGE_ENTRIES) + key_entry{l}) * param(KV_HEADS) + kv_head)
            * KEY_QUADS + key_quad{l}];
        //@ end
        for (var block = start; block < to; block += BLOCK) {
            //@ for l KEY_BLOCKS
            tile[key_entry{l} * KEY_STRIDE + key_quad{l}] = next{l};
            //@ end
            scores[thread / 16u * SCORES + GAP + thread % 16u] = 0.0;
            workgroupBarrier();
            //@ for v {pass}
            //@ for l VALUE_BLOCKS
            let value_entry{l} = (thread + {l}u * THREADS) / VALUE_QUADS;
            let value_quad{l} = (thread + {l}u * THREADS) % VALUE_QUADS;
            // Entries from `to` on were not written for this sequence.
            var value{l} = vec4<f16>();
            if block + value_entry{l} < to {
                value{l} = kv[param(VALUES_AT) / 2u + value_quad{l} + VALUE_QUADS
                    * ((page * param(PAGE_ENTRIES) + value_entry{l}) * param(KV_HEADS) + kv_head)];
            }
            //@ end
            //@ end
            // The keys of the next block are read while those of this one are multiplied.
            if block + BLOCK < to {
                page = page_of(span, param(WINDOW_INDEX), block + BLOCK);
                //@ for l KEY_BLOCKS
                next{l} = kv[((page * param(PAGE_ENTRIES) + key_entry{l}) * param(KV_HEADS)
                    + kv_head) * KEY_QUADS + key_quad{l}];
                //@ end
            }
            //@ for n 2
            var dots{n} = coop_mat16x16<f32, C>();
            //@ for r 2
            //@ for k HALF_BLOCKS
            let k{n}_{r}_{k} = coopLoad<coop_mat16x16<f16, B>>(
                &tile[16u * {n}u * KEY_STRIDE + {r}u * HALF_QUADS + 4u * {k}u], KEY_STRIDE);
            dots{n} = coopMultiplyAdd(q{r}_{k}, k{n}_{r}_{k}, dots{n});
            //@ end
            //@ end
            coopStore(dots{n}, &scores[(2u * subgroup + {n}u) * SCORES], 16u);
            //@ end
            workgroupBarrier();
            // A lane has sixteen of its row's entries.
            let entry = block + 16u * half;
            let at = (2u * subgroup + half) * SCORES + lane / 2u;
            //@ for e 4
            var p{e}: vec4<f32>;
            //@ for j 4
            p{e}[{j}] = scores[at + 16u * (4u * {e}u + {j}u)];
            //@ end
            p{e} *= scale;
            if cap > 0.0 {
                //@ for j 4
                p{e}[{j}] = cap * tanh_of(p{e}[{j}] / cap);
                //@ end
            }
            //@ for j 4
            if entry + 4u * {e}u + {j}u < range.x || entry + 4u * {e}u + {j}u >= mine_to {
                p{e}[{j}] = LEAST;
            }
            //@ end
            //@ for v {pass}
            let probability{e} = vec4<f16>(select(
                UNIT * exp(p{e} - largest), vec4<f32>(), p{e} == vec4(LEAST)));
            probabilities[tile_row * PROBABILITY_STRIDE + 4u * half + {e}u] = probability{e};
            let x{e} = vec4<f32>(probability{e});
            sum += (x{e}.x + x{e}.y) + (x{e}.z + x{e}.w);
            //@ end
            if {pass}u == 0u {
                largest = max(largest, max(max(p{e}.x, p{e}.y), max(p{e}.z, p{e}.w)));
            }
            //@ end
            //@ for v {pass}
            // All rows multiply all values, those that they do not see with zero. Zero times NaN or
            // infinity is NaN, so such values become zero, and the sums of rows that see them NaN.
            //@ for l VALUE_BLOCKS
            if !all(abs(vec4<f32>(value{l})) <= vec4(LARGEST_HALF)) {
                scores[value_entry{l} / 16u * SCORES + GAP + value_entry{l} % 16u] = 1.0;
                scores[2u * SCORES + GAP] = 1.0;
                value{l} = vec4<f16>();
            }
            tile[value_entry{l} * VALUE_STRIDE + value_quad{l}] = value{l};
            //@ end
            workgroupBarrier();
            if scores[2u * SCORES + GAP] != 0.0 {
                for (var e = 0u; e < 16u; e++) {
                    let is_seen = entry + e >= range.x && entry + e < mine_to;
                    if is_seen && scores[half * SCORES + GAP + e] != 0.0 {
                        sum = bitcast<f32>(0x7fc00000u | thread);
                    }
                }
            }
            //@ for k 2
            let w{k} = coopLoadT<coop_mat16x16<f16, A>>(
                &probabilities[16u * subgroup * PROBABILITY_STRIDE + 4u * {k}u], PROBABILITY_STRIDE);
            //@ for n VALUE_BLOCKS
            let v{k}_{n} = coopLoadT<coop_mat16x16<f16, B>>(
                &tile[16u * {k}u * VALUE_STRIDE + 4u * {n}u], VALUE_STRIDE);
            result{n} = coopMultiplyAdd(w{k}, v{k}_{n}, result{n});
            //@ end
            //@ end
            //@ end
            workgroupBarrier();
        }
    }
    if {pass}u == 0u {
        parts[own] = largest;
        workgroupBarrier();
        largest = max(largest, parts[other]);
        if has(HAS_SINKS) {
            largest = max(largest, sinks[head]);
        }
        workgroupBarrier();
    }
    //@ end
    parts[own] = sum;
    workgroupBarrier();
    var total = parts[own] + parts[other];
    if has(HAS_SINKS) {
        total += UNIT * exp(sinks[head] - largest);
    }
    //@ for n VALUE_BLOCKS
    coopStore(result{n}, &scores[2u * subgroup * SCORES], 16u);
    workgroupBarrier();
    if mine < end {
        let to = ((row * heads + head) * VALUE_BLOCKS + {n}u) * 16u + 8u * half;
        for (var c = 0u; c < 8u; c++) {
            let at = 2u * subgroup * SCORES + (8u * half + c) * 16u + lane / 2u;
            output[to + c] = scores[at] / total;
        }
    }
    workgroupBarrier();
    //@ end
}
