//! Lowers hyper-connections and sparse attention.

use bodkin_model::{Attention, Entries, Op, Value as PlanValue};

use super::lowering::Lowering;
use super::stage::{AttendEntries, CompressStage, HyperWeights, Mix, SelectStage, Sparse, Work};

impl Lowering<'_> {
    /// An operation of hyper-connections or sparse attention.
    pub(super) fn sparse(&mut self, i: usize) -> Work {
        Work::Sparse(match &self.plan.ops[i] {
            &Op::Attention { q, kv, attention, slot } => {
                Sparse::Attend(self.attend_entries(i, (q, kv), attention, slot.0))
            }
            &Op::Mix { input, weights, results } => {
                let (input, weights) = (self.floats(input), self.floats(weights));
                Sparse::Mix(Mix { input, weights, results, out: self.out(i) })
            }
            &Op::HyperWeights { input, scale, base, streams, iterations, eps } => {
                let (input, weights, out) = (self.floats(input), [scale, base], self.out(i));
                let weights = HyperWeights { input, weights, streams, iterations, eps, out };
                Sparse::HyperWeights(weights)
            }
            &Op::Compress { input, scores, compression, state } => {
                let (input, scores, state) = (self.floats(input), self.floats(scores), state.0);
                let out = self.out(i);
                Sparse::Compress(CompressStage { input, scores, compression, state, out })
            }
            &Op::Select { q, k, weights, indexer, slot } => {
                let [q, k, weights] = [q, k, weights].map(|value| self.floats(value));
                let (slot, out) = (slot.0, self.out(i));
                Sparse::Select(SelectStage { q, k, weights, indexer, slot, out })
            }
            op => unreachable!("{op:?} is lowered elsewhere"),
        })
    }

    fn attend_entries(
        &mut self,
        i: usize,
        (q, kv): (PlanValue, Option<[PlanValue; 2]>),
        attention: Attention,
        slot: usize,
    ) -> AttendEntries {
        let (q, kv) = (self.floats(q), kv.map(|kv| kv.map(|value| self.floats(value))));
        let attend = self.attend(i, (q, kv), None, (attention, slot));
        let selected = attention.entries.selected().map(|value| self.floats(value));
        let blocks = match attention.entries {
            Entries::TokensAndBlocks { blocks, slot, .. } => Some((self.floats(blocks), slot.0)),
            Entries::Tokens | Entries::Selected(_) => None,
        };
        AttendEntries { attend, selected, blocks }
    }
}
