//! The storage formats of tensors. `table.rs` gives every format its id, name, block size and the
//! type that defines its block. That type's scalar code is the definition of the format; tests
//! compare every faster kernel with it. This module must not know files.

mod block;
pub mod fp4;
mod group;
mod groups;
pub mod iq;
pub mod iq4;
pub mod k;
pub mod low_bit;
pub mod plain;
pub mod q;
mod runs;
mod scale_search;
pub mod sparse;
mod sparse_rows;
mod table;

pub use block::Block;
pub use group::{GroupReader, Groups};
pub use groups::{Codes, coded_blocks, groups};
pub use runs::{CodedBlock, CodedBlockReader};
pub use table::Format;
