//! Encoders of the BERT kind.

use bodkin_gguf::Value;
use serde_json::{Value as Json, json};

use super::definition::{Family, Names, Vocabulary, unchanged};
use super::keys::Keys;
use crate::change::Change;
use crate::config::Config;
use crate::error::Result;

const GLOBALS: Names = &[
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("emb_ln", "token_embd_norm"),
];

pub(super) const BERT: Family = Family {
    classes: &["BertModel", "BertForMaskedLM"],
    architecture: "bert",
    layers: "encoder.layer.",
    globals: GLOBALS,
    blocks: &[
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("attention.output.dense", "attn_output"),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("output.dense", "ffn_down"),
        ("output.LayerNorm", "layer_output_norm"),
    ],
    complete,
    keys,
    change: unchanged,
    vocabulary: Vocabulary::Encoder,
};

pub(super) const ROBERTA: Family = Family {
    classes: &["XLMRobertaModel"],
    complete: complete_roberta,
    change: change_roberta,
    ..BERT
};

pub(super) const NOMIC_BERT: Family = Family {
    classes: &["NomicBertModel"],
    architecture: "nomic-bert",
    layers: "encoder.layers.",
    blocks: &[
        ("attn.Wqkv", "attn_qkv"),
        ("attn.out_proj", "attn_output"),
        ("norm1", "attn_output_norm"),
        ("norm2", "layer_output_norm"),
        ("mlp.fc11", "ffn_up"),
        ("mlp.fc12", "ffn_gate"),
        ("mlp.fc2", "ffn_down"),
    ],
    complete: complete_nomic,
    ..BERT
};

/// What this architecture means is fixed, so a configuration that says otherwise is refused. All
/// kinds of GELU are computed as one.
fn complete(config: &mut Config) -> Result<()> {
    let gelu = ["gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"];
    config.expect("hidden_act", &gelu.map(Json::from))?;
    config.expect("position_embedding_type", &["absolute".into()])?;
    config.expect("is_decoder", &[false.into()])?;
    config.set_defaults(&[("layer_norm_eps", json!(1e-12)), ("type_vocab_size", json!(2))]);
    Ok(())
}

/// The rows of the position embeddings that stand for padding and before it.
fn padding_rows(config: &Config) -> Result<u32> {
    Ok(config.u32(&["pad_token_id"])?.map_or(0, |pad| pad.saturating_add(1)))
}

fn complete_roberta(config: &mut Config) -> Result<()> {
    complete(config)?;
    config.set_defaults(&[("pad_token_id", json!(1))]);
    let positions = config.need_count(&["max_position_embeddings"])?;
    let Some(positions) = positions.checked_sub(padding_rows(config)?) else {
        let expected = "more positions than the id of padding";
        return Err(config.invalid("max_position_embeddings", expected, &positions.to_string()));
    };
    config.set("max_position_embeddings", positions);
    Ok(())
}

/// What this architecture means is fixed, so a configuration that says otherwise is refused.
fn complete_nomic(config: &mut Config) -> Result<()> {
    for (name, expected) in [
        ("activation_function", json!("swiglu")),
        ("causal", json!(false)),
        ("qkv_proj_bias", json!(false)),
        ("mlp_fc1_bias", json!(false)),
        ("mlp_fc2_bias", json!(false)),
        ("prenorm", json!(false)),
        ("rotary_emb_fraction", json!(1.0)),
        ("rotary_emb_interleaved", json!(false)),
    ] {
        config.expect(name, &[expected])?;
    }
    // Version 1 and 1.5 name the length of their scaled context, but were trained for this one.
    if config.need_count(&["n_positions"])? == 8192
        && config.u32(&["max_trained_positions"])?.unwrap_or(2048) == 2048
    {
        config.set("n_positions", 2048);
    }
    config.set_defaults(&[("rotary_emb_base", json!(10_000.0)), ("type_vocab_size", json!(2))]);
    config.set_defaults(&[("layer_norm_epsilon", json!(1e-12))]);
    Ok(())
}

fn keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    keys.standard(config)?;
    keys.set("attention.causal", Value::Bool(false));
    keys.pooling();
    Ok(())
}

fn change_roberta(config: &Config, name: &str, _: &[u64]) -> Result<Change> {
    Ok(match name {
        "position_embd.weight" => Change::WithoutRows(u64::from(padding_rows(config)?)),
        _ => Change::None,
    })
}
