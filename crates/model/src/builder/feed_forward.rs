//! Feed-forward layers without experts.

use super::Builder;
use crate::error::{Error, Result};
use crate::ids::Value;
use crate::op::{Act, Op};

impl Builder<'_> {
    /// A feed-forward layer: gated, `down(act(gate(x)) * up(x))`, or not, `down(act(up(x)))`.
    pub fn feed_forward(&mut self, input: Value, act: Act, hidden: usize) -> Result<Value> {
        let h = self.feed_forward_hidden(input, act, hidden)?;
        self.linear(h, "ffn_down", self.width(input))
    }

    /// The hidden activations of a feed-forward layer. Without a gate tensor, a fused `ffn_up` of
    /// `2 * hidden` rows has the gate's rows first.
    pub fn feed_forward_hidden(&mut self, input: Value, act: Act, hidden: usize) -> Result<Value> {
        if self.has("ffn_gate") {
            let gate = self.linear(input, "ffn_gate", hidden)?;
            let up = self.linear(input, "ffn_up", hidden)?;
            return Ok(self.push(Op::Glu { gate, up, act }, hidden));
        }
        if self.rows("ffn_up") == Some(hidden) {
            let up = self.linear(input, "ffn_up", hidden)?;
            return Ok(self.push(Op::Act { input: up, act }, hidden));
        }
        let both = self.linear(input, "ffn_up", 2 * hidden)?;
        let (gate, up) = (self.slice(both, 0, hidden), self.slice(both, hidden, hidden));
        Ok(self.push(Op::Glu { gate, up, act }, hidden))
    }

    /// Checks that no gate has an activation that is not one of gates: the file may have a gate
    /// where its architecture has none.
    pub(super) fn check_gates(&self) -> Result<()> {
        let is_wrong = |op: &Op| matches!(op, Op::Glu { act: Act::Xielu(_), .. });
        match self.plan.ops.iter().any(is_wrong) {
            true => Err(Error::Unsupported(
                "a gate (`ffn_gate`, or a fused `ffn_up`) with the activation xIELU".to_owned(),
            )),
            false => Ok(()),
        }
    }
}
