//! What encoders have and decoders have not: tables that are read by position or at one row, and
//! the pooling of rows at the end.

use crate::error::Result;
use crate::op::{EmbedBy, Op, PoolKind};
use crate::plan::Value;

use super::Builder;

impl Builder<'_> {
    /// The rows of a table by position, of which it has `positions`.
    pub fn position_embed(&mut self, name: &str, width: usize, positions: usize) -> Result<Value> {
        let table = self.find(&format!("{name}.weight"), width, positions)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::Position }, width))
    }

    /// The first row of a table, for every token.
    pub fn first_embed(&mut self, name: &str, width: usize) -> Result<Value> {
        let rows = self.rows(name).unwrap_or(0);
        let table = self.find(&format!("{name}.weight"), width, rows)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::First }, width))
    }

    /// One row for each sequence.
    pub fn pool(&mut self, input: Value, kind: PoolKind) -> Value {
        let width = self.width(input);
        self.push(Op::Pool { input, kind }, width)
    }
}
