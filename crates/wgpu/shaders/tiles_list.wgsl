// Which rows a tile of the GEMM has: those of a list of the step, in order.

fn tile_start(tile: u32) -> u32 {
    return tile * TILE;
}

fn tile_end(tile: u32) -> u32 {
    return batch[LISTS + 4u * param(LIST) + 1u];
}

// Where a row of the list is in halves, what its input row is, and where its results are.
fn half_row(i: u32) -> u32 {
    return i;
}

fn input_row(i: u32) -> u32 {
    return batch[batch[LISTS + 4u * param(LIST)] + 2u * i];
}

fn output_row(i: u32) -> u32 {
    return batch[batch[LISTS + 4u * param(LIST)] + 2u * i + 1u];
}
