//! Column-major weights: a GEMV skips the columns whose input is zero (activation sparsity). For
//! more tokens, groups are expanded to ordinary panels in scratch that stays in L2.

pub(super) mod groups;
pub(super) mod layout;
mod pack;

pub(crate) use groups::ColumnGroups;
pub use pack::{has_columns, pack_columns};
