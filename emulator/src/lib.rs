//! An NVIDIA driver without a device: the library that the CUDA backend opens at run time, with
//! kernels interpreted from their PTX. Tests run the backend with it on machines without a card:
//! the same calls, the same kernels, other speed. It says what a card does not: which instruction
//! read beyond what was taken, and which threads wait for each other for ever; warps take turns in
//! a random order, and copies that run by themselves arrive late.
//!
//! What differs from a card: sums of products are rounded once for each `mma`; functions that PTX
//! calls approximate are exact; and there are no races within an instruction.

mod allot;
mod block;
mod decode;
mod driver;
mod grid;
mod kernel;
mod lanes;
mod matrix;
mod memory;
mod parse;
mod text;
mod warp;

use std::fmt;

/// What is wrong with a kernel, or with what it did.
#[derive(Debug)]
pub(crate) struct Fault(pub(crate) String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
