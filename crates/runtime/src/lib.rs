//! Language models from Rust: a model's name becomes a file, a plan, a choice of backend, sizes
//! that fit, and a loaded model.

#![forbid(unsafe_code)]

mod activation_sparsity;
mod backends;
pub mod cleanup;
mod error;
pub mod memory;
mod model_file;
mod options;
mod progress;
pub mod source;

pub use backends::backend;
pub use error::{Error, Result};
pub use model_file::{ModelFile, tokenizer};
pub use options::{MAX_BATCH_TOKENS, MAX_TOKENS, Options, within};
pub use progress::{Phase, Progress, Reporter};

pub use bodkin_backend::KvType;
pub use bodkin_cpu::Sparse;
