//! Matmul of many tokens on AVX2 without VNNI: integer panels are unpacked into scratch first.

use std::marker::PhantomData;

use super::block::Gemm;
use super::dense::DenseGemm;
use super::staged::Staging;
use crate::linear::activations::BLOCK_COLS;
use crate::linear::kernel::unpacked;
use crate::linear::layout::{FloatLayout, IntegerLayout, VisitLayout};
use crate::linear::simd::Avx2;

/// Columns of a panel that are unpacked at a time: they fit L1.
const UNPACKED_COLS: usize = 512;

/// Panels that are unpacked in sequence for the same columns, whose activations stay in L2.
const UNPACKED_PASSES: usize = 8;

/// Runs the matmul, once its layout is known.
pub(super) struct UnpackedGemm<'a>(pub(super) Gemm<'a>);

impl VisitLayout for UnpackedGemm<'_> {
    type Output = ();

    fn integer<K: IntegerLayout>(self) {
        const { assert!(UNPACKED_COLS.is_multiple_of(K::COLS)) };
        let bytes = UNPACKED_COLS / BLOCK_COLS * unpacked::BYTES;
        let staging = Staging { panels: 1, passes: UNPACKED_PASSES, cols: UNPACKED_COLS, bytes };
        // SAFETY: the panel has the columns, the scratch is long enough, and an `Isa` proves its
        // instructions.
        let unpack = |panel: *const u8, cols, scratch| unsafe {
            unpacked::unpack::<K>(panel, cols, scratch);
        };
        let mut gemm = self.0;
        gemm.for_staged_groups(staging, unpack, |gemm, group| {
            // SAFETY: tiles lie inside the operands that `matmul` checked, its caller keeps other
            // threads away, and an `Isa` proves its instructions.
            gemm.tiles(group, &[(1, 1), (2, 1), (4, 1), (16, 1)], |tile, _, tokens| unsafe {
                match tokens {
                    16 => unpacked::tile::<K, 4, 4>(tile),
                    4 => unpacked::tile::<K, 1, 4>(tile),
                    2 => unpacked::tile::<K, 1, 2>(tile),
                    _ => unpacked::tile::<K, 1, 1>(tile),
                }
            });
        });
    }

    fn float<K: FloatLayout>(self) {
        DenseGemm::<Avx2<0, false>>(self.0, PhantomData).float::<K>();
    }
}
