//! An emulated NVIDIA driver: a CPU implementation of the library that the CUDA backend opens at
//! run time, which interprets kernels from their PTX. Tests on machines without a GPU run the
//! backend with the same calls and the same kernels. Unlike a device it reports out-of-bounds
//! accesses and deadlocks with the line of the instruction, runs warps in random order, and delays
//! asynchronous copies at random.
//!
//! Differences from a device: the sums of an `mma` are rounded once; approximate functions are
//! exact; lanes of one instruction do not race; a `wgmma` runs when it is issued, so that a missing
//! wait for its sums is not found (memory that changes before the wait is); fences between proxies
//! and the waits of dependent launches have no effect.

mod async_copy;
mod block;
mod decode;
mod driver;
mod grid;
mod kernel;
mod lanes;
mod launch;
mod lexer;
mod matrix;
mod memory;
mod parse;
mod random;
mod registers;
mod scheduler;
mod stream_op;
mod warp;

use std::fmt;

/// An invalid kernel, or an invalid operation of a kernel.
#[derive(Debug)]
pub(crate) struct Fault(pub(crate) String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
