//! What each weight of a plan is for, from the operations that read it.

use crate::ids::Value;
use crate::op::Op;
use crate::plan::Plan;

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The token table, the output head, and what belongs to no layer.
    Vocabulary,
    /// Projections of attention, their norms, and indexers.
    Attention,
    /// Convolutions, scans and delta rules, and their projections.
    Recurrence,
    /// The feed-forward part of layers without experts.
    FeedForward,
    /// What every token uses in the feed-forward part of layers with experts.
    SharedExperts,
    /// The scores by which experts are chosen.
    Routers,
    /// The experts that tokens choose from.
    Experts,
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Part; 7] = [
        Part::Vocabulary,
        Part::Attention,
        Part::Recurrence,
        Part::FeedForward,
        Part::SharedExperts,
        Part::Routers,
        Part::Experts,
    ];

    /// What it is, for people.
    pub fn name(self) -> &'static str {
        match self {
            Part::Vocabulary => "token table and output head",
            Part::Attention => "attention",
            Part::Recurrence => "recurrent layers",
            Part::FeedForward => "feed-forward layers",
            Part::SharedExperts => "shared experts and norms",
            Part::Routers => "routers",
            Part::Experts => "experts",
        }
    }
}

impl Plan {
    /// The part of the model that each weight belongs to.
    pub fn parts(&self) -> Vec<Part> {
        let mixers = self.mixers();
        let routed = self.routed_layers();
        let mut parts = vec![None; self.weights.len()];
        for (op, mixer) in self.ops.iter().zip(mixers) {
            for id in op.weights() {
                let layer = self.weight(id).layer;
                let part = match (op, layer) {
                    (Op::ExpertLinear { route: Some(_), .. }, _) => Part::Experts,
                    (Op::Linear { .. }, _) if self.is_router(id) => Part::Routers,
                    (Op::Route { .. } | Op::ScaleExperts { .. }, _) => Part::Routers,
                    (_, None) => Part::Vocabulary,
                    (_, Some(layer)) => mixer.unwrap_or(match routed.contains(&layer) {
                        true => Part::SharedExperts,
                        false => Part::FeedForward,
                    }),
                };
                // What several parts read is the first one's.
                parts[id.0].get_or_insert(part);
            }
        }
        parts.into_iter().map(|part| part.unwrap_or(Part::Vocabulary)).collect()
    }

    /// The values between two sums of the residual stream that have attention or a recurrence
    /// between them: which of both.
    fn mixers(&self) -> Vec<Option<Part>> {
        let mut mixers = vec![None; self.ops.len()];
        let is_sum = |op: &Op| matches!(op, Op::Add { .. } | Op::Mix { .. } | Op::Embed { .. });
        // Whether a value comes from attention or a recurrence.
        let mut is_behind = vec![false; self.ops.len()];
        for (i, op) in self.ops.iter().enumerate() {
            let part = match op {
                Op::Attention { .. } | Op::Select { .. } | Op::Compress { .. } => Part::Attention,
                Op::Conv { .. } | Op::Scan { .. } | Op::DeltaRule { .. } => Part::Recurrence,
                _ => {
                    let from = op.inputs().find(|value| is_behind[value.0] && !is_sum(op));
                    is_behind[i] = from.is_some();
                    mixers[i] = from.and_then(|value| mixers[value.0]);
                    continue;
                }
            };
            (mixers[i], is_behind[i]) = (Some(part), true);
            // What it reads, back to the last sum.
            let mut reads: Vec<Value> = op.inputs().collect();
            while let Some(Value(read)) = reads.pop() {
                if mixers[read].is_none() && !is_sum(&self.ops[read]) {
                    mixers[read] = Some(part);
                    reads.extend(self.ops[read].inputs());
                }
            }
        }
        mixers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of the weights of a model of the parity kit, by their roles.
    fn parts(model: &str) -> Vec<(String, Part)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = crate::open(format!("{folder}/{model}.gguf")).unwrap();
        let plan = crate::plan(file.metadata(), file.tensors()).unwrap();
        let roles = plan.weights.iter().map(|weight| weight.role().to_owned());
        roles.zip(plan.parts()).collect()
    }

    #[test]
    fn operations_tell_what_weights_are_for() {
        for (model, role, part) in [
            ("llama-q4_0", "token_embd", Part::Vocabulary),
            ("llama-q4_0", "output_norm", Part::Vocabulary),
            ("llama-q4_0", "attn_q", Part::Attention),
            ("llama-q4_0", "attn_output", Part::Attention),
            ("llama-q4_0", "ffn_down", Part::FeedForward),
            ("gemma3", "post_attention_norm", Part::Attention),
            ("gemma3", "ffn_gate", Part::FeedForward),
            ("mamba2", "ssm_in", Part::Recurrence),
            ("mamba2", "ssm_out", Part::Recurrence),
            ("lfm2", "shortconv.out_proj", Part::Recurrence),
            ("lfm2", "attn_output", Part::Attention),
            ("qwen35", "attn_qkv", Part::Recurrence),
            ("qwen35", "ffn_up", Part::FeedForward),
            ("mixtral", "ffn_gate_exps", Part::Experts),
            ("mixtral", "ffn_gate_inp", Part::Routers),
            ("nemotron-h-moe-latent", "ffn_up_shexp", Part::SharedExperts),
            ("nemotron-h-moe-latent", "ffn_down_exps", Part::Experts),
        ] {
            let all = parts(model);
            let found: Vec<Part> =
                all.iter().filter(|(name, _)| name == role).map(|(_, part)| *part).collect();
            assert!(!found.is_empty(), "{model}: {role} is none of {all:?}");
            assert!(found.iter().all(|found| *found == part), "{model}: {role}: {found:?}");
        }
    }
}
