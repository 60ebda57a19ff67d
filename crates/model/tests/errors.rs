//! Files that read well but describe no model: errors that name what is wrong, and no panic.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Format, Metadata, Tensor, Value};
use bodkin_model::{Error, Plan, plan};

fn parts(name: &str) -> (Metadata, Vec<Tensor>) {
    let file = rules::open(name);
    (file.metadata().clone(), file.tensors().to_vec())
}

/// The plan of a model with one key set to another value.
fn with(name: &str, key: &str, value: Value) -> Result<Plan, Error> {
    let (mut metadata, tensors) = parts(name);
    metadata.insert(key, value);
    plan(&metadata, &tensors)
}

/// Checks that the error's text names all of `parts`, in one line.
#[track_caller]
fn assert_names(result: Result<Plan, Error>, parts: &[&str]) {
    let text = result.expect_err("no plan can be made of this").to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "`{text}` does not name {parts:?}");
    assert!(!text.contains('\n'), "{text}");
}

/// The metadata and tensors of a model whose architecture has another name.
fn renamed(model: &str, name: &str) -> (Metadata, Vec<Tensor>) {
    let (metadata, tensors) = parts(model);
    let mut renamed = Metadata::new();
    let old = metadata.architecture().unwrap().to_owned();
    for (key, value) in metadata.iter() {
        let rest = key.strip_prefix(&old).filter(|rest| rest.starts_with('.'));
        renamed.insert(rest.map_or(key.to_owned(), |rest| format!("{name}{rest}")), value.clone());
    }
    renamed.insert("general.architecture", Value::String(name.as_bytes().into()));
    (renamed, tensors)
}

#[test]
fn the_true_architecture_is_among_the_nearest() {
    let mut wrong = Vec::new();
    for model in rules::models() {
        let name = parts(&model).0.architecture().unwrap().to_owned();
        let (metadata, tensors) = renamed(&model, "unheard-of");
        let text = plan(&metadata, &tensors).unwrap_err().to_string();
        let named = text.split("the nearest known one").nth(1).unwrap_or_default();
        let named = named.split(", which ").next().unwrap_or_default();
        let named = named.trim_start_matches("s are ").trim_start_matches(" is ");
        let names: Vec<&str> = named.split(", ").flat_map(|names| names.split(" and ")).collect();
        if names.len() > 5 || !names.contains(&name.as_str()) {
            wrong.push(format!("{model}, a {name}: {text}"));
        }
    }
    let row = "`USUAL` in `crates/model/src/nearest.rs` may need a row for it";
    assert!(wrong.is_empty(), "{}\n{row}", wrong.join("\n"));
}

#[test]
fn an_unknown_architecture_is_named_with_the_nearest_known_one() {
    let (mut metadata, mut tensors) = renamed("qwen3moe", "qwen9");
    let whole = ["`qwen9`", "ones are qwen3moe, ", "which read all its tensors"];
    assert_names(plan(&metadata, &tensors), &whole);
    // Keys without a prefix tell it from others, too.
    let (swiss, its) = renamed("apertus", "edelweiss");
    let whole = ["one is apertus, which reads all its tensors and keys"];
    assert_names(plan(&swiss, &its), &whole);
    // Many tensors and keys of a new kind are one line of bounded length.
    let gate = tensors.iter().find(|t| t.name == "blk.0.attn_q.weight").unwrap().clone();
    for i in 0..300 {
        let name = format!("blk.{}.attn_{}.weight", i % 2, "new".repeat(i));
        tensors.push(Tensor { name, ..gate.clone() });
        metadata.insert(format!("qwen9.\n{}", "k".repeat(i)), Value::U32(1));
    }
    let parts = ["`qwen9`", "ones are qwen3moe, ", "blk.*.attn_new", "294 more", "\\n"];
    assert_names(plan(&metadata, &tensors), &parts);
    assert!(plan(&metadata, &tensors).unwrap_err().to_string().len() < 1000);
    let (metadata, mut tensors) = renamed("granite", "basalt");
    tensors.retain(|tensor| !tensor.name.contains("ffn_norm"));
    let parts = ["`basalt`", "blk.0.ffn_norm.weight` is missing"];
    assert_names(plan(&metadata, &tensors), &parts);
    assert_names(plan(&metadata, &[]), &["`basalt`", "known: ", "llama", "gemma3"]);
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"] {
        let (metadata, mut tensors) = parts("llama");
        tensors.retain(|tensor| tensor.name != name);
        assert_names(plan(&metadata, &tensors), &[name, "missing"]);
    }
    assert_names(plan(&parts("llama").0, &[]), &["token_embd.weight"]);
}

#[test]
fn a_head_is_needed() {
    let (metadata, mut tensors) = parts("llama");
    tensors.retain(|tensor| tensor.name != "output.weight");
    plan(&metadata, &tensors).expect("the token table is the head");
}

#[test]
fn a_wrong_shape_is_named_with_both() {
    for model in rules::models() {
        let (metadata, tensors) = parts(&model);
        let weights = plan(&metadata, &tensors).unwrap().weights;
        // Tensors of multi-token prediction, factors of short contexts, and projections of keys
        // that nothing attends to are not read.
        let is_read = |i: &usize| weights.iter().any(|weight| weight.name == tensors[*i].name);
        for i in (0..tensors.len()).filter(is_read) {
            for dim in 0..tensors[i].shape.len() {
                let mut tensors = tensors.clone();
                let name = tensors[i].name.clone();
                tensors[i].shape[dim] += 32;
                match plan(&metadata, &tensors) {
                    // The table's rows are the vocabulary, those of another are types of which
                    // the first is used, and a norm of heads may be as wide as all of them.
                    Ok(plan) => {
                        let passing = ["token_embd.weight", "types.weight", "_norm.weight"];
                        assert!(passing.iter().any(|end| name.ends_with(end)), "{name}");
                        rules::check(&plan);
                    }
                    Err(error) => assert!(error.to_string().contains("shape"), "{error}"),
                }
            }
        }
    }
}

#[test]
fn more_dimensions_are_no_way_around_a_shape() {
    let (metadata, mut tensors) = parts("llama");
    let tensor = tensors.iter_mut().find(|t| t.name == "blk.0.attn_norm.weight").unwrap();
    tensor.shape.push(7);
    assert_names(plan(&metadata, &tensors), &["blk.0.attn_norm.weight", "7"]);
}

#[test]
fn absurd_sizes_are_named() {
    let cases: [(&str, u32, &str); 13] = [
        ("attention.head_count", 0, "found 0"),
        ("attention.head_count_kv", 0, "found 0"),
        ("attention.head_count_kv", 3, "3"),
        ("block_count", 0, "found 0"),
        ("block_count", 1 << 31, "2147483648"),
        ("block_count", 5000, "5000"),
        ("block_count", 4, "blk.3"),
        ("block_count", 2, "a block 2, found 2 blocks"),
        ("embedding_length", 0, "found 0"),
        ("feed_forward_length", 0, "found 0"),
        ("rope.dimension_count", 7, "7"),
        ("rope.dimension_count", 4096, "4096"),
        ("context_length", 0, "found 0"),
    ];
    let (_, tensors) = parts("llama");
    let blocks = tensors.iter().filter(|t| t.name.ends_with("attn_norm.weight")).count();
    assert_eq!(blocks, 3, "the fourth block of the case above is one too many");
    for (key, value, part) in cases {
        let key = format!("llama.{key}");
        assert_names(with("llama", &key, Value::U32(value)), &[part]);
    }
}

#[test]
fn absurd_numbers_are_named() {
    let cases = [
        ("attention.layer_norm_rms_epsilon", f32::NAN),
        ("attention.layer_norm_rms_epsilon", f32::INFINITY),
        ("rope.freq_base", f32::NAN),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", -10_000.0),
        ("rope.scaling.factor", f32::NAN),
        ("rope.scaling.factor", -4.0),
    ];
    for (key, value) in cases {
        let key = format!("llama.{key}");
        assert_names(with("llama-linear", &key, Value::F32(value)), &[key.as_str()]);
    }
}

#[test]
fn unknown_scalings_are_refused() {
    let value = Value::String((*b"mystery").into());
    assert_names(with("llama", "llama.rope.scaling.type", value), &["scaling.type", "mystery"]);
}

#[test]
fn absurd_experts_are_named() {
    // A dense model that claims to have some.
    let claim = with("llama", "llama.expert_count", Value::U32(8));
    assert_names(claim, &["llama.expert_used_count", "layer 0"]);
    let cases: [(&str, u32, &[&str]); 12] = [
        ("expert_count", 0, &["expert_count", "found 0"]),
        ("expert_count", 6, &["expert_group_count", "4", "6 experts"]),
        ("expert_count", 12, &["blk.1.ffn_gate_inp.weight", "[64, 12]"]),
        ("expert_count", u32::MAX, &["expert_count", "4294967295"]),
        ("expert_used_count", 0, &["expert_used_count", "found 0"]),
        ("expert_used_count", 9, &["expert_used_count", "1 to 8", "found 9"]),
        ("expert_used_count", 5, &["expert_group_used_count", "5 experts", "found 2"]),
        ("expert_gating_func", 9, &["expert_gating_func", "found 9"]),
        ("expert_group_count", 3, &["expert_group_count", "3", "8 experts"]),
        ("expert_group_used_count", 5, &["expert_group_used_count", "found 5"]),
        ("rope.dimension_count", 32, &["rope.dimension_count", "found 32"]),
        ("nextn_predict_layers", 3, &["nextn_predict_layers", "found 3"]),
    ];
    for (key, value, parts) in cases {
        let key = format!("deepseek2.{key}");
        assert_names(with("deepseek3-yarn", &key, Value::U32(value)), parts);
    }
    let (mut metadata, tensors) = parts("mixtral");
    metadata.remove("llama.expert_used_count");
    assert_names(plan(&metadata, &tensors), &["expert_used_count", "layer 0"]);
    metadata.remove("llama.expert_count");
    assert_names(plan(&metadata, &tensors), &["llama.expert_count"]);
}

#[test]
fn unknown_poolings_are_named() {
    for kind in [0, 5, 7] {
        let value = Value::U32(kind);
        assert_names(with("bert", "bert.pooling_type", value), &["pooling_type", "found"]);
    }
    let (mut metadata, tensors) = parts("bert");
    metadata.remove("bert.attention.layer_norm_epsilon");
    assert_names(plan(&metadata, &tensors), &["bert.attention.layer_norm_epsilon", "missing"]);
}

#[test]
fn a_key_of_another_type_is_named() {
    let key = "llama.attention.head_count";
    assert_names(with("llama", key, Value::String((*b"four").into())), &[key]);
    let short = Value::Array(Array::U32(vec![4]));
    with("llama", key, short).expect("one value for all layers");
    assert_names(with("llama", key, Value::Array(Array::U32(vec![]))), &["0"]);
}

/// More heads than the width has elements leave nothing to a head; with a fused projection no
/// other shape contradicts that.
#[test]
fn heads_of_no_width_are_refused() {
    let (mut metadata, mut tensors) = parts("llama");
    let width = metadata.u32("llama.embedding_length").unwrap().unwrap();
    for key in ["head_count", "head_count_kv"] {
        metadata.insert(format!("llama.attention.{key}"), Value::U32(2 * width));
    }
    metadata.remove("llama.attention.key_length");
    metadata.remove("llama.rope.dimension_count");
    metadata.insert("llama.attention.value_length", Value::U32(1));
    for tensor in &mut tensors {
        if tensor.name.ends_with("attn_q.weight") {
            tensor.name = tensor.name.replace("attn_q", "attn_qkv");
            tensor.shape = vec![u64::from(width), 2 * u64::from(width)];
        } else if tensor.name.ends_with("attn_output.weight") {
            tensor.shape = vec![2 * u64::from(width), u64::from(width)];
        }
    }
    if let Ok(plan) = plan(&metadata, &tensors) {
        rules::check(&plan);
    }
}

/// Every key with every awkward value: no panic, and what passes is a plan that keeps the rules.
#[test]
fn awkward_metadata_never_panics() {
    let integers = [0u32, 1, 2, 3, 7, 31, 33, 4096, 4097, 1 << 24, 1 << 31, u32::MAX];
    let floats = [0.0, -0.0, -1.0, 1.0, 1e-45, 1e38, f32::NAN, f32::INFINITY];
    let mut values: Vec<Value> = integers.map(Value::U32).to_vec();
    values.extend(floats.map(Value::F32));
    values.extend([Value::I32(-1), Value::U64(u64::MAX), Value::Bool(true)]);
    values.extend([Value::String((*b"yarn").into()), Value::Array(Array::U32(vec![0, 1, 2]))]);
    for model in rules::models() {
        let (metadata, tensors) = parts(&model);
        let prefix = format!("{}.", metadata.architecture().unwrap());
        // Some have keys of their own without a prefix.
        let is_common = |key: &str| key.starts_with("general.") || key.starts_with("tokenizer.");
        let keys = metadata.iter().map(|(key, _)| key).filter(|key| !is_common(key));
        let more = [
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attention.value_length",
            "rope.scaling.attn_factor",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "nextn_predict_layers",
            "expert_count",
            "expert_used_count",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_weights_scale",
        ];
        let more = more.map(|key| format!("{prefix}{key}"));
        for key in keys.chain(more.iter().map(String::as_str)) {
            for value in &values {
                let mut metadata = metadata.clone();
                metadata.insert(key, value.clone());
                if let Ok(plan) = plan(&metadata, &tensors) {
                    rules::check(&plan);
                }
            }
            let mut metadata = metadata.clone();
            metadata.remove(key);
            let _ = plan(&metadata, &tensors);
        }
    }
}

#[test]
fn a_gate_where_the_architecture_has_none_is_an_error() {
    let (metadata, mut tensors) = parts("apertus");
    let ups = tensors.iter().filter(|tensor| tensor.name.ends_with("ffn_up.weight"));
    let gates = ups.map(|up| Tensor { name: up.name.replace("ffn_up", "ffn_gate"), ..up.clone() });
    let gates: Vec<Tensor> = gates.collect();
    tensors.extend(gates);
    assert_names(plan(&metadata, &tensors), &["`ffn_gate`", "xIELU"]);
    let (metadata, mut tensors) = parts("apertus");
    let ups = tensors.iter_mut().filter(|tensor| tensor.name.ends_with("ffn_up.weight"));
    ups.for_each(|up| up.shape[1] *= 2);
    assert_names(plan(&metadata, &tensors), &["a fused `ffn_up`", "xIELU"]);
}

#[test]
fn any_tensor_may_be_missing_or_of_any_format() {
    for model in rules::models() {
        let (metadata, tensors) = parts(&model);
        for i in 0..tensors.len() {
            let mut fewer = tensors.clone();
            fewer.remove(i);
            if let Ok(plan) = plan(&metadata, &fewer) {
                rules::check(&plan);
            }
            let mut other = tensors.clone();
            other[i].format = Format::F16;
            rules::check(&plan(&metadata, &other).unwrap());
        }
    }
}
