//! GGUF files: bytes to metadata and tensors, and back. Every block format is defined here by its
//! scalar code. This crate is pure and bounded: hostile bytes give an [`Error`], never a panic, an
//! overflow or an allocation larger than the file justifies. It must not know models, devices or
//! threads.

#![deny(unsafe_code)]

mod error;
mod file;
pub mod format;
mod header;
mod metadata;
mod split;
mod tensor;
mod write;

pub use error::{Error, Result};
pub use file::File;
pub use format::Format;
pub use metadata::{Array, Metadata, Value};
pub use tensor::Tensor;
pub use write::Writer;
