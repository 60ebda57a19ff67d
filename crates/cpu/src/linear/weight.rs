//! Weights as kernels read them: panels of 16 rows, each contiguous, packed at load. It knows how
//! formats become kinds and nothing of products.

use std::marker::PhantomData;
use std::ops::Range;

use bodkin_gguf::Format;
use half::f16;

use super::columns::{ColumnGroups, EIGHT};
use super::kind::{FloatKind, IntegerKind, Kind, Visit};
use super::level::PANEL_ROWS;
use super::memory::Memory;
use super::sparse::{SparsePacker, SparsePanels};
use crate::simd::Simd;

/// Columns that are dequantised at a time; all blocks of all formats divide it.
const CHUNK_COLS: usize = 256;

/// Rows of a tensor as a file has them.
#[derive(Copy, Clone)]
pub struct Rows<'a> {
    format: Format,
    /// All data of the tensor.
    data: &'a [u8],
    /// The rows of the tensor.
    total: usize,
    /// Which of them comes first here.
    first: usize,
}

impl<'a> Rows<'a> {
    /// The `total` rows of a tensor whose data are `data`.
    pub fn new(format: Format, data: &'a [u8], total: usize) -> Rows<'a> {
        Rows { format, data, total, first: 0 }
    }

    /// The rows without the `count` first ones.
    pub fn from(self, count: usize) -> Rows<'a> {
        Rows { first: self.first + count, ..self }
    }

    /// How they are stored.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// Some rows one after the other, in the base where the format is sparse. `room` is where they
    /// are made dense.
    fn dense<'b>(self, rows: Range<usize>, cols: usize, room: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        let rows = self.first + rows.start..self.first + rows.end;
        let Some(base) = self.format.base() else {
            let bytes = self.data.len() / self.total;
            return &self.data[rows.start * bytes..rows.end * bytes];
        };
        let bytes = base.row_bytes(cols).expect("the kind of the base has so many columns");
        room.resize(rows.len() * bytes, 0);
        for (row, dense) in rows.zip(room.chunks_exact_mut(bytes)) {
            self.format.densify_row(self.format.row(self.data, self.total, row), dense);
        }
        room
    }
}

/// A weight matrix `[rows, cols]`, packed.
pub struct PackedWeight {
    kind: Kind,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    store: Store,
}

/// Where the panels are.
enum Store {
    /// In memory of their own.
    Packed(Memory),
    /// Nowhere: they are packed whenever they are used, from `[rows, cols]` in the format.
    Source(Source, Format),
    /// In memory of their own, without zeros.
    Sparse(SparsePanels),
    /// In memory of their own, by columns.
    Columns(ColumnGroups),
}

/// Bytes that someone else owns.
pub type Source = Box<dyn AsRef<[u8]> + Send + Sync>;

impl PackedWeight {
    /// Rows of a panel.
    pub const PANEL_ROWS: usize = PANEL_ROWS;
    /// Rows that weights by columns are filled up to.
    pub const GROUP_ROWS: usize = EIGHT * PANEL_ROWS;

    /// The bytes that a weight takes when packed; `None` if that overflows or if the kind cannot
    /// have so many columns.
    pub fn bytes_for(kind: Kind, rows: usize, cols: usize) -> Option<usize> {
        kind.panel_bytes(cols)?.checked_mul(rows.div_ceil(PANEL_ROWS))
    }

    /// A weight of zeros, to be filled through [`PackedWeight::packer`].
    ///
    /// # Panics
    /// If [`PackedWeight::bytes_for`] has no answer.
    pub fn zeroed(kind: Kind, rows: usize, cols: usize) -> PackedWeight {
        let bytes = PackedWeight::bytes_for(kind, rows, cols);
        let bytes = bytes.unwrap_or_else(|| panic!("{kind:?}: no panels of {rows} x {cols}"));
        let panel_bytes = kind.panel_bytes(cols).unwrap_or(0);
        let store = Store::Packed(Memory::zeroed(bytes));
        PackedWeight { kind, rows, cols, panel_bytes, store }
    }

    /// Packs a whole weight on this thread, with its zeros; `source` is `[rows, cols]` in `format`.
    ///
    /// # Panics
    /// As [`PackedWeight::zeroed`] and [`PackedWeight::packer`].
    pub fn pack(format: Format, source: &[u8], rows: usize, cols: usize) -> PackedWeight {
        let kind = Kind::native(format).unwrap_or_else(|| float_kind(format, source, cols));
        let mut weight = PackedWeight::zeroed(kind, rows, cols);
        let panels = 0..weight.panels();
        // SAFETY: no other thread knows this weight.
        unsafe { weight.packer(Rows::new(format, source, rows)).pack(panels) };
        weight
    }

    /// Packs a whole weight of a sparse format on this thread, without its zeros.
    ///
    /// # Panics
    /// As [`SparsePacker::new`].
    pub fn pack_sparse(format: Format, source: &[u8], rows: usize, cols: usize) -> PackedWeight {
        let packer = SparsePacker::new(Rows::new(format, source, rows), rows, cols);
        packer.join(&[packer.pack(0..rows.div_ceil(PANEL_ROWS))])
    }

    /// A weight whose panels have no zeros, and become `kind` with them.
    pub(super) fn of_sparse(
        kind: Kind,
        rows: usize,
        cols: usize,
        panels: SparsePanels,
    ) -> PackedWeight {
        let panel_bytes = kind.panel_bytes(cols);
        let panel_bytes = panel_bytes.unwrap_or_else(|| panic!("{kind:?}: no panels of {cols}"));
        PackedWeight { kind, rows, cols, panel_bytes, store: Store::Sparse(panels) }
    }

    /// A weight by columns, whose panels become `kind`.
    pub(super) fn of_columns(
        kind: Kind,
        rows: usize,
        cols: usize,
        groups: ColumnGroups,
    ) -> PackedWeight {
        let panel_bytes = kind.panel_bytes(cols);
        let panel_bytes = panel_bytes.unwrap_or_else(|| panic!("{kind:?}: no panels of {cols}"));
        PackedWeight { kind, rows, cols, panel_bytes, store: Store::Columns(groups) }
    }

    /// A weight that takes no memory: its panels are packed from `source`, `[rows, cols]` in
    /// `format`, whenever they are used. Slower, with the same results.
    ///
    /// # Panics
    /// As [`PackedWeight::zeroed`], or if `source` has another size.
    pub fn unpacked(format: Format, source: Source, rows: usize, cols: usize) -> PackedWeight {
        let bytes = (*source).as_ref();
        let kind = Kind::native(format).unwrap_or_else(|| float_kind(format, bytes, cols));
        let panel_bytes = kind.panel_bytes(cols);
        let panel_bytes = panel_bytes.unwrap_or_else(|| panic!("{kind:?}: no panels of {cols}"));
        assert_eq!(bytes.len(), rows * format.row_bytes(cols).unwrap_or(0), "{rows} x {cols}");
        PackedWeight { kind, rows, cols, panel_bytes, store: Store::Source(source, format) }
    }

    /// Prepares packing from the first of these rows.
    ///
    /// # Panics
    /// If there are too few of them, if they have another number of columns, or if the kind cannot
    /// hold the format: an integer kind holds its own and sparse ones over it, a float kind any.
    pub fn packer<'a>(&'a mut self, source: Rows<'a>) -> Packer<'a> {
        let format = source.format.base().unwrap_or(source.format);
        let (kind, rows, cols, panel_bytes) = (self.kind, self.rows, self.cols, self.panel_bytes);
        let row_bytes = format.row_bytes(cols).filter(|&bytes| {
            let is_whole = source.total.checked_mul(bytes) == Some(source.data.len());
            (is_whole || source.format.base().is_some()) && source.first + rows <= source.total
        });
        let Some(row_bytes) = row_bytes else {
            panic!("{}: {} bytes for {rows} x {cols}", format.name(), source.data.len());
        };
        let integer = kind.cols_multiple() > 1;
        assert!(!integer || kind.format() == format, "{} as {kind:?}", format.name());
        let Store::Packed(memory) = &mut self.store else { panic!("this weight is not packed") };
        let start = memory.start_mut();
        let owner = PhantomData;
        Packer { start, kind, rows, cols, panel_bytes, format, source, row_bytes, owner }
    }

    /// How the weight is stored.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Rows: the width of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: the width of the activations.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 16 rows, the last one padded with zeros.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Bytes that a product reads.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Packed(memory) => memory.len(),
            Store::Source(source, _) => (**source).as_ref().len(),
            Store::Sparse(panels) => panels.len(),
            Store::Columns(groups) => groups.len(),
        }
    }

    /// The panels that begin in a part of the weight's bytes, for one of `threads` threads: parts
    /// side by side have all panels once, and no part much more bytes than it says.
    pub(crate) fn panels_in(&self, bytes: Range<usize>, threads: usize) -> Range<usize> {
        let panels = self.panels();
        let first = |at: usize| match &self.store {
            Store::Sparse(sparse) => sparse.first_at(at),
            Store::Columns(groups) => {
                let panel = (at * panels).div_ceil(self.bytes().max(1));
                panel.next_multiple_of(groups.together(threads))
            }
            _ => (at * panels).div_ceil(self.bytes().max(1)),
        };
        first(bytes.start).min(panels)..first(bytes.end).min(panels)
    }

    /// Where some panels lie one behind the other, as a product with one token reads them; nowhere
    /// where it does not.
    pub(crate) fn place(&self, panels: Range<usize>) -> Range<*const u8> {
        let start = |at: usize| match &self.store {
            Store::Packed(memory) => memory.start().wrapping_add(at * self.panel_bytes),
            Store::Sparse(sparse) => sparse.place(at),
            Store::Source(..) | Store::Columns(_) => std::ptr::null(),
        };
        start(panels.start)..start(panels.end)
    }

    /// The panels of a weight that leaves zeros out.
    pub(crate) fn sparse(&self) -> Option<&SparsePanels> {
        match &self.store {
            Store::Sparse(panels) => Some(panels),
            _ => None,
        }
    }

    /// The groups of a weight by columns.
    pub(crate) fn columns(&self) -> Option<&ColumnGroups> {
        match &self.store {
            Store::Columns(groups) => Some(groups),
            _ => None,
        }
    }

    /// Takes the weight out of the processor's caches, where it can: the next product reads it from
    /// memory.
    pub(crate) fn evict(&self) {
        match &self.store {
            Store::Packed(memory) => memory.evict(),
            Store::Sparse(panels) => panels.evict(),
            Store::Columns(groups) => groups.evict(),
            Store::Source(..) => {}
        }
    }

    /// The bytes of a weight of one panel.
    pub(super) fn panel_mut(&mut self) -> &mut [u8] {
        let Store::Packed(memory) = &mut self.store else { panic!("this weight is not packed") };
        memory.bytes_mut()
    }

    /// Bytes of one panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The first byte of all panels; none if they have to be written as
    /// the kind whenever they are used.
    pub(crate) fn start(&self) -> Option<*const u8> {
        match &self.store {
            Store::Packed(memory) => Some(memory.start()),
            Store::Source(..) | Store::Sparse(_) | Store::Columns(_) => None,
        }
    }

    /// Packs some panels of a weight that stays unpacked, or makes them dense.
    ///
    /// # Safety
    /// `room` has place for the panels, and no other thread touches it.
    pub(crate) unsafe fn pack_into(&self, simd: Simd, panels: Range<usize>, room: *mut u8) {
        let (rows, cols, panel_bytes) = (self.rows, self.cols, self.panel_bytes);
        let (source, format) = match &self.store {
            Store::Packed(_) => panic!("the weight is packed"),
            // SAFETY: passed on.
            Store::Sparse(sparse) => unsafe {
                return sparse.expand_into(simd, panels, cols, panel_bytes, room);
            },
            // SAFETY: passed on.
            Store::Columns(groups) => unsafe {
                let sizes = (cols, panel_bytes);
                return groups.expand_into(simd, self.kind, panels, sizes, room);
            },
            Store::Source(source, format) => ((**source).as_ref(), *format),
        };
        let (kind, row_bytes) = (self.kind, source.len() / rows);
        let source = Rows::new(format, source, rows);
        let bytes = panels.len() * panel_bytes;
        let skipped = panels.start * panel_bytes;
        // SAFETY: the caller gives the room. What lies before it is never written.
        unsafe {
            room.write_bytes(0, bytes);
            let start = room.wrapping_sub(skipped);
            let owner = PhantomData;
            let packer =
                Packer { start, kind, rows, cols, panel_bytes, format, source, row_bytes, owner };
            packer.pack(panels);
        }
    }
}

/// The float kind for rows of a format that has no kind of its own: F16, or F32 where F16 would
/// lose more than 2^-11 of a row's largest value. Parts of a tensor may be asked about one by one;
/// if any answers F32, the tensor needs it.
///
/// | stored as | becomes | loses |
/// | --- | --- | --- |
/// | I8, NVFP4, Q1_0, Q2_0, TQ1_0, TQ2_0 | F16 | nothing |
/// | IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S | F16 | 2^-12 of a value at most |
/// | Q8_1, Q8_K, I16, I32, I64, F64 | F16 | 2^-12 of a value at most |
/// | any of these with a value above 65504, or with rows too small for F16 | F32 | 2^-25 of it |
///
/// Products are formed in f32 with the activations as they are. `tests/linear_parity.rs` and
/// `tests/linear.rs` hold each of these types against the exact product of its dequantised values:
/// NMSE at most 1e-6.
///
/// # Panics
/// If `source` is no whole number of rows of `cols` columns.
pub fn float_kind(format: Format, source: &[u8], cols: usize) -> Kind {
    let row_bytes = format.row_bytes(cols).unwrap_or(0);
    assert!(row_bytes > 0 && source.len().is_multiple_of(row_bytes), "{}", format.name());
    let mut values = vec![0.0; cols];
    let fits = source.chunks_exact(row_bytes).all(|row| {
        format.dequantize(row, &mut values);
        row_fits_f16(&values)
    });
    if fits { Kind::F16 } else { Kind::F32 }
}

fn row_fits_f16(values: &[f32]) -> bool {
    let largest = values.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
    // Rounding loses at most 2^-12 of a normal value and 2^-25 of a smaller one.
    if largest >= f32::from(f16::MIN_POSITIVE) {
        return largest <= f32::from(f16::MAX);
    }
    let bound = largest / 2048.0;
    values.iter().all(|&v| (f16::from_f32(v).to_f32() - v).abs() <= bound)
}

/// The right to pack panels of a weight, shareable between threads.
#[derive(Copy, Clone)]
pub struct Packer<'a> {
    start: *mut u8,
    kind: Kind,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    /// Of the rows as they are packed: never a sparse one.
    format: Format,
    source: Rows<'a>,
    row_bytes: usize,
    owner: PhantomData<&'a mut PackedWeight>,
}

// SAFETY: the pointer stays valid for 'a, and `pack` demands that threads pack different panels.
unsafe impl Send for Packer<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Packer<'_> {}

impl Packer<'_> {
    /// Packs the panels of a range.
    ///
    /// # Safety
    /// No other thread packs the same panels at the same time.
    ///
    /// # Panics
    /// If the weight has fewer panels.
    pub unsafe fn pack(self, panels: Range<usize>) {
        assert!(panels.end <= self.rows.div_ceil(PANEL_ROWS), "panel {}", panels.end);
        let mut room = Vec::new();
        for panel in panels {
            let first = panel * PANEL_ROWS;
            let rows = PANEL_ROWS.min(self.rows - first);
            let source = self.source.dense(first..first + rows, self.cols, &mut room);
            // SAFETY: the panel lies in the memory, and the caller keeps other threads off it.
            let target = unsafe {
                let start = self.start.wrapping_add(panel * self.panel_bytes);
                std::slice::from_raw_parts_mut(start, self.panel_bytes)
            };
            self.kind.visit(PackPanel { packer: self, source, rows, target });
        }
    }
}

/// One panel on its way from a format to a kind.
struct PackPanel<'a> {
    packer: Packer<'a>,
    source: &'a [u8],
    rows: usize,
    target: &'a mut [u8],
}

impl Visit for PackPanel<'_> {
    type Output = ();

    fn integer<K: IntegerKind>(self) {
        assert_eq!(self.row_bytes(), self.packer.cols / K::COLS * K::SOURCE_BYTES);
        for (index, span) in self.target.chunks_exact_mut(K::BYTES).enumerate() {
            for row in 0..self.rows {
                let at = row * self.packer.row_bytes + index * K::SOURCE_BYTES;
                K::pack(&self.source[at..at + K::SOURCE_BYTES], row, span);
            }
        }
    }

    fn float<K: FloatKind>(self) {
        if self.packer.format == self.packer.kind.format() {
            self.transpose::<K>();
        } else {
            self.dequantize::<K>();
        }
    }
}

impl PackPanel<'_> {
    fn row_bytes(&self) -> usize {
        self.packer.row_bytes
    }

    /// Rows of the same floats become columns.
    fn transpose<K: FloatKind>(self) {
        let row_bytes = self.row_bytes();
        for (col, column) in self.target.chunks_exact_mut(PANEL_ROWS * K::BYTES).enumerate() {
            let column = column.chunks_exact_mut(K::BYTES).take(self.rows).enumerate();
            for (row, value) in column {
                let at = row * row_bytes + col * K::BYTES;
                value.copy_from_slice(&self.source[at..at + K::BYTES]);
            }
        }
    }

    /// Rows of any format become columns of floats.
    fn dequantize<K: FloatKind>(self) {
        let (format, cols) = (self.packer.format, self.packer.cols);
        let mut values = [[0.0; CHUNK_COLS]; PANEL_ROWS];
        for first in (0..cols).step_by(CHUNK_COLS) {
            let count = CHUNK_COLS.min(cols - first);
            let bytes = |cols| format.row_bytes(cols).expect("chunks are whole blocks");
            for (row, values) in values[..self.rows].iter_mut().enumerate() {
                let at = row * self.row_bytes() + bytes(first);
                format.dequantize(&self.source[at..at + bytes(count)], &mut values[..count]);
            }
            let target = &mut self.target[first * PANEL_ROWS * K::BYTES..];
            let columns = target.chunks_exact_mut(PANEL_ROWS * K::BYTES);
            for (col, column) in columns.take(count).enumerate() {
                for (value, to) in values[..self.rows].iter().zip(column.chunks_mut(K::BYTES)) {
                    K::store(value[col], to);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_is_refused_where_it_loses_too_much() {
        assert!(row_fits_f16(&[0.0, 65504.0, 1e-9]));
        assert!(row_fits_f16(&[0.0; 4]));
        assert!(!row_fits_f16(&[65536.0]));
        assert!(!row_fits_f16(&[1.2345e-7]));
    }
}
