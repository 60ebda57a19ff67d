//! Where products go: rows in memory that several threads fill. It knows no weight.

use std::marker::PhantomData;

/// Where products go: rows of f32 that several threads fill together.
#[derive(Copy, Clone)]
pub struct OutRows<'a> {
    start: *mut f32,
    stride: usize,
    pub(super) rows: usize,
    /// Where rows go that are parts of longer ones.
    parts: Option<Parts<'a>>,
    owner: PhantomData<&'a mut [f32]>,
}

/// Rows that are parts of longer rows, in any order.
#[derive(Copy, Clone)]
struct Parts<'a> {
    /// Row `i` is part `places[i] % parts` of the longer row `places[i] / parts`.
    places: &'a [u32],
    parts: usize,
    /// Elements of a part.
    width: usize,
}

// SAFETY: the pointer stays valid for 'a, and `multiply` demands that threads write apart.
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
    /// For 'a, the rows are valid to write as far as products into them are wide.
    pub unsafe fn from_raw(start: *mut f32, stride: usize, rows: usize) -> OutRows<'a> {
        OutRows { start, stride, rows, parts: None, owner: PhantomData }
    }

    /// Rows of `width` elements that are parts of rows of `parts` such, which begin `stride`
    /// elements apart: row `i` is part `places[i] % parts` of row `places[i] / parts`.
    ///
    /// # Safety
    /// As for [`OutRows::from_raw`], for the rows that `places` name.
    ///
    /// # Panics
    /// If the parts do not fit the distance of rows.
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

    /// The elements that a row may have.
    pub(super) fn width(&self) -> usize {
        self.parts.map_or(self.stride, |p| p.width)
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// There is such a row.
    pub(super) unsafe fn row(&self, row: usize) -> *mut f32 {
        let offset = match self.parts {
            None => row * self.stride,
            Some(p) => {
                let place = p.places[row] as usize;
                place / p.parts * self.stride + place % p.parts * p.width
            }
        };
        // SAFETY: inside what whoever made this vouched for.
        unsafe { self.start.add(offset) }
    }
}
