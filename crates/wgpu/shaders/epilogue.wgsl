// What a matmul does with its sums. Rows of the weight are counted in pairs: `weight_row` of what
// follows says which row of the weight a row of the tile is, `finish_of` reads what two sums need,
// and `finish` stores their results.

@group(0) @binding(3) var<storage, read> bias: array<f32>;
// Added to the result, in rows of its width.
@group(0) @binding(4) var<storage, read> addend: array<f32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

// From one input row to the next; the list of rows; whether there are a bias and an addend.
const INPUT_STRIDE: u32 = 12u;
const LIST: u32 = 13u;
const HAS_BIAS: u32 = 14u;
const HAS_ADDEND: u32 = 15u;
// Columns of an output row, and of those of two more results.
const OUTPUT_WIDTH: u32 = 16u;
// The activation function and its parameters.
const ACT: u32 = 19u;

// What two sums are finished with: it can be read before they are known.
struct Finish {
    factors: vec2<f32>,
    biases: vec2<f32>,
    addends: vec2<f32>,
}

// The factors and biases of two rows of the weight.
fn with_biases(first: u32, second: u32) -> Finish {
    var end = Finish(vec2(factor(first), factor(second)), vec2<f32>(), vec2<f32>());
    if param(HAS_BIAS) != 0u {
        //@ if cached
        end.biases = vec2(bias[bias_row(first)], bias[bias_row(second)]);
        //@ else
        let at = param(FIRST_ROW);
        end.biases = vec2(bias[at + first], bias[at + second]);
        //@ end if
    }
    return end;
}

// The results of two sums, but for the addends.
fn finished(sums: vec2<f32>, end: Finish) -> vec2<f32> {
    let y = sums * end.factors;
    if param(HAS_BIAS) != 0u {
        return y + end.biases;
    }
    return y;
}
