//! Files of Ollama's own converter: other tensor names, missing or renamed keys, tensors of vision
//! encoders. A file is changed only if its content identifies that converter.

use bodkin_gguf::{Array, File, Format, Metadata, Tensor, Value};

use crate::error::{Error, Result};

/// Converts a file of Ollama's converter, and leaves others unchanged.
pub(super) fn convert(file: &mut File) -> Result<()> {
    match file.metadata().str("general.architecture")? {
        Some("gptoss") => gpt_oss(file),
        Some("gemma3") => {
            gemma3(file);
            Ok(())
        }
        Some("llama") => llama3(file),
        Some("nemotron_h_moe") => nemotron(file),
        _ => Ok(()),
    }
}

fn text(value: &str) -> Value {
    Value::String(value.as_bytes().into())
}

fn add_missing(metadata: &mut Metadata, key: &str, value: Value) {
    if metadata.get(key).is_none() {
        metadata.insert(key, value);
    }
}

/// GPT-OSS with other names of keys and tensors.
fn gpt_oss(file: &mut File) -> Result<()> {
    rename_keys(file.metadata_mut(), "gptoss.", "gpt-oss.");
    file.rename_tensors(|name| {
        let name = name.replace(".attn_out.", ".attn_output.");
        let name = name.replace(".ffn_norm.", ".post_attention_norm.");
        Some(if name.ends_with(".attn_sinks") { format!("{name}.weight") } else { name })
    })?;
    split_gate_up(file)?;
    widen_biases(file)?;
    let hidden = file.tensor("blk.0.ffn_gate_exps.weight").and_then(|t| t.shape.get(1).copied());
    let metadata = file.metadata_mut();
    metadata.insert("general.architecture", text("gpt-oss"));
    metadata.insert("tokenizer.ggml.pre", text("gpt-4o"));
    add_missing(metadata, "gpt-oss.rope.scaling.type", text("yarn"));
    if let Some(hidden) = hidden {
        add_missing(metadata, "gpt-oss.expert_feed_forward_length", Value::U64(hidden));
    }
    Ok(())
}

/// Replaces a prefix of keys, in place.
fn rename_keys(metadata: &mut Metadata, from: &str, to: &str) {
    let mut renamed = Metadata::new();
    for (key, value) in metadata.iter() {
        let key = key.strip_prefix(from).map_or(key.to_owned(), |rest| format!("{to}{rest}"));
        renamed.insert(key, value.clone());
    }
    *metadata = renamed;
}

/// Splits experts' tensors whose rows alternate between gate and up.
fn split_gate_up(file: &mut File) -> Result<()> {
    let is_fused = |name: &str| name.contains(".ffn_gate_up_exps.");
    let all = file.tensors().iter();
    let fused: Vec<Tensor> = all.filter(|tensor| is_fused(&tensor.name)).cloned().collect();
    file.retain_tensors(|tensor| !is_fused(&tensor.name));
    for tensor in fused {
        // Elements alternate in a bias, rows in a matrix.
        let is_bias = tensor.name.ends_with(".bias");
        let dim = if is_bias { 0 } else { 1 };
        let elements = if is_bias { 1 } else { tensor.cols() };
        let (Some(bytes), Some(&rows)) = (tensor.format.row_bytes(elements), tensor.shape.get(dim))
        else {
            let Tensor { name, shape, .. } = &tensor;
            let what =
                format!("tensor `{name}` of shape {shape:?} instead of rows of gates and ups");
            return Err(Error::Unsupported(what));
        };
        let mut shape = tensor.shape.clone();
        shape[dim] = rows / 2;
        for (part, first) in [("_gate_exps", 0), ("_up_exps", 1)] {
            let (name, tensor) = (tensor.name.replace("_gate_up_exps", part), tensor.clone());
            file.add_tensor(&name, tensor.format, &shape, move |file| {
                let rows = file.data(&tensor).chunks_exact(bytes);
                let rows = rows.skip(first).step_by(2).collect::<Vec<_>>().concat();
                file.release(&tensor);
                rows
            })?;
        }
    }
    Ok(())
}

/// Converts BF16 biases of experts to F32.
fn widen_biases(file: &mut File) -> Result<()> {
    let is_narrow = |t: &Tensor| t.format == Format::BF16 && t.name.ends_with("_exps.bias");
    let narrow: Vec<Tensor> = file.tensors().iter().filter(|t| is_narrow(t)).cloned().collect();
    file.retain_tensors(|tensor| !is_narrow(tensor));
    for tensor in narrow {
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        file.add_tensor(&name, Format::F32, &shape, move |file| {
            let mut values = vec![0.0; tensor.elements() as usize];
            tensor.format.dequantize(file.data(&tensor), &mut values);
            values.into_iter().flat_map(f32::to_le_bytes).collect()
        })?;
    }
    Ok(())
}

/// Gemma 3 with renamed keys for the RoPE bases, missing keys, and a vision encoder.
fn gemma3(file: &mut File) {
    let is_vision = |name: &str| name.starts_with("v.") || name.starts_with("mm.");
    let bases = [("global.freq_base", "freq_base", 1e6), ("local.freq_base", "freq_base_swa", 1e4)];
    let has_old_key =
        bases.iter().any(|(old, ..)| file.metadata().get(&format!("gemma3.rope.{old}")).is_some());
    if !has_old_key && !file.tensors().iter().any(|t| is_vision(&t.name)) {
        return;
    }
    file.retain_tensors(|tensor| !is_vision(&tensor.name));
    let rows = file.tensor("token_embd.weight").map(|tensor| tensor.rows());
    let metadata = file.metadata_mut();
    for (old, new, default) in bases {
        let old = metadata.remove(&format!("gemma3.rope.{old}"));
        let value = old.unwrap_or(Value::F32(default));
        add_missing(metadata, &format!("gemma3.rope.{new}"), value);
    }
    let eps = "gemma3.attention.layer_norm_rms_epsilon";
    add_missing(metadata, eps, Value::F32(1e-6));
    let is_long = metadata.u32("gemma3.context_length").ok().flatten() >= Some(131_072);
    if is_long && metadata.get("gemma3.rope.scaling.factor").is_none() {
        add_missing(metadata, "gemma3.rope.scaling.type", text("linear"));
        metadata.insert("gemma3.rope.scaling.factor", Value::F32(8.0));
    }
    for key in ["tokens", "scores", "token_type"] {
        truncate(metadata, &format!("tokenizer.ggml.{key}"), rows.unwrap_or(usize::MAX));
    }
}

/// Truncates an array of token entries to the rows of the embedding table.
fn truncate(metadata: &mut Metadata, key: &str, len: usize) {
    let Some(Value::Array(array)) = metadata.get(key).filter(|_| len > 0) else { return };
    if array.len() <= len {
        return;
    }
    let mut array = array.clone();
    match &mut array {
        Array::String(items) => items.truncate(len),
        Array::F32(items) => items.truncate(len),
        Array::I32(items) => items.truncate(len),
        Array::U32(items) => items.truncate(len),
        _ => return,
    }
    metadata.insert(key, Value::Array(array));
}

/// Llama 3 files without a pre-tokenizer, whose end-of-turn token is also wrong.
fn llama3(file: &mut File) -> Result<()> {
    const END_OF_TURN: u32 = 128_009;
    let metadata = file.metadata_mut();
    let tokens = metadata.strings("tokenizer.ggml.tokens").ok().flatten().unwrap_or_default();
    let is_llama3 = tokens.get(END_OF_TURN as usize).is_some_and(|t| **t == *b"<|eot_id|>");
    let pre = metadata.str("tokenizer.ggml.pre").ok().flatten();
    if !is_llama3 || !matches!(pre, None | Some("default")) {
        return Ok(());
    }
    metadata.insert("tokenizer.ggml.pre", text("llama-bpe"));
    if metadata.u32("tokenizer.ggml.eos_token_id").ok().flatten() == Some(128_001) {
        metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(END_OF_TURN));
    }
    Ok(())
}

/// Nemotron 3 with other names of latent projections, and with multi-token prediction blocks.
fn nemotron(file: &mut File) -> Result<()> {
    file.retain_tensors(|tensor| !tensor.name.starts_with("mtp."));
    file.rename_tensors(|name| {
        let name = name.replace(".ffn_latent_in.", ".ffn_latent_down.");
        Some(name.replace(".ffn_latent_out.", ".ffn_latent_up."))
    })?;
    let mut tensors = file.tensors().iter();
    let latent = tensors.find(|tensor| tensor.name.ends_with(".ffn_latent_down.weight"));
    if let Some(latent) = latent.map(|tensor| tensor.rows() as u64) {
        let key = "nemotron_h_moe.moe_latent_size";
        add_missing(file.metadata_mut(), key, Value::U64(latent));
    }
    Ok(())
}
