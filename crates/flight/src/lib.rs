//! Embeddings as Arrow: record batches, Arrow and Parquet files, a client of vector stores over
//! Arrow Flight, and bodkin's own Flight service. It must not know how vectors are computed, nor
//! terminals and arguments.

#![forbid(unsafe_code)]

mod batch;
mod columns;
mod error;
pub mod file;
pub mod input;
pub mod service;
pub mod store;

pub use batch::{BatchBuilder, Id, RecordBatch, Row, Schema};
pub use columns::{Columns, StoredRow};
pub use error::{Error, Result};
