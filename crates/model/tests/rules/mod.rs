//! What holds for every plan, whatever the model: operands come before their use and fit.

use std::path::Path;

use bodkin_gguf::{File, Metadata, Tensor};
use bodkin_model::{Attention, Entries, KvSlot, Op, Plan, RecurrentState, Value, WeightId};

/// One of the tiny models that all tests share. Of some only the header is kept: no plan reads a
/// weight, so zeros stand for them.
pub(crate) fn open(name: &str) -> File {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity");
    let header = folder.join("headers").join(name).with_extension("gguf");
    if let Ok(mut bytes) = std::fs::read(&header) {
        bytes.resize(bytes.len() + 4_000_000, 0);
        return File::from_bytes(name, bytes).unwrap_or_else(|error| panic!("{error}"));
    }
    let path = folder.join("models").join(name).with_extension("gguf");
    File::open(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// The names of the tiny models that have a golden text: one at least for each architecture.
#[allow(dead_code, reason = "not every test takes all models")]
pub(crate) fn models() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{error}"));
    let name = |path: std::path::PathBuf| path.file_stem()?.to_str().map(str::to_owned);
    let names = entries.map(|entry| entry.ok().and_then(|entry| name(entry.path())));
    let names: Vec<String> = names.map(|name| name.expect("a file with a name")).collect();
    assert!(names.len() >= 18, "only {} golden texts", names.len());
    names
}

/// The metadata and tensors of a model, with some keys set to other values.
#[allow(dead_code, reason = "not every test changes keys")]
pub(crate) fn parts(name: &str, changes: &[(&str, bodkin_gguf::Value)]) -> (Metadata, Vec<Tensor>) {
    let file = open(name);
    let mut metadata = file.metadata().clone();
    for (key, value) in changes {
        let key = format!("{}.{key}", file.metadata().architecture().unwrap());
        metadata.insert(key, value.clone());
    }
    (metadata, file.tensors().to_vec())
}

/// The plan of a model with some keys set to other values.
#[allow(dead_code, reason = "not every test changes keys")]
pub(crate) fn try_with(
    name: &str,
    changes: &[(&str, bodkin_gguf::Value)],
) -> Result<Plan, bodkin_model::Error> {
    let (metadata, tensors) = parts(name, changes);
    bodkin_model::plan(&metadata, &tensors)
}

/// As [`try_with`], for a plan that there is.
#[allow(dead_code, reason = "not every test changes keys")]
#[track_caller]
pub(crate) fn with(name: &str, changes: &[(&str, bodkin_gguf::Value)]) -> Plan {
    let plan = try_with(name, changes).unwrap_or_else(|error| panic!("{error}"));
    check(&plan);
    plan
}

/// Panics if an operation of the plan contradicts its operands.
pub(crate) fn check(plan: &Plan) {
    assert_eq!(plan.ops.len(), plan.widths.len());
    assert!(plan.is_encoder() || plan.output_width() == plan.vocabulary);
    assert!(plan.widths.iter().all(|&width| width > 0), "no value is empty:\n{plan}");
    for (i, op) in plan.ops.iter().enumerate() {
        assert!(op.inputs().all(|value| value.0 < i), "%{i} reads what is made before it");
        assert!(op.weights().all(|id| id.0 < plan.weights.len()), "%{i} reads known weights");
        let out = plan.widths[i];
        let width = |value: &Value| plan.width(*value);
        match op {
            Op::Input => panic!("a whole plan has no rows from elsewhere:\n{plan}"),
            Op::Embed { table, .. } => assert_eq!(plan.weight(*table).cols, out),
            Op::Norm { input, weight, groups, eps, .. } => {
                assert_eq!(width(input), out);
                let cols = weight.map_or(out, |weight| plan.weight(weight).cols);
                assert!(cols == out || cols * groups == out);
                assert!(eps.is_finite());
            }
            Op::Linear { input, weight, .. } | Op::Logits { input, weight, .. } => {
                assert_eq!(plan.weight(*weight).cols, width(input));
                assert_eq!(plan.weight(*weight).rows, out);
            }
            Op::Rope { input, heads, head_dim, rope } => {
                assert_eq!((width(input), heads * head_dim), (out, out));
                assert!(rope.dims % 2 == 0 && rope.dims <= *head_dim);
                if let Some(factors) = rope.factors {
                    assert_eq!(plan.weight(factors).cols, rope.dims / 2, "a factor for each pair");
                }
            }
            Op::Attention { .. } => check_attention(plan, i, op, out),
            Op::Glu { gate, up, .. } => {
                assert!(width(up) == out && out.is_multiple_of(width(gate)));
            }
            Op::Add { a, b } => assert_eq!((width(a), width(b)), (out, out)),
            Op::ScaleBy { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::ScaleExperts { .. } => check_scaling(plan, op, out),
            Op::Act { input, .. }
            | Op::Scale { input, .. }
            | Op::Softcap { input, .. }
            | Op::Clamp { input, .. }
            | Op::Pool { input, .. } => assert_eq!(width(input), out),
            Op::Slice { input, groups, start, len } => {
                assert!(len * groups == out && start + len <= width(input) / groups);
            }
            Op::Concat { a, b, groups } => {
                let part = out / groups - width(a) / groups;
                assert!(width(b) == part || width(b) == part * groups);
            }
            Op::Route { .. } | Op::ExpertLinear { .. } | Op::ExpertSum { .. } => {
                check_experts(plan, op, out);
            }
            Op::Conv { .. } | Op::Scan { .. } | Op::DeltaRule { .. } | Op::Compress { .. } => {
                check_recurrent(plan, op, out);
            }
            Op::Mix { .. } | Op::HyperWeights { .. } => check_streams(plan, op, out),
            Op::Select { q, k, weights, indexer: i, slot } => {
                assert_eq!((width(q), width(k)), (i.heads * i.dim, i.dim));
                assert_eq!((width(weights), out), (i.heads, i.top_k));
                let kept = plan.slots[slot.0];
                assert_eq!((kept.kv_heads, kept.key_dim, kept.value_dim), (1, i.dim, 0));
            }
        }
    }
}

/// Heads are as wide as what they read, and the slot is filled before it is read.
fn check_attention(plan: &Plan, i: usize, op: &Op, out: usize) {
    let Op::Attention { q, kv, attention: a, slot } = op else { panic!("{} attends", op.name()) };
    let width = |value: &Value| plan.width(*value);
    assert_eq!(width(q), a.heads * a.key_dim);
    if let Some([k, v]) = kv {
        assert_eq!(width(k), a.kv_heads * a.key_dim);
        assert_eq!(width(v), a.kv_heads * a.value_dim);
    }
    assert_eq!(out, a.heads * a.value_dim);
    assert!(a.heads % a.kv_heads == 0 && a.scale.is_finite() && a.window != Some(0));
    assert_eq!(plan.slots[slot.0], KvSlot::of(a));
    let stores = |op: &Op| matches!(op, Op::Attention { kv: Some(_), slot: s, .. } if s == slot);
    assert!(plan.ops[..=i].iter().any(stores), "%{i} reads a slot that is filled");
    check_entries(plan, a);
}

/// Residual streams are mixed with a weight for each pair.
fn check_streams(plan: &Plan, op: &Op, out: usize) {
    let width = |value: &Value| plan.width(*value);
    match op {
        Op::Mix { input, weights, results } => {
            let parts = width(weights) / results;
            assert_eq!((parts * results, out * parts), (width(weights), width(input) * results));
        }
        Op::HyperWeights { input, scale, base, streams: n, .. } => {
            let scales = if out == *n { 1 } else { 3 };
            assert!(width(input) == out && (scales == 1 || out == n * (n + 2)));
            assert_eq!((plan.weight(*scale).cols, plan.weight(*base).cols), (scales, out));
        }
        other => panic!("{} mixes no streams", other.name()),
    }
}

/// What attention reads beside its own tokens fits them.
fn check_entries(plan: &Plan, a: &Attention) {
    let is_selection = |value: Value| matches!(plan.ops[value.0], Op::Select { .. });
    match a.entries {
        Entries::Tokens => {}
        Entries::Selected(selected) => assert!(is_selection(selected)),
        Entries::TokensAndBlocks { blocks, slot, selected } => {
            assert!(selected.is_none_or(is_selection));
            let kept = plan.slots[slot.0];
            assert_eq!((kept.key_dim, kept.value_dim), (a.key_dim, a.value_dim));
            assert!(plan.width(blocks) == kept.key_dim && kept.kv_heads == a.kv_heads);
        }
    }
}

/// There is a scale for each element, or one for all.
fn check_scaling(plan: &Plan, op: &Op, out: usize) {
    let width = |value: &Value| plan.width(*value);
    match op {
        Op::ScaleBy { input, weight } => {
            assert_eq!(width(input), out);
            assert!(plan.weight(*weight).cols == 1 || plan.weight(*weight).cols == out);
        }
        Op::Rescale { input, like } => {
            assert!(width(input) == out && out.is_multiple_of(width(like)))
        }
        Op::Cutoff { input, deviations } => {
            assert!(width(input) == out && out > 1 && deviations.is_finite());
        }
        Op::ScaleExperts { route, .. } => assert_eq!(width(route), out),
        _ => unreachable!("{op:?} scales nothing"),
    }
}

/// What an operation keeps of a sequence is as wide as what it works on.
fn check_recurrent(plan: &Plan, op: &Op, out: usize) {
    let width = |value: &Value| plan.width(*value);
    match op {
        Op::Conv { input, weight, state, .. } => {
            let weight = plan.weight(*weight);
            assert_eq!((width(input), weight.rows), (out, out));
            let kept = RecurrentState::Conv { kernel: weight.cols, width: out };
            assert_eq!(plan.states[state.0], kept);
        }
        Op::Compress { input, scores, compression: c, state } => {
            let cols = if c.overlaps { 2 * c.dim } else { c.dim };
            assert_eq!((width(input), width(scores), c.dim), (cols, cols, out));
            assert_eq!(plan.states[state.0], RecurrentState::Compression(*c));
        }
        Op::Scan { x, b, c, dt, a, d, dt_bias, scan: s, state } => {
            assert_eq!((width(x), width(dt)), (out, s.dt_width()));
            assert_eq!(s.heads * s.head_dim, out);
            assert!(s.heads % s.groups == 0);
            assert_eq!((width(b), width(c)), (s.groups * s.state, s.groups * s.state));
            let elements = |id: &WeightId| plan.weight(*id).cols * plan.weight(*id).rows;
            let states = if s.is_channelwise { s.state } else { 1 };
            assert_eq!(elements(a), states * s.dt_width());
            assert_eq!((elements(d), elements(dt_bias)), (s.dt_width(), s.dt_width()));
            assert_eq!(plan.states[state.0], RecurrentState::Scan(*s));
        }
        Op::DeltaRule { qkv, decay, beta, a, dt_bias, rule: r, state, .. } => {
            assert_eq!((width(qkv), out), (r.qkv_width(), r.width()));
            assert_eq!((width(decay), width(beta)), (r.decay_width(), r.value_heads));
            assert!(r.value_heads % r.key_heads == 0);
            let elements = |id: &WeightId| plan.weight(*id).cols * plan.weight(*id).rows;
            assert_eq!((elements(a), elements(dt_bias)), (r.value_heads, r.decay_width()));
            assert_eq!(plan.states[state.0], RecurrentState::DeltaRule(*r));
        }
        other => panic!("{} keeps nothing", other.name()),
    }
}

/// A choice is possible, and what the chosen make is as wide as all of their matrices together.
fn check_experts(plan: &Plan, op: &Op, out: usize) {
    let width = |value: &Value| plan.width(*value);
    match op {
        Op::Route { input, chosen, routing: r, bias } => {
            assert!(chosen.is_none_or(|chosen| width(&chosen) == r.used));
            assert_eq!((width(input), 2 * r.used), (r.experts, out));
            assert!(r.experts % r.groups == 0 && (1..=r.groups).contains(&r.groups_used));
            assert!((1..=r.experts / r.groups * r.groups_used).contains(&r.used));
            assert!(r.scale.is_finite());
            assert!(bias.is_none_or(|id| plan.weight(id).cols == r.experts));
        }
        Op::ExpertLinear { input, route, weight, experts, bias } => {
            let used = route.as_ref().map_or(*experts, |route| width(route) / 2);
            let weight = plan.weight(*weight);
            assert!(width(input) == weight.cols || width(input) == weight.cols * used);
            let rows = weight.rows / experts;
            assert_eq!((rows * used, rows * experts), (out, weight.rows));
            if let Some(bias) = bias.map(|id| plan.weight(id)) {
                assert_eq!((bias.rows, bias.cols), (*experts, rows));
            }
        }
        Op::ExpertSum { input, route } => assert_eq!(width(input), out * width(route) / 2),
        other => panic!("{} is no operation of experts", other.name()),
    }
}
