//! Linear attention by the gated delta rule: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024), and
//! Kimi Delta Attention (2025), whose decays differ by channel.

use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, DeltaRule, NormKind, Op};
use crate::plan::RecurrentState;

use super::Builder;

/// The sizes of a layer with the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaMixer {
    /// Taps of the convolutions, at least 2.
    pub kernel: usize,
    /// Heads, widths.
    pub rule: DeltaRule,
    /// The epsilon of the norms.
    pub eps: f32,
}

impl DeltaMixer {
    /// The settings of all Gated DeltaNet layers of a model. `is_cyclic` as in [`DeltaRule`].
    pub fn new(m: &HyperParameters<'_>, eps: f32, is_cyclic: bool) -> Result<DeltaMixer> {
        let kernel = m.kernel("ssm.conv_kernel")?;
        let (key_heads, value_heads) = (m.size("ssm.group_count")?, m.size("ssm.time_step_rank")?);
        if value_heads % key_heads != 0 {
            let problem = format!("{key_heads} does not divide the {value_heads} value heads");
            return Err(m.error("ssm.group_count", problem));
        }
        let (head_dim, inner) = (m.size("ssm.state_size")?, m.size("ssm.inner_size")?);
        if inner != value_heads * head_dim {
            let expected = format!("{value_heads} heads of {head_dim}");
            return Err(m.error("ssm.inner_size", format!("expected {expected}, found {inner}")));
        }
        let is_channelwise = false;
        let rule = DeltaRule { key_heads, value_heads, head_dim, is_cyclic, is_channelwise };
        Ok(DeltaMixer { kernel, rule, eps })
    }

    /// The settings of all Kimi Delta Attention layers of a model.
    pub fn kimi(m: &HyperParameters<'_>, eps: f32) -> Result<DeltaMixer> {
        let (heads, head_dim) = (m.size("attention.head_count")?, m.size("kda.head_dim")?);
        let (key_heads, value_heads, is_cyclic, is_channelwise) = (heads, heads, false, true);
        let rule = DeltaRule { key_heads, value_heads, head_dim, is_cyclic, is_channelwise };
        Ok(DeltaMixer { kernel: m.kernel("ssm.conv_kernel")?, rule, eps })
    }
}

impl Builder<'_> {
    /// A Gated DeltaNet layer: projections to q, k and v, to the output gate, to beta and decay; a
    /// convolution of q, k and v; the rule; a norm of each head, gated; the output projection.
    pub fn delta_mixer(&mut self, input: Value, mixer: DeltaMixer) -> Result<Value> {
        let rule = mixer.rule;
        let (qkv, gate) = match self.has("ssm_in") {
            true => self.interleaved_qkv(input, &rule)?,
            false => {
                let qkv = self.linear(input, "attn_qkv", rule.qkv_width())?;
                (qkv, self.linear(input, "attn_gate", rule.width())?)
            }
        };
        let (beta, decay) = match self.has("ssm_ba") {
            true => {
                let both = self.linear(input, "ssm_ba", 2 * rule.value_heads)?;
                let heads = rule.value_heads / rule.key_heads;
                let beta = self.slices(both, rule.key_heads, 0, heads);
                (beta, self.slices(both, rule.key_heads, heads, heads))
            }
            false => {
                let beta = self.linear(input, "ssm_beta", rule.value_heads)?;
                (beta, self.linear(input, "ssm_alpha", rule.value_heads)?)
            }
        };
        let qkv = self.conv(qkv, "ssm_conv1d", mixer.kernel)?;
        let y = self.delta_rule(qkv, decay, beta, mixer)?;
        let y = self.gated_norm(y, gate, Act::Silu, mixer)?;
        self.linear(y, "ssm_out", self.width(input))
    }

    /// The one projection of older files: q, k, v and the output gate of each key head in turn.
    fn interleaved_qkv(&mut self, input: Value, rule: &DeltaRule) -> Result<(Value, Value)> {
        let (groups, dim) = (rule.key_heads, rule.head_dim);
        let all = self.linear(input, "ssm_in", rule.qkv_width() + rule.width())?;
        let values = rule.width() / groups;
        let q = self.slices(all, groups, 0, dim);
        let k = self.slices(all, groups, dim, dim);
        let v = self.slices(all, groups, 2 * dim, values);
        let gate = self.slices(all, groups, 2 * dim + values, values);
        let qk = self.concat(q, k, 1, self.width(k));
        Ok((self.concat(qk, v, 1, self.width(v)), gate))
    }

    /// A Kimi Delta Attention layer: as [`Builder::delta_mixer`], with convolutions of their own
    /// for q, k and v, and low-rank projections to decay and output gate.
    pub fn kimi_delta_mixer(&mut self, input: Value, mixer: DeltaMixer) -> Result<Value> {
        let DeltaMixer { kernel, rule, .. } = mixer;
        let width = rule.width();
        let [q, k, v] = match self.has("attn_qkv") {
            true => {
                let qkv = self.linear(input, "attn_qkv", 3 * width)?;
                [0, width, 2 * width].map(|start| self.slice(qkv, start, width))
            }
            false => {
                let q = self.linear(input, "attn_q", width)?;
                let k = self.linear(input, "attn_k", width)?;
                [q, k, self.linear(input, "attn_v", width)?]
            }
        };
        let beta = self.linear(input, "ssm_beta", rule.value_heads)?;
        let decay = self.linear(input, "ssm_f_a", rule.head_dim)?;
        let gate = self.linear(input, "ssm_g_a", rule.head_dim)?;
        let decay = self.linear(decay, "ssm_f_b", width)?;
        let gate = self.linear(gate, "ssm_g_b", width)?;
        let q = self.conv(q, "ssm_conv1d_q", kernel)?;
        let k = self.conv(k, "ssm_conv1d_k", kernel)?;
        let v = self.conv(v, "ssm_conv1d_v", kernel)?;
        let qk = self.concat(q, k, 1, width);
        let qkv = self.concat(qk, v, 1, width);
        let y = self.delta_rule(qkv, decay, beta, mixer)?;
        let y = self.gated_norm(y, gate, Act::Sigmoid, mixer)?;
        self.linear(y, "attn_output", self.width(input))
    }

    /// The rule on activated q, k and v.
    fn delta_rule(
        &mut self,
        qkv: Value,
        decay: Value,
        beta: Value,
        DeltaMixer { rule, eps, .. }: DeltaMixer,
    ) -> Result<Value> {
        let qkv = self.push(Op::Act { input: qkv, act: Act::Silu }, rule.qkv_width());
        // The names of these tensors do not end in `.weight`; converters shape `ssm_a` either way.
        let a = format!("{}ssm_a", self.prefix);
        let [cols, rows] = match rule.is_channelwise {
            true => [1, rule.value_heads],
            false => [rule.value_heads, 1],
        };
        let a = self.find(&a, cols, rows)?;
        let dt_bias = self.find(&format!("{}ssm_dt.bias", self.prefix), rule.decay_width(), 1)?;
        let state = self.state(RecurrentState::DeltaRule(rule));
        let op = Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps, rule, state };
        Ok(self.push(op, rule.width()))
    }

    /// A norm of each head, times a gate.
    fn gated_norm(
        &mut self,
        input: Value,
        gate: Value,
        act: Act,
        DeltaMixer { rule, eps, .. }: DeltaMixer,
    ) -> Result<Value> {
        let weight = Some(self.weight("ssm_norm", rule.head_dim, 1)?);
        let (kind, bias, groups, width) = (NormKind::Rms, None, rule.value_heads, rule.width());
        let up = self.push(Op::Norm { input, kind, weight, bias, eps, groups }, width);
        Ok(self.push(Op::Glu { gate, up, act }, width))
    }
}
