//! A plan as text, one operation a line, for `inspect --plan` and golden tests.

use std::fmt;

use crate::op::{
    Act, Attention, DeltaRule, EmbedBy, Entries, Gating, NormKind, Op, PoolKind, Routing, Scan,
};
use crate::op::{Temperature, Xielu};
use crate::plan::Plan;

impl Plan {
    fn fmt_op(&self, f: &mut fmt::Formatter<'_>, op: &Op) -> fmt::Result {
        for (i, value) in op.inputs().enumerate() {
            write!(f, "{} %{}", if i == 0 { "" } else { "," }, value.0)?;
        }
        for id in op.weights() {
            let w = self.weight(id);
            write!(f, " {} {}[{}, {}]", w.name, w.format.name(), w.rows, w.cols)?;
        }
        match op {
            Op::Norm { kind, eps, groups, .. } => {
                write!(f, " {} eps {eps:e}", kind.name())?;
                fmt_groups(f, *groups)
            }
            Op::Rope { heads, head_dim, rope, .. } => write!(f, " heads {heads}x{head_dim} {rope}"),
            Op::Attention { attention, slot, .. } => write!(f, " slot {} {attention}", slot.0),
            Op::Act { act, .. } | Op::Glu { act, .. } => write!(f, " {act}"),
            Op::Scale { factor, .. } => write!(f, " by {factor}"),
            Op::Cutoff { deviations, .. } => write!(f, " {deviations} deviations"),
            Op::Softcap { cap, .. } => write!(f, " cap {cap}"),
            Op::Clamp { low, high, .. } => write!(f, " {low}..{high}"),
            Op::Mix { results, .. } => write!(f, " to {results}"),
            Op::HyperWeights { streams, iterations, eps, .. } => {
                write!(f, " streams {streams} iterations {iterations} eps {eps:e}")
            }
            Op::Compress { compression: c, state, .. } => {
                let overlap = if c.overlaps { " overlapping" } else { "" };
                write!(f, " state {} {} tokens to {}{overlap}", state.0, c.ratio, c.dim)
            }
            Op::Select { indexer: i, slot, .. } => {
                write!(f, " slot {} heads {}x{} best {}", slot.0, i.heads, i.dim, i.top_k)
            }
            Op::Slice { groups, start, len, .. } => {
                write!(f, " {start}..{}", start + len)?;
                fmt_groups(f, *groups)
            }
            Op::Concat { groups, .. } => fmt_groups(f, *groups),
            Op::Route { routing, .. } => write!(f, " {routing}"),
            Op::ExpertLinear { experts, .. } => write!(f, " experts {experts}"),
            Op::Conv { state, .. } => write!(f, " state {}", state.0),
            Op::Scan { scan, state, .. } => write!(f, " state {} {scan}", state.0),
            Op::DeltaRule { rule, eps, state, .. } => {
                write!(f, " state {} {rule} eps {eps:e}", state.0)
            }
            Op::Pool { kind, .. } => f.write_str(match kind {
                PoolKind::Mean => " mean",
                PoolKind::First => " first",
                PoolKind::Last => " last",
                PoolKind::Sum => " sum",
            }),
            Op::Embed { by, .. } => f.write_str(match by {
                EmbedBy::Token => "",
                EmbedBy::Position => " by position",
                EmbedBy::PositionModulo => " by position modulo rows",
                EmbedBy::First => " first",
            }),
            Op::Input
            | Op::Linear { .. }
            | Op::Add { .. }
            | Op::ScaleBy { .. }
            | Op::Rescale { .. }
            | Op::ScaleExperts { .. }
            | Op::ExpertSum { .. }
            | Op::Logits { .. } => Ok(()),
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (heads, dims) = ((self.heads, self.kv_heads), (self.key_dim, self.value_dim));
        write!(f, "heads {}/{} dims {}/{}", heads.0, heads.1, dims.0, dims.1)?;
        write!(f, " scale {}", self.scale)?;
        self.temperature.map_or(Ok(()), |t| write!(f, " {t}"))?;
        let kind = if self.chunked { "chunks" } else { "window" };
        self.window.map_or(Ok(()), |w| write!(f, " {kind} {w}"))?;
        self.softcap.map_or(Ok(()), |c| write!(f, " softcap {c}"))?;
        f.write_str(if self.causal { "" } else { " both ways" })?;
        match self.entries {
            Entries::Tokens => Ok(()),
            Entries::Selected(_) => f.write_str(" selected"),
            Entries::TokensAndBlocks { slot, selected, .. } => {
                let selected = if selected.is_some() { "selected " } else { "" };
                write!(f, " and {selected}blocks of slot {}", slot.0)
            }
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "plan {} vocabulary {} context {}",
            self.architecture, self.vocabulary, self.context_length
        )?;
        for (i, op) in self.ops.iter().enumerate() {
            write!(f, "%{i} [{}] = {}", self.widths[i], op.name())?;
            self.fmt_op(f, op)?;
            writeln!(f)?;
        }
        Ok(())
    }
}

impl NormKind {
    fn name(self) -> &'static str {
        match self {
            NormKind::Rms => "rms",
            NormKind::Layer => "layer",
        }
    }
}

fn fmt_groups(f: &mut fmt::Formatter<'_>, groups: usize) -> fmt::Result {
    if groups > 1 { write!(f, " groups {groups}") } else { Ok(()) }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Act::Identity => "identity",
            Act::Silu => "silu",
            Act::Sigmoid => "sigmoid",
            Act::Gelu => "gelu",
            Act::GeluTanh => "gelu_tanh",
            Act::ReluSquared => "relu_squared",
            Act::Softplus => "softplus",
            Act::ClampedSwish => "clamped_swish",
            Act::Xielu(Xielu { positive, negative, beta, eps }) => {
                return write!(f, "xielu {positive}/{negative} beta {beta} eps {eps:e}");
            }
        })
    }
}

impl fmt::Display for Temperature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "temperature {} per {}", self.growth, self.length)?;
        if self.offset == 0 { Ok(()) } else { write!(f, " from {}", self.offset) }
    }
}

impl fmt::Display for Scan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scan { heads, head_dim, groups, state, is_channelwise } = self;
        let by_channel = if *is_channelwise { " by channel" } else { "" };
        write!(f, "heads {heads}x{head_dim} groups {groups} of {state}{by_channel}")
    }
}

impl fmt::Display for DeltaRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeltaRule { key_heads, value_heads, head_dim, is_cyclic, is_channelwise } = self;
        let cyclic = if *is_cyclic { " cyclic" } else { "" };
        let by_channel = if *is_channelwise { " by channel" } else { "" };
        write!(f, "heads {value_heads}/{key_heads}x{head_dim}{cyclic}{by_channel}")
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gating = match self.gating {
            Gating::Softmax => "softmax",
            Gating::Sigmoid => "sigmoid",
            Gating::SoftmaxOfChosen => "softmax of chosen",
            Gating::SqrtSoftplus => "sqrt softplus",
        };
        write!(f, "{} of {} {gating}", self.used, self.experts)?;
        if self.groups > 1 {
            write!(f, " from {} of {} groups", self.groups_used, self.groups)?;
        }
        f.write_str(if self.normalize { " normalized" } else { "" })?;
        if self.scale == 1.0 { Ok(()) } else { write!(f, " by {}", self.scale) }
    }
}
