//! The components of encoders only: position and token type embeddings, classifiers, and pooling.

use crate::error::{Error, Result};
use crate::ids::Value;
use crate::op::{EmbedBy, Op};
use crate::pooling::Pooling;

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

    /// The matmuls `dense_2` and `dense_3` between pooling and the embedding, if the file has them.
    /// Each row passes through them although they are made for a pooled one, which is the same, as
    /// both are linear, so that pooling stays the last operation.
    pub fn embedding_projections(&mut self, mut x: Value) -> Result<Value> {
        for name in ["dense_2", "dense_3"] {
            if let Some(rows) = self.rows(name) {
                x = self.linear(x, name, rows)?;
            }
        }
        Ok(x)
    }

    /// The embedding of each sequence, or the scores of its classifier.
    pub fn embedding(&mut self, input: Value, pooling: Pooling) -> Result<Value> {
        let input = match pooling {
            Pooling::Rank => self.classifier(input)?,
            _ => input,
        };
        let width = self.width(input);
        Ok(self.push(Op::Pool { input, kind: pooling.kind() }, width))
    }

    /// A classifier: `cls` with a tanh, `cls.output`, or both. Each row is classified although one
    /// of a sequence is pooled, so that pooling stays the last operation: a matmul of the model's
    /// width beside the dozen of each layer.
    fn classifier(&mut self, mut x: Value) -> Result<Value> {
        self.leave_blocks();
        let (first, last) = (self.rows("cls"), self.rows("cls.output"));
        if let Some(rows) = first {
            x = self.linear(x, "cls", rows)?;
            // With a cap of 1, this is the tanh.
            x = self.softcap(x, Some(1.0));
        }
        match (first, last) {
            (_, Some(rows)) => self.linear(x, "cls.output", rows),
            (Some(_), None) => Ok(x),
            (None, None) => Err(Error::MissingTensor("cls.output.weight".to_owned())),
        }
    }
}
