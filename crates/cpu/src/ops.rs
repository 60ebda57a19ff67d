//! What stages do to values: row by row, attention over pages, or along a sequence.

pub(crate) mod act;
pub(crate) mod attention;
pub(crate) mod recurrent;
pub(crate) mod route;
pub(crate) mod rows;
