// Matmuls of few rows: a workgroup computes ROWS rows of the weight for TOKENS rows of the list.
// The sum of a product has the same order whatever is beside it: each thread adds its chunks, then
// the threads are added.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = linear_id(id, groups) * ROWS;
    let rows = param(PART_ROWS);
    if first >= rows {
        return;
    }
    let chunks = row_chunks();
    //@ for r ROWS
    let row{r} = weight_row(min(first + {r}u, rows - 1u)) * chunks;
    var w{r} = chunk(row{r} + min(thread, chunks - 1u));
    //@ for n TOKENS
    var sum{r}_{n} = 0.0;
    //@ end
    //@ end
    let list_at = LISTS + 4u * param(LIST);
    // The first row of a list is in the header.
    //@ for s ALONE
    let count = 1u;
    let at0 = batch[list_at + 2u] * param(INPUT_WIDTH);
    //@ end
    //@ for s SEVERAL
    let list = batch[list_at] + 2u * id.z * TOKENS;
    let count = min(batch[list_at + 1u] - id.z * TOKENS, TOKENS);
    //@ for n TOKENS
    let at{n} = batch[list + 2u * min({n}u, count - 1u)] * param(INPUT_WIDTH);
    //@ end
    //@ end
    // Some threads finish two sums each; what they need for that is on its way meanwhile.
    let n = thread % TOKENS;
    let i_end = first + 2u * (thread / TOKENS);
    let finishes = thread / TOKENS < ROWS / 2u && n < count && i_end < rows;
    var out_row = 0u;
    var end = Finish();
    if finishes {
        //@ for s ALONE
        out_row = batch[list_at + 3u];
        //@ end
        //@ for s SEVERAL
        out_row = batch[list + 2u * n + 1u];
        //@ end
        end = finish_of(i_end, out_row);
    }
    for (var start = 0u; start < chunks; start += THREADS) {
        // The next chunks are read while those here are multiplied.
        let i = start + thread;
        //@ for n TOKENS
        let x{n} = columns(at{n}, min(i, chunks - 1u));
        //@ end
        let next = min(i + THREADS, chunks - 1u);
        //@ for r ROWS
        let next_w{r} = chunk(row{r} + next);
        //@ end
        if i < chunks {
            //@ for r ROWS
            //@ for n TOKENS
            sum{r}_{n} += dot_chunk(w{r}, x{n});
            //@ end
            //@ end
        }
        //@ for r ROWS
        w{r} = next_w{r};
        //@ end
    }
    //@ for r ROWS
    //@ for n TOKENS
    put(TOKENS * {r}u + {n}u, thread, sum{r}_{n});
    //@ end
    //@ end
    add_up(thread);
    if finishes {
        let r = 2u * (thread / TOKENS);
        let sums = vec2(sum_of(TOKENS * r + n), sum_of(TOKENS * (r + 1u) + n));
        finish(i_end, out_row, sums, end);
    }
}
