//! Which columns of a single row are not zero: what a product reads that skips the others. It knows
//! rows as they are stored, no weight.
//!
//! Of int8 blocks, the columns of each half are named by their place in the block, with their
//! codes side by side, and padded to whole quads with the last of them again, of code zero. Of
//! floats, all columns are named by their number.

use super::{BLOCK_COLS, Block, Form, HALF};
use crate::linear::memory::Memory;

/// Columns that one step of an integer product takes.
pub(crate) const QUAD: usize = 4;

/// How many names can be read behind the last one of floats.
pub(crate) const AHEAD: usize = 16;

/// The bytes of an index of rows of up to `cols` columns.
pub(super) fn bytes(cols: usize) -> usize {
    size_of::<u32>() * (cols / HALF + 1 + cols + AHEAD) + cols
}

/// The names of a row's columns, somewhere in memory.
#[derive(Copy, Clone)]
pub(crate) struct Kept {
    /// Where the names of each half end, after a zero; of floats, how many there are.
    ends: *mut u32,
    columns: *mut u32,
    codes: *mut i8,
}

impl Kept {
    /// The index of a row of `cols` columns in a memory of [`bytes`] for as many or more.
    pub(super) fn at(memory: *mut u8, cols: usize) -> Kept {
        let ends = memory.cast::<u32>();
        let columns = ends.wrapping_add(cols / HALF + 1);
        Kept { ends, columns, codes: columns.wrapping_add(cols + AHEAD).cast() }
    }

    /// Names the columns of a row that `start` holds.
    ///
    /// # Safety
    /// The memory holds the index and `start` the row; no other thread touches either.
    pub(super) unsafe fn set(self, form: Form, start: *const u8, cols: usize) {
        // SAFETY: passed on.
        unsafe {
            match form {
                Form::Floats => self.set_floats(std::slice::from_raw_parts(start.cast(), cols)),
                Form::Blocks => {
                    let blocks = cols / BLOCK_COLS;
                    self.set_blocks(std::slice::from_raw_parts(start.cast(), blocks));
                }
                Form::Pairs => unreachable!("pairs have no index"),
            }
        }
    }

    unsafe fn set_floats(self, row: &[f32]) {
        let mut count = 0;
        for (col, &x) in row.iter().enumerate() {
            // SAFETY: there is room for all columns. Without a branch: which they are is chance.
            unsafe { *self.columns.add(count) = col as u32 };
            count += usize::from(x != 0.0);
        }
        // SAFETY: the first end always exists.
        unsafe { *self.ends = count as u32 };
    }

    unsafe fn set_blocks(self, row: &[Block]) {
        let mut end = 0;
        // SAFETY: no half takes more names than it has columns, a multiple of a quad.
        unsafe {
            *self.ends = 0;
            for (index, block) in row.iter().enumerate() {
                for half in 0..2 {
                    for col in half * HALF..(half + 1) * HALF {
                        *self.columns.add(end) = col as u32;
                        *self.codes.add(end) = block.codes[col];
                        end += usize::from(block.codes[col] != 0);
                    }
                    while !end.is_multiple_of(QUAD) {
                        // Its weights are read anyway.
                        *self.columns.add(end) = *self.columns.add(end - 1);
                        *self.codes.add(end) = 0;
                        end += 1;
                    }
                    *self.ends.add(2 * index + half + 1) = end as u32;
                }
            }
        }
    }

    /// The names of a half of a block, and their codes.
    ///
    /// # Safety
    /// The index was set for blocks, of which this is a half.
    #[inline(always)]
    pub(crate) unsafe fn quads<'a>(self, half: usize) -> (&'a [[u32; QUAD]], *const i8) {
        // SAFETY: halves are whole quads.
        unsafe {
            let (start, end) = (*self.ends.add(half) as usize, *self.ends.add(half + 1) as usize);
            let quads = self.columns.add(start).cast_const().cast();
            let quads = std::slice::from_raw_parts(quads, (end - start) / QUAD);
            (quads, self.codes.add(start))
        }
    }

    /// The columns of a row of floats, in order, how many they are, and behind them [`AHEAD`] names
    /// that mean nothing.
    ///
    /// # Safety
    /// The index was set for floats.
    #[inline(always)]
    pub(crate) unsafe fn columns<'a>(self) -> (&'a [u32], usize) {
        // SAFETY: as the caller vouches; there is room for so many names behind all columns.
        unsafe {
            let count = *self.ends as usize;
            (std::slice::from_raw_parts(self.columns, count + AHEAD), count)
        }
    }
}

/// A memory for the index of rows of up to `cols` columns.
pub(super) fn memory(cols: usize) -> Memory {
    Memory::zeroed(bytes(cols))
}
