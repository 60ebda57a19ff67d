//! DeepSeek V4: hyper-connections instead of a residual stream; attention over a sliding window and
//! compressed blocks of tokens, with one head of keys that are the values too; experts, which a
//! table chooses by token in the first blocks.

use super::deepseek2::indexer;
use super::routings;
use crate::builder::{Builder, Compressor, ExpertLayer, HyperConnections};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Attention, Entries, Gating, Indexer};
use crate::rope::{Rope, RopeScaling, RopeStyle, yarn_mscale};

/// What blocks have in common.
struct Decoder {
    hyper: HyperConnections,
    eps: f32,
    heads: usize,
    head_dim: usize,
    window: Option<usize>,
    /// The rotary embedding of blocks without compression.
    rope: Rope,
    /// The rotary embedding of blocks with compression.
    compress_rope: Rope,
    indexer: Indexer,
    output_groups: usize,
    output_rank: usize,
}

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    // Some files count blocks for multi-token prediction that they do not have.
    if !g.block(m.layers()?).has("nextn.eh_proj") {
        m.ignore_mtp();
    }
    g.leave_blocks();
    let layers = m.layers()?;
    let decoder = Decoder::new(m)?;
    let ratios = m
        .counts("attention.compress_ratios", layers)?
        .ok_or_else(|| m.error("attention.compress_ratios", "missing"))?;
    let routings = routings(m, g, Gating::SqrtSoftplus, false)?;
    let clamps = m.floats("swiglu_clamp_exp", layers)?.unwrap_or_else(|| vec![0.0; layers]);
    let shared_clamps = m.floats("swiglu_clamp_shexp", layers)?.unwrap_or_else(|| clamps.clone());
    let hashed = m.u32("hash_layer_count")?.unwrap_or(0) as usize;
    let (hyper, eps) = (decoder.hyper, decoder.eps);
    let x = g.embed("token_embd", m.size("embedding_length")?)?;
    let mut x = g.streams(x, hyper.streams);
    for (i, ratio) in ratios.into_iter().enumerate() {
        let b = g.block(i);
        let [h, writes] = b.read_streams(x, "hc_attn", &hyper)?;
        let h = b.rms_norm(h, "attn_norm", eps)?;
        let h = decoder.attention(b, h, ratio)?;
        x = b.write_streams(h, x, writes, &hyper);
        let [h, writes] = b.read_streams(x, "hc_ffn", &hyper)?;
        let h = b.rms_norm(h, "ffn_norm", eps)?;
        let Some(&routing) = routings.get(i) else {
            return Err(m.error("expert_count", "missing"));
        };
        let chosen = match i < hashed {
            true => Some(b.embed_in_block("ffn_gate_tid2eid", routing.used)?),
            false => None,
        };
        let [clamp, shared_clamp] = [clamps[i], shared_clamps[i]].map(|c| (c > 1e-6).then_some(c));
        let plain = ExpertLayer::new(routing, Act::Silu);
        let layer = ExpertLayer { chosen, clamp, shared_clamp, ..plain };
        let h = b.expert_layer(h, &layer)?;
        x = b.write_streams(h, x, writes, &hyper);
    }
    let x = g.join_streams(x, &hyper)?;
    g.logits(x, "output_norm", eps, &["output"])
}

impl Decoder {
    fn new(m: &HyperParameters<'_>) -> Result<Decoder> {
        let eps = m.rms_eps()?;
        let (heads, head_dim) =
            (m.size("attention.head_count")?, m.size("attention.key_length")?);
        let at_most = |name, most| match m.size(name)? {
            found if found > most => {
                Err(m.error(name, format!("expected at most {most}, found {found}")))
            }
            found => Ok(found),
        };
        let streams = at_most("hyper_connection.count", 64)?;
        let required = |name| m.f32(name)?.ok_or_else(|| m.error(name, "missing"));
        let hyper = HyperConnections {
            streams,
            iterations: at_most("hyper_connection.sinkhorn_iterations", 1024)?,
            eps: required("hyper_connection.epsilon")?,
            norm_eps: eps,
        };
        let output_groups = m.size("attention.output_group_count")?;
        if heads % output_groups != 0 {
            let problem = format!("{output_groups} does not divide the {heads} heads");
            return Err(m.error("attention.output_group_count", problem));
        }
        let rope = m.rope(RopeStyle::Norm, head_dim)?;
        let name = "attention.compress_rope_freq_base";
        let base = m.rope_base(name)?.ok_or_else(|| m.error(name, "missing"))?;
        let mut compress_rope = Rope { base, ..rope };
        // Sine and cosine keep their size.
        if let RopeScaling::Yarn { factor, attn_factor, .. } = &mut compress_rope.scaling {
            *attn_factor = 1.0 / yarn_mscale(*factor, 1.0);
        }
        let indexer = indexer(m, rope.dims)?;
        Ok(Decoder {
            hyper,
            eps,
            heads,
            head_dim,
            window: m.sliding_window()?,
            rope: Rope { scaling: RopeScaling::None, ..rope },
            compress_rope,
            indexer,
            output_groups,
            output_rank: m.size("attention.output_lora_rank")?,
        })
    }

    /// Self-attention: queries from a latent row, keys that are the values too, and an output
    /// projection in groups of heads. Blocks of `ratio` tokens are compressed if it is not zero.
    fn attention(&self, b: &mut Builder<'_>, input: Value, ratio: usize) -> Result<Value> {
        let &Decoder { eps, heads, head_dim, .. } = self;
        let rope = if ratio == 0 { self.rope } else { self.compress_rope };
        let width = b.width(input);
        let latent = b.linear_of_file(input, "attn_q_a")?;
        let latent = b.rms_norm(latent, "attn_q_a_norm", eps)?;
        let q = b.linear(latent, "attn_q_b", heads * head_dim)?;
        let q = b.weightless_norm(q, heads, eps);
        let q = b.rope_end(q, heads, rope);
        let k = b.linear(input, "attn_kv", head_dim)?;
        let k = b.rms_norm(k, "attn_kv_a_norm", eps)?;
        let k = b.rope_end(k, 1, rope);
        let entries = match ratio {
            0 => Entries::Tokens,
            _ => {
                let rope = Rope { block: ratio, ..rope };
                let compressor = Compressor { ratio, dim: head_dim, rope, eps };
                b.compressed_entries(input, latent, &compressor, self.indexer)?
            }
        };
        let attention = Attention {
            heads,
            kv_heads: 1,
            key_dim: head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            temperature: None,
            softcap: None,
            window: self.window,
            chunked: false,
            causal: true,
            sinks: b.sinks(heads)?,
            entries,
        };
        let h = b.attend(q, k, k, attention);
        let h = b.rope_end(h, heads, Rope { inverse: true, ..rope });
        let h = b.group_linear(h, "attn_output_a", self.output_groups, self.output_rank)?;
        b.linear(h, "attn_output_b", width)
    }
}
