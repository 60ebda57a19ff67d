//! Matrix multiplication on the CPU. Weights are packed once into panels of 16 rows
//! ([`PackedWeight`]); activations are converted to the format that the weight's [`PackedLayout`]
//! requires ([`Activations`]); [`matmul`] multiplies them. This module must not know plans, pools
//! or models.
//!
//! An element of the output depends only on its row of the weight and its row of the activations:
//! the number of tokens, the partition of panels and the threads change no bit. `kernel` states the
//! order of arithmetic, `layout` the layouts of weights, `activations` those of the input, `simd`
//! the instruction sets.
//!
//! Kernels never read outside the bytes of a panel or tile; only prefetches may.

mod activations;
mod columns;
mod gemm;
mod kernel;
mod lanes;
mod layout;
mod out;
mod simd;
mod source;
mod sparse;
mod weight;

pub(crate) use activations::ActivationFormats;
pub use activations::{ActivationFormat, ActivationWriter, Activations};
pub use columns::{has_columns, pack_columns};
pub(crate) use gemm::scratch_len as matmul_scratch_len;
pub use gemm::{SCRATCH_LEN, matmul};
pub use layout::PackedLayout;
pub use out::OutRows;
pub use source::{SourceRows, float_layout};
pub use sparse::{SparsePacker, SparsePart};
pub use weight::{PackedWeight, Packer, Source};
