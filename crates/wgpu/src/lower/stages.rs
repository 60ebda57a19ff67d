//! Which consecutive operations run as one dispatch, or as a few that belong together.

use std::ops::Range;

use bodkin_model::fusion::{self, Readers};
use bodkin_model::{Act, Entries, Op, Plan, Value, WeightId};

use crate::layout::Packing;

/// The widest head that the kernels of attention take.
pub(super) const MAX_HEAD_DIM: usize = 1024;
/// The most matmuls of one input that run as one.
const MAX_SIBLINGS: usize = 3;

/// Consecutive operations, and how they run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stage {
    pub(crate) ops: Range<usize>,
    pub(crate) kind: Kind,
}

/// How operations run together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// One operation.
    Alone,
    /// Matmuls of the same input, whose weights are stacked.
    Siblings,
    /// Two matmuls, whose weights are stacked in this order, and the gate that alone reads them.
    Gated { gate: usize, up: usize, act: Act },
    /// A matmul and the sum that alone reads it.
    Residual { to: Value },
    /// The sum of a token's experts, and the residual sum that alone reads it.
    Summed { to: Value },
    /// Norms and rotations of queries and keys, and the attention that alone reads them.
    Rotated,
}

impl Stage {
    /// The weights that are stacked; none for other stages.
    pub(crate) fn stacked(&self, plan: &Plan) -> Vec<WeightId> {
        let weight = |i: usize| matmul(plan, i).expect("a matmul").0;
        match self.kind {
            Kind::Siblings => self.ops.clone().map(weight).collect(),
            Kind::Gated { gate, up, .. } => vec![weight(gate), weight(up)],
            Kind::Alone | Kind::Residual { .. } | Kind::Summed { .. } | Kind::Rotated => Vec::new(),
        }
    }

    /// The operation whose result lies between the two dispatches of a rotated attention.
    pub(crate) fn rotated_queries(&self) -> Option<usize> {
        (self.kind == Kind::Rotated).then(|| self.ops.end - 3)
    }

    /// The operations whose results other stages read.
    pub(crate) fn results(&self) -> Range<usize> {
        match self.kind {
            Kind::Siblings => self.ops.clone(),
            _ => self.ops.end - 1..self.ops.end,
        }
    }
}

/// The weight and the bias of a matmul before the head.
pub(super) fn matmul(plan: &Plan, i: usize) -> Option<(WeightId, Option<WeightId>)> {
    match plan.ops.get(i)? {
        Op::Linear { weight, bias, .. } | Op::ExpertLinear { weight, bias, .. } => {
            Some((*weight, *bias))
        }
        _ => None,
    }
}

/// The stages of a plan; without `fuse`, each has one operation.
pub(crate) fn stages(plan: &Plan, most_bytes: u64, fuse: bool) -> Vec<Stage> {
    let fusing = Fusing { plan, readers: Readers::of(plan), most_bytes };
    let mut stages = Vec::new();
    let mut first = 0;
    while first < plan.ops.len() {
        let fused = if fuse { fusing.from(first) } else { None };
        let (len, kind) = fused.unwrap_or((1, Kind::Alone));
        stages.push(Stage { ops: first..first + len, kind });
        first += len;
    }
    stages
}

/// The weights of each stage that are stacked.
pub(crate) fn stacks(plan: &Plan, stages: &[Stage]) -> Vec<Vec<WeightId>> {
    let stacks = stages.iter().map(|stage| stage.stacked(plan));
    stacks.filter(|weights| !weights.is_empty()).collect()
}

struct Fusing<'a> {
    plan: &'a Plan,
    readers: Readers,
    most_bytes: u64,
}

impl Fusing<'_> {
    /// What begins with operation `i`, if it is more than that.
    fn from(&self, i: usize) -> Option<(usize, Kind)> {
        let plan = self.plan;
        if let Some(len) = self.rotated(i) {
            return Some((len, Kind::Rotated));
        }
        if let Some(kind) = self.gated(i) {
            return Some((3, kind));
        }
        let residual = fusion::residual(plan, &self.readers, i);
        let residual = residual.filter(|residual| residual.sum == i + 1);
        if let Op::ExpertSum { .. } = plan.ops[i] {
            return residual.map(|residual| (2, Kind::Summed { to: residual.to }));
        }
        fusion::linear(plan, i)?;
        if let Some(residual) = residual {
            return Some((2, Kind::Residual { to: residual.to }));
        }
        let mut len = 1;
        while len < MAX_SIBLINGS && self.are_alike(i..i + len + 1) {
            len += 1;
        }
        (len > 1).then_some((len, Kind::Siblings))
    }

    fn gated(&self, i: usize) -> Option<Kind> {
        let (act, gate) = fusion::gated(self.plan, &self.readers, i)?;
        let kind = Kind::Gated { gate, up: 2 * i + 1 - gate, act };
        self.are_alike(i..i + 2).then_some(kind)
    }

    /// Whether the weights of these matmuls can be stacked: nothing else reads them, they have the
    /// same layout, and a buffer holds them all.
    fn are_alike(&self, ops: Range<usize>) -> bool {
        let (plan, first) = (self.plan, ops.start);
        let Some((one, first_bias)) = matmul(plan, first) else { return false };
        let one = plan.weight(one);
        let packing = Packing::of(one.format);
        let mut bytes = 0;
        for i in ops {
            let Some((id, bias)) = matmul(plan, i) else { return false };
            let weight = plan.weight(id);
            let other = Packing::of(weight.format);
            let uses = plan.ops.iter().flat_map(Op::weights).filter(|used| *used == id).count();
            let is_alike = fusion::have_same_input(&plan.ops[first], &plan.ops[i])
                && (other.layout, other.codebook) == (packing.layout, packing.codebook)
                && bias.is_some() == first_bias.is_some()
                && !plan.is_router(id)
                && uses == 1;
            if !is_alike {
                return false;
            }
            bytes += packing.layout.bytes(weight.rows, weight.cols);
        }
        bytes <= self.most_bytes
    }

    /// The length of the stage of an attention that begins with `i`: its queries and keys are
    /// rotated, and before that maybe normalised, by operations that it alone needs.
    fn rotated(&self, i: usize) -> Option<usize> {
        let ops = self.plan.ops.get(i..)?;
        match ops {
            [Op::Norm { .. }, Op::Norm { .. }, Op::Rope { .. }, Op::Rope { .. }, ..] => {
                let are_normed = self.is_head_norm(i, i + 2) && self.is_head_norm(i + 1, i + 3);
                (are_normed && self.is_attention(i + 2)).then_some(5)
            }
            [Op::Rope { .. }, Op::Rope { .. }, ..] => self.is_attention(i).then_some(3),
            _ => None,
        }
    }

    /// Whether operation `i` is a norm of each head that rotation `rope` alone reads.
    fn is_head_norm(&self, i: usize, rope: usize) -> bool {
        let Op::Rope { input, heads, head_dim, .. } = self.plan.ops[rope] else { return false };
        let shape = match self.plan.ops[i] {
            Op::Norm { kind: bodkin_model::NormKind::Rms, weight, bias: None, groups, .. } => {
                let weight = weight.map(|id| self.plan.weight(id));
                weight.is_some_and(|w| w.rows * w.cols == head_dim) && groups == heads
            }
            _ => false,
        };
        shape && input.0 == i && self.readers.is_only_read_by(i, rope)
    }

    /// Whether rotations `i` and `i + 1` are of the queries and keys of attention `i + 2` alone.
    fn is_attention(&self, i: usize) -> bool {
        let Some(Op::Attention { q, kv: Some([k, v]), attention, .. }) = self.plan.ops.get(i + 2)
        else {
            return false;
        };
        let (Op::Rope { rope, head_dim, .. }, Op::Rope { rope: other, head_dim: k_dim, .. }) =
            (&self.plan.ops[i], &self.plan.ops[i + 1])
        else {
            return false;
        };
        let is_read = |value: usize| self.readers.is_only_read_by(value, i + 2);
        attention.entries == Entries::Tokens
            && (q.0, k.0) == (i, i + 1)
            && v.0 < i
            && is_read(i)
            && is_read(i + 1)
            && rope == other
            && (*head_dim, *k_dim) == (attention.key_dim, attention.key_dim)
            && attention.key_dim.max(attention.value_dim) <= MAX_HEAD_DIM
    }
}
