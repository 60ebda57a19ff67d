//! `serve` from the outside: the real binary on tiny models, driven by the official clients of its
//! interfaces, by `schemathesis`, and by sockets that misbehave.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clients;
mod constraints;
mod defaults;
mod echo;
mod embeddings;
mod faults;
mod fields;
mod memory;
mod metrics;
mod models;
mod openapi;
#[cfg(feature = "otlp")]
mod otlp;
mod python;
mod rerank;
#[path = "../fixtures/reranker.rs"]
mod reranker;
mod server;
mod streams;
mod tools;
