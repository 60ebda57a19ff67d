//! Matrix multiplication: packed weights times rows of activations.

#[cfg(target_arch = "x86_64")]
mod amx;
mod block;
mod dense;
mod skipping;
mod staged;
#[cfg(target_arch = "x86_64")]
mod unpacked;

use std::marker::PhantomData;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::activations::ActivationFormat;
use super::activations::{Activations, NonZeros};
use super::columns::ColumnGroups;
use super::kernel::MicroKernels;
use super::out::OutRows;
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
use super::simd::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::sparse::SparsePanels;
use super::weight::PackedWeight;
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use amx::{TILE_SCRATCH_LEN, TileGemm};
use block::Gemm;
use dense::DenseGemm;
use skipping::{ColumnGemv, SparseGemv};
#[cfg(target_arch = "x86_64")]
use unpacked::UnpackedGemm;

pub use block::SCRATCH_LEN;

#[cfg(not(target_arch = "x86_64"))]
const TILE_SCRATCH_LEN: usize = 0;

/// Elements of scratch with which all matmuls of a weight run, and run fast.
pub(crate) fn scratch_len(isa: Isa, panel_bytes: usize) -> usize {
    let tiles = if isa.has_tiles() { TILE_SCRATCH_LEN } else { 0 };
    SCRATCH_LEN.max(tiles + panel_bytes.div_ceil(size_of::<f32>()))
}

/// Writes `out[token][row] = sum over columns of weight[row] * x[token] + bias[row]` for the rows
/// of `panels` and for `tokens`. Each call reads the weights once, as long as the activations of a
/// group of tokens fit the caches. Weights that are not packed densely need `scratch` of at least
/// one dense panel. With [`SCRATCH_LEN`] elements, large batches of any weight are faster. Rows in
/// tiles need [`SCRATCH_LEN`] elements for every weight, and the dense panel besides.
///
/// # Safety
/// No other thread reads or writes the same rows of the same tokens at the same time, and none
/// writes `x`. Each row of `out` has at least `weight.rows()` elements.
///
/// # Panics
/// If shapes or formats do not fit.
#[allow(clippy::too_many_arguments)]
pub unsafe fn matmul(
    isa: Isa,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    x: &Activations,
    tokens: Range<usize>,
    out: OutRows<'_>,
    scratch: &mut [f32],
) {
    let (layout, format) = (weight.layout(), x.format());
    let fits = format == layout.activation_format(isa) || format == layout.prefill_format(isa);
    assert!(fits, "{layout:?} times {format:?}");
    assert!(x.cols() == weight.cols(), "{} columns times {}", weight.cols(), x.cols());
    assert!(bias.is_none_or(|bias| bias.len() == weight.rows()), "the bias has another length");
    assert!(panels.end <= weight.panels(), "panel {} of {}", panels.end, weight.panels());
    assert!(tokens.end <= x.rows().min(out.rows), "token {} of {}", tokens.end, x.rows());
    assert!(weight.rows() <= out.max_width(), "{} rows into {}", weight.rows(), out.max_width());
    let gemm = Gemm { isa, weight, bias, panels, x, tokens, out, scratch };
    #[cfg(target_arch = "x86_64")]
    if format.is_tiles() {
        return layout.visit(TileGemm(gemm));
    }
    // Only a GEMV skips zeros: more tokens expand the panels to dense ones.
    let is_gemv = gemm.tokens.len() == 1;
    let sparse = weight.sparse().filter(|_| is_gemv);
    let columns = weight.columns().zip(x.nonzeros().filter(|_| is_gemv));
    let expands = sparse.is_some() || columns.is_some();
    match if expands { isa.for_expansion() } else { isa } {
        Isa::Portable => run::<Portable>(gemm, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if gemm.should_stage() => layout.visit(UnpackedGemm(gemm)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => run::<Avx2<0, false>>(gemm, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => run::<Avx2<0, true>>(gemm, sparse, columns),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if format == ActivationFormat::Bf16 => dense::run_bf16(gemm),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxEmulated => {
            run::<Avx512>(gemm, sparse, columns)
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => run::<Neon<0, 4, false>>(gemm, sparse, columns),
        #[cfg(target_arch = "aarch64")]
        Isa::DotProd => run::<Neon<0, 4, true>>(gemm, sparse, columns),
    }
}

/// Chooses the kernels. The processor has the instructions, and those that `Isa::for_expansion`
/// checks if zeros are skipped.
fn run<M: MicroKernels>(
    gemm: Gemm<'_>,
    sparse: Option<&SparsePanels>,
    columns: Option<(&ColumnGroups, NonZeros)>,
) {
    match (sparse, columns) {
        (Some(panels), _) => panels.format.visit(SparseGemv::<M>(gemm, panels, PhantomData)),
        (_, Some((groups, x))) => {
            groups.layout.visit(ColumnGemv::<M>(gemm, groups, x, PhantomData))
        }
        (None, None) => gemm.weight.layout().visit(DenseGemm::<M>(gemm, PhantomData)),
    }
}
