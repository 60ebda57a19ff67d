//! Formats of pruned weights, which do not store zeros. Each packs the codes of a dense format, its
//! *base*, in blocks of 32 elements, and converts back to that base without loss. The ids of these
//! formats are private to this project.
//!
//! - `S24_*`, 2:4: two of every four neighbours are stored. All blocks have one size.
//! - `BITMAP_*`: one bit for each element, then the codes of the non-zero elements.
//! - `CSR_F16`, compressed sparse rows: the non-zero values and their columns.
//!
//! `BITMAP_*` and `CSR_F16` rows differ in length, so a tensor's data begin with an index of row
//! offsets (`index.rs`). Any bytes are a valid row: missing codes read as zero, surplus codes are
//! ignored. This module must not know files.

pub(super) mod base;
pub(super) mod bitmap;
pub(super) mod csr;
pub(super) mod index;
pub(super) mod two_four;

pub use two_four::{S24_F16, S24_Q4_0, S24_Q8_0};
