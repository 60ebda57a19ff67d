//! Matrix products: packed weights times rows of activations. Weights are repacked once into panels
//! of 16 rows ([`PackedWeight`]); activations are brought into the form that the weight's [`Kind`]
//! wants ([`Activations`]); [`multiply`] does the rest. It must not know plans, pools or models.
//!
//! A result depends on its row of the weight and its row of the activations only: number of tokens,
//! cut into panels, and threads do not change a bit. `tile` states the order of arithmetic, `kind`
//! the layout of weights, `activations` that of the other side, `level` the instructions.
//!
//! No part reads outside the bytes of a panel or tile; prefetches may name what does not exist.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::Simd;

mod activations;
mod columns;
mod kind;
mod level;
mod memory;
mod out;
mod sparse;
mod tile;
mod weight;
mod widened;

pub(crate) use activations::Forms;
pub use activations::{Activations, Filling, Form};
pub use columns::{is_known as has_columns, pack_columns};
pub use kind::Kind;
pub(crate) use memory::{Memory, Number, ask};
pub use out::OutRows;
pub use sparse::{SparsePacker, SparsePart};
pub(crate) use tile::unrolled;
pub use weight::{PackedWeight, Packer, Rows, Source, float_kind};

use activations::{Kept, TILE_ROWS};
use columns::{ColumnGroups, ColumnInteger, EIGHT, VisitColumns};
use kind::{FloatKind, IntegerKind, Visit};
use level::{Level, PANEL_ROWS, Portable};
use sparse::{SparseFloat, SparseInteger, SparsePanels, VisitSparse};
use tile::Tile;
#[cfg(target_arch = "x86_64")]
use tile::pairs;
#[cfg(target_arch = "x86_64")]
use widened::RunUnpacked;
use widened::{WIDE_COLS, Wide};

/// Panels are taken in groups of about this size, which stays in the second-level cache while all
/// tokens pass over it.
const GROUP_BYTES: usize = 512 << 10;

/// Elements of a thread's room for panels that are packed or widened only when they are used.
pub const ROOM: usize = 1 << 18;

/// Writes `out[token][row] = sum over columns of weight[row] * x[token] + bias[row]` for the rows
/// of `panels` and the tokens of `tokens`. Weights are read once a call, so long as a group of
/// tokens' activations fits the caches. `room` is scratch for weights that stay unpacked or are
/// sparse: at least a dense panel, best [`ROOM`]; others need none, but with [`ROOM`] many tokens
/// are faster.
///
/// # Safety
/// No other thread writes the same rows of the same tokens, or reads them, at the same time; none
/// fills `x`. `out` has room for `weight.rows()` elements in each row.
///
/// # Panics
/// If shapes or forms do not fit.
#[allow(clippy::too_many_arguments)]
pub unsafe fn multiply(
    simd: Simd,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    x: &Activations,
    tokens: Range<usize>,
    out: OutRows<'_>,
    room: &mut [f32],
) {
    assert!(x.form() == weight.kind().form(simd), "{:?} times {:?}", weight.kind(), x.form());
    assert!(x.cols() == weight.cols(), "{} columns times {}", weight.cols(), x.cols());
    assert!(bias.is_none_or(|bias| bias.len() == weight.rows()), "the bias is not as long");
    assert!(panels.end <= weight.panels(), "panel {} of {}", panels.end, weight.panels());
    assert!(tokens.end <= x.rows().min(out.rows), "token {} of {}", tokens.end, x.rows());
    assert!(weight.rows() <= out.width(), "{} rows into {}", weight.rows(), out.width());
    let job = Job { simd, weight, bias, panels, x, tokens, out, room };
    // Of sparse weights, many tokens read the dense kind.
    let sparse = weight.sparse().filter(|_| job.tokens.len() == 1);
    let columns = weight.columns().zip(x.kept().filter(|_| job.tokens.len() == 1));
    let expands = sparse.is_some() || columns.is_some();
    match if expands { simd.expanding() } else { simd } {
        Simd::Portable => run::<Portable>(job, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 if job.x.form() == Form::Blocks && job.is_worth_widening() => {
            job.weight.kind().visit(RunUnpacked(job));
        }
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => run::<level::Avx2<0, false>>(job, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Simd::AvxVnni => run::<level::Avx2<0, true>>(job, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 if job.x.form() == Form::Pairs => run_pairs(job),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 | Simd::Avx512Bf16 => run::<level::Avx512>(job, sparse, columns),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("{simd} on another processor"),
    }
}

/// Runs a job on a level, whose instructions exist: all of them for one that skips zeros.
fn run<L: Level>(
    job: Job<'_>,
    sparse: Option<&SparsePanels>,
    columns: Option<(&ColumnGroups, Kept)>,
) {
    let kind = job.weight.kind();
    match (sparse, columns) {
        (Some(panels), _) => panels.layout.visit(RunSparse::<L>(job, panels, PhantomData)),
        (_, Some((groups, kept))) => {
            columns::visit(kind, RunColumns::<L>(job, groups, kept, PhantomData));
        }
        (None, None) => kind.visit(Run::<L>(job, PhantomData)),
    }
}

/// Runs a job whose activations are pairs, on a processor that multiplies them.
#[cfg(target_arch = "x86_64")]
fn run_pairs(mut job: Job<'_>) {
    job.packed(|job, group| {
        // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps other
        // threads away, and a `Simd` proves its instructions.
        job.tiles(group, pairs::SHAPES, |tile, panels, tokens| unsafe {
            match (panels, tokens) {
                (3, _) => pairs::tile::<3, 8>(tile),
                (_, 8) => pairs::tile::<1, 8>(tile),
                (1, 4) => pairs::tile::<1, 4>(tile),
                (_, 4) => pairs::tile::<4, 4>(tile),
                (1, 2) => pairs::tile::<1, 2>(tile),
                (_, 2) => pairs::tile::<4, 2>(tile),
                (1, _) => pairs::tile::<1, 1>(tile),
                (_, _) => pairs::tile::<4, 1>(tile),
            }
        });
    });
}

/// The operands of a product, checked by [`multiply`], which also passes on its caller's promises.
struct Job<'a> {
    simd: Simd,
    weight: &'a PackedWeight,
    bias: Option<&'a [f32]>,
    panels: Range<usize>,
    x: &'a Activations,
    tokens: Range<usize>,
    out: OutRows<'a>,
    room: &'a mut [f32],
}

/// Panels that lie one after the other.
#[derive(Clone, Copy)]
struct Panels {
    /// The number of the first one.
    first: usize,
    count: usize,
    start: *const u8,
    /// Bytes from one to the next.
    bytes: usize,
    /// The first column, and how many.
    col: usize,
    cols: usize,
    /// Where the sums of the first token wait until all columns have been seen; null where these
    /// are all.
    sums: *mut f32,
}

impl Job<'_> {
    /// Cuts the panels into groups that stay in the second-level cache while all tokens pass over
    /// them.
    fn packed(&mut self, mut run: impl FnMut(&Self, Panels)) {
        let (bytes, cols) = (self.weight.panel_bytes(), self.weight.cols());
        let group = (GROUP_BYTES / bytes.max(1)).max(4);
        let Some(start) = self.weight.start() else { return self.repacked(run) };
        for first in self.panels.clone().step_by(group) {
            let count = group.min(self.panels.end - first);
            // SAFETY: the memory holds all panels.
            let start = unsafe { start.add(first * bytes) };
            let sums = std::ptr::null_mut();
            run(self, Panels { first, count, start, bytes, col: 0, cols, sums });
        }
    }

    /// As [`Job::packed`], for a weight that is packed, or made dense, only when it is used: as
    /// many panels at a time as there is room for.
    fn repacked(&mut self, mut run: impl FnMut(&Self, Panels)) {
        let (bytes, cols) = (self.weight.panel_bytes(), self.weight.cols());
        let group = size_of_val(self.room) / bytes.max(1);
        assert!(group > 0, "room for {} bytes of a panel of {bytes}", size_of_val(self.room));
        let room = self.room.as_mut_ptr().cast::<u8>();
        for first in self.panels.clone().step_by(group) {
            let count = group.min(self.panels.end - first);
            // SAFETY: the room has place for the group and belongs to this thread.
            unsafe { self.weight.pack_into(self.simd, first..first + count, room) };
            let sums = std::ptr::null_mut();
            run(self, Panels { first, count, start: room, bytes, col: 0, cols, sums });
        }
    }

    /// Calls `run` with each tile of a group, its panels and its tokens: as many as `shapes`, pairs
    /// of tokens and panels, allows.
    #[inline(always)]
    fn tiles(&self, group: Panels, shapes: &[(usize, usize)], run: impl Fn(&Tile, usize, usize)) {
        let mut token = self.tokens.start;
        while token < self.tokens.end {
            let left = (self.tokens.end - token).min(TILE_ROWS - token % TILE_ROWS);
            let fits = shapes.iter().rev().find(|(tokens, _)| *tokens <= left);
            let &(tokens, together) = fits.expect("every level has tiles of one token");
            let mut panel = 0;
            while panel < group.count {
                let count = if group.count - panel >= together { together } else { 1 };
                run(&self.tile(group, (panel, count), (token, tokens)), count, tokens);
                panel += count;
            }
            token += tokens;
        }
    }

    fn tile(
        &self,
        group: Panels,
        (panel, count): (usize, usize),
        (token, tokens): (usize, usize),
    ) -> Tile {
        let first = (group.first + panel) * PANEL_ROWS;
        let (x, x_stride) = self.x.row(token);
        let bias = self.bias.map_or(std::ptr::null(), |bias| bias[first..].as_ptr());
        let mut out = [std::ptr::null_mut(); TILE_ROWS];
        for (out, token) in out.iter_mut().zip(token..self.tokens.end) {
            // SAFETY: `multiply` checked the tokens and the rows against `out`.
            *out = unsafe { self.out.row(token).add(first) };
        }
        let (is_first, is_last) = (group.col == 0, group.col + group.cols == self.weight.cols());
        let waiting = (token - self.tokens.start) * group.count + panel * tokens;
        Tile {
            // SAFETY: the group has so many panels.
            panel: unsafe { group.start.add(panel * group.bytes) },
            panel_bytes: group.bytes,
            cols: group.cols,
            is_first,
            is_last,
            sums: group.sums.wrapping_add(waiting * PANEL_ROWS),
            // SAFETY: a row has a step for each of its columns, or so many of them.
            x: unsafe { x.add(group.col / self.x.form().step_cols() * x_stride) },
            x_stride,
            out,
            rows: (count * PANEL_ROWS).min(self.weight.rows() - first),
            bias,
        }
    }
}

/// Runs a job on a level, once its kind is known.
struct Run<'a, L>(Job<'a>, PhantomData<L>);

impl<L: Level> Run<'_, L> {
    /// Runs the tiles of a group of floats.
    fn floats<K: FloatKind>(job: &Job<'_>, group: Panels, shapes: &[(usize, usize)]) {
        // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps other
        // threads away, and a `Simd` proves its instructions.
        job.tiles(group, shapes, |tile, panels, tokens| unsafe {
            match (panels, tokens) {
                (_, 16) => L::float::<K, 1, 16>(tile),
                (3, 8) => L::float::<K, 3, 8>(tile),
                (_, 8) => L::float::<K, 1, 8>(tile),
                (1, 4) => L::float::<K, 1, 4>(tile),
                (2, 4) => L::float::<K, 2, 4>(tile),
                (_, 4) => L::float::<K, 4, 4>(tile),
                (1, 2) => L::float::<K, 1, 2>(tile),
                (_, 2) => L::float::<K, 4, 2>(tile),
                (1, _) => L::float::<K, 1, 1>(tile),
                (_, _) => L::float::<K, 4, 1>(tile),
            }
        });
    }
}

impl<L: Level> Visit for Run<'_, L> {
    type Output = ();

    fn integer<K: IntegerKind>(self) {
        /// Integer tiles have one panel.
        const SHAPES: [(usize, usize); 5] = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)];
        let shapes = &SHAPES[..=L::TOKENS.ilog2() as usize];
        let mut job = self.0;
        job.packed(|job, group| {
            // SAFETY: as for floats.
            job.tiles(group, shapes, |tile, _, tokens| unsafe {
                match tokens {
                    16 => L::integer::<K, 16>(tile),
                    8 => L::integer::<K, 8>(tile),
                    4 => L::integer::<K, 4>(tile),
                    2 => L::integer::<K, 2>(tile),
                    _ => L::integer::<K, 1>(tile),
                }
            });
        });
    }

    fn float<K: FloatKind>(self) {
        let mut job = self.0;
        let widest = L::WIDE_PANELS.last().filter(|_| job.is_worth_widening());
        let Some(&(_, panels)) = widest else {
            return job.packed(|job, group| Self::floats::<K>(job, group, L::FLOAT_PANELS));
        };
        let widen = |panel: *const u8, cols: Range<usize>, room| {
            let start = panel.wrapping_add(cols.start * PANEL_ROWS * K::BYTES);
            // SAFETY: the panel has the columns, the room is long enough, and a `Simd` proves its
            // instructions.
            unsafe { L::widen::<K>(start, cols.len(), room) }
        };
        let bytes = size_of::<f32>() * PANEL_ROWS * WIDE_COLS;
        job.widened(Wide { panels, turns: 1, cols: WIDE_COLS, bytes }, widen, |job, group| {
            Self::floats::<kind::F32>(job, group, L::WIDE_PANELS);
        });
    }
}

/// Runs a job with one token on a level, once the layout of the sparse panels is known.
struct RunSparse<'a, L>(Job<'a>, &'a SparsePanels, PhantomData<L>);

impl<L: Level> RunSparse<'_, L> {
    /// The operands of `count` panels.
    fn tile(&self, panel: usize, count: usize) -> Tile {
        let (start, cols) = (self.1.panel(panel), self.0.weight.cols());
        let (bytes, sums) = (self.1.panel_bytes(panel), std::ptr::null_mut());
        let group = Panels { first: panel, count, start, bytes, col: 0, cols, sums };
        self.0.tile(group, (0, count), (self.0.tokens.start, 1))
    }

    fn floats<K: SparseFloat, const P: usize>(&self, panel: usize) {
        let panels = std::array::from_fn(|i| self.1.panel(panel + i));
        let last = self.0.weight.panels() - 1;
        let next = std::array::from_fn(|i| self.1.panel(last.min(panel + P + i)));
        // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps other
        // threads away, and a `Simd` that expands proves its instructions.
        unsafe { L::sparse_float::<K, P>(&self.tile(panel, P), panels, next) }
    }
}

impl<L: Level> VisitSparse for RunSparse<'_, L> {
    type Output = ();

    fn integer<K: SparseInteger>(self) {
        for panel in self.0.panels.clone() {
            // SAFETY: as for floats.
            unsafe { L::sparse_integer::<K>(&self.tile(panel, 1)) }
        }
    }

    fn float<K: SparseFloat>(self) {
        let mut panels = self.0.panels.clone();
        while panels.len() >= 4 {
            self.floats::<K, 4>(panels.start);
            panels.start += 4;
        }
        panels.for_each(|panel| self.floats::<K, 1>(panel));
    }

    fn csr(self) {
        for panel in self.0.panels.clone() {
            // SAFETY: as for floats.
            unsafe { L::csr(&self.tile(panel, 1)) }
        }
    }
}

/// Runs a job with one token on a level, for a weight by columns.
struct RunColumns<'a, L>(Job<'a>, &'a ColumnGroups, Kept, PhantomData<L>);

impl<L: Level> RunColumns<'_, L> {
    /// The operands of `count` panels of one group.
    fn tile(&self, panel: usize, count: usize) -> Tile {
        let (start, cols) = (std::ptr::null(), self.0.weight.cols());
        let sums = std::ptr::null_mut();
        let group = Panels { first: panel, count, start, bytes: 0, col: 0, cols, sums };
        self.0.tile(group, (0, count), (self.0.tokens.start, 1))
    }
}

impl<L: Level> VisitColumns for RunColumns<'_, L> {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        for (first, group) in self.1.groups(self.0.panels.clone()) {
            // SAFETY: as for floats.
            unsafe {
                L::columns_integer::<K>(&self.tile(first, group.panels.len()), &group, self.2)
            }
        }
    }

    fn float<K: FloatKind>(self) {
        for (mut first, mut group) in self.1.groups(self.0.panels.clone()) {
            while !group.panels.is_empty() {
                let count = if group.panels.len() >= EIGHT { EIGHT } else { 1 };
                let tile = self.tile(first, count);
                // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps
                // other threads away, and a `Simd` proves its instructions.
                unsafe {
                    match count {
                        EIGHT => L::columns_float::<K, EIGHT>(&tile, &group, self.2),
                        _ => L::columns_float::<K, 1>(&tile, &group, self.2),
                    }
                }
                (first, group.panels.start) = (first + count, group.panels.start + count);
            }
        }
    }
}
