//! Matmul over dense panels.

use std::marker::PhantomData;
use std::ops::Range;

use super::block::{Gemm, PanelGroup};
use super::staged::{STAGED_COLS, Staging};
use crate::linear::kernel::MicroKernels;
#[cfg(target_arch = "x86_64")]
use crate::linear::kernel::bf16;
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::layout::{self, FloatLayout, IntegerLayout, VisitLayout};

/// Whether `M` has float tiles of this shape. A kernel of any other shape is not compiled: the
/// widest are the slowest to compile, and would have too few registers.
const fn has_tile<M: MicroKernels>(panels: usize, tokens: usize) -> bool {
    const fn contains(shapes: &[(usize, usize)], panels: usize, tokens: usize) -> bool {
        let mut i = 0;
        while i < shapes.len() {
            // A panel that is left over is a tile of its own.
            if shapes[i].0 == tokens && (shapes[i].1 == panels || panels == 1) {
                return true;
            }
            i += 1;
        }
        false
    }
    contains(M::FLOAT_PANELS, panels, tokens) || contains(M::STAGED_PANELS, panels, tokens)
}

/// Runs a matmul with the micro-kernels `M`, once its layout is known.
pub(super) struct DenseGemm<'a, M>(pub(super) Gemm<'a>, pub(super) PhantomData<M>);

impl<M: MicroKernels> DenseGemm<'_, M> {
    /// Runs the tiles of a group of float panels.
    fn floats<K: FloatLayout>(gemm: &Gemm<'_>, group: PanelGroup, shapes: &[(usize, usize)]) {
        // SAFETY: tiles lie inside the operands that `matmul` checked, its caller keeps other
        // threads away, and an `Isa` proves its instructions.
        gemm.tiles(group, shapes, |tile, panels, tokens| unsafe {
            match (panels, tokens) {
                (1, 16) if const { has_tile::<M>(1, 16) } => M::Floats::float::<K, 1, 16>(tile),
                (3, 8) if const { has_tile::<M>(3, 8) } => M::Floats::float::<K, 3, 8>(tile),
                (1, 8) if const { has_tile::<M>(1, 8) } => M::Floats::float::<K, 1, 8>(tile),
                (4, 4) if const { has_tile::<M>(4, 4) } => M::Floats::float::<K, 4, 4>(tile),
                (2, 4) if const { has_tile::<M>(2, 4) } => M::Floats::float::<K, 2, 4>(tile),
                (1, 4) => M::Floats::float::<K, 1, 4>(tile),
                (4, 2) if const { has_tile::<M>(4, 2) } => M::Floats::float::<K, 4, 2>(tile),
                (2, 2) if const { has_tile::<M>(2, 2) } => M::Floats::float::<K, 2, 2>(tile),
                (1, 2) => M::Floats::float::<K, 1, 2>(tile),
                (4, 1) if const { has_tile::<M>(4, 1) } => M::Floats::float::<K, 4, 1>(tile),
                (1, 1) => M::Floats::float::<K, 1, 1>(tile),
                _ => unreachable!("a float tile of {panels} panels and {tokens} tokens"),
            }
        });
    }
}

impl<M: MicroKernels> VisitLayout for DenseGemm<'_, M> {
    type Output = ();

    fn integer<K: IntegerLayout>(self) {
        // Integer tiles have one panel.
        const SHAPES: [(usize, usize); 5] = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)];
        let shapes = &SHAPES[..=M::TOKENS.ilog2() as usize];
        let mut gemm = self.0;
        gemm.for_groups(|gemm, group| {
            // SAFETY: as for floats.
            gemm.tiles(group, shapes, |tile, _, tokens| unsafe {
                match tokens {
                    16 if const { M::TOKENS >= 16 } => M::integer::<K, 16>(tile),
                    8 if const { M::TOKENS >= 8 } => M::integer::<K, 8>(tile),
                    4 => M::integer::<K, 4>(tile),
                    2 => M::integer::<K, 2>(tile),
                    _ => M::integer::<K, 1>(tile),
                }
            });
        });
    }

    fn float<K: FloatLayout>(self) {
        let mut gemm = self.0;
        let widest = M::STAGED_PANELS.last().filter(|_| gemm.should_stage());
        let Some(&(_, panels)) = widest else {
            return gemm.for_groups(|gemm, group| Self::floats::<K>(gemm, group, M::FLOAT_PANELS));
        };
        let convert = |panel: *const u8, cols: Range<usize>, scratch| {
            let start = panel.wrapping_add(cols.start * PANEL_ROWS * K::BYTES);
            // SAFETY: the panel has the columns, the scratch is long enough, and an `Isa` proves
            // its instructions.
            unsafe { M::Floats::to_f32::<K>(start, cols.len(), scratch) }
        };
        let bytes = size_of::<f32>() * PANEL_ROWS * STAGED_COLS;
        gemm.for_staged_groups(
            Staging { panels, passes: 1, cols: STAGED_COLS, bytes },
            convert,
            |gemm, group| {
                Self::floats::<layout::F32>(gemm, group, M::STAGED_PANELS);
            },
        );
    }
}

/// Runs a matmul of BF16 panels with BF16 activations, on a processor with a BF16 dot product.
#[cfg(target_arch = "x86_64")]
pub(super) fn run_bf16(mut gemm: Gemm<'_>) {
    gemm.for_groups(|gemm, group| {
        // SAFETY: tiles lie inside the operands that `matmul` checked, its caller keeps other
        // threads away, and an `Isa` proves its instructions.
        gemm.tiles(group, bf16::SHAPES, |tile, panels, tokens| unsafe {
            match (panels, tokens) {
                (3, _) => bf16::tile::<3, 8>(tile),
                (_, 8) => bf16::tile::<1, 8>(tile),
                (1, 4) => bf16::tile::<1, 4>(tile),
                (_, 4) => bf16::tile::<4, 4>(tile),
                (1, 2) => bf16::tile::<1, 2>(tile),
                (_, 2) => bf16::tile::<4, 2>(tile),
                (1, _) => bf16::tile::<1, 1>(tile),
                (_, _) => bf16::tile::<4, 1>(tile),
            }
        });
    });
}
