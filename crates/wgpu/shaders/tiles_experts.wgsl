// Which rows a tile of the GEMM has: pairs of a row of a list and one of its experts, all of the
// same expert, as `expert_permutation.wgsl` sorts them.

@group(0) @binding(6) var<storage, read> tiles: array<u32>;

// Experts of a token, its input rows (one for all experts, or one for each), and where pairs begin.
const USED: u32 = 17u;
const TOKEN_ROWS: u32 = 18u;
const PAIRS_AT: u32 = 24u;

fn tile_start(tile: u32) -> u32 {
    return tiles[2u + 3u * tile];
}

fn tile_end(tile: u32) -> u32 {
    return tiles[3u + 3u * tile];
}

fn input_of(row: u32, pair: u32) -> u32 {
    return row * param(TOKEN_ROWS) + pair % param(USED) % param(TOKEN_ROWS);
}

fn list_row(pair: u32) -> u32 {
    return batch[batch[LISTS + 4u * param(LIST)] + 2u * (pair / param(USED))];
}

// Where a row is in halves, what its input row is, and where its results are.
fn half_row(i: u32) -> u32 {
    let pair = tiles[param(PAIRS_AT) + i];
    return input_of(pair / param(USED), pair);
}

fn input_row(i: u32) -> u32 {
    let pair = tiles[param(PAIRS_AT) + i];
    return input_of(list_row(pair), pair);
}

fn output_row(i: u32) -> u32 {
    let pair = tiles[param(PAIRS_AT) + i];
    return list_row(pair) * param(USED) + pair % param(USED);
}
