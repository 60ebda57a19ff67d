// GEMVs of experts: a workgroup computes ROWS rows of one expert's matrix for one row of a list,
// summed as in gemv.wgsl. Input columns stay as they are: as bytes they took a model's logits further
// from the reference than an NMSE of 1e-3.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;
@group(0) @binding(5) var<storage, read> route: array<f32>;

// Columns of an input row; rows of an expert's matrix; experts of a token; whether only some experts
// are used; whether there is a bias; the list of rows.
const INPUT_WIDTH: u32 = 12u;
const EXPERT_ROWS: u32 = 13u;
const USED: u32 = 14u;
const IS_ROUTED: u32 = 15u;
const HAS_BIAS: u32 = 16u;
const LIST: u32 = 17u;
// The activation function of a gate, and its parameters.
const ACT: u32 = 18u;

// The row of a weight, from the first of the expert, that row `i` of its tiles is.
fn row_of(i: u32) -> u32 {
    return i / RESULT_ROWS + i % RESULT_ROWS * (param(PART_ROWS) / RESULT_ROWS);
}

// Sum `i`, of a row of the weight, with what the row has beside.
fn result(i: u32, row: u32) -> f32 {
    let y = sum_of(i) * factor(row);
    if param(HAS_BIAS) != 0u {
        //@ if cached
        return y + bias[bias_row(row)];
        //@ else
        return y + bias[param(FIRST_ROW) + row];
        //@ end if
    }
    return y;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let used = param(USED);
    let expert_rows = param(EXPERT_ROWS);
    // A result has one row of the weight, or a gate's and one that it is multiplied with.
    let rows = RESULT_ROWS * expert_rows;
    let groups_of_expert = (rows + ROWS - 1u) / ROWS;
    let tile = linear_id(id, groups);
    let slot = tile / groups_of_expert;
    let first = (tile % groups_of_expert) * ROWS;
    // The first row of a list is in the header.
    let header = LISTS + 4u * param(LIST);
    var token = batch[header + 2u];
    if id.x > 0u {
        token = batch[batch[header] + 2u * id.x];
    }
    if slot >= used {
        return;
    }
    var expert = slot;
    if param(IS_ROUTED) != 0u {
        expert = u32(route[token * 2u * used + used + slot]);
    }
    //@ if cached
    let slot_of_expert = cache[param(CACHE_AT) + expert];
    let has_slot = slot_of_expert != NO_SLOT;
    if has_slot != (param(IS_OF_SLOTS) != 0u) {
        return;
    }
    let place = select(expert, slot_of_expert, has_slot);
    rows_to_expert = (expert - place) * expert_rows;
    expert = place;
    //@ end if
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
    let chunks = row_chunks();
    //@ for r ROWS
    let row{r} = (matrix + row_of(min(first + {r}u, rows - 1u))) * chunks;
    var w{r} = chunk(row{r} + min(thread, chunks - 1u));
    var sum{r} = 0.0;
    //@ end
    for (var i = thread; i < chunks; i += THREADS) {
        // The next chunks are read while those here are multiplied.
        let next = min(i + THREADS, chunks - 1u);
        //@ for r ROWS
        let next_w{r} = chunk(row{r} + next);
        //@ end
        let x = columns(at, i);
        //@ for r ROWS
        sum{r} += dot_chunk(w{r}, x);
        w{r} = next_w{r};
        //@ end
    }
    //@ for r ROWS
    put({r}u, thread, sum{r});
    //@ end
    add_up(thread, 0u);
    let i = RESULT_ROWS * thread;
    if i < ROWS && first + i < rows {
        let at = (token * used + slot) * expert_rows + (first + i) / RESULT_ROWS;
        let y = result(i, matrix + row_of(first + i));
        //@ for _ PLAIN
        output[at] = y;
        //@ end
        //@ for _ GATED
        let up = result(i + 1u, matrix + row_of(first + i + 1u));
        output[at] = glu(param(ACT), y, up, ACT + 1u);
        //@ end
    }
}
