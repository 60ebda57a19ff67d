//! A GGUF in, a GGUF out: what activations say about weights, and the weights in fewer bits, or
//! fewer of them. Files are worked through tensor by tensor, in bounded memory and on several
//! threads. It must not know text, tokens, any particular backend, or who shows its progress.

#![forbid(unsafe_code)]

mod error;
pub mod imatrix;
pub mod mixture;
mod pattern;
pub mod prune;
pub mod quantize;
mod rows;
pub mod surgery;

pub use error::{Error, Result};
pub use pattern::Pattern;
