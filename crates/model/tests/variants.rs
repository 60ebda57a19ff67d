//! What a family's metadata changes in its plan beyond what the tiny models have.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Metadata, Tensor, Value};
use bodkin_model::{Op, Plan, Rope, RopeScaling, plan, plan_for};

/// The metadata and tensors of a model, with some keys set to other values.
fn parts(name: &str, changes: &[(&str, Value)]) -> (Metadata, Vec<Tensor>) {
    let file = rules::open(name);
    let mut metadata = file.metadata().clone();
    for (key, value) in changes {
        let key = format!("{}.{key}", file.metadata().architecture().unwrap());
        metadata.insert(key, value.clone());
    }
    (metadata, file.tensors().to_vec())
}

fn with(name: &str, changes: &[(&str, Value)]) -> Plan {
    let (metadata, tensors) = parts(name, changes);
    let plan = plan(&metadata, &tensors).unwrap();
    rules::check(&plan);
    plan
}

/// All rotations, of which a layer has two: that of its queries and that of its keys.
fn ropes(plan: &Plan) -> Vec<Rope> {
    let rope = |op: &Op| match op {
        Op::Rope { rope, .. } => Some(*rope),
        _ => None,
    };
    plan.ops.iter().filter_map(rope).collect()
}

fn windows(plan: &Plan) -> Vec<Option<usize>> {
    plan.slots.iter().map(|slot| slot.window).collect()
}

/// What values are multiplied with, in order.
fn factors(plan: &Plan) -> Vec<f32> {
    let factor = |op: &Op| match op {
        Op::Scale { factor, .. } => Some(*factor),
        _ => None,
    };
    plan.ops.iter().filter_map(factor).collect()
}

#[test]
fn the_context_decides_between_long_and_short_factors() {
    let (metadata, tensors) = parts("phi4-mini", &[]);
    let factors = |plan: &Plan| {
        let ropes = ropes(plan);
        assert_eq!(ropes.len(), 6);
        assert!(ropes.iter().all(|rope| *rope == ropes[0]));
        assert!(matches!(ropes[0].scaling, RopeScaling::Long { attn_factor } if attn_factor > 1.1));
        plan.weight(ropes[0].factors.unwrap()).name.clone()
    };
    let found = |context| factors(&plan_for(&metadata, &tensors, context).unwrap());
    assert_eq!(found(256), "rope_factors_short.weight");
    assert_eq!(found(257), "rope_factors_long.weight");
    // The model was made for 1024 tokens.
    assert_eq!(factors(&plan(&metadata, &tensors).unwrap()), "rope_factors_long.weight");
    let plan = plan_for(&metadata, &tensors, 256).unwrap();
    assert_eq!(plan.context_length, 1024, "what the model was made for stays");
}

#[test]
fn long_rope_may_be_named() {
    let kind = ("rope.scaling.type", Value::String((*b"longrope").into()));
    assert_eq!(with("phi4-mini", &[kind]), with("phi4-mini", &[]));
}

#[test]
fn the_window_of_phi_is_not_used() {
    let window = ("attention.sliding_window", Value::U32(31));
    assert_eq!(with("phi3", &[window]), with("phi3", &[]));
}

#[test]
fn granite_may_do_without_rotation() {
    assert_eq!(ropes(&with("granite", &[])).len(), 6);
    let finetuned = |is| [("rope.scaling.finetuned", Value::Bool(is))];
    assert_eq!(ropes(&with("granite", &finetuned(true))).len(), 6);
    assert_eq!(ropes(&with("granite", &finetuned(false))).len(), 0);
}

#[test]
fn the_factors_of_granite_are_where_they_belong() {
    let (embedding, residual, logit) = (3.0, 0.6, 1.0 / 0.5);
    let mut wanted = vec![residual; 8];
    wanted[0] = embedding;
    wanted[7] = logit;
    assert_eq!(factors(&with("granite", &[])), wanted);
    let names = ["embedding_scale", "residual_scale", "logit_scale"];
    let zeros = names.map(|name| (name, Value::F32(0.0)));
    assert_eq!(factors(&with("granite", &zeros)), [], "zero stands for none");
}

#[test]
fn olmo_with_a_window_has_local_layers() {
    let changes = [
        ("attention.sliding_window", Value::U32(31)),
        ("attention.sliding_window_pattern", Value::Array(Array::Bool(vec![true, false, true]))),
        ("rope.scaling.type", Value::String((*b"linear").into())),
        ("rope.scaling.factor", Value::F32(4.0)),
    ];
    let plan = with("olmo2", &changes);
    assert_eq!(windows(&plan), [Some(31), None, Some(31)]);
    let ropes = ropes(&plan);
    for (i, scaling) in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }].iter().enumerate()
    {
        assert_eq!(ropes[2 * i], Rope { scaling: *scaling, ..ropes[0] });
        assert_eq!(ropes[2 * i + 1], ropes[2 * i], "keys as queries");
    }
    assert_eq!(ropes[0].base, 500_000.0, "no base of their own");
    let own = [changes[0].clone(), ("rope.freq_base_swa", Value::F32(10_000.0))];
    let plan = with("olmo2", &own);
    assert_eq!(windows(&plan), [Some(31); 3], "the global layer would be the fourth");
    assert_eq!(self::ropes(&plan)[0].base, 10_000.0);
}

#[test]
fn a_pattern_is_a_period_or_a_value_for_each_layer() {
    let period = [("attention.sliding_window_pattern", Value::U32(3))];
    let plan = with("gemma3", &period);
    let global = windows(&plan).iter().map(Option::is_none).collect::<Vec<_>>();
    let wanted: Vec<bool> = (1..=global.len()).map(|layer| layer % 3 == 0).collect();
    assert_eq!(global, wanted);

    let short = Value::Array(Array::Bool(vec![true]));
    let (metadata, tensors) = parts("gemma3", &[("attention.sliding_window_pattern", short)]);
    let error = bodkin_model::plan(&metadata, &tensors).unwrap_err().to_string();
    assert!(error.contains("sliding_window_pattern") && error.contains("found 1"), "{error}");
}
