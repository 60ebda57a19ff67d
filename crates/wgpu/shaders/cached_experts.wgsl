// What matmuls of cached experts have: a dispatch for the experts that have a slot, and one for
// those in memory of the host. A workgroup whose expert is not there has nothing to do.

@group(0) @binding({binding}) var<storage, read> cache: array<u32>;

// Where the slots of the layer's experts begin, whether the weight is of slots or of all experts,
// and the rows of a matrix of all experts.
const CACHE_AT: u32 = 25u;
const IS_OF_SLOTS: u32 = 26u;
const ALL_ROWS: u32 = 27u;

// From the row of a slot to the row of its expert.
var<private> rows_to_expert: u32;

// The bias of a row of this part of the weight: biases are those of all experts.
fn bias_row(row: u32) -> u32 {
    let rows = param(PART_ROWS) / RESULT_ROWS;
    let in_matrix = param(FIRST_ROW) + row % rows + rows_to_expert;
    return row / rows * param(ALL_ROWS) + in_matrix;
}
