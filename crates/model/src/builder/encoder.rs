//! The components of encoders only: position and token type embeddings, and pooling.

use crate::error::Result;
use crate::ids::Value;
use crate::op::{EmbedBy, Op, PoolKind};

use super::Builder;

impl Builder<'_> {
    /// Learned position embeddings, from a table of `positions` rows.
    pub fn position_embed(&mut self, name: &str, width: usize, positions: usize) -> Result<Value> {
        let table = self.find(&format!("{name}.weight"), width, positions)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::Position }, width))
    }

    /// The first row of a table for every token, for token types.
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
