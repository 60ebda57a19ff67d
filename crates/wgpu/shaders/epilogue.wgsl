// What a matmul does with its sums. Rows of the weight are counted in pairs: `weight_row` of what
// follows says which row of the weight a row of the tile is, and `finish` takes the sums of two.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
// Added to the result, in rows of its width.
@group(0) @binding(4) var<storage, read> addend: array<f32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

// Columns of an input row; the list of rows; whether there are a bias and an addend.
const INPUT_WIDTH: u32 = 12u;
const LIST: u32 = 13u;
const HAS_BIAS: u32 = 14u;
const HAS_ADDEND: u32 = 15u;
// Columns of an output row, and of those of two more results.
const OUTPUT_WIDTH: u32 = 16u;
// The activation function and its parameters.
const ACT: u32 = 19u;

// The result of a sum, but for the addend.
fn with_bias(row: u32, sum: f32) -> f32 {
    let y = sum * factor(row);
    if param(HAS_BIAS) != 0u {
        return y + bias[param(FIRST_ROW) + row];
    }
    return y;
}
