// The parameters with which a weight and its input are read.

// Groups of 32 columns of a row.
const GROUPS: u32 = 0u;
// Where scales and factors begin, in words.
const SCALES_AT: u32 = 1u;
const FACTORS_AT: u32 = 2u;
// Columns of a row, rows of this part of the weight, and the first of them.
const COLS: u32 = 3u;
const PART_ROWS: u32 = 4u;
const FIRST_ROW: u32 = 5u;
// Four words, as a vector.
const CODEBOOK: u32 = 2u;
