//! What follows from the metadata of models with sparse attention, hyper-connections and attention
//! in chunks beyond what the tiny ones have.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Value};
use bodkin_model::{Attention, Entries, Op, Plan, RecurrentState, Temperature};
use rules::{try_with, with};

fn error(name: &str, changes: &[(&str, Value)]) -> String {
    try_with(name, changes).unwrap_err().to_string()
}

fn count(plan: &Plan, name: &str) -> usize {
    plan.ops.iter().filter(|op| op.name() == name).count()
}

fn attention(plan: &Plan) -> Vec<Attention> {
    let attention = |op: &Op| match op {
        Op::Attention { attention, .. } => Some(*attention),
        _ => None,
    };
    plan.ops.iter().filter_map(attention).collect()
}

#[test]
fn layers_without_an_indexer_take_the_selection_before() {
    let types =
        |types: [bool; 3]| ("attention.indexer.types", Value::Array(Array::Bool(types.to_vec())));
    let all = with("glm-dsa", &[]);
    assert_eq!((count(&all, "select"), all.slots.len()), (3, 6));
    let shared = with("glm-dsa", &[types([true, false, false])]);
    assert_eq!((count(&shared, "select"), shared.slots.len()), (1, 4));
    let entries: Vec<Entries> = attention(&shared).iter().map(|a| a.entries).collect();
    assert!(matches!(entries[0], Entries::Selected(_)) && entries == [entries[0]; 3]);
    // As integers, and with the default of files with the context of GLM 5.2.
    let integers = Value::Array(Array::U32(vec![1, 0, 1]));
    let plan = with("glm-dsa", &[("attention.indexer.types", integers)]);
    assert_eq!(count(&plan, "select"), 2);
    let problem = "metadata key `glm-dsa.attention.indexer.types`: expected true for the first \
                   layer, found false";
    assert_eq!(error("glm-dsa", &[types([false, true, true])]), problem);
}

#[test]
fn blocks_of_tokens_are_cached_once() {
    let plan = with("deepseek4", &[]);
    // For each layer with blocks: of the indexer, of the blocks, of the tokens.
    let slots: Vec<_> = plan.slots.iter().map(|s| (s.ratio, s.key_dim, s.value_dim)).collect();
    let (tokens, four) = ((1, 32, 32), [(4, 64, 0), (4, 32, 32), (1, 32, 32)]);
    assert_eq!(slots, [&[tokens], &four[..], &[(128, 32, 32), tokens], &four[..]].concat());
    // The windows have 24 tokens.
    let windows = 4 * 24 * 64;
    assert_eq!(plan.kv_elements(127), windows + 2 * 31 * (64 + 64));
    assert_eq!(plan.kv_elements(128), windows + 2 * 32 * (64 + 64) + 64);
    let states = plan.states.iter().map(RecurrentState::elements).collect::<Vec<_>>();
    assert_eq!(states, [6 * 64, 6 * 32, 3 * 32, 6 * 64, 6 * 32]);
    let iterations = ("hyper_connection.sinkhorn_iterations", Value::U32(1 << 20));
    let problem = "metadata key `deepseek4.hyper_connection.sinkhorn_iterations`: expected at \
                   most 1024, found 1048576";
    assert_eq!(error("deepseek4", &[iterations]), problem);
    let ratios = Value::Array(Array::U32(vec![0, 4, 64, 4]));
    let found = error("deepseek4", &[("attention.compress_ratios", ratios)]);
    assert!(found.contains("blk.2.attn_compressor_ape.weight"), "{found}");
}

#[test]
fn only_layers_without_rotation_have_a_temperature() {
    let temperature = Some(Temperature { growth: 0.1, length: 8192, offset: 1 });
    let layers = |plan: &Plan| -> Vec<_> {
        attention(plan).iter().map(|a| (a.window, a.chunked, a.temperature)).collect()
    };
    let chunked = (Some(8192), true, None);
    let plan = with("llama4", &[]);
    assert_eq!(layers(&plan), [chunked, chunked, chunked, (None, false, temperature)]);
    assert_eq!((count(&plan, "rope"), count(&plan, "expert_sum")), (6, 0));
    assert_eq!(
        layers(&with("llama4", &[("attention.sliding_window", Value::U32(0))])),
        [(None, false, None); 4]
    );
    // Two experts: both are given their own input.
    let two = with("llama4", &[("expert_used_count", Value::U32(2))]);
    assert_eq!(count(&two, "concat"), 2, "the inputs of two layers with experts");
}

#[test]
fn a_temperature_has_a_length() {
    let layers = attention(&with("mistral4", &[]));
    let temperature = Some(Temperature { growth: 0.1, length: 64, offset: 0 });
    assert!(layers.iter().all(|a| a.temperature == temperature));
    let none = with("mistral4", &[("attention.temperature_scale", Value::F32(0.0))]);
    assert!(attention(&none).iter().all(|a| a.temperature.is_none()));
}
