//! What files of Gemma 3n, Gemma 4, EmbeddingGemma and ModernBERT may say beside the tiny models,
//! and errors about what they may not.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Format, Tensor, Value};
use bodkin_model::{Act, Op, Plan, plan};
use rules::with;

/// Checks that no plan can be made, for a reason that names the key and what was found.
#[track_caller]
fn assert_refused(name: &str, key: &str, value: Value, found: &str) {
    let (metadata, tensors) = rules::parts(name, &[(key, value)]);
    let text = plan(&metadata, &tensors).unwrap_err().to_string();
    assert!(text.contains(key) && text.contains(found), "`{text}` names neither {key} nor {found}");
}

/// The slot of each attention, and whether it stores keys and values there.
fn slots(plan: &Plan) -> Vec<(usize, bool)> {
    let slot = |op: &Op| match op {
        Op::Attention { kv, slot, .. } => Some((slot.0, kv.is_some())),
        _ => None,
    };
    plan.ops.iter().filter_map(slot).collect()
}

#[test]
fn the_last_layers_attend_to_the_last_cache_of_their_kind() {
    // Two sliding-window layers and a global one, twice; the last three share.
    let plan = with("gemma4-e2b", &[]);
    let own = [(0, true), (1, true), (2, true)];
    assert_eq!(slots(&plan), [&own[..], &[(1, false), (1, false), (2, false)]].concat());
    assert_eq!(plan.slots.len(), 3, "memory is taken for what is stored");
    assert_eq!(plan.split_before_layer(3), None, "a split would need the cache on both sides");
    let plan = with("gemma3n", &[("attention.shared_kv_layers", Value::U32(0))]);
    assert_eq!(slots(&plan)[20..], [(20, true), (21, true)]);
    let plan = with("gemma3n", &[]);
    assert_eq!(slots(&plan)[20..], [(18, false), (19, false)]);
}

#[test]
fn a_layer_needs_a_cache_of_its_kind() {
    for shared in [4, 6, 7] {
        let key = "attention.shared_kv_layers";
        assert_refused("gemma4-e2b", key, Value::U32(shared), "layer");
    }
}

#[test]
fn gates_are_sparse_where_the_file_says() {
    let cutoffs = |plan: &Plan| -> Vec<f32> {
        let deviations = |op: &Op| match op {
            Op::Cutoff { deviations, .. } => Some(*deviations),
            _ => None,
        };
        plan.ops.iter().filter_map(deviations).collect()
    };
    assert_eq!(cutoffs(&with("gemma3n", &[])).len(), 10);
    let mut scales = vec![f32::NEG_INFINITY; 22];
    scales[3] = 0.5;
    let array = |scales: Vec<f32>| Value::Array(Array::F32(scales));
    let key = "activation_sparsity_scale";
    assert_eq!(cutoffs(&with("gemma3n", &[(key, array(scales.clone()))])), [0.5]);
    scales[3] = f32::NAN;
    assert_refused("gemma3n", key, array(scales), "NaN");
    assert_refused("gemma3n", key, array(vec![1.0; 3]), "found 3");
}

#[test]
fn unknown_settings_are_refused() {
    let text = |text: &str| Value::String(text.as_bytes().into());
    assert_refused("gemma3n", "altup.active_idx", Value::U32(1), "found 1");
    assert_refused("gemma3n", "altup.num_inputs", Value::U32(1), "found 1");
    assert_refused("modern-bert", "hidden_activation", text("relu"), "found `relu`");
    assert_refused("modern-bert", "pooling_type", Value::U32(4), "found rank");
    let (mut metadata, tensors) = rules::parts("gemma4", &[]);
    metadata.remove("gemma4.attention.sliding_window_pattern");
    let error = plan(&metadata, &tensors).unwrap_err().to_string();
    assert!(error.contains("sliding_window_pattern") && error.contains("missing"), "{error}");
}

#[test]
fn encoders_look_to_both_sides() {
    let windows = |plan: &Plan| -> Vec<Option<usize>> {
        let window = |op: &Op| match op {
            Op::Attention { attention, .. } => {
                assert!(!attention.causal);
                Some(attention.window)
            }
            _ => None,
        };
        plan.ops.iter().filter_map(window).collect()
    };
    let plan = with("modern-bert", &[]);
    assert_eq!(windows(&plan), [None, Some(24), Some(24), None]);
    assert_eq!(plan.windows(), [None], "no page is dropped before the step ends");
    let silu = Value::String((*b"silu").into());
    let plan = with("modern-bert", &[("hidden_activation", silu)]);
    assert!(plan.ops.iter().any(|op| matches!(op, Op::Glu { act: Act::Silu, .. })));
    let plan = with("gemma-embedding", &[]);
    assert_eq!(windows(&plan), [vec![Some(24); 5], vec![None], vec![Some(24)]].concat());
}

#[test]
fn pooled_states_may_be_projected() {
    let (metadata, mut tensors) = rules::parts("gemma-embedding", &[]);
    for (name, shape) in [("dense_2.weight", vec![64, 256]), ("dense_3.weight", vec![256, 48])] {
        let bytes = 4 * shape.iter().product::<u64>();
        let (name, format) = (name.to_owned(), Format::F32);
        tensors.push(Tensor { name, shape, format, offset: 0, bytes, shard: 0 });
    }
    let plan = plan(&metadata, &tensors).unwrap();
    rules::check(&plan);
    assert_eq!(plan.output_width(), 48);
    let names: Vec<&str> = plan.ops.iter().rev().take(3).map(Op::name).collect();
    assert_eq!(names, ["pool", "linear", "linear"]);
}

#[test]
fn layers_without_keys_of_their_own_may_have_one_tensor_for_all() {
    let (metadata, mut tensors) = rules::parts("gemma3n", &[]);
    let rows = |part: &str| {
        let name = format!("blk.20.attn_{part}.weight");
        tensors.iter().find(|tensor| tensor.name == name).unwrap().shape[1]
    };
    let all = rows("q") + rows("k") + rows("v");
    tensors.retain(|t| !["blk.20.attn_k.weight", "blk.20.attn_v.weight"].contains(&&*t.name));
    let fused = tensors.iter_mut().find(|t| t.name == "blk.20.attn_q.weight").unwrap();
    (fused.name, fused.shape[1]) = ("blk.20.attn_qkv.weight".to_owned(), all);
    let fused = bodkin_model::plan(&metadata, &tensors).unwrap();
    rules::check(&fused);
    let split = rules::with("gemma3n", &[]);
    assert_eq!((fused.slots.len(), fused.ops.len()), (split.slots.len(), split.ops.len() + 1));
}
