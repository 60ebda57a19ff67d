//! The architectures: one file each, and the table of their names.

use bodkin_gguf::{Metadata, Tensor};

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::nearest::{Build, describe};
use crate::op::{Attention, Entries, Gating, Routing, Temperature};
use crate::plan::Plan;
use crate::pooling::Pooling;
use crate::rope::{Rope, RopeStyle};

/// Declares the modules and the table from `general.architecture` to their build functions.
macro_rules! architectures {
    ($($module:ident: $($name:literal),+;)+) => {
        $(mod $module;)+

        const TABLE: &[(&str, Build)] = &[$($(($name, $module::build),)+)+];
    };
}

architectures! {
    afmoe: "afmoe";
    apertus: "apertus";
    bert: "bert", "nomic-bert", "nomic-bert-moe";
    bitnet: "bitnet";
    cohere: "cohere2", "cohere2moe";
    command_r: "command-r";
    deepseek2: "deepseek2", "deepseek32", "glm-dsa", "mistral4";
    deepseek4: "deepseek4";
    exaone: "exaone4", "exaone-moe";
    falcon_h1: "falcon-h1";
    gemma: "gemma", "gemma2", "gemma3", "gemma-embedding";
    gemma3n: "gemma3n";
    gemma4: "gemma4";
    glm: "glm4", "glm4moe";
    gpt_oss: "gpt-oss";
    granite: "granite", "granitehybrid", "granitemoe";
    hunyuan: "hunyuan-dense", "hunyuan-moe";
    jamba: "jamba";
    kimi_linear: "kimi-linear";
    laguna: "laguna";
    lfm2: "lfm2", "lfm2moe";
    llama: "llama", "ernie4_5", "ernie4_5-moe";
    llama4: "llama4";
    mamba2: "mamba2";
    mellum: "mellum";
    minimax: "minimax-m2", "dots1", "bailingmoe2", "hy_v3";
    mistral: "mistral3";
    modern_bert: "modern-bert";
    nemotron: "nemotron_h", "nemotron_h_moe";
    olmo2: "olmo2";
    olmoe: "olmoe";
    phi: "phi3";
    qwen: "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe";
    qwen35: "qwen35", "qwen35moe", "qwen3next";
    seed_oss: "seed_oss";
    smollm3: "smollm3";
    stablelm: "stablelm";
    starcoder2: "starcoder2";
}

/// The names of all architectures that [`plan`] knows.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|(name, _)| *name)
}

/// The plan of a model, from its metadata and its tensors' names, shapes and formats, for sequences
/// up to the model's context length.
pub fn plan(metadata: &Metadata, tensors: &[Tensor]) -> Result<Plan> {
    build(&HyperParameters::new(metadata)?, tensors)
}

/// As [`plan`], for sequences of up to `context` tokens: LongRoPE has other factors if none is
/// longer than the original context length.
pub fn plan_for(metadata: &Metadata, tensors: &[Tensor], context: usize) -> Result<Plan> {
    build(&HyperParameters::new(metadata)?.for_context(context), tensors)
}

/// As [`plan`], for embeddings of texts of up to `context` tokens, pooled as the metadata says if
/// not otherwise. The plan of a decoder ends with its normalised hidden states, pooled, instead of
/// the output head.
pub fn embedding_plan(
    metadata: &Metadata,
    tensors: &[Tensor],
    context: Option<usize>,
    pooling: Option<Pooling>,
) -> Result<Plan> {
    let mut keys = HyperParameters::new(metadata)?.with_pooling(pooling);
    if let Some(context) = context {
        keys = keys.for_context(context);
    }
    let plan = build(&keys, tensors)?;
    if plan.is_encoder() {
        return Ok(plan);
    }
    match keys.pooling()? {
        Pooling::Rank => {
            let problem = "expected mean, cls or last for a decoder, found rank";
            Err(keys.error("pooling_type", problem))
        }
        pooling => Ok(plan.pooled(pooling.kind())),
    }
}

fn build(keys: &HyperParameters<'_>, tensors: &[Tensor]) -> Result<Plan> {
    let found = keys.architecture();
    if found == "clip" {
        return Err(Error::Projector);
    }
    let Some((_, build)) = TABLE.iter().find(|(name, _)| *name == found) else {
        let nearest = describe(keys.metadata(), tensors, TABLE)?;
        return Err(Error::UnknownArchitecture { found: found.to_owned(), nearest });
    };
    let mut builder = Builder::new(keys, tensors)?;
    let output = build(keys, &mut builder)?;
    refuse_more_blocks(keys, tensors)?;
    builder.finish(output)
}

/// Refuses a file with tensors of more blocks than its metadata has: a model without its last
/// layers runs, and answers with nonsense.
fn refuse_more_blocks(keys: &HyperParameters<'_>, tensors: &[Tensor]) -> Result<()> {
    let block = |tensor: &Tensor| -> Option<usize> {
        tensor.name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
    };
    let (last, blocks) = (tensors.iter().filter_map(block).max(), keys.size("block_count")?);
    match last {
        Some(last) if last >= blocks => {
            let problem = format!("the tensors have a block {last}, found {blocks} blocks");
            Err(keys.error("block_count", problem))
        }
        _ => Ok(()),
    }
}

/// The attention of every layer of a model without recurrent layers.
fn attention_layers(m: &HyperParameters<'_>) -> Result<Vec<Attention>> {
    let layers = m.layers()?;
    // `sizes` rejects zeros.
    m.sizes("attention.head_count", layers)?;
    m.sizes("attention.head_count_kv", layers)?;
    Ok(hybrid_attention_layers(m, layers)?.into_iter().flatten().collect())
}

/// The attention of every layer; none for the layers without KV heads, the recurrent layers of a
/// hybrid.
fn hybrid_attention_layers(
    m: &HyperParameters<'_>,
    layers: usize,
) -> Result<Vec<Option<Attention>>> {
    let width = m.size("embedding_length")?;
    let heads = m
        .counts("attention.head_count", layers)?
        .ok_or_else(|| m.error("attention.head_count", "missing"))?;
    let kv_heads = m.counts("attention.head_count_kv", layers)?.unwrap_or_else(|| heads.clone());
    let first = heads.iter().copied().find(|&heads| heads > 0).unwrap_or(width);
    let key_dim = m.size_or("attention.key_length", width / first)?;
    if key_dim == 0 {
        let problem = format!("a width of {width} leaves nothing to each of {first} heads");
        return Err(m.error("attention.head_count", problem));
    }
    let value_dim = m.size_or("attention.value_length", key_dim)?;
    let scale = 1.0 / (key_dim as f32).sqrt();
    let layer = |(heads, kv_heads): (usize, usize)| {
        if kv_heads == 0 {
            return Ok(None);
        }
        if heads == 0 || heads % kv_heads != 0 {
            let problem = format!("{kv_heads} does not divide the {heads} query heads");
            return Err(m.error("attention.head_count_kv", problem));
        }
        Ok(Some(Attention {
            heads,
            kv_heads,
            key_dim,
            value_dim,
            scale,
            temperature: None,
            softcap: None,
            window: None,
            chunked: false,
            causal: true,
            sinks: None,
            entries: Entries::Tokens,
        }))
    };
    heads.into_iter().zip(kv_heads).map(layer).collect()
}

/// The rotary embedding of heads of `head_dim`, with the frequency factors of the file: Llama 3's,
/// or LongRoPE's short or long ones.
fn rope(
    m: &HyperParameters<'_>,
    g: &mut Builder<'_>,
    style: RopeStyle,
    head_dim: usize,
) -> Result<Rope> {
    let rope = m.rope(style, head_dim)?;
    let is_long = m.context()? > m.original_context()?;
    let longrope = if is_long { "rope_factors_long" } else { "rope_factors_short" };
    let name = if g.has("rope_freqs") { "rope_freqs" } else { longrope };
    Ok(Rope { factors: g.vector(name, rope.dims / 2)?, ..rope })
}

/// The temperature of attention by position, if the file has one, which begins to grow after
/// `length` tokens.
fn temperature(m: &HyperParameters<'_>, length: usize) -> Result<Option<Temperature>> {
    let growth = m.f32("attention.temperature_scale")?.filter(|&growth| growth != 0.0);
    Ok(growth.map(|growth| Temperature { growth, length: length as u32, offset: 0 }))
}

/// The hidden width of every layer's feed-forward network. Optional for models with experts: then
/// the width is zero.
fn hidden_sizes(m: &HyperParameters<'_>, has_experts: bool) -> Result<Vec<usize>> {
    let (name, layers) = ("feed_forward_length", m.layers()?);
    match m.sizes(name, layers)? {
        Some(sizes) => Ok(sizes),
        None if has_experts => Ok(vec![0; layers]),
        None => Err(m.error(name, "missing")),
    }
}

/// The routing of each layer; empty if the model has no experts. `gating` and `normalize` are the
/// defaults of the architecture.
fn routings(
    m: &HyperParameters<'_>,
    g: &Builder<'_>,
    gating: Gating,
    normalize: bool,
) -> Result<Vec<Routing>> {
    if !m.has_experts()? && !g.has_experts() {
        return Ok(Vec::new());
    }
    (0..m.layers()?).map(|layer| m.routing(layer, gating, normalize)).collect()
}
