//! The components of Gemma 3n and Gemma 4: attention with normed values that may use the keys and
//! values of an earlier layer, inputs of each layer, sparse gates, and experts whose router has a
//! norm of its own.

use std::f32::consts::FRAC_1_SQRT_2;

use crate::error::Result;
use crate::ids::{SlotId, Value};
use crate::op::{Act, Attention, EmbedBy, NormKind, Op, Routing};

use super::{AttentionLayer, Builder};

impl Builder<'_> {
    /// Self-attention with norms of query, key and value heads. With a `slot`, which an earlier
    /// layer fills, there are queries only. Without a value projection, values are the projected
    /// keys before norm and rotation. Returns the slot too.
    pub fn normed_attention(
        &mut self,
        input: Value,
        layer: AttentionLayer,
        slot: Option<SlotId>,
    ) -> Result<(Value, SlotId)> {
        let AttentionLayer { attention: a, rope, norm: (_, eps), .. } = layer;
        let (width, key_width) = (self.width(input), a.kv_heads * a.key_dim);
        let (q, kv) = self.shared_qkv(input, &a, slot.is_none())?;
        let mut q = self.part_norm(q, "attn_q_norm", a.heads, eps)?;
        let mut kv = match kv {
            Some([k, v]) => Some([
                self.part_norm(k, "attn_k_norm", a.kv_heads, eps)?,
                self.weightless_norm(v, a.kv_heads, eps),
            ]),
            None => None,
        };
        if let Some(rope) = rope {
            let (head_dim, q_width) = (a.key_dim, self.width(q));
            q = self.push(Op::Rope { input: q, heads: a.heads, head_dim, rope }, q_width);
            if let Some([k, _]) = &mut kv {
                let op = Op::Rope { input: *k, heads: a.kv_heads, head_dim, rope };
                *k = self.push(op, key_width);
            }
        }
        let slot = slot.unwrap_or_else(|| self.slot(&a));
        let out = self.attend_in(slot, q, kv, a);
        Ok((self.linear(out, "attn_output", width)?, slot))
    }

    /// Queries, and keys and values if the layer has its own. Without a value projection, values
    /// are keys.
    fn shared_qkv(
        &mut self,
        input: Value,
        a: &Attention,
        has_kv: bool,
    ) -> Result<(Value, Option<[Value; 2]>)> {
        let widths = [a.heads * a.key_dim, a.kv_heads * a.key_dim, a.kv_heads * a.value_dim];
        if self.has("attn_qkv") && !has_kv {
            let all = self.linear(input, "attn_qkv", widths.iter().sum())?;
            return Ok((self.slice(all, 0, widths[0]), None));
        }
        if has_kv && (self.has("attn_qkv") || self.has("attn_v")) {
            let [q, k, v] = self.qkv(input, widths)?;
            return Ok((q, Some([k, v])));
        }
        let q = self.linear(input, "attn_q", widths[0])?;
        let k = if has_kv { Some(self.linear(input, "attn_k", widths[1])?) } else { None };
        Ok((q, k.map(|k| [k, k])))
    }

    /// An RMS norm of each of `parts` parts of a row with one weight.
    fn part_norm(&mut self, input: Value, name: &str, parts: usize, eps: f32) -> Result<Value> {
        let (kind, width, bias) = (NormKind::Rms, self.width(input), None);
        let weight = Some(self.weight(name, width / parts, 1)?);
        Ok(self.push(Op::Norm { input, kind, weight, bias, eps, groups: parts }, width))
    }

    /// A gated feed-forward network whose gate is zero up to some standard deviations above its
    /// mean, if that is given.
    pub fn sparse_feed_forward(
        &mut self,
        input: Value,
        act: Act,
        hidden: usize,
        deviations: Option<f32>,
    ) -> Result<Value> {
        let mut gate = self.linear(input, "ffn_gate", hidden)?;
        let up = self.linear(input, "ffn_up", hidden)?;
        if let Some(deviations) = deviations {
            gate = self.push(Op::Cutoff { input: gate, deviations }, hidden);
        }
        let h = self.push(Op::Glu { gate, up, act }, hidden);
        self.linear(h, "ffn_down", self.width(input))
    }

    /// A value times the weight `name`, of one number or one for each column.
    pub fn scale_by(&mut self, input: Value, name: &str, cols: usize) -> Result<Value> {
        let (weight, width) = (self.weight(name, cols, 1)?, self.width(input));
        Ok(self.push(Op::ScaleBy { input, weight }, width))
    }

    /// The inputs of all layers, `[rows, layers * width]`: embeddings of their own, and projections
    /// of the token embeddings.
    pub fn layer_inputs(
        &mut self,
        embedded: Value,
        layers: usize,
        width: usize,
        eps: f32,
    ) -> Result<Value> {
        let (all, rows) = (layers * width, self.plan.vocabulary);
        let projected = self.linear(embedded, "per_layer_model_proj", all)?;
        let projected = self.scale(projected, Some(1.0 / (self.width(embedded) as f32).sqrt()));
        let projected = self.part_norm(projected, "per_layer_proj_norm", layers, eps)?;
        let table = self.find("per_layer_token_embd.weight", all, rows)?;
        let own = self.push(Op::Embed { table, by: EmbedBy::Token }, all);
        let own = self.scale(own, Some((width as f32).sqrt()));
        let sum = self.add(projected, own);
        Ok(self.scale(sum, Some(FRAC_1_SQRT_2)))
    }

    /// What the input of `layer` adds to the residual stream, gated by `x`.
    pub fn layer_input(
        &mut self,
        x: Value,
        inputs: Value,
        (layer, width): (usize, usize),
        eps: f32,
    ) -> Result<Value> {
        let out = self.width(x);
        let gate = self.linear(x, "inp_gate", width)?;
        let up = self.slice(inputs, layer * width, width);
        let y = self.push(Op::Glu { gate, up, act: Act::GeluTanh }, width);
        let y = self.linear(y, "proj", out)?;
        self.rms_norm(y, "post_norm", eps)
    }

    /// Experts beside the feed-forward network, chosen from the normed residual stream `x`. The
    /// output of each is multiplied by a number, if the file has one for it.
    pub fn experts_beside(
        &mut self,
        x: Value,
        routing: &Routing,
        act: Act,
        eps: f32,
    ) -> Result<Value> {
        let (width, experts, used) = (self.width(x), routing.experts, routing.used);
        let weight = Some(self.find(&format!("{}ffn_gate_inp.scale", self.prefix), width, 1)?);
        let (kind, bias) = (NormKind::Rms, None);
        let h = self.push(Op::Norm { input: x, kind, weight, bias, eps, groups: 1 }, width);
        let h = self.scale(h, Some(1.0 / (width as f32).sqrt()));
        let input = self.linear(h, "ffn_gate_inp", experts)?;
        let route = self.push(Op::Route { input, chosen: None, bias, routing: *routing }, 2 * used);
        let h = self.rms_norm(x, "pre_ffw_norm_2", eps)?;
        let h = self.expert_hidden((h, width), route, routing, (act, None))?;
        let shape = [self.width(h) / used, width];
        let h = self.expert_linear(h, route, "ffn_down_exps", experts, shape)?;
        let numbers = format!("{}ffn_down_exps.scale", self.prefix);
        let scaled = match self.find_optional(&numbers, experts, 1)? {
            Some(weight) => self.push(Op::ScaleExperts { route, weight }, 2 * used),
            None => route,
        };
        let h = self.push(Op::ExpertSum { input: h, route: scaled }, width);
        self.rms_norm(h, "post_ffw_norm_2", eps)
    }
}
