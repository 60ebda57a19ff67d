//! What follows from the metadata and tensors of models with recurrent state beyond what the tiny
//! ones have, what they keep of a sequence, and errors that name what is wrong.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Value};
use bodkin_model::{Op, Plan, RecurrentState, Scan, plan};
use rules::{try_with, with};

fn count(plan: &Plan, name: &str) -> usize {
    plan.ops.iter().filter(|op| op.name() == name).count()
}

#[test]
fn states_by_hand() {
    let scan = Scan { heads: 8, head_dim: 16, groups: 2, state: 32, is_channelwise: false };
    let mamba = with("mamba2", &[]);
    let layer = [RecurrentState::Conv { kernel: 4, width: 256 }, RecurrentState::Scan(scan)];
    assert_eq!(mamba.states, layer.repeat(3));
    assert_eq!(mamba.state_elements(), 3 * (3 * 256 + 8 * 16 * 32));
    assert_eq!((mamba.kv_elements(1000), mamba.windows()), (0, vec![]));

    let lfm = with("lfm2", &[]);
    assert_eq!(lfm.states, [RecurrentState::Conv { kernel: 3, width: 64 }; 3]);
    assert_eq!(lfm.state_elements(), 3 * 2 * 64);
    assert_eq!(lfm.slots.len(), 1, "the layer with key heads");

    let falcon = with("falcon-h1", &[]);
    assert_eq!((falcon.slots.len(), falcon.states.len()), (3, 6), "both in every layer");
    assert_eq!(with("llama", &[]).state_elements(), 0);
}

#[test]
fn key_heads_and_hidden_widths_say_what_a_block_is() {
    let plan = with("nemotron-h", &[]);
    let found = (plan.slots.len(), count(&plan, "scan"), count(&plan, "rope"));
    assert_eq!(found, (1, 2, 0));
    // The fourth block has no mixer's tensors.
    let none = Value::Array(Array::U32(vec![0; 5]));
    let error = try_with("nemotron-h", &[("attention.head_count_kv", none)]).unwrap_err();
    assert_eq!(error.to_string(), "tensor `blk.3.ssm_in.weight` is missing");
}

#[test]
fn blocks_that_draft_are_left_out() {
    let plan = with("nemotron-h", &[("nextn_predict_layers", Value::U32(1))]);
    assert!(plan.weights.iter().any(|w| w.name.starts_with("blk.3.")));
    assert!(!plan.weights.iter().any(|w| w.name.starts_with("blk.4.")));
}

#[test]
fn a_hybrid_granite_rotates_if_it_was_trained_so() {
    let finetuned = |is| [("rope.scaling.finetuned", Value::Bool(is))];
    assert_eq!(count(&with("granitehybrid-dense", &finetuned(true)), "rope"), 2);
    assert_eq!(count(&with("granitehybrid-dense", &finetuned(false)), "rope"), 0);
    // Embeddings, both halves of four blocks, logits.
    assert_eq!(count(&with("granitehybrid-dense", &[]), "scale"), 1 + 2 * 4 + 1);
}

#[test]
fn the_window_of_lfm2_is_that_of_its_attention() {
    let plan = with("lfm2", &[("attention.sliding_window", Value::U32(31))]);
    assert_eq!(plan.windows(), [Some(31)]);
    let ahead = [("attention.causal", Value::Bool(false))];
    let error = try_with("lfm2", &ahead).unwrap_err();
    assert_eq!(error.to_string(), "a lfm2 model with non-causal convolutions is not supported");
}

#[test]
fn a_mixer_may_have_a_norm_or_none() {
    let (metadata, mut tensors) = rules::parts("mamba2", &[]);
    tensors.retain(|tensor| tensor.name != "blk.1.ssm_norm.weight");
    let fewer = plan(&metadata, &tensors).unwrap();
    rules::check(&fewer);
    assert_eq!(count(&fewer, "norm"), count(&with("mamba2", &[]), "norm") - 1);
    let of_groups = |op: &&Op| matches!(op, Op::Norm { groups: 2, .. });
    assert_eq!(fewer.ops.iter().filter(of_groups).count(), 2);
}

#[test]
fn missing_tensors_of_a_mixer_are_named() {
    for name in ["blk.1.ssm_a", "blk.1.ssm_d", "blk.1.ssm_dt.bias", "blk.0.ssm_conv1d.weight"] {
        let (metadata, mut tensors) = rules::parts("mamba2", &[]);
        tensors.retain(|tensor| tensor.name != name);
        let error = plan(&metadata, &tensors).unwrap_err().to_string();
        assert_eq!(error, format!("tensor `{name}` is missing"));
    }
}

#[test]
fn nonsense_is_named() {
    let cases = [
        ("mamba2", "ssm.time_step_rank", 7, "7 heads do not divide the width of 128"),
        ("mamba2", "ssm.time_step_rank", 0, "found 0"),
        ("mamba2", "ssm.inner_size", 0, "found 0"),
        ("mamba2", "ssm.inner_size", u32::MAX, "found 4294967295"),
        ("mamba2", "ssm.group_count", 3, "3 does not divide the 8 heads"),
        ("mamba2", "ssm.state_size", 0, "found 0"),
        ("mamba2", "ssm.conv_kernel", 1, "expected at least 2, found 1"),
        ("lfm2", "shortconv.l_cache", 1, "expected at least 2, found 1"),
        ("lfm2", "attention.head_count_kv", 3, "3 does not divide the 4 query heads"),
        ("falcon-h1", "attention.head_count_kv", 0, "found 0"),
        ("nemotron-h", "nextn_predict_layers", 5, "expected less than 5, found 5"),
    ];
    for (model, key, value, problem) in cases {
        let error = try_with(model, &[(key, Value::U32(value))]).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(problem), "{model}: {error}");
    }
    let short = Value::Array(Array::U32(vec![0, 2]));
    let error = try_with("lfm2", &[("attention.head_count_kv", short)]).unwrap_err().to_string();
    assert!(error.contains("head_count_kv") && error.contains("found 2"), "{error}");
}
