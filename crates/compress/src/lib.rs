//! Compression of GGUF files: activation statistics, quantisation and pruning. Files are processed
//! tensor by tensor, in bounded memory and on several threads. It must not know text, tokens, any
//! particular backend, or how progress is displayed.

#![forbid(unsafe_code)]

mod error;
pub mod imatrix;
pub mod mixture;
mod pattern;
pub mod prune;
pub mod quantize;
mod rows;
mod source;
pub mod surgery;

pub use error::{Error, Result};
pub use pattern::Pattern;
pub use source::Source;
