//! A GGUF file in, a GGUF file out: weights in fewer bits, or fewer weights. Files are worked
//! through tensor by tensor in bounded memory, on several threads. This crate must not know
//! text, how a backend computes, or who shows its progress.

#![forbid(unsafe_code)]

mod error;
pub mod mixture;
mod pattern;
pub mod quantize;
mod rows;

pub use error::{Error, Result};
pub use pattern::Pattern;
