//! Evaluation of a model: perplexity, KL divergence from a base model, and sanity checks. It must
//! not know any backend by name, nor how results are displayed.

#![forbid(unsafe_code)]

pub mod check;
mod divergence;
mod error;
mod kld;
mod perplexity;
mod routing;
mod score;
mod text;
mod windows;

pub use divergence::{Divergence, Estimate, Values, nmse};
pub use error::{Error, Result};
pub use kld::{Base, BaseRow, BaseWriter, encode_row};
pub use perplexity::Perplexity;
pub use routing::{Outcome, Policy, Recorder, RoutingTrace};
pub use score::{LogSoftmax, Row, limits, read, score};
pub use text::{compare, measure};
pub use windows::Windows;
