//! Activations in the form that the kernels read: int8 blocks for integer kinds, f32 for float
//! kinds, pairs of bfloat16 where the processor multiplies those. It knows rows of f32 and how
//! tiles lie in memory, no weight.
//!
//! Rows (tokens) are grouped in tiles of 16, the last tile being as wide as there are rows left.
//! Inside a tile the column steps come first and the rows second:
//!
//! ```text
//! blocks   [tile][cols / 32][row in tile] of Block (52 bytes)
//! floats   [tile][cols][row in tile] of f32
//! pairs    [tile][cols / 2, rounded up][row in tile] of two bfloat16, the last of an odd row zero
//! ```
//!
//! So a kernel walks one pointer for all its tokens, and a single row is plain row-major.
//!
//! An int8 block holds 32 columns in two halves, each with `scale = max |x| / 127` and
//! `code = round(x * (127 / max |x|))`, ties to even. A half below 2^-118 becomes zero (its
//! reciprocal would overflow); a half with a value that is not finite gets the scale NaN, so that
//! the fault shows in every result.

mod avx512;
mod kept;

use std::marker::PhantomData;
use std::sync::Arc;

use half::bf16;

use super::memory::Memory;
use crate::simd::Simd;

pub(crate) use kept::{AHEAD, Kept};

/// Rows (tokens) of a full tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Columns of an int8 block.
pub(crate) const BLOCK_COLS: usize = 32;

/// Columns that share a scale. Real activations have outliers; with 16 to a scale each spoils fewer
/// of its neighbours, and logits are a third closer to those of exact arithmetic than with 32.
const HALF: usize = BLOCK_COLS / 2;

/// A half with nothing as large as this becomes zero.
const SMALLEST: f32 = f32::from_bits(0x0480_0000);

/// Adding this rounds a small f32 to an integer, ties to even, in its low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// 32 columns of one row as int8, with a scale for each half. The sums are negative because that is
/// how kernels need them.
#[derive(Copy, Clone)]
#[repr(C)]
pub(crate) struct Block {
    pub(crate) codes: [i8; BLOCK_COLS],
    pub(crate) scales: [f32; 2],
    /// Minus the sum of all codes, each times its scale, for kinds with minimums.
    pub(crate) minus_scaled_sum: f32,
    /// Minus 128 times the sum of the codes of each half.
    pub(crate) starts: [i32; 2],
}

/// What the activations of a kind of weight are turned into.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// int8 blocks of 32 columns.
    Blocks,
    /// f32, as they are.
    Floats,
    /// bfloat16, rounded to nearest, in pairs of columns.
    Pairs,
}

/// Which forms the products of one input want.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Forms([bool; Form::ALL.len()]);

impl Forms {
    /// The forms that are wanted.
    pub(crate) fn iter(self) -> impl Iterator<Item = Form> {
        Form::ALL.into_iter().filter(move |&form| self.0[form as usize])
    }
}

impl FromIterator<Form> for Forms {
    fn from_iter<I: IntoIterator<Item = Form>>(wanted: I) -> Forms {
        let mut forms = Forms::default();
        wanted.into_iter().for_each(|form| forms.0[form as usize] = true);
        forms
    }
}

impl Form {
    /// All forms, in the order of their numbers.
    pub(crate) const ALL: [Form; 3] = [Form::Blocks, Form::Floats, Form::Pairs];

    /// Bytes of so many rows of `cols` columns.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols) + rows.saturating_sub(1) / TILE_ROWS * self.gap_bytes()
    }

    fn row_bytes(self, cols: usize) -> usize {
        match self {
            Form::Blocks => cols / BLOCK_COLS * size_of::<Block>(),
            Form::Floats => cols * size_of::<f32>(),
            Form::Pairs => cols.div_ceil(2) * size_of::<[bf16; 2]>(),
        }
    }

    /// Bytes between two tiles. Where some columns of all tiles are passed over together, tiles
    /// at a distance of a power of two would have all of them in the same few sets of the
    /// second-level cache.
    fn gap_bytes(self) -> usize {
        match self {
            Form::Blocks | Form::Pairs => 0,
            Form::Floats => 8 << 10,
        }
    }

    /// Columns of one step.
    pub(crate) fn step_cols(self) -> usize {
        match self {
            Form::Blocks => BLOCK_COLS,
            Form::Floats => 1,
            Form::Pairs => 2,
        }
    }

    /// Bytes of one step along the columns of one row.
    pub(crate) fn step_bytes(self) -> usize {
        match self {
            Form::Blocks => size_of::<Block>(),
            Form::Floats => size_of::<f32>(),
            Form::Pairs => size_of::<[bf16; 2]>(),
        }
    }
}

/// Where the columns of a single row are named that are not zero.
#[derive(Clone)]
struct Index {
    /// Keeps what `start` points to alive.
    _memory: Arc<Memory>,
    start: *mut u8,
    /// Columns of the longest row; 0 if nobody wants an index.
    cols: usize,
}

impl Index {
    fn new(cols: usize) -> Index {
        let mut memory = kept::memory(cols);
        let start = memory.start_mut();
        Index { _memory: Arc::new(memory), start, cols }
    }

    /// Of `rows` rows of `cols` columns, if there is one. No product of pairs skips columns.
    fn of(&self, form: Form, rows: usize, cols: usize) -> Option<Kept> {
        let has_index = form != Form::Pairs && rows == 1 && cols <= self.cols;
        has_index.then(|| Kept::at(self.start, cols))
    }
}

/// A buffer of activations: made once for the largest step, filled anew before each product.
/// Threads that fill and read it together each take a handle of the same shape.
pub struct Activations {
    /// Keeps what `start` points to alive.
    memory: Arc<Memory>,
    start: *mut u8,
    index: Index,
    form: Form,
    rows: usize,
    cols: usize,
}

// SAFETY: the memory lives as long as any handle; `Filling::set` and `multiply` demand that no
// row is set while another thread sets or reads it.
unsafe impl Send for Activations {}
// SAFETY: as for Send.
unsafe impl Sync for Activations {}

impl Activations {
    /// A buffer that can hold `bytes`, see [`Form::bytes`].
    pub fn with_bytes(bytes: usize) -> Activations {
        let mut memory = Memory::zeroed(bytes);
        let start = memory.start_mut();
        let (form, index) = (Form::Floats, Index::new(0));
        Activations { memory: Arc::new(memory), start, index, form, rows: 0, cols: 0 }
    }

    /// The same buffer with an index for single rows of up to `cols` columns, with which products
    /// skip weights by columns whose input is zero.
    pub fn with_index(self, cols: usize) -> Activations {
        Activations { index: Index::new(cols), ..self }
    }

    /// A handle of the same buffer in another shape, and the right to set its rows.
    ///
    /// # Panics
    /// As [`Activations::fill`].
    pub fn shaped(&self, form: Form, rows: usize, cols: usize) -> Activations {
        let (memory, start) = (Arc::clone(&self.memory), self.start);
        let index = self.index.clone();
        let mut handle = Activations { memory, start, index, form, rows, cols };
        handle.fill(form, rows, cols);
        handle
    }

    /// The right to set rows in the present shape.
    pub fn filling(&self) -> Filling<'_> {
        let Activations { start, form, rows, cols, .. } = *self;
        let index = self.index.of(form, rows, cols);
        Filling { start, index, form, rows, cols, owner: PhantomData }
    }

    /// Begins a new filling with `rows` rows of `cols` columns. Every row must be set before the
    /// product; until then it holds whatever was there.
    ///
    /// # Panics
    /// If the buffer is too small, or if `cols` is no multiple of 32 for [`Form::Blocks`].
    pub fn fill(&mut self, form: Form, rows: usize, cols: usize) -> Filling<'_> {
        assert!(form != Form::Blocks || cols.is_multiple_of(BLOCK_COLS), "{cols} columns");
        let bytes = form.bytes(rows, cols);
        assert!(bytes <= self.memory.len(), "activations: {bytes} of {}", self.memory.len());
        (self.form, self.rows, self.cols) = (form, rows, cols);
        self.filling()
    }

    /// The columns of the one row that are not zero, where the buffer has an index.
    pub(crate) fn kept(&self) -> Option<Kept> {
        self.index.of(self.form, self.rows, self.cols)
    }

    /// How the rows are stored.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Rows (tokens) of the present filling.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the present filling.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Where `row` begins in its tile, and the distance in bytes between two column steps.
    pub(crate) fn row(&self, row: usize) -> (*const u8, usize) {
        let place = Place::of(row, self.rows, self.form, self.cols);
        // SAFETY: `place` lies inside `rows` rows, which `fill` checked against the memory.
        (unsafe { self.start.add(place.offset).cast_const() }, place.stride)
    }
}

/// Where a row lies in the buffer, in bytes.
struct Place {
    offset: usize,
    stride: usize,
}

impl Place {
    fn of(row: usize, rows: usize, form: Form, cols: usize) -> Place {
        assert!(row < rows, "activations: row {row} of {rows}");
        let first = row - row % TILE_ROWS;
        let width = TILE_ROWS.min(rows - first);
        let step = form.step_bytes();
        let tile = first * form.row_bytes(cols) + first / TILE_ROWS * form.gap_bytes();
        Place { offset: tile + (row - first) * step, stride: width * step }
    }
}

/// The right to set rows of an [`Activations`] buffer, shareable between threads.
#[derive(Copy, Clone)]
pub struct Filling<'a> {
    start: *mut u8,
    index: Option<Kept>,
    form: Form,
    rows: usize,
    cols: usize,
    owner: PhantomData<&'a mut Activations>,
}

// SAFETY: the pointer stays valid for 'a, and `set` demands that no two threads set the same row.
unsafe impl Send for Filling<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Filling<'_> {}

impl Filling<'_> {
    /// Sets `row` from `x`, `[cols]`. Give a thread whole tiles of 16 rows where possible: the rows
    /// of a tile share cache lines. The result is the same on every level.
    ///
    /// # Safety
    /// No other thread sets or reads the same row at the same time.
    ///
    /// # Panics
    /// If `row` or the length of `x` does not fit the filling.
    pub unsafe fn set(self, simd: Simd, row: usize, x: &[f32]) {
        assert!(x.len() == self.cols, "activations: {} columns of {}", x.len(), self.cols);
        let place = Place::of(row, self.rows, self.form, self.cols);
        // SAFETY: `place` lies inside the buffer, whose size `fill` checked.
        let (start, stride) = (unsafe { self.start.add(place.offset) }, place.stride);
        match self.form {
            // SAFETY: all `cols` steps lie inside the tile; the caller keeps other threads away.
            Form::Floats => unsafe { copy_row(start, stride, x) },
            // SAFETY: likewise.
            Form::Pairs => unsafe { pair_row(start, stride, x) },
            Form::Blocks => match simd {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as for floats; a `Simd` proves its instructions.
                Simd::Avx512 | Simd::Avx512Bf16 => unsafe {
                    avx512::quantize_row(start, stride, x);
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Simd::Avx2 | Simd::AvxVnni => unsafe { quantize_row_avx2(start, stride, x) },
                // SAFETY: as for floats.
                _ => unsafe { quantize_row(start, stride, x) },
            },
        }
        if let Some(index) = self.index {
            // SAFETY: the row is the only one, and the index made for as many columns.
            unsafe { index.set(self.form, start, self.cols) }
        }
    }
}

/// # Safety
/// `start` has `x.len()` steps of `stride` bytes to write to.
unsafe fn copy_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (col, &value) in x.iter().enumerate() {
        // SAFETY: the caller gives the room; steps are multiples of 4 bytes, so f32 is aligned.
        unsafe { start.add(col * stride).cast::<f32>().write(value) }
    }
}

/// # Safety
/// `start` has a step of `stride` bytes to write to for each two of `x`.
unsafe fn pair_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (step, pair) in x.chunks(2).enumerate() {
        let pair = [pair[0], pair.get(1).copied().unwrap_or(0.0)].map(bf16::from_f32);
        // SAFETY: the caller gives the room; steps are multiples of 4 bytes, so bf16 is aligned.
        unsafe { start.add(step * stride).cast::<[bf16; 2]>().write(pair) }
    }
}

/// # Safety
/// As [`quantize_row`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantize_row_avx2(start: *mut u8, stride: usize, x: &[f32]) {
    // SAFETY: passed on.
    unsafe { quantize_row(start, stride, x) }
}

/// # Safety
/// `start` has `x.len() / 32` steps of `stride` bytes to write to.
#[inline(always)]
unsafe fn quantize_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (index, block) in x.as_chunks::<BLOCK_COLS>().0.iter().enumerate() {
        // SAFETY: the caller gives the room; steps are multiples of 52 bytes, so Block is aligned.
        unsafe { start.add(index * stride).cast::<Block>().write(quantize_block(block)) }
    }
}

#[inline(always)]
fn quantize_block(x: &[f32; BLOCK_COLS]) -> Block {
    let mut block =
        Block { codes: [0; BLOCK_COLS], scales: [0.0; 2], minus_scaled_sum: 0.0, starts: [0; 2] };
    for (half, x) in x.as_chunks::<HALF>().0.iter().enumerate() {
        let (codes, scale, sum) = quantize_half(x);
        block.codes[half * HALF..][..HALF].copy_from_slice(&codes);
        block.scales[half] = scale;
        block.minus_scaled_sum -= scale * sum as f32;
        block.starts[half] = -128 * sum;
    }
    block
}

/// The definition of the int8 form. Integer maximum, one product and one addition per value: no
/// order of evaluation can change a bit, so the compiler may vectorise it as it likes.
#[inline(always)]
fn quantize_half(x: &[f32; HALF]) -> ([i8; HALF], f32, i32) {
    // The bits of |x| order as the values do, with infinity and NaN on top.
    let bits = x.iter().fold(0, |max, v| (v.to_bits() & 0x7fff_ffff).max(max));
    let largest = f32::from_bits(bits);
    let (scale, inverse) = if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    };
    let mut codes = [0; HALF];
    let mut sum = 0;
    for i in 0..HALF {
        let value = if inverse == 0.0 { 0.0 } else { x[i] * inverse };
        let code = (value + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
        codes[i] = code as i8;
        sum += code;
    }
    (codes, scale, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(first: f32, step: f32) -> [f32; 32] {
        std::array::from_fn(|i| first + step * i as f32)
    }

    #[test]
    fn a_block_reads_back_within_half_a_step() {
        let x = ramp(-3.0, 0.21);
        let block = quantize_block(&x);
        for (i, (x, code)) in x.iter().zip(block.codes).enumerate() {
            let scale = block.scales[i / HALF];
            assert!((x - scale * f32::from(code)).abs() <= scale * 0.501);
        }
        for (codes, start) in block.codes.chunks(HALF).zip(block.starts) {
            assert_eq!(start, -128 * codes.iter().map(|&c| i32::from(c)).sum::<i32>());
        }
    }

    #[test]
    fn extreme_blocks_stay_finite_and_faults_show() {
        for (first, step) in [(0.0, 0.0), (1e30, 1e29), (-3e36, 1e35), (1e-40, 1e-41), (1e-36, 0.0)]
        {
            let block = quantize_block(&ramp(first, step));
            assert!(block.scales.iter().all(|s| s.is_finite()));
            assert!(block.minus_scaled_sum.is_finite());
            assert!(block.codes.iter().all(|&c| c != i8::MIN));
        }
        for fault in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = ramp(1.0, 1.0);
            x[7] = fault;
            assert!(quantize_block(&x).scales[0].is_nan());
        }
    }

    #[test]
    fn all_levels_write_the_same_bytes_in_tiles() {
        let (rows, cols) = (19, 96);
        let mut x: Vec<f32> =
            (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 - 500.5).collect();
        // Halves of a block with nothing, with faults, and with the largest and smallest numbers.
        x[..32].fill(0.0);
        x[40] = f32::INFINITY;
        x[50] = f32::NAN;
        x[70] = f32::MAX;
        x[96..112].fill(f32::from_bits(SMALLEST.to_bits() - 1));
        x[112..128].fill(SMALLEST);
        let fill = |simd| {
            let mut buffer = Activations::with_bytes(Form::Blocks.bytes(rows, cols));
            let filling = buffer.fill(Form::Blocks, rows, cols);
            for row in 0..rows {
                // SAFETY: one thread.
                unsafe { filling.set(simd, row, &x[row * cols..][..cols]) }
            }
            let mut bytes = vec![];
            for row in 0..rows {
                let (start, stride) = buffer.row(row);
                for step in 0..cols / 32 {
                    // SAFETY: inside the row, and Block has no padding.
                    let block = unsafe { start.add(step * stride).cast::<[u8; 52]>().read() };
                    bytes.extend(block);
                }
            }
            bytes
        };
        let expected = fill(Simd::Portable);
        for simd in Simd::available() {
            assert!(fill(simd) == expected, "{simd}");
        }
    }
}
