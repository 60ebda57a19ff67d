//! Made-up files as older and other converters wrote them, in today's form.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, File, Format, Metadata, Tensor, Value, Writer};
use bodkin_model::{canonical, plan};

/// A tensor to be written: its name, format, shape and data.
type Part = (String, Format, Vec<u64>, Vec<u8>);

fn text(value: &str) -> Value {
    Value::String(value.as_bytes().into())
}

/// Data that differ from byte to byte and from tensor to tensor, and are small as floats.
fn data(name: &str, bytes: u64) -> Vec<u8> {
    let seed = name.bytes().fold(7u64, |hash, byte| hash * 31 % 65_521 + u64::from(byte));
    (0..bytes).map(|i| ((seed + i * i) % 61) as u8).collect()
}

fn part(tensor: &Tensor) -> Part {
    let data = data(&tensor.name, tensor.bytes);
    (tensor.name.clone(), tensor.format, tensor.shape.clone(), data)
}

fn file(metadata: &Metadata, parts: &[Part]) -> File {
    let mut writer = Writer::new("made-up.gguf", metadata).unwrap();
    for (name, format, shape, data) in parts {
        writer.tensor(name, *format, shape, data).unwrap();
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    File::from_bytes("made-up.gguf", bytes).unwrap()
}

/// A tiny model with its tensors in another form.
fn odd(name: &str, change: impl Fn(Part) -> Vec<Part>) -> (Metadata, Vec<Part>) {
    let file = rules::open(name);
    let parts = file.tensors().iter().map(part).flat_map(change).collect();
    (file.metadata().clone(), parts)
}

/// Checks that a file has the tensors of a tiny model, and its plan.
#[track_caller]
fn assert_is(found: &File, name: &str) {
    let wanted = rules::open(name);
    for tensor in wanted.tensors() {
        let found_tensor = found.tensor(&tensor.name).unwrap_or_else(|| panic!("{}", tensor.name));
        assert_eq!((found_tensor.format, &found_tensor.shape), (tensor.format, &tensor.shape));
        let same = found.data(found_tensor) == data(&tensor.name, tensor.bytes);
        assert!(same, "data of {}", tensor.name);
    }
    assert_eq!(found.tensors().len(), wanted.tensors().len());
    let plan_of = |file: &File| plan(file.metadata(), file.tensors()).unwrap();
    rules::check(&plan_of(found));
    // The order of tensors may be another; that of operations may not.
    assert_eq!(plan_of(found).to_string(), plan_of(&wanted).to_string());
}

/// One tensor for each expert of a stack.
fn unstack((name, format, shape, data): Part) -> Vec<Part> {
    if !name.contains("_exps.") {
        return vec![(name, format, shape, data)];
    }
    let experts = shape[2] as usize;
    let bytes = data.len() / experts;
    let one = |e: usize| {
        let name = name.replace("_exps", &format!(".{e}"));
        (name, format, shape[..2].to_vec(), data[e * bytes..][..bytes].to_vec())
    };
    // In no order: the names say which is which.
    (0..experts).rev().map(one).collect()
}

#[test]
fn experts_of_one_tensor_each_are_stacked() {
    let (metadata, parts) = odd("mixtral", unstack);
    assert!(parts.iter().any(|(name, ..)| name == "blk.1.ffn_down.3.weight"));
    assert_is(&canonical(file(&metadata, &parts)).unwrap(), "mixtral");
}

#[test]
fn stacks_with_a_hole_or_of_several_kinds_are_refused() {
    let (metadata, parts) = odd("mixtral", unstack);
    let name = "blk.1.ffn_up.2.weight";
    let refused = |parts: &[Part], wanted: &str| {
        let error = canonical(file(&metadata, parts)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(wanted), "{error}");
    };
    let mut fewer = parts.clone();
    fewer.retain(|(found, ..)| found != name);
    refused(&fewer, "missing");
    let mut other = parts.clone();
    let at = other.iter().position(|(found, ..)| found == name).unwrap();
    other[at].1 = Format::F16;
    other[at].3.truncate(parts[at].3.len() / 2);
    refused(&other, "F16");
    other[at] = parts[at].clone();
    other[at].2 = vec![32, 128];
    refused(&other, "shape");
    other[at] = parts[at].clone();
    other[at].0 = "blk.1.ffn_up.02.weight".to_owned();
    other.push(parts[at].clone());
    let error = canonical(file(&metadata, &other)).unwrap_err().to_string();
    assert!(error.contains("a second tensor"), "{error}");
}

#[test]
fn files_of_today_stay_as_they_are() {
    for name in ["llama", "mixtral", "gemma3", "gpt-oss", "bert"] {
        let (metadata, parts) = odd(name, |part| vec![part]);
        let (before, after) = (file(&metadata, &parts), file(&metadata, &parts));
        let after = canonical(after).unwrap();
        assert_eq!(before.metadata(), after.metadata());
        assert_eq!(before.tensors(), after.tensors());
    }
}

/// Metadata with all keys of one start under another.
fn with_prefix(metadata: &Metadata, from: &str, to: &str) -> Metadata {
    let mut out = Metadata::new();
    for (key, value) in metadata.iter() {
        let rest = key.strip_prefix(from);
        out.insert(rest.map_or(key.to_owned(), |rest| format!("{to}{rest}")), value.clone());
    }
    out
}

fn gptoss(change: impl Fn(Part) -> Vec<Part>) -> File {
    let (metadata, parts) = odd("gpt-oss", |(name, format, shape, data)| {
        let name = name.replace("attn_output", "attn_out");
        let name = name.replace("attn_sinks.weight", "attn_sinks");
        change((name.replace("post_attention_norm", "ffn_norm"), format, shape, data))
    });
    let mut metadata = with_prefix(&metadata, "gpt-oss.", "gptoss.");
    metadata.insert("general.architecture", text("gptoss"));
    metadata.insert("tokenizer.ggml.pre", text("default"));
    metadata.remove("gptoss.rope.scaling.type");
    metadata.remove("gptoss.expert_feed_forward_length");
    metadata.remove("gptoss.feed_forward_length");
    canonical(file(&metadata, &parts)).unwrap()
}

#[test]
fn ollamas_gpt_oss() {
    let found = gptoss(|part| vec![part]);
    assert_is(&found, "gpt-oss");
    let metadata = found.metadata();
    assert_eq!(metadata.architecture().unwrap(), "gpt-oss");
    assert_eq!(metadata.str("tokenizer.ggml.pre").unwrap(), Some("gpt-4o"));
    assert_eq!(metadata.u32("gpt-oss.expert_feed_forward_length").unwrap(), Some(64));
}

#[test]
fn biases_of_experts_in_bf16_are_widened() {
    let found = gptoss(|(name, format, shape, data)| match name.ends_with("_exps.bias") {
        // The upper half of a float.
        true => {
            let upper = data.chunks_exact(4).flat_map(|x| [x[2], x[3]]).collect();
            vec![(name, Format::BF16, shape, upper)]
        }
        false => vec![(name, format, shape, data)],
    });
    let name = "blk.2.ffn_down_exps.bias";
    let tensor = found.tensor(name).unwrap();
    assert_eq!((tensor.format, &tensor.shape[..]), (Format::F32, &[64, 4][..]));
    let mut wanted = data(name, tensor.bytes);
    wanted.chunks_exact_mut(4).for_each(|x| x[..2].fill(0));
    assert_eq!(found.data(tensor), wanted);
}

#[test]
fn gates_and_ups_of_experts_in_turns_are_taken_apart() {
    let found = gptoss(|(name, format, shape, gate)| {
        if name.contains("ffn_up_exps") {
            return Vec::new();
        }
        if !name.contains("ffn_gate_exps") {
            return vec![(name, format, shape, gate)];
        }
        let up = data(&name.replace("_gate_", "_up_"), gate.len() as u64);
        let (dim, bytes) = if name.ends_with("bias") { (0, 4) } else { (1, 4 * 64) };
        let rows = gate.chunks_exact(bytes).zip(up.chunks_exact(bytes));
        let both = rows.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let mut shape = shape;
        shape[dim] *= 2;
        vec![(name.replace("_gate_", "_gate_up_"), format, shape, both)]
    });
    assert_is(&found, "gpt-oss");
}

#[test]
fn ollamas_gemma3() {
    let (mut metadata, mut parts) = odd("gemma3", |part| vec![part]);
    let pictures = ["v.blk.0.attn_q.weight", "mm.mm_input_projection.weight"];
    for name in pictures {
        parts.push((name.to_owned(), Format::F32, vec![8], vec![0; 32]));
    }
    let eps = "gemma3.attention.layer_norm_rms_epsilon";
    let keys = ["gemma3.rope.freq_base", "gemma3.rope.freq_base_swa", eps];
    let wanted = keys.map(|key| metadata.f32(key).unwrap());
    let base = metadata.remove("gemma3.rope.freq_base").unwrap();
    metadata.insert("gemma3.rope.global.freq_base", base);
    metadata.remove("gemma3.rope.freq_base_swa");
    metadata.remove(eps);
    let mut tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap().to_vec();
    let rows = tokens.len();
    tokens.push((*b"<image>").into());
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    let found = canonical(file(&metadata, &parts)).unwrap();
    assert_is(&found, "gemma3");
    let metadata = found.metadata();
    assert_eq!(keys.map(|key| metadata.f32(key).unwrap()), wanted);
    assert_eq!(metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap().len(), rows);
    assert_eq!(metadata.get("gemma3.rope.scaling.factor"), None, "no long context");
}

#[test]
fn a_long_gemma3_is_stretched() {
    let (mut metadata, parts) = odd("gemma3", |part| vec![part]);
    metadata.insert("gemma3.context_length", Value::U32(131_072));
    let factor = |metadata: &Metadata| {
        let found = canonical(file(metadata, &parts)).unwrap();
        found.metadata().f32("gemma3.rope.scaling.factor").unwrap()
    };
    assert_eq!(factor(&metadata), None, "not one of Ollama's");
    metadata.insert("gemma3.rope.local.freq_base", Value::F32(10_000.0));
    assert_eq!(factor(&metadata), Some(8.0));
}

#[test]
fn llama3_without_a_word_on_splitting() {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", text("llama"));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(128_001));
    let mend = |metadata: &Metadata| canonical(file(metadata, &[])).unwrap().metadata().clone();
    assert_eq!(mend(&metadata), metadata, "not Llama 3");
    let mut tokens: Vec<Box<[u8]>> = vec![(*b"x").into(); 128_009];
    tokens.push((*b"<|eot_id|>").into());
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    let mended = mend(&metadata);
    assert_eq!(mended.str("tokenizer.ggml.pre").unwrap(), Some("llama-bpe"));
    assert_eq!(mended.u32("tokenizer.ggml.eos_token_id").unwrap(), Some(128_009));
    metadata.insert("tokenizer.ggml.pre", text("llama-bpe"));
    assert_eq!(mend(&metadata), metadata, "a base model ends with its own token");
}

#[test]
fn ollamas_nemotron() {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", text("nemotron_h_moe"));
    let names = ["blk.1.ffn_latent_in.weight", "blk.1.ffn_latent_out.weight", "mtp.0.weight"];
    let parts = names.map(|name| (name.to_owned(), Format::F32, vec![8, 3], data(name, 96)));
    let found = canonical(file(&metadata, &parts)).unwrap();
    let names: Vec<&str> = found.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["blk.1.ffn_latent_down.weight", "blk.1.ffn_latent_up.weight"]);
    assert_eq!(found.data(&found.tensors()[1]), parts[1].3);
    assert_eq!(found.metadata().u32("nemotron_h_moe.moe_latent_size").unwrap(), Some(3));
}

/// Without any one tensor, and with any one in another shape or format of the same bytes: no panic,
/// and no tensor whose data are not there.
#[test]
fn files_with_one_tensor_wrong_never_panic() {
    let (metadata, experts) = odd("mixtral", unstack);
    let (oss, fused) = odd("gpt-oss", |(name, format, mut shape, data)| {
        if name.contains("_gate_exps") {
            let dim = shape.len() - 2;
            shape[dim] *= 2;
            return vec![(name.replace("_gate_", "_gate_up_"), format, shape, data.repeat(2))];
        }
        vec![(name, format, shape, data)]
    });
    let mut oss = with_prefix(&oss, "gpt-oss.", "gptoss.");
    oss.insert("general.architecture", text("gptoss"));
    for (metadata, parts) in [(metadata, experts), (oss, fused)] {
        for i in 0..parts.len() {
            let changed = |part: Option<Part>| {
                let mut parts = parts.clone();
                parts.splice(i..=i, part);
                let Ok(file) = canonical(file(&metadata, &parts)) else { return };
                for tensor in file.tensors() {
                    assert_eq!(file.data(tensor).len() as u64, tensor.bytes, "{}", tensor.name);
                }
                if let Ok(plan) = plan(file.metadata(), file.tensors()) {
                    rules::check(&plan);
                }
            };
            let (name, format, shape, data) = parts[i].clone();
            let elements = shape.iter().product::<u64>();
            let shapes = [vec![elements], vec![1, elements], vec![elements / 2, 1, 2]];
            changed(None);
            for shape in shapes {
                let name = name.clone();
                changed(Some((name, format, shape, data.clone())));
            }
            changed(Some((name, Format::BF16, vec![2, elements], data)));
        }
    }
}
