// Matmuls of few rows: a workgroup has TEAMS teams of THREADS threads, each of which computes ROWS rows
// of the weight for TOKENS rows of the list. Teams read the same input rows, from the nearest cache.
// The sum of a product has the same order whatever is beside it: each thread adds its chunks, then
// the threads are added, ROUND_ROWS rows at once.

@compute @workgroup_size(ALL_THREADS)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let begin = linear_id(id, groups) * ROWS * TEAMS;
    let rows = param(PART_ROWS);
    if begin >= rows {
        return;
    }
    let team = index / THREADS;
    let thread = index % THREADS;
    let first = begin + ROWS * team;
    let chunks = row_chunks();
    //@ for g ROUNDS
    //@ for r ROUND_ROWS
    let i{g}_{r} = first + {g}u * ROUND_ROWS + {r}u;
    let row{g}_{r} = weight_row(min(i{g}_{r}, rows - 1u)) * chunks;
    var w{g}_{r} = chunk(row{g}_{r} + min(thread, chunks - 1u));
    //@ for n TOKENS
    var sum{g}_{r}_{n} = 0.0;
    //@ end
    //@ end
    //@ end
    let list_at = LISTS + 4u * param(LIST);
    // The first row of a list is in the header.
    //@ for s ALONE
    let count = 1u;
    let at0 = batch[list_at + 2u] * param(INPUT_STRIDE);
    //@ end
    //@ for s SEVERAL
    let list = batch[list_at] + 2u * id.x * TOKENS;
    let count = min(batch[list_at + 1u] - id.x * TOKENS, TOKENS);
    //@ for n TOKENS
    let at{n} = batch[list + 2u * min({n}u, count - 1u)] * param(INPUT_STRIDE);
    //@ end
    //@ end
    // Some threads finish two sums each; what they need for that is on its way meanwhile.
    let n = index % TOKENS;
    let r_end = 2u * (index / TOKENS);
    let i_end = begin + r_end;
    let finishes = r_end < ROWS * TEAMS && n < count && i_end < rows;
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
        //@ for g ROUNDS
        //@ for r ROUND_ROWS
        let next_w{g}_{r} = chunk(row{g}_{r} + next);
        //@ end
        //@ end
        if i < chunks {
            //@ for g ROUNDS
            //@ for r ROUND_ROWS
            //@ for n TOKENS
            sum{g}_{r}_{n} += dot_chunk(w{g}_{r}, x{n});
            //@ end
            //@ end
            //@ end
        }
        //@ for g ROUNDS
        //@ for r ROUND_ROWS
        w{g}_{r} = next_w{g}_{r};
        //@ end
        //@ end
    }
    //@ for g ROUNDS
    //@ for r ROUND_ROWS
    //@ for n TOKENS
    put(TOKENS * (ROUND_ROWS * team + {r}u) + {n}u, thread, sum{g}_{r}_{n});
    //@ end
    //@ end
    add_up(index, {g}u);
    //@ end
    if finishes {
        let sums = vec2(sum_of(sum_place(r_end, n)), sum_of(sum_place(r_end + 1u, n)));
        finish(i_end, out_row, sums, end);
    }
}

// Where the sum of row `r` of the workgroup's and row `n` of the list is.
fn sum_place(r: u32, n: u32) -> u32 {
    let row = r % ROWS;
    let in_round = ROUND_ROWS * (r / ROWS) + row % ROUND_ROWS;
    return SUMS * (row / ROUND_ROWS) + TOKENS * in_round + n;
}
