//! What a family's metadata changes in its plan beyond what the tiny models have.

#![allow(clippy::unwrap_used)]

mod rules;

use bodkin_gguf::{Array, Tensor, Value};
use bodkin_model::{
    Gating, Op, Plan, PoolKind, Pooling, Rope, RopeScaling, Routing, embedding_plan, plan, plan_for,
};
use rules::with;

/// The scale of the scores in the first layer.
fn scale(plan: &Plan) -> f32 {
    let scale = |op: &Op| match op {
        Op::Attention { attention, .. } => Some(attention.scale),
        _ => None,
    };
    plan.ops.iter().find_map(scale).unwrap()
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
    let (metadata, tensors) = rules::parts("phi4-mini", &[]);
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
    let (metadata, tensors) =
        rules::parts("gemma3", &[("attention.sliding_window_pattern", short)]);
    let error = bodkin_model::plan(&metadata, &tensors).unwrap_err().to_string();
    assert!(error.contains("sliding_window_pattern") && error.contains("found 1"), "{error}");
}

/// The tensors of a model with some of them in another form.
fn changed(name: &str, change: impl FnMut(Tensor) -> Vec<Tensor>) -> Vec<Tensor> {
    rules::parts(name, &[]).1.into_iter().flat_map(change).collect()
}

#[test]
fn latent_attention_is_expanded_where_one_matrix_makes_keys_and_values() {
    let lengths = [("attention.key_length", 32), ("attention.value_length", 16)];
    let lengths = lengths.map(|(key, value)| (key, Value::U32(value)));
    let (mut metadata, _) = rules::parts("deepseek3-yarn", &lengths);
    metadata.remove("deepseek2.attention.key_length_mla");
    metadata.remove("deepseek2.attention.value_length_mla");
    let tensors = changed("deepseek3-yarn", |mut tensor| {
        if tensor.name.ends_with("attn_v_b.weight") {
            return Vec::new();
        }
        if tensor.name.ends_with("attn_k_b.weight") {
            tensor.name = tensor.name.replace("attn_k_b", "attn_kv_b");
            tensor.shape = vec![32, 4 * (16 + 16)];
        }
        vec![tensor]
    });
    let expanded = plan(&metadata, &tensors).unwrap();
    rules::check(&expanded);
    let narrow = with("deepseek3-yarn", &[]);
    for (slot, other) in expanded.slots.iter().zip(&narrow.slots) {
        assert_eq!((slot.kv_heads, slot.key_dim, slot.value_dim), (4, 32, 16));
        assert_eq!((other.kv_heads, other.key_dim, other.value_dim), (1, 32 + 16, 32));
    }
    assert_eq!(ropes(&expanded), ropes(&narrow));
    assert_eq!(scale(&expanded), scale(&narrow));
}

#[test]
fn yarn_without_a_multiplier_grows_what_is_rotated() {
    let (mut metadata, tensors) = rules::parts("deepseek3-yarn", &[]);
    metadata.remove("deepseek2.rope.scaling.yarn_log_multiplier");
    let rope = ropes(&plan(&metadata, &tensors).unwrap())[0];
    assert!((rope.table(None).attention_factor - (1.0 + 0.1 * 4f32.ln())).abs() < 1e-6);
    let rope = ropes(&with("deepseek3-yarn", &[]))[0];
    assert!((rope.table(None).attention_factor - 1.0).abs() < 1e-6, "the scores grow as a whole");
}

#[test]
fn a_multiplier_of_yarn_divides_what_is_rotated() {
    let (ln, half) = (4f32.ln(), Value::F32(0.05));
    let plan = with("mistral4", &[("rope.scaling.yarn_log_multiplier", half)]);
    let rotary = (1.0 + 0.1 * ln) / (1.0 + 0.05 * ln);
    assert!((ropes(&plan)[0].table(None).attention_factor - rotary).abs() < 1e-6);
    let wanted = (1.0 + 0.1 * ln).powi(2) / 32f32.sqrt();
    assert!((scale(&plan) - wanted).abs() < 1e-6, "{} is not {wanted}", scale(&plan));
}

#[test]
fn drafting_blocks_are_left_out() {
    let all = with("deepseek3-yarn", &[]);
    let fewer = with("deepseek3-yarn", &[("nextn_predict_layers", Value::U32(1))]);
    assert_eq!((all.slots.len(), fewer.slots.len()), (3, 2));
}

#[test]
fn deepseek_4_may_count_drafting_blocks_that_the_file_lacks() {
    let whole = with("deepseek4", &[]);
    let (metadata, mut tensors) =
        rules::parts("deepseek4", &[("nextn_predict_layers", Value::U32(1))]);
    assert_eq!(plan(&metadata, &tensors).unwrap(), whole);
    let last = whole.layers() - 1;
    tensors.push(tensor(&format!("blk.{last}.nextn.eh_proj.weight"), &[128, 64]));
    let fewer = plan(&metadata, &tensors).unwrap();
    assert_eq!(fewer.layers(), last);
}

#[test]
fn gate_and_up_of_experts_may_be_one_tensor() {
    let tensors = changed("qwen3moe", |mut tensor| {
        if tensor.name.contains("ffn_gate_exps") {
            tensor.name = tensor.name.replace("ffn_gate_exps", "ffn_gate_up_exps");
            tensor.shape[1] *= 2;
        }
        if tensor.name.contains("ffn_up_exps") { Vec::new() } else { vec![tensor] }
    });
    let fused = plan(&rules::parts("qwen3moe", &[]).0, &tensors).unwrap();
    rules::check(&fused);
    let apart = with("qwen3moe", &[]);
    assert_eq!(fused.cost().flops_per_token, apart.cost().flops_per_token);
    assert_eq!(fused.cost().parameters, apart.cost().parameters);
}

#[test]
fn metadata_decide_how_experts_are_chosen() {
    let routing = |plan: &Plan| *plan.routings().next().unwrap();
    let normalize = |name| routing(&with(name, &[])).normalize;
    assert_eq!(["mixtral", "qwen3moe", "granitemoe"].map(normalize), [true; 3]);
    assert_eq!(["olmoe", "qwen2moe", "gpt-oss"].map(normalize), [false; 3]);
    let found = routing(&with(
        "olmoe",
        &[
            ("expert_weights_norm", Value::Bool(true)),
            ("expert_gating_func", Value::U32(2)),
            ("expert_weights_scale", Value::F32(2.5)),
            ("expert_used_count", Value::Array(Array::U32(vec![5, 2]))),
        ],
    ));
    let (gating, groups, groups_used) = (Gating::Sigmoid, 1, 1);
    let (normalize, scale) = (true, 2.5);
    let wanted = Routing { experts: 8, used: 5, gating, groups, groups_used, normalize, scale };
    assert_eq!(found, wanted);
}

#[test]
fn encoders_pool_as_the_file_says() {
    for (kind, wanted) in [(1, PoolKind::Mean), (2, PoolKind::First), (3, PoolKind::Last)] {
        let plan = with("bert", &[("pooling_type", Value::U32(kind))]);
        assert!(matches!(plan.ops.last(), Some(Op::Pool { kind, .. }) if *kind == wanted));
        assert!(plan.is_encoder() && plan.needs_whole_sequences());
        assert_eq!(plan.max_positions(), 256);
    }
    assert_eq!(
        with("nomic-bert", &[]).max_positions(),
        usize::MAX,
        "a rotation has no last position"
    );
    assert!(!with("llama", &[]).needs_whole_sequences());
}

#[test]
fn a_decoder_pools_what_its_head_would_read() {
    for name in ["llama", "llama3-tied", "gemma2", "granite", "mamba2", "falcon-h1"] {
        let (metadata, tensors) = rules::parts(name, &[]);
        let whole = plan(&metadata, &tensors).unwrap();
        let head = whole.ops.iter().position(|op| matches!(op, Op::Logits { .. })).unwrap();
        let Op::Logits { input: read, weight, .. } = &whole.ops[head] else { unreachable!() };
        let pooled = embedding_plan(&metadata, &tensors, None, None).unwrap();
        rules::check(&pooled);
        // Recurrent state is not stored for every prefix.
        let kind = if whole.states.is_empty() { PoolKind::Sum } else { PoolKind::Mean };
        assert_eq!(pooled.ops.last(), Some(&Op::Pool { input: *read, kind }));
        assert_eq!(pooled.gives_sums(), whole.states.is_empty());
        assert_eq!((pooled.ops.len(), pooled.output_width()), (head + 1, whole.width(*read)));
        assert!(pooled.is_encoder() && pooled.slots == whole.slots);
        let head = whole.weight(*weight);
        let is_tied = head.name == "token_embd.weight";
        assert_eq!(pooled.weights.contains(head), is_tied, "{name}: the head is not loaded");
        let wanted = whole.weights.len() - usize::from(!is_tied);
        assert_eq!(pooled.weights.len(), wanted, "{name}");
    }
    let last = ("pooling_type", Value::U32(3));
    let (metadata, tensors) = rules::parts("qwen3", &[last]);
    let kind =
        |pooling| match embedding_plan(&metadata, &tensors, Some(64), pooling).unwrap().ops.pop() {
            Some(Op::Pool { kind, .. }) => kind,
            other => panic!("{other:?} pools nothing"),
        };
    assert_eq!(kind(None), PoolKind::Last);
    assert_eq!(kind(Some(Pooling::Mean)), PoolKind::Sum);
    assert_eq!(kind(Some(Pooling::Cls)), PoolKind::First);
    let error = embedding_plan(&metadata, &tensors, None, Some(Pooling::Rank)).unwrap_err();
    assert!(error.to_string().contains("found rank"), "{error}");
    assert!(!plan(&metadata, &tensors).unwrap().is_encoder(), "it still makes text");
}

/// A tensor beside those of the file.
fn tensor(name: &str, shape: &[u64]) -> Tensor {
    let bytes = 4 * shape.iter().product::<u64>();
    let format = bodkin_gguf::Format::F32;
    Tensor { name: name.to_owned(), shape: shape.to_vec(), format, offset: 0, bytes, shard: 0 }
}

#[test]
fn a_reranker_scores_before_it_pools() {
    let rank = ("pooling_type", Value::U32(4));
    let (metadata, mut tensors) = rules::parts("bert", &[rank]);
    let error = plan(&metadata, &tensors).unwrap_err();
    assert!(error.to_string().contains("cls.output.weight"), "{error}");
    let width = plan(&rules::parts("bert", &[]).0, &tensors).unwrap().output_width() as u64;
    tensors.push(tensor("cls.output.weight", &[width, 1]));
    assert_eq!(plan(&metadata, &tensors).unwrap().output_width(), 1);
    tensors.extend([tensor("cls.weight", &[width, width]), tensor("cls.bias", &[width])]);
    let scores = plan(&metadata, &tensors).unwrap();
    rules::check(&scores);
    let names: Vec<&str> = scores.ops.iter().rev().take(4).map(Op::name).collect();
    assert_eq!(names, ["pool", "linear", "softcap", "linear"]);
    // The same file makes embeddings if it is asked to.
    let mean = embedding_plan(&metadata, &tensors, None, Some(Pooling::Mean)).unwrap();
    assert_eq!(mean.output_width() as u64, width);
}

/// Llama with another tensor beside its own.
fn with_tensor(model: &str, name: &str, elements: u64) -> Result<Plan, bodkin_model::Error> {
    let (metadata, mut tensors) = rules::parts(model, &[]);
    tensors.push(tensor(name, &[elements]));
    plan(&metadata, &tensors)
}

#[test]
fn a_scale_of_a_weight_is_read_or_refused() {
    let scaled = with_tensor("bitnet", "blk.1.ffn_down.scale", 1).unwrap();
    rules::check(&scaled);
    let text = scaled.to_string();
    assert!(text.contains("blk.1.ffn_down.scale"), "{text}");
    for (model, scale, elements) in [
        ("qwen2", "blk.0.attn_q.scale", 1),
        ("llama", "blk.0.attn_q.scale", 2),
        ("llama", "output.scale", 1),
        ("qwen3moe", "blk.1.ffn_gate_exps.scale", 8),
    ] {
        let error = with_tensor(model, scale, elements).unwrap_err().to_string();
        assert_eq!(error, format!("the scale tensor `{scale}` is not supported"));
    }
    // That of an input, or of a weight that the plan does not read, changes nothing.
    for name in ["blk.0.attn_q.input_scale", "blk.2.other.scale"] {
        assert_eq!(with_tensor("llama", name, 1).unwrap(), with("llama", &[]), "{name}");
    }
}

#[test]
fn what_no_plan_reads_is_named() {
    let (metadata, mut tensors) = rules::parts("qwen35-mtp", &[]);
    let plan = plan(&metadata, &tensors).unwrap();
    let names = |tensors: &[Tensor]| plan.unread(tensors).into_iter().collect::<Vec<_>>();
    assert_eq!(names(&tensors), ["blk.4.*"]);
    tensors.push(tensor("blk.0.attn_q.input_scale", &[1]));
    assert_eq!(names(&tensors), ["blk.0.attn_q.input_scale", "blk.4.*"]);
}

#[test]
fn a_projector_is_no_model() {
    let (mut metadata, tensors) = rules::parts("llama", &[]);
    metadata.insert("general.architecture", Value::String((*b"clip").into()));
    let error = plan(&metadata, &tensors).unwrap_err().to_string();
    assert!(error.starts_with("this is a projector (mmproj)"), "{error}");
}
