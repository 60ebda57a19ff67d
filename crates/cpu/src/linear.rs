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
mod kind;
mod level;
mod memory;
mod tile;
mod weight;

pub use activations::{Activations, Filling, Form};
pub use kind::Kind;
pub(crate) use memory::Memory;
pub use weight::{PackedWeight, Packer, float_kind};

use activations::TILE_ROWS;
use kind::{FloatKind, IntegerKind, Visit};
use level::{Level, PANEL_ROWS, Portable};
use tile::Tile;

/// Panels are taken in groups of about this size, which stays in the second-level cache while all
/// tokens pass over it.
const GROUP_BYTES: usize = 512 << 10;

/// Where products go: rows of f32 that several threads fill together.
#[derive(Copy, Clone)]
pub struct OutRows<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    owner: PhantomData<&'a mut [f32]>,
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
        OutRows { start: out.as_mut_ptr(), stride: width, rows, owner: PhantomData }
    }

    /// `rows` rows that begin `stride` elements apart.
    ///
    /// # Safety
    /// For 'a, the rows are valid to write as far as products into them are wide.
    pub unsafe fn from_raw(start: *mut f32, stride: usize, rows: usize) -> OutRows<'a> {
        OutRows { start, stride, rows, owner: PhantomData }
    }
}

/// Writes `out[token][row] = sum over columns of weight[row] * x[token] + bias[row]` for the rows
/// of `panels` and the tokens of `tokens`. Weights are read once a call, so long as a group of
/// tokens' activations fits the caches.
///
/// # Safety
/// No other thread writes the same rows of the same tokens, or reads them, at the same time; none
/// fills `x`. `out` has room for `weight.rows()` elements in each row.
///
/// # Panics
/// If shapes or forms do not fit.
pub unsafe fn multiply(
    simd: Simd,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    x: &Activations,
    tokens: Range<usize>,
    out: OutRows<'_>,
) {
    assert!(x.form() == weight.kind().form(), "{:?} times {:?}", weight.kind(), x.form());
    assert!(x.cols() == weight.cols(), "{} columns times {}", weight.cols(), x.cols());
    assert!(bias.is_none_or(|bias| bias.len() == weight.rows()), "the bias is not as long");
    assert!(panels.end <= weight.panels(), "panel {} of {}", panels.end, weight.panels());
    assert!(tokens.end <= x.rows().min(out.rows), "token {} of {}", tokens.end, x.rows());
    assert!(weight.rows() <= out.stride, "{} rows into {}", weight.rows(), out.stride);
    let job = Job { weight, bias, panels, x, tokens, out };
    match simd {
        Simd::Portable => weight.kind().visit(Run::<Portable>(job, PhantomData)),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => weight.kind().visit(Run::<level::Avx2<0, false>>(job, PhantomData)),
        #[cfg(target_arch = "x86_64")]
        Simd::AvxVnni => weight.kind().visit(Run::<level::Avx2<0, true>>(job, PhantomData)),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => weight.kind().visit(Run::<level::Avx512>(job, PhantomData)),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("{simd} on another processor"),
    }
}

/// The operands of a product, checked by [`multiply`], which also passes on its caller's promises.
struct Job<'a> {
    weight: &'a PackedWeight,
    bias: Option<&'a [f32]>,
    panels: Range<usize>,
    x: &'a Activations,
    tokens: Range<usize>,
    out: OutRows<'a>,
}

impl Job<'_> {
    /// Calls `run` with each tile, its tokens (1, 2, 4, 8 or 16, at most `widest`) and its panels
    /// (1, or 4 where there are few tokens and `several` is set).
    #[inline(always)]
    fn tiles(self, widest: usize, several: bool, run: impl Fn(&Tile, usize, usize)) {
        let group = (GROUP_BYTES / self.weight.panel_bytes().max(1)).max(4);
        for first in self.panels.clone().step_by(group) {
            let panels = first..(first + group).min(self.panels.end);
            let mut token = self.tokens.start;
            while token < self.tokens.end {
                let left = (self.tokens.end - token).min(TILE_ROWS - token % TILE_ROWS);
                let tokens = 1 << left.min(widest).ilog2();
                let mut panel = panels.start;
                while panel < panels.end {
                    let together = several && tokens <= 4 && panels.end - panel >= 4;
                    let count = if together { 4 } else { 1 };
                    run(&self.tile(panel, count, token), count, tokens);
                    panel += count;
                }
                token += tokens;
            }
        }
    }

    fn tile(&self, panel: usize, count: usize, token: usize) -> Tile {
        let first = panel * PANEL_ROWS;
        let (x, x_stride) = self.x.row(token);
        let bias = self.bias.map_or(std::ptr::null(), |bias| bias[first..].as_ptr());
        Tile {
            panel: self.weight.panel(panel),
            panel_bytes: self.weight.panel_bytes(),
            cols: self.weight.cols(),
            x,
            x_stride,
            // SAFETY: `multiply` checked the token and the row against `out`.
            out: unsafe { self.out.start.add(token * self.out.stride + first) },
            out_stride: self.out.stride,
            rows: (count * PANEL_ROWS).min(self.weight.rows() - first),
            bias,
        }
    }
}

/// Runs a job on a level, once its kind is known.
struct Run<'a, L>(Job<'a>, PhantomData<L>);

impl<L: Level> Visit for Run<'_, L> {
    type Output = ();

    fn integer<K: IntegerKind>(self) {
        // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps other
        // threads away, and a `Simd` proves its instructions.
        self.0.tiles(L::TOKENS, false, |tile, _, tokens| unsafe {
            match tokens {
                16 => L::integer::<K, 16>(tile),
                8 => L::integer::<K, 8>(tile),
                4 => L::integer::<K, 4>(tile),
                2 => L::integer::<K, 2>(tile),
                _ => L::integer::<K, 1>(tile),
            }
        });
    }

    fn float<K: FloatKind>(self) {
        // SAFETY: as for integer kinds.
        self.0.tiles(L::TOKENS, true, |tile, panels, tokens| unsafe {
            match (panels, tokens) {
                (_, 16) => L::float::<K, 1, 16>(tile),
                (_, 8) => L::float::<K, 1, 8>(tile),
                (1, 4) => L::float::<K, 1, 4>(tile),
                (1, 2) => L::float::<K, 1, 2>(tile),
                (1, _) => L::float::<K, 1, 1>(tile),
                (_, 4) => L::float::<K, 4, 4>(tile),
                (_, 2) => L::float::<K, 4, 2>(tile),
                (_, _) => L::float::<K, 4, 1>(tile),
            }
        });
    }
}
