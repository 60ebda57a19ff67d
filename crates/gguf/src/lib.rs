//! GGUF files: bytes to metadata and tensors, and back. The scalar code of every block format here
//! is its definition. Hostile bytes return an [`Error`]: they never cause a panic, an overflow or
//! an allocation larger than the file. This crate must not know models, devices or threads.

#![deny(unsafe_code)]

mod error;
mod file;
pub mod format;
mod header;
mod metadata;
mod split;
mod tensor;
mod write;

pub use error::{Error, Result, printable, quoted};
pub use file::{File, exit_on_truncation, kind_of_file};
pub use format::Format;
pub use metadata::{Array, Metadata, Value};
pub use split::stem;
pub use tensor::Tensor;
pub use write::Writer;
