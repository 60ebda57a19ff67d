//! What each kind of operation reads, and its name.

use super::Op;
use crate::ids::{Value, WeightId};

impl Op {
    /// The values that the operation reads.
    pub fn inputs(&self) -> impl Iterator<Item = Value> {
        let inputs = match *self {
            Op::Input | Op::Embed { .. } => [None; 5],
            Op::Norm { input, .. }
            | Op::Linear { input, .. }
            | Op::Rope { input, .. }
            | Op::Act { input, .. }
            | Op::Scale { input, .. }
            | Op::ScaleBy { input, .. }
            | Op::Cutoff { input, .. }
            | Op::ScaleExperts { route: input, .. }
            | Op::Softcap { input, .. }
            | Op::Clamp { input, .. }
            | Op::HyperWeights { input, .. }
            | Op::Slice { input, .. }
            | Op::Conv { input, .. }
            | Op::Pool { input, .. }
            | Op::Logits { input, .. } => [Some(input), None, None, None, None],
            Op::Attention { q, kv, attention, .. } => {
                let [k, v] = kv.map_or([None; 2], |kv| kv.map(Some));
                let [first, second] = attention.entries.inputs();
                [Some(q), k, v, first, second]
            }
            Op::Glu { gate: a, up: b, .. }
            | Op::Add { a, b }
            | Op::Concat { a, b, .. }
            | Op::Rescale { input: a, like: b }
            | Op::Mix { input: a, weights: b, .. }
            | Op::Compress { input: a, scores: b, .. }
            | Op::ExpertSum { input: a, route: b } => [Some(a), Some(b), None, None, None],
            Op::ExpertLinear { input, route: other, .. }
            | Op::Route { input, chosen: other, .. } => [Some(input), other, None, None, None],
            Op::Select { q, k, weights, .. } => [Some(q), Some(k), Some(weights), None, None],
            Op::Scan { x, b, c, dt, .. } => [Some(x), Some(b), Some(c), Some(dt), None],
            Op::DeltaRule { qkv, decay, beta, .. } => {
                [Some(qkv), Some(decay), Some(beta), None, None]
            }
        };
        inputs.into_iter().flatten()
    }

    /// The input that the operation can overwrite with its result, because it works elementwise.
    pub fn in_place_input(&self) -> Option<Value> {
        match *self {
            Op::Act { input, .. }
            | Op::Scale { input, .. }
            | Op::Softcap { input, .. }
            | Op::Clamp { input, .. } => Some(input),
            Op::Glu { gate: a, up: b, .. } | Op::Add { a, b } => Some(a).filter(|_| a != b),
            _ => None,
        }
    }

    /// The weights that the operation reads.
    pub fn weights(&self) -> impl Iterator<Item = WeightId> {
        let weights = match self {
            Op::Embed { table: weight, .. }
            | Op::ScaleBy { weight, .. }
            | Op::ScaleExperts { weight, .. } => [Some(*weight), None, None],
            Op::Norm { weight, bias, .. } => [*weight, *bias, None],
            Op::Linear { weight, bias, .. }
            | Op::ExpertLinear { weight, bias, .. }
            | Op::Conv { weight, bias, .. }
            | Op::Logits { weight, bias, .. } => [Some(*weight), *bias, None],
            Op::Rope { rope, .. } => [rope.factors, None, None],
            Op::Attention { attention, .. } => [attention.sinks, None, None],
            Op::Route { bias, .. } => [*bias, None, None],
            Op::Scan { a, d, dt_bias, .. } => [Some(*a), Some(*d), Some(*dt_bias)],
            Op::DeltaRule { a, dt_bias, .. } => [Some(*a), Some(*dt_bias), None],
            Op::HyperWeights { scale, base, .. } => [Some(*scale), Some(*base), None],
            Op::Input
            | Op::Act { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::Softcap { .. }
            | Op::Clamp { .. }
            | Op::Mix { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::ExpertSum { .. }
            | Op::Compress { .. }
            | Op::Select { .. }
            | Op::Pool { .. } => [None; 3],
        };
        weights.into_iter().flatten()
    }

    /// The operation's name in the text of a plan.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input => "input",
            Op::Embed { .. } => "embed",
            Op::Norm { .. } => "norm",
            Op::Linear { .. } => "linear",
            Op::Rope { .. } => "rope",
            Op::Attention { .. } => "attention",
            Op::Act { .. } => "act",
            Op::Glu { .. } => "glu",
            Op::Add { .. } => "add",
            Op::Scale { .. } => "scale",
            Op::ScaleBy { .. } => "scale_by",
            Op::ScaleExperts { .. } => "scale_experts",
            Op::Rescale { .. } => "rescale",
            Op::Cutoff { .. } => "cutoff",
            Op::Softcap { .. } => "softcap",
            Op::Clamp { .. } => "clamp",
            Op::Mix { .. } => "mix",
            Op::HyperWeights { .. } => "hyper_weights",
            Op::Slice { .. } => "slice",
            Op::Concat { .. } => "concat",
            Op::Route { .. } => "route",
            Op::ExpertLinear { .. } => "expert_linear",
            Op::ExpertSum { .. } => "expert_sum",
            Op::Conv { .. } => "conv",
            Op::Compress { .. } => "compress",
            Op::Select { .. } => "select",
            Op::Scan { .. } => "scan",
            Op::DeltaRule { .. } => "delta_rule",
            Op::Pool { .. } => "pool",
            Op::Logits { .. } => "logits",
        }
    }
}
