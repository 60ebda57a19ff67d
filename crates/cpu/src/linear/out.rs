//! The output of a matmul: rows in memory that several threads write.

use std::marker::PhantomData;

/// Rows of f32 that several threads write together: each has a copy and writes other elements.
#[derive(Copy, Clone)]
pub struct OutRows<'a> {
    start: *mut f32,
    stride: usize,
    pub(super) rows: usize,
    /// The scatter map, if rows are parts of token rows.
    scatter: Option<Scatter<'a>>,
    owner: PhantomData<&'a mut [f32]>,
}

/// The (token, expert) pair of each row: row `i` is part `pairs[i] % used` of the row of token
/// `pairs[i] / used`.
#[derive(Copy, Clone)]
struct Scatter<'a> {
    pairs: &'a [u32],
    /// Experts per token.
    used: usize,
    /// Elements of a part.
    width: usize,
}

// SAFETY: the pointer stays valid for 'a, and `matmul` requires threads to write disjoint elements.
unsafe impl Send for OutRows<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for OutRows<'_> {}

impl<'a> OutRows<'a> {
    /// Rows of `width` elements, one after the other.
    ///
    /// # Panics
    /// If `out` is no whole number of rows.
    pub fn new(out: &'a mut [f32], width: usize) -> OutRows<'a> {
        assert!(width > 0 && out.len().is_multiple_of(width), "{} of {width}", out.len());
        let rows = out.len() / width;
        OutRows { start: out.as_mut_ptr(), stride: width, rows, scatter: None, owner: PhantomData }
    }

    /// `rows` rows that begin `stride` elements apart.
    ///
    /// # Safety
    /// For 'a, the rows are valid for writes of the width of the matmul.
    pub unsafe fn from_raw(start: *mut f32, stride: usize, rows: usize) -> OutRows<'a> {
        OutRows { start, stride, rows, scatter: None, owner: PhantomData }
    }

    /// Rows of `width` elements, one for each (token, expert) pair. A token's row begins `stride`
    /// elements after the one before and has a part for each of its `used` experts. Row `i` is part
    /// `pairs[i] % used` of the row of token `pairs[i] / used`.
    ///
    /// # Safety
    /// As for [`OutRows::from_raw`], for the tokens' rows; the pairs are distinct and less than
    /// `tokens * used`.
    ///
    /// # Panics
    /// If a token's parts are longer than `stride`.
    pub unsafe fn scattered(
        start: *mut f32,
        stride: usize,
        pairs: &'a [u32],
        used: usize,
        width: usize,
    ) -> OutRows<'a> {
        assert!(used * width <= stride, "{used} parts of {width} in {stride}");
        let (rows, scatter) = (pairs.len(), Some(Scatter { pairs, used, width }));
        OutRows { start, stride, rows, scatter, owner: PhantomData }
    }

    /// The most elements that a row may have.
    pub(super) fn max_width(&self) -> usize {
        self.scatter.map_or(self.stride, |s| s.width)
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// The row exists.
    pub(super) unsafe fn row(&self, row: usize) -> *mut f32 {
        let offset = match self.scatter {
            None => row * self.stride,
            Some(s) => {
                let pair = s.pairs[row] as usize;
                pair / s.used * self.stride + pair % s.used * s.width
            }
        };
        // SAFETY: inside the rows that the constructor was given.
        unsafe { self.start.add(offset) }
    }
}
