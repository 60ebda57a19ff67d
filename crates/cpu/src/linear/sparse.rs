//! Weights with zeros left out: bitmap, 2:4 and CSR layouts over dense ones.

mod bitmap;
pub(super) mod csr;
mod format;
pub(super) mod layout;
mod pack;
pub(super) mod panels;
mod pattern;
mod two_four;

pub(crate) use format::VisitSparse;
pub use pack::{SparsePacker, SparsePart};
pub(crate) use panels::SparsePanels;
