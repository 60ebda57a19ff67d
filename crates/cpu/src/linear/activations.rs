//! Activations in the formats that kernels read: int8 blocks for integer layouts, f32 for float
//! layouts, pairs of bfloat16 for BF16 dot instructions, tiles of bfloat16 for tile registers.
//!
//! Rows (tokens) are grouped in tiles of 16; the last tile holds the remaining rows. In a tile,
//! column steps are the outer and rows the inner dimension:
//!
//! ```text
//! Int8   [tile][cols / 32][row in tile] of Block (52 bytes)
//! F32    [tile][cols][row in tile] of f32
//! Bf16   [tile][cols / 2, rounded up][row in tile] of two bfloat16, zero after an odd column
//! tiles  [tile][cols / 32, rounded up][parts][row in tile] of 32 bfloat16, zero after the last
//! ```
//!
//! A kernel therefore walks one pointer for all its tokens, and a single row is plain row-major.
//! Only in the last format the last tile has 16 rows too; those that are not set are arbitrary.

mod avx512;
mod block;
mod format;
mod nonzero;
mod tiles;

use std::marker::PhantomData;
use std::sync::Arc;

use half::bf16;

use crate::isa::Isa;
use crate::memory::AlignedMemory;
use block::quantize_row;
use nonzero::NonZeroMemory;

pub(crate) use block::{BLOCK_COLS, Block};
pub use format::ActivationFormat;
use format::TILE_ROW_BYTES;
pub(crate) use format::{ActivationFormats, TILE_ROWS};
pub(crate) use nonzero::{NonZeros, PREFETCH_COLS};

/// A buffer of activations, allocated for the largest step and written before each matmul. Threads
/// that write and read it together each take a handle of the same shape.
pub struct Activations {
    /// Keeps the memory behind `start` alive.
    memory: Arc<AlignedMemory>,
    start: *mut u8,
    nonzeros: NonZeroMemory,
    format: ActivationFormat,
    rows: usize,
    cols: usize,
}

// SAFETY: the memory lives as long as any handle; `ActivationWriter::set` and `matmul` require
// that no row is set while another thread sets or reads it.
unsafe impl Send for Activations {}
// SAFETY: as for Send.
unsafe impl Sync for Activations {}

impl Activations {
    /// A buffer that can hold `bytes`, see [`ActivationFormat::bytes`].
    pub fn with_bytes(bytes: usize) -> Activations {
        let mut memory = AlignedMemory::zeroed(bytes);
        let start = memory.start_mut();
        let (format, nonzeros) = (ActivationFormat::F32, NonZeroMemory::new(0));
        Activations { memory: Arc::new(memory), start, nonzeros, format, rows: 0, cols: 0 }
    }

    /// The same buffer with non-zero indices for single rows of up to `cols` columns, which
    /// column-major kernels need.
    pub fn with_nonzeros(self, cols: usize) -> Activations {
        Activations { nonzeros: NonZeroMemory::new(cols), ..self }
    }

    /// A handle of the same buffer in another shape.
    ///
    /// # Panics
    /// As [`Activations::reshape`].
    pub fn shaped(&self, format: ActivationFormat, rows: usize, cols: usize) -> Activations {
        let (memory, start) = (Arc::clone(&self.memory), self.start);
        let nonzeros = self.nonzeros.clone();
        let mut handle = Activations { memory, start, nonzeros, format, rows, cols };
        handle.reshape(format, rows, cols);
        handle
    }

    /// Writes rows in the present shape.
    pub fn writer(&self) -> ActivationWriter<'_> {
        let Activations { start, format, rows, cols, .. } = *self;
        let nonzeros = self.nonzeros.indices(rows, cols);
        ActivationWriter { start, nonzeros, format, rows, cols, owner: PhantomData }
    }

    /// Changes the shape to `rows` rows of `cols` columns. Every row must be set before the matmul;
    /// until then its content is arbitrary.
    ///
    /// # Panics
    /// If the buffer is too small, or if `cols` is no multiple of 32 for
    /// [`ActivationFormat::Int8`].
    pub fn reshape(
        &mut self,
        format: ActivationFormat,
        rows: usize,
        cols: usize,
    ) -> ActivationWriter<'_> {
        assert!(
            format != ActivationFormat::Int8 || cols.is_multiple_of(BLOCK_COLS),
            "{cols} columns"
        );
        let bytes = format.bytes(rows, cols);
        assert!(bytes <= self.memory.len(), "activations: {bytes} of {}", self.memory.len());
        (self.format, self.rows, self.cols) = (format, rows, cols);
        self.writer()
    }

    /// The non-zero columns of the only row, if the buffer has indices and the format lists them.
    pub(crate) fn nonzeros(&self) -> Option<NonZeros> {
        let indices = self.nonzeros.indices(self.rows, self.cols);
        indices.filter(|_| matches!(self.format, ActivationFormat::Int8 | ActivationFormat::F32))
    }

    /// How the rows are stored.
    pub fn format(&self) -> ActivationFormat {
        self.format
    }

    /// Rows (tokens) of the present shape.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the present shape.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes from one whole tile to the next.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn tile_bytes(&self) -> usize {
        TILE_ROWS * self.format.row_bytes(self.cols) + self.format.gap_bytes()
    }

    /// The start of `row` in its tile, and the distance in bytes between two column steps.
    pub(crate) fn row(&self, row: usize) -> (*const u8, usize) {
        let place = Place::of(row, self.rows, self.format, self.cols);
        // SAFETY: `place` lies inside `rows` rows, which `reshape` checked against the memory.
        (unsafe { self.start.add(place.offset).cast_const() }, place.stride)
    }
}

/// The position of a row in the buffer, in bytes.
struct Place {
    offset: usize,
    stride: usize,
}

impl Place {
    fn of(row: usize, rows: usize, format: ActivationFormat, cols: usize) -> Place {
        assert!(row < rows, "activations: row {row} of {rows}");
        let first = row - row % TILE_ROWS;
        let width = if format.is_tiles() { TILE_ROWS } else { TILE_ROWS.min(rows - first) };
        let step = format.step_bytes();
        let tile = first * format.row_bytes(cols) + first / TILE_ROWS * format.gap_bytes();
        // The parts of a row are in tiles of their own.
        let distance = if format.is_tiles() { TILE_ROW_BYTES } else { step };
        Place { offset: tile + (row - first) * distance, stride: width * step }
    }
}

/// Writes rows of an [`Activations`] buffer; shareable between threads.
#[derive(Copy, Clone)]
pub struct ActivationWriter<'a> {
    start: *mut u8,
    nonzeros: Option<NonZeros>,
    format: ActivationFormat,
    rows: usize,
    cols: usize,
    owner: PhantomData<&'a mut Activations>,
}

// SAFETY: the pointer stays valid for 'a, and `set` requires that no two threads set the same row.
unsafe impl Send for ActivationWriter<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for ActivationWriter<'_> {}

impl ActivationWriter<'_> {
    /// Sets `row` from `x`, `[cols]`. Give a thread whole tiles of 16 rows where possible: the rows
    /// of a tile share cache lines. The result is the same on every instruction set.
    ///
    /// # Safety
    /// No other thread sets or reads the same row at the same time.
    ///
    /// # Panics
    /// If `row` or the length of `x` does not fit the shape.
    pub unsafe fn set(self, isa: Isa, row: usize, x: &[f32]) {
        assert!(x.len() == self.cols, "activations: {} columns of {}", x.len(), self.cols);
        let place = Place::of(row, self.rows, self.format, self.cols);
        // SAFETY: `place` lies inside the buffer, whose size `reshape` checked.
        let (start, stride) = (unsafe { self.start.add(place.offset) }, place.stride);
        match self.format {
            // SAFETY: all `cols` steps lie inside the tile; the caller keeps other threads away.
            // Indices exist if this is the only row, which is contiguous.
            ActivationFormat::F32 => unsafe {
                copy_row(start, stride, x);
                if let Some(nonzeros) = self.nonzeros {
                    nonzeros.set_f32(x);
                }
            },
            // SAFETY: likewise.
            ActivationFormat::Bf16 => unsafe { pair_row(start, stride, x) },
            // SAFETY: likewise; an `Isa` with tiles proves its instructions.
            #[cfg(target_arch = "x86_64")]
            ActivationFormat::Bf16Tiles if isa.has_tiles() => unsafe {
                tiles::set_row::<1>(start, stride, x);
            },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            ActivationFormat::SplitBf16Tiles if isa.has_tiles() => unsafe {
                tiles::set_row::<2>(start, stride, x);
            },
            ActivationFormat::Bf16Tiles | ActivationFormat::SplitBf16Tiles => {
                panic!("{isa} has no tiles")
            }
            // SAFETY: likewise.
            ActivationFormat::Int8 => unsafe {
                quantize(isa, start, stride, x);
                if let Some(nonzeros) = self.nonzeros {
                    let blocks = x.len() / BLOCK_COLS;
                    nonzeros.set_blocks(std::slice::from_raw_parts(start.cast(), blocks));
                }
            },
        }
    }
}

/// Quantises a row to int8 blocks.
///
/// # Safety
/// As `block::quantize_row`.
unsafe fn quantize(isa: Isa, start: *mut u8, stride: usize, x: &[f32]) {
    // SAFETY: passed on; an `Isa` proves its instructions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxEmulated => {
                avx512::quantize_row(start, stride, x)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => block::quantize_row_avx2(start, stride, x),
            // Compilers vectorise the definition for NEON, which every 64-bit Arm processor has.
            _ => quantize_row(start, stride, x),
        }
    }
}

/// # Safety
/// `start` has `x.len()` steps of `stride` bytes to write to.
unsafe fn copy_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (col, &value) in x.iter().enumerate() {
        // SAFETY: the caller provides the memory; steps are multiples of 4 bytes, so f32 is
        // aligned.
        unsafe { start.add(col * stride).cast::<f32>().write(value) }
    }
}

/// # Safety
/// `start` has a step of `stride` bytes to write to for each two of `x`.
unsafe fn pair_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (step, pair) in x.chunks(2).enumerate() {
        let pair = [pair[0], pair.get(1).copied().unwrap_or(0.0)].map(bf16::from_f32);
        // SAFETY: the caller provides the memory; steps are multiples of 4 bytes, so bf16 is
        // aligned.
        unsafe { start.add(step * stride).cast::<[bf16; 2]>().write(pair) }
    }
}

#[cfg(test)]
mod tests {
    use super::block::{HALF, SMALLEST, quantize_block};
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
    fn all_isas_write_the_same_bytes_in_tiles() {
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
        let fill = |isa| {
            let mut buffer = Activations::with_bytes(ActivationFormat::Int8.bytes(rows, cols));
            let writer = buffer.reshape(ActivationFormat::Int8, rows, cols);
            for row in 0..rows {
                // SAFETY: one thread.
                unsafe { writer.set(isa, row, &x[row * cols..][..cols]) }
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
        let expected = fill(Isa::Portable);
        for isa in Isa::available() {
            assert!(fill(isa) == expected, "{isa}");
        }
    }
}
