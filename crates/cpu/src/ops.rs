//! What stages do to values: row by row, or attention over pages.

pub(crate) mod attention;
pub(crate) mod rows;
