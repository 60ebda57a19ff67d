//! The output of a matmul: rows in memory that several threads write.

use std::marker::PhantomData;

/// Rows of f32 that several threads write together.
#[derive(Copy, Clone)]
pub struct OutRows<'a> {
    start: *mut f32,
    stride: usize,
    pub(super) rows: usize,
    /// The scatter map, if rows are parts of longer ones.
    parts: Option<Parts<'a>>,
    owner: PhantomData<&'a mut [f32]>,
}

/// A scatter map: rows that are parts of longer rows, in any order.
#[derive(Copy, Clone)]
struct Parts<'a> {
    /// Row `i` is part `places[i] % parts` of the longer row `places[i] / parts`.
    places: &'a [u32],
    parts: usize,
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
        OutRows { start: out.as_mut_ptr(), stride: width, rows, parts: None, owner: PhantomData }
    }

    /// `rows` rows that begin `stride` elements apart.
    ///
    /// # Safety
    /// For 'a, the rows are valid for writes of the width of the matmul.
    pub unsafe fn from_raw(start: *mut f32, stride: usize, rows: usize) -> OutRows<'a> {
        OutRows { start, stride, rows, parts: None, owner: PhantomData }
    }

    /// Rows of `width` elements that are parts of longer rows. A longer row has `parts` of them,
    /// and begins `stride` elements after the one before. Row `i` is part `places[i] % parts` of
    /// row `places[i] / parts`.
    ///
    /// # Safety
    /// As for [`OutRows::from_raw`], for the longer rows.
    ///
    /// # Panics
    /// If the parts are longer than `stride`.
    pub unsafe fn scattered(
        start: *mut f32,
        stride: usize,
        places: &'a [u32],
        parts: usize,
        width: usize,
    ) -> OutRows<'a> {
        assert!(parts * width <= stride, "{parts} parts of {width} in {stride}");
        let (rows, parts) = (places.len(), Some(Parts { places, parts, width }));
        OutRows { start, stride, rows, parts, owner: PhantomData }
    }

    /// The most elements of a row.
    pub(super) fn width(&self) -> usize {
        self.parts.map_or(self.stride, |p| p.width)
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// The row exists.
    pub(super) unsafe fn row(&self, row: usize) -> *mut f32 {
        let offset = match self.parts {
            None => row * self.stride,
            Some(p) => {
                let place = p.places[row] as usize;
                place / p.parts * self.stride + place % p.parts * p.width
            }
        };
        // SAFETY: inside the rows that the constructor was given.
        unsafe { self.start.add(offset) }
    }
}
