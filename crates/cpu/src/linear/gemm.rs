//! Matrix multiplication: packed weights times rows of activations.

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
use block::Gemm;
use dense::DenseGemm;
use skipping::{ColumnGemv, SparseGemv};
#[cfg(target_arch = "x86_64")]
use unpacked::UnpackedGemm;

pub use block::SCRATCH_LEN;

/// Writes `out[token][row] = sum over columns of weight[row] * x[token] + bias[row]` for the rows
/// of `panels` and for `tokens`. Each call reads the weights once, as long as the activations of a
/// group of tokens fit the caches. Weights that are not packed densely need `scratch` of at least
/// one dense panel. With [`SCRATCH_LEN`] elements, large batches of any weight are faster.
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
    assert!(format == layout.activation_format(isa), "{layout:?} times {format:?}");
    assert!(x.cols() == weight.cols(), "{} columns times {}", weight.cols(), x.cols());
    assert!(bias.is_none_or(|bias| bias.len() == weight.rows()), "the bias has another length");
    assert!(panels.end <= weight.panels(), "panel {} of {}", panels.end, weight.panels());
    assert!(tokens.end <= x.rows().min(out.rows), "token {} of {}", tokens.end, x.rows());
    assert!(weight.rows() <= out.max_width(), "{} rows into {}", weight.rows(), out.max_width());
    let gemm = Gemm { isa, weight, bias, panels, x, tokens, out, scratch };
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
        Isa::Avx512 | Isa::Avx512Bf16 => run::<Avx512>(gemm, sparse, columns),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => run::<Neon<0, 4, false>>(gemm, sparse, columns),
        #[cfg(target_arch = "aarch64")]
        Isa::DotProd => run::<Neon<0, 4, true>>(gemm, sparse, columns),
    }
}

/// Chooses the kernels. The processor has the instructions, with those that expand if zeros are
/// skipped.
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
