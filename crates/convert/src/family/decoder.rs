//! Decoders of the Llama kind.

use bodkin_gguf::Value;
use serde_json::json;

use super::definition::{Family, Names, Vocabulary, unchanged};
use super::keys::{HEADS, KV_HEADS, Keys, Rope, WIDTH};
use crate::change::Change;
use crate::config::Config;
use crate::error::Result;

/// The widest head whose divisors of frequencies are computed.
const HEAD_WIDTH_MAX: u32 = 1 << 16;

const GLOBALS: Names =
    &[("embed_tokens", "token_embd"), ("norm", "output_norm"), ("lm_head", "output")];

const BLOCKS: Names = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.w2", "ffn_down_exps"),
    ("block_sparse_moe.experts.w3", "ffn_up_exps"),
];

const GEMMA_BLOCKS: Names = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const DECODER: Family = Family {
    classes: &[],
    architecture: "",
    layers: "layers.",
    globals: GLOBALS,
    blocks: BLOCKS,
    complete,
    keys,
    change: unchanged,
    vocabulary: Vocabulary::Decoder,
};

pub(super) const LLAMA: Family = Family {
    classes: &["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "LlamaModel"],
    architecture: "llama",
    complete: complete_llama,
    keys: llama_keys,
    change: change_llama,
    vocabulary: Vocabulary::Llama,
    ..DECODER
};

pub(super) const QWEN2: Family =
    Family { classes: &["Qwen2ForCausalLM", "Qwen2Model"], architecture: "qwen2", ..DECODER };

pub(super) const QWEN3: Family = Family {
    classes: &["Qwen3ForCausalLM", "Qwen3Model"],
    architecture: "qwen3",
    complete: complete_qwen3,
    ..DECODER
};

pub(super) const QWEN3_MOE: Family = Family {
    classes: &["Qwen3MoeForCausalLM"],
    architecture: "qwen3moe",
    keys: qwen3_moe_keys,
    ..DECODER
};

pub(super) const GEMMA3: Family = Family {
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    architecture: "gemma3",
    blocks: GEMMA_BLOCKS,
    complete: complete_gemma3,
    keys: gemma3_keys,
    change: change_gemma3,
    vocabulary: Vocabulary::Gemma,
    ..DECODER
};

fn complete(config: &mut Config) -> Result<()> {
    // Gemma's configurations have another key, and this one with a value that is not used.
    match config.class()?.starts_with("Gemma3") {
        true => config.expect("hidden_activation", &["gelu_pytorch_tanh".into()])?,
        false => config.expect("hidden_act", &["silu".into(), "swish".into()])?,
    }
    if Rope::of(config)?.base.is_none() {
        config.set("rope_theta", 10_000.0);
    }
    config.set_defaults(&[("rms_norm_eps", json!(1e-6))]);
    let heads = config.need_count(HEADS)?;
    config.set_defaults(&[("num_key_value_heads", json!(heads))]);
    Ok(())
}

fn complete_llama(config: &mut Config) -> Result<()> {
    if config.class()? == "MixtralForCausalLM" {
        if Rope::of(config)?.base.is_none() {
            config.set("rope_theta", 1_000_000.0);
        }
        config.set_defaults(&[
            ("rms_norm_eps", json!(1e-5)),
            ("num_key_value_heads", json!(8)),
            ("num_local_experts", json!(8)),
            ("num_experts_per_tok", json!(2)),
        ]);
        return complete(config);
    }
    if config.class()? == "MistralForCausalLM" {
        config.set_defaults(&[("num_key_value_heads", json!(8))]);
    }
    let width = config.need_count(WIDTH)? / config.need_count(HEADS)?;
    config.set_defaults(&[("head_dim", json!(width))]);
    complete(config)
}

fn complete_qwen3(config: &mut Config) -> Result<()> {
    config.set_defaults(&[("head_dim", json!(128))]);
    complete(config)
}

fn complete_gemma3(config: &mut Config) -> Result<()> {
    if Rope::of(config)?.base.is_none() {
        config.set("rope_theta", 1_000_000.0);
    }
    let nested = config.get(&["rope_parameters"]).is_some_and(|rope| {
        rope.get("sliding_attention").is_some_and(|local| local.get("rope_theta").is_some())
    });
    if !nested {
        config.set_defaults(&[("rope_local_base_freq", json!(10_000.0))]);
    }
    config.set_defaults(&[
        ("max_position_embeddings", json!(131_072)),
        ("num_attention_heads", json!(8)),
        ("num_key_value_heads", json!(4)),
        ("head_dim", json!(256)),
        ("sliding_window", json!(4096)),
    ]);
    complete(config)
}

fn keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    keys.standard(config)?;
    keys.pooling();
    Ok(())
}

fn llama_keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    keys.standard(config)?;
    keys.u32("vocab_size", config.need_count(&["vocab_size"])?);
    keys.u32("rope.dimension_count", head_width(config)?);
    Ok(())
}

fn qwen3_moe_keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    keys.standard(config)?;
    if let Some(width) = config.u32(&["moe_intermediate_size"])? {
        keys.u32("expert_feed_forward_length", width);
    }
    Ok(())
}

fn gemma3_keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    keys.standard(config)?;
    if let Some(cap) = config.f64(&["final_logit_softcapping"])? {
        keys.set("final_logit_softcapping", Value::F32(cap as f32));
    }
    if config.u32(&["sliding_window_pattern"])? != Some(1) {
        keys.u32("attention.sliding_window", config.need_u32(&["sliding_window"])?);
    }
    Ok(())
}

fn head_width(config: &Config) -> Result<u32> {
    match config.u32(&["head_dim"])? {
        Some(width) => Ok(width),
        None => Ok(config.need_count(WIDTH)? / config.need_count(HEADS)?),
    }
}

/// Llama's rotary embedding turns neighbours in GGUF, and element i with i + half in safetensors.
fn change_llama(config: &Config, name: &str, shape: &[u64]) -> Result<Change> {
    let heads = match name.rsplit_once("attn_").map(|(_, rest)| rest) {
        Some("q.weight" | "q.bias") => config.need_count(HEADS)?,
        Some("k.weight" | "k.bias") => config.need_count(KV_HEADS)?,
        _ => return Ok(Change::None),
    };
    let rows = shape.first().copied().unwrap_or(0);
    if rows == 0 || !rows.is_multiple_of(2 * u64::from(heads)) {
        let expected = format!("{heads} heads in the {rows} rows of {name}");
        return Err(config.invalid(HEADS[0], "pairs of rows", &expected));
    }
    Ok(Change::HalvesToPairs { rows_per_head: rows / u64::from(heads) })
}

/// Gemma's norms scale by one more than what is stored.
fn change_gemma3(_: &Config, name: &str, _: &[u64]) -> Result<Change> {
    Ok(if name.ends_with("norm.weight") { Change::AddOne } else { Change::None })
}

/// The divisors of the rotary frequencies that Llama 3 stretches to a longer context; None for
/// others. Source: Hugging Face's `modeling_rope_utils.py`, `llama3`.
pub(crate) fn rope_divisors(config: &Config) -> Result<Option<Vec<f32>>> {
    let rope = Rope::of(config)?;
    if rope.kind() != Some("llama3") {
        return Ok(None);
    }
    let width = head_width(config)?;
    if width > HEAD_WIDTH_MAX {
        let expected = format!("at most {HEAD_WIDTH_MAX}");
        return Err(config.invalid("head_dim", &expected, &width.to_string()));
    }
    let number = |name: &str, default: f64| rope.number(name).unwrap_or(default) as f32;
    let factor = number("factor", 8.0);
    let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
    let trained = number("original_max_position_embeddings", 8192.0);
    let base = rope.base.unwrap_or(10_000.0) as f32;
    let divisor = |dim: u32| {
        let frequency = 1.0 / base.powf(dim as f32 / width as f32);
        let wavelength = 1.0 / frequency * std::f32::consts::TAU;
        if wavelength < trained / high {
            1.0
        } else if wavelength > trained / low {
            factor
        } else {
            let smooth = (1.0 / wavelength * trained - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    Ok(Some((0..width).step_by(2).map(divisor).collect()))
}
