//! Arrow, Parquet and Flight from the outside: the real binary, a store on pyarrow's Flight server
//! in a process of its own, and pyarrow's client.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod errors;
mod files;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../commands/place.rs"]
mod place;
#[path = "../serve/python.rs"]
mod python;
#[path = "../fixtures/reranker.rs"]
mod reranker;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../serve/server.rs"]
mod server;
mod service;
mod stand_in;
mod systems;
mod upload;
