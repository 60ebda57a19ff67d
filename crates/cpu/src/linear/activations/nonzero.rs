//! The indices of the non-zero columns of a single row of activations, for column-major kernels.
//!
//! For int8 blocks, each half has a list of columns within the block and the list of their codes,
//! both padded to whole quads with the last column and code zero. For f32, one list names all
//! columns.

use std::sync::Arc;

use super::block::{Block, HALF};
use crate::memory::AlignedMemory;

/// Columns per step of an integer dot product.
pub(crate) const QUAD: usize = 4;

/// How many columns ahead float kernels prefetch; as many indices are readable after the last one.
pub(crate) const PREFETCH_COLS: usize = 16;

/// Memory for the indices of one row.
#[derive(Clone)]
pub(super) struct NonZeroMemory {
    /// Keeps the memory behind `start` alive.
    _memory: Arc<AlignedMemory>,
    start: *mut u8,
    /// Columns of the longest row; 0 if no indices are needed.
    cols: usize,
}

impl NonZeroMemory {
    pub(super) fn new(cols: usize) -> NonZeroMemory {
        let indices = cols / HALF + 1 + cols + PREFETCH_COLS;
        let mut memory = AlignedMemory::zeroed(size_of::<u32>() * indices + cols);
        let start = memory.start_mut();
        NonZeroMemory { _memory: Arc::new(memory), start, cols }
    }

    /// The indices of the only row, if there is memory for them.
    pub(super) fn indices(&self, rows: usize, cols: usize) -> Option<NonZeros> {
        (rows == 1 && cols <= self.cols).then(|| {
            let ends = self.start.cast::<u32>();
            let columns = ends.wrapping_add(cols / HALF + 1);
            NonZeros { ends, columns, codes: columns.wrapping_add(cols + PREFETCH_COLS).cast() }
        })
    }
}

/// The non-zero columns of a row.
#[derive(Copy, Clone)]
pub(crate) struct NonZeros {
    /// The end of each half's list, after a zero; for f32, the number of columns.
    ends: *mut u32,
    columns: *mut u32,
    codes: *mut i8,
}

impl NonZeros {
    /// Lists the columns of an f32 row.
    ///
    /// # Safety
    /// The memory fits the row, and no other thread accesses it.
    pub(super) unsafe fn set_f32(self, row: &[f32]) {
        let mut count = 0;
        for (col, &x) in row.iter().enumerate() {
            // SAFETY: there is space for all columns. Branchless, since branches would mispredict.
            unsafe { *self.columns.add(count) = col as u32 };
            count += usize::from(x != 0.0);
        }
        // SAFETY: the first end always exists.
        unsafe { *self.ends = count as u32 };
    }

    /// Lists the columns of a row of int8 blocks.
    ///
    /// # Safety
    /// As [`NonZeros::set_f32`].
    pub(super) unsafe fn set_blocks(self, row: &[Block]) {
        let mut end = 0;
        // SAFETY: no half lists more than its columns, a multiple of a quad.
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
                        // The same column again: its weights are read anyway.
                        *self.columns.add(end) = *self.columns.add(end - 1);
                        *self.codes.add(end) = 0;
                        end += 1;
                    }
                    *self.ends.add(2 * index + half + 1) = end as u32;
                }
            }
        }
    }

    /// The columns of a half block in quads, and their codes.
    ///
    /// # Safety
    /// The row was set as blocks, and has this half.
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

    /// The columns of an f32 row in order and their number. The slice has [`PREFETCH_COLS`]
    /// arbitrary indices more.
    ///
    /// # Safety
    /// The row was set as f32.
    #[inline(always)]
    pub(crate) unsafe fn columns<'a>(self) -> (&'a [u32], usize) {
        // SAFETY: as the caller vouches; the memory has the extra indices.
        unsafe {
            let count = *self.ends as usize;
            (std::slice::from_raw_parts(self.columns, count + PREFETCH_COLS), count)
        }
    }
}
