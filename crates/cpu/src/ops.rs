//! The arithmetic of stages other than matmuls: row by row, attention over pages, along a sequence.

pub(crate) mod act;
pub(crate) mod attention;
pub(crate) mod compress;
pub(crate) mod delta_rule;
pub(crate) mod hyper;
pub(crate) mod recurrent;
pub(crate) mod route;
pub(crate) mod rows;
pub(crate) mod select;
