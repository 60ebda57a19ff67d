//! Language models from Rust: a model's name becomes a file, a plan, a choice of backend, sizes
//! that fit, and a loaded model.

#![forbid(unsafe_code)]

mod activation_sparsity;
mod backends;
mod builder;
pub mod cleanup;
mod encoder;
mod error;
pub mod memory;
mod model;
mod model_file;
mod options;
mod progress;
mod scorer;
pub mod source;

pub use backends::backend;
pub use builder::Builder;
pub use encoder::Encoder;
pub use error::{Error, Result};
pub use model::{Answer, Message, Model};
pub use model_file::{ModelFile, tokenizer};
pub use options::{MAX_BATCH_TOKENS, MAX_TOKENS, Options, within};
pub use progress::{Phase, Progress, Reporter};
pub use scorer::Scorer;

pub use bodkin_backend::KvType;
pub use bodkin_cpu::Sparse;
pub use bodkin_engine::{
    Canceller, Event, Events, Finish, Request, SamplerOptions, Timings, Usage,
};
