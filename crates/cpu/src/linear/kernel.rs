//! The micro-kernels: panels of weights times one tile of tokens, for every packed layout and
//! instruction set. They see the pointers of one tile; `gemm` cuts the work into tiles.
//!
//! The order of arithmetic is part of the contract: the sum of each (row, token) pair is formed in
//! this order in every tile. Results therefore do not depend on neighbouring rows, threads or
//! chunked prefill, and all instruction sets with fused multiply-add agree bit for bit.
//!
//! Integer layouts, for each block of 32 columns in order:
//!
//! ```text
//! d[h] = f32(i32 dot of the codes of half h), for both halves of the block
//! one scale a block:      sum = fma(fma(d[1], x.scale[1], d[0] * x.scale[0]), scale, sum)
//! one scale a half:       for each h: sum = fma(d[h], scale[h] * x.scale[h], sum)
//! layouts with minimums:  sum = fma(min[g], minus the scaled sum of x's codes, sum), each group g
//! ```
//!
//! Float layouts, for each column in order: `sum = fma(w, x, sum)`. BF16 goes by pairs of columns
//! where the instruction set has a BF16 dot product, see `bf16`. Prefill rows of all layouts go by
//! tiles where it has those, see `amx`. A bias is added to the final sum.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16;
mod columns;
mod dense;
mod isa;
mod sparse;
mod tile;
#[cfg(target_arch = "x86_64")]
pub(crate) mod unpacked;

pub(crate) use isa::MicroKernels;
pub(crate) use tile::Tile;
