// Matmuls of few rows: a workgroup computes ROWS rows of the weight for TOKENS rows of the list.
// The sum of a product has the same order whatever is beside it: each thread adds its chunks, every
// 64th, then the threads are added.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = linear_id(id, groups) * ROWS;
    let rows = param(PART_ROWS);
    let list = batch[LISTS + 2u * param(LIST)];
    let count = min(batch[LISTS + 2u * param(LIST) + 1u] - id.z * TOKENS, TOKENS);
    if first >= rows {
        return;
    }
    let chunks = row_chunks();
    //@ for n TOKENS
    let at{n} = batch[list + 2u * (id.z * TOKENS + min({n}u, count - 1u))] * param(INPUT_WIDTH);
    //@ end
    //@ for r ROWS
    let row{r} = weight_row(min(first + {r}u, rows - 1u)) * chunks;
    //@ for n TOKENS
    var sum{r}_{n} = 0.0;
    //@ end
    //@ end
    for (var i = thread; i < chunks; i += THREADS) {
        //@ for r ROWS
        let w{r} = chunk(row{r} + i);
        //@ end
        //@ for n TOKENS
        let x{n} = columns(at{n}, i);
        //@ end
        //@ for r ROWS
        //@ for n TOKENS
        sum{r}_{n} += dot_chunk(w{r}, x{n});
        //@ end
        //@ end
    }
    //@ for r ROWS
    //@ for n TOKENS
    put(TOKENS * {r}u + {n}u, thread, sum{r}_{n});
    //@ end
    //@ end
    add_up(thread);
    let n = thread % TOKENS;
    let r = 2u * (thread / TOKENS);
    if r < ROWS && n < count && first + r < rows {
        let out_row = batch[list + 2u * (id.z * TOKENS + n) + 1u];
        finish(first + r, out_row, vec2(sum_of(TOKENS * r + n), sum_of(TOKENS * (r + 1u) + n)));
    }
}
