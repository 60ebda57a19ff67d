//! Mamba 2, whose layers have a state and no attention.

use bodkin_gguf::Value;

use super::definition::{Family, Vocabulary};
use super::keys::{Keys, LAYERS};
use crate::change::Change;
use crate::config::Config;
use crate::error::Result;

/// There is no context length; this one is llama.cpp's.
const CONTEXT_LENGTH: u32 = 1 << 20;
const PADDED_VOCABULARY: u32 = 16;
const WIDTH: &[&str] = &["hidden_size", "d_model"];
const INNER: &[&str] = &["intermediate_size", "d_inner"];

pub(super) const MAMBA2: Family = Family {
    classes: &["Mamba2ForCausalLM"],
    architecture: "mamba2",
    layers: "backbone.layers.",
    globals: &[
        ("backbone.embeddings", "token_embd"),
        ("backbone.embedding", "token_embd"),
        ("backbone.norm_f", "output_norm"),
        ("lm_head", "output"),
    ],
    blocks: &[
        ("norm", "attn_norm"),
        ("mixer.in_proj", "ssm_in"),
        ("mixer.conv1d", "ssm_conv1d"),
        ("mixer.dt_proj", "ssm_dt"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.D", "ssm_d"),
        ("mixer.norm", "ssm_norm"),
        ("mixer.out_proj", "ssm_out"),
    ],
    complete,
    keys,
    change,
    vocabulary: Vocabulary::Padded(PADDED_VOCABULARY),
};

fn complete(config: &mut Config) -> Result<()> {
    if config.u32(INNER)?.is_none() {
        let expand = config.u32(&["expand"])?.unwrap_or(2);
        let width = config.need_count(WIDTH)?;
        let Some(inner) = width.checked_mul(expand) else {
            return Err(config.invalid("expand", "a small factor", &expand.to_string()));
        };
        config.set("intermediate_size", inner);
    }
    Ok(())
}

fn groups(config: &Config) -> Result<u32> {
    Ok(config.u32(&["n_groups"])?.unwrap_or(1).max(1))
}

fn keys(config: &Config, keys: &mut Keys<'_>) -> Result<()> {
    let inner = config.need_count(INNER)?;
    let head_width = config.u32(&["head_dim"])?.unwrap_or(64).max(1);
    keys.u32("context_length", CONTEXT_LENGTH);
    keys.u32("embedding_length", config.need_count(WIDTH)?);
    keys.u32("feed_forward_length", 0);
    keys.u32("attention.head_count", 0);
    keys.u32("block_count", config.need_count(LAYERS)?);
    keys.u32("ssm.conv_kernel", config.u32(&["conv_kernel", "d_conv"])?.unwrap_or(4));
    keys.u32("ssm.inner_size", inner);
    keys.u32("ssm.state_size", config.u32(&["state_size", "d_state"])?.unwrap_or(128));
    keys.u32("ssm.time_step_rank", inner / head_width);
    keys.u32("ssm.group_count", groups(config)?);
    let epsilon = config.f64(&["layer_norm_epsilon", "rms_norm_eps"])?.unwrap_or(1e-5);
    keys.set("attention.layer_norm_rms_epsilon", Value::F32(epsilon as f32));
    keys.file_type();
    Ok(())
}

fn change(config: &Config, name: &str, shape: &[u64]) -> Result<Change> {
    let elements = shape.iter().product::<u64>();
    let part = name.splitn(3, '.').nth(2).unwrap_or(name);
    Ok(match part {
        "ssm_conv1d.weight" if shape.len() == 3 && shape[1] == 1 => {
            Change::Shape(vec![shape[0], shape[2]])
        }
        "ssm_a" => Change::NegativeExp(vec![elements, 1]),
        "ssm_d" => Change::Shape(vec![elements, 1]),
        "ssm_norm.weight" => {
            let groups = u64::from(groups(config)?);
            if !elements.is_multiple_of(groups) {
                let found = format!("{groups} for {elements} elements of {name}");
                return Err(config.invalid("n_groups", "a divisor", &found));
            }
            Change::Shape(vec![groups, elements / groups])
        }
        _ => Change::None,
    })
}
