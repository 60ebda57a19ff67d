//! What carries a state of fixed size along: convolutions and scans, alone and in the layers that
//! are made of them; and state slots whose state is copied.

use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Error, Model, Result, Transfer};
use bodkin_gguf::Format;
use bodkin_model::{Act, Attention, DeltaRule, NormKind, Op, RecurrentState, Scan, Value};

use super::case::{Case, FLOAT, HALF_STATE, INTEGER, Maker, VOCABULARY, usual_attention};
use super::prompt::{Feeding, Pages, Sequence, run_prompt};
use super::sparse;

const TOKENS: usize = 19;
const LONG: usize = 75;
/// The width of what layers take and give.
const WIDTH: usize = 64;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for width in [1, 7, 33, 80] {
        for kernel in [2, 3, 4, 7] {
            for has_bias in [false, true] {
                cases.push(convolution(width, kernel, has_bias));
            }
        }
    }
    for (heads, head_dim, groups, state) in [
        (1, 1, 1, 1),
        (2, 3, 1, 5),
        (3, 7, 3, 33),
        (6, 5, 2, 7),
        (8, 16, 2, 16),
        (4, 33, 1, 20),
        (2, 64, 1, 128),
        (2, 18, 1, 256),
    ] {
        let scan = mamba_2(heads, head_dim, groups, state);
        cases.push(scanned(scan, TOKENS));
        cases.push(scanned(scan, LONG));
        cases.push(scanned(Scan { is_channelwise: true, ..scan }, TOKENS));
    }
    cases.extend(delta_rules());
    let (plain, grouped) = ((8, 16, 1, 16), (6, 16, 3, 33));
    for (format, tolerance) in [(Format::F32, FLOAT), (Format::Q8_0, 5.0 * INTEGER)] {
        for (heads, head_dim, groups, state) in [plain, grouped] {
            let scan = mamba_2(heads, head_dim, groups, state);
            cases.push(mixers(format, scan, tolerance));
        }
        cases.push(short_convolutions(format, tolerance));
        cases.push(gated_delta_nets(format, tolerance));
    }
    cases.push(hybrid());
    cases
}

/// A scan with decays by head.
fn mamba_2(heads: usize, head_dim: usize, groups: usize, state: usize) -> Scan {
    Scan { heads, head_dim, groups, state, is_channelwise: false }
}

fn convolution(width: usize, kernel: usize, has_bias: bool) -> Case {
    let name = format!("conv width {width} kernel {kernel} bias {has_bias}");
    let (mut maker, input) = Maker::start(name, width);
    let value = conv(&mut maker, input, kernel, has_bias);
    maker.logits(value);
    maker.finish(FLOAT, TOKENS)
}

pub(super) fn conv(maker: &mut Maker, input: Value, kernel: usize, has_bias: bool) -> Value {
    let width = maker.width(input);
    let weight = maker.matrix(Format::F32, width, kernel);
    let bias = has_bias.then(|| maker.vector(width, 0.5));
    let state = maker.state(RecurrentState::Conv { kernel, width });
    maker.push(Op::Conv { input, weight, bias, state }, width)
}

fn scanned(s: Scan, tokens: usize) -> Case {
    let (mut maker, input) = Maker::start(format!("{s:?} {tokens} tokens"), WIDTH);
    let x = maker.linear(input, Format::F32, s.heads * s.head_dim);
    let b = maker.linear(input, Format::F32, s.groups * s.state);
    let c = maker.linear(input, Format::F32, s.groups * s.state);
    let dt = maker.linear(input, Format::F32, s.dt_width());
    let value = scan(&mut maker, [x, b, c, dt], s);
    maker.logits(value);
    maker.finish(FLOAT, tokens)
}

/// Some heads forget at once, others keep nearly all.
fn scan(maker: &mut Maker, [x, b, c, dt]: [Value; 4], s: Scan) -> Value {
    let width = s.dt_width();
    let of_head = |i: usize| -16.0 / 4f32.powi((i * s.heads / width) as i32);
    let of_channel = |i: usize| -1.0 - (i % s.state) as f32;
    let a: Vec<f32> = match s.is_channelwise {
        false => (0..width).map(of_head).collect(),
        true => (0..width * s.state).map(of_channel).collect(),
    };
    let (a, d, dt_bias) = (maker.floats(&a), maker.vector(width, 1.0), maker.vector(width, -1.0));
    let state = maker.state(RecurrentState::Scan(s));
    let op = Op::Scan { x, b, c, dt, a, d, dt_bias, scan: s, state };
    maker.push(op, s.heads * s.head_dim)
}

/// Rules alone, with few and with many heads of each kind.
fn delta_rules() -> impl Iterator<Item = Case> {
    let shapes = [
        (1, 1, 1),
        (2, 4, 7),
        (1, 3, 16),
        (2, 6, 33),
        (3, 3, 20),
        (1, 2, 128),
        (1, 1, 129),
        (1, 1, 256),
    ];
    let rules = shapes.into_iter().flat_map(|(key_heads, value_heads, head_dim)| {
        [(false, false), (true, false), (false, true)].map(|(is_cyclic, is_channelwise)| {
            DeltaRule { key_heads, value_heads, head_dim, is_cyclic, is_channelwise }
        })
    });
    rules.map(|rule| {
        let (mut maker, input) = Maker::start(format!("{rule:?}"), WIDTH);
        let value = delta_rule(&mut maker, input, rule);
        maker.logits(value);
        maker.finish(FLOAT, TOKENS)
    })
}

/// Some heads forget within a few tokens, others keep nearly all.
fn delta_rule(maker: &mut Maker, input: Value, rule: DeltaRule) -> Value {
    let qkv = maker.linear(input, Format::F32, rule.qkv_width());
    let decay = maker.linear(input, Format::F32, rule.decay_width());
    let beta = maker.linear(input, Format::F32, rule.value_heads);
    let a: Vec<f32> = (0..rule.value_heads).map(|head| -1.0 / 4f32.powi(head as i32)).collect();
    let (a, dt_bias) = (maker.floats(&a), maker.vector(rule.decay_width(), -1.0));
    let state = maker.state(RecurrentState::DeltaRule(rule));
    let op = Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps: 1e-6, rule, state };
    maker.push(op, rule.width())
}

/// As Mamba 2 has it: convolution, scan, gate, norm in groups.
fn mixer(maker: &mut Maker, input: Value, format: Format, s: Scan) -> Value {
    let (inner, shared) = (s.heads * s.head_dim, s.groups * s.state);
    let mixed = inner + 2 * shared;
    let all = maker.linear(input, format, inner + mixed + s.heads);
    let slice = |maker: &mut Maker, input, start, len| {
        maker.push(Op::Slice { input, groups: 1, start, len }, len)
    };
    let gate = slice(maker, all, 0, inner);
    let xbc = slice(maker, all, inner, mixed);
    let dt = slice(maker, all, inner + mixed, s.heads);
    let xbc = conv(maker, xbc, 4, true);
    let xbc = maker.push(Op::Act { input: xbc, act: Act::Silu }, mixed);
    let x = slice(maker, xbc, 0, inner);
    let b = slice(maker, xbc, inner, shared);
    let c = slice(maker, xbc, inner + shared, shared);
    let up = scan(maker, [x, b, c, dt], s);
    let input = maker.push(Op::Glu { gate, up, act: Act::Silu }, inner);
    let (weight, kind, bias) = (Some(maker.vector(inner, 1.0)), NormKind::Rms, None);
    let op = Op::Norm { input, kind, weight, bias, eps: 1e-5, groups: s.groups };
    let value = maker.push(op, inner);
    maker.linear(value, format, WIDTH)
}

/// Two layers, each with state slots of its own.
fn mixers(format: Format, s: Scan, tolerance: f64) -> Case {
    let (mut maker, mut x) = Maker::start(format!("mixers {} {s:?}", format.name()), WIDTH);
    for _ in 0..2 {
        let h = mixer(&mut maker, x, format, s);
        x = maker.push(Op::Add { a: x, b: h }, WIDTH);
    }
    maker.logits(x);
    maker.finish(tolerance, LONG)
}

/// As LFM2 has it: a convolution between two gates.
fn short_convolutions(format: Format, tolerance: f64) -> Case {
    let (mut maker, mut x) = Maker::start(format!("short convs {}", format.name()), WIDTH);
    for _ in 0..2 {
        let [before, after, h] = [0; 3].map(|_| maker.linear(x, format, WIDTH));
        let h = maker.push(Op::Glu { gate: before, up: h, act: Act::Identity }, WIDTH);
        let h = conv(&mut maker, h, 3, false);
        let h = maker.push(Op::Glu { gate: after, up: h, act: Act::Identity }, WIDTH);
        let h = maker.linear(h, format, WIDTH);
        x = maker.push(Op::Add { a: x, b: h }, WIDTH);
    }
    maker.logits(x);
    maker.finish(tolerance, LONG)
}

/// A mixer and attention with a window on the same input.
fn hybrid() -> Case {
    let (mut maker, x) = Maker::start("mixer beside attention", WIDTH);
    let a = mixer(&mut maker, x, Format::F32, mamba_2(4, 8, 2, 8));
    let attention = Attention { window: Some(20), ..usual_attention(4, 2, 16) };
    let b = maker.attention(x, Format::F32, attention);
    let sum = maker.push(Op::Add { a, b }, WIDTH);
    maker.logits(sum);
    maker.finish(HALF_STATE, LONG)
}

/// As Qwen 3.5 has it: convolution, delta rule, gated norm of each head.
fn gated_delta_nets(format: Format, tolerance: f64) -> Case {
    let (mut maker, mut x) = Maker::start(format!("delta nets {}", format.name()), WIDTH);
    let (key_heads, value_heads, head_dim) = (2, 4, 16);
    let is_channelwise = false;
    let rule = DeltaRule { key_heads, value_heads, head_dim, is_cyclic: true, is_channelwise };
    for _ in 0..2 {
        let h = conv(&mut maker, x, 4, false);
        let h = maker.push(Op::Act { input: h, act: Act::Silu }, WIDTH);
        let input = delta_rule(&mut maker, h, rule);
        let (weight, kind, bias) = (Some(maker.vector(head_dim, 1.0)), NormKind::Rms, None);
        let op = Op::Norm { input, kind, weight, bias, eps: 1e-6, groups: value_heads };
        let up = maker.push(op, rule.width());
        let gate = maker.linear(x, format, rule.width());
        let h = maker.push(Op::Glu { gate, up, act: Act::Silu }, rule.width());
        let h = maker.linear(h, format, WIDTH);
        x = maker.push(Op::Add { a: x, b: h }, WIDTH);
    }
    maker.logits(x);
    maker.finish(tolerance, LONG)
}

/// A sequence goes on from a copy of another's pages and state slot as the other would, and slots
/// that the model was not loaded for are refused.
pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    let mixers = mixers(Format::F32, mamba_2(4, 8, 2, 8), FLOAT);
    let blocks = sparse::compressed(16, true, Some(3), LONG).optional();
    for case in [mixers, gated_delta_nets(Format::F32, FLOAT), hybrid(), blocks] {
        if case.is_refused(backend) {
            continue;
        }
        for through_host in [false, true] {
            if let Err(error) = check_copies(backend, &case, through_host, failures) {
                failures.push(format!("copies of state: {error}"));
            }
        }
    }
}

fn check_copies(
    backend: &dyn Backend,
    case: &Case,
    through_host: bool,
    failures: &mut Vec<String>,
) -> Result<()> {
    let limits = case.limits();
    let mut model = backend.load(Arc::clone(&case.plan), &case.file, &limits, &|_, _| ())?;
    let whole = run_prompt(model.as_mut(), case, Feeding::Whole)?;
    let mut pages = Pages::new(model.as_ref(), false);
    let mut first = pages.start(0);
    // The rest begins in the middle of the second page.
    let (start, rest) = case.tokens.split_at(43);
    step(model.as_mut(), &mut pages, &mut [(&mut first, start)])?;
    let mut copy = pages.start(first.position);
    for (from, to) in pages.copied(&first, &mut copy) {
        if through_host {
            let mut bytes = b"before".to_vec();
            let read = model.transfer(Transfer::Read { from, to: &mut bytes })?;
            bytes.extend(b"behind");
            let wrote = model.transfer(Transfer::Write { from: &bytes[6..], to })?;
            if (read, wrote) != (bytes.len() - 12, read) {
                failures.push(format!("copies of state: {read} bytes read, {wrote} written"));
            }
        } else {
            model.transfer(Transfer::Copy { from, to })?;
        }
    }
    // The first goes another way beside its copy, then alone.
    let (same, more) = rest.split_at(5);
    let other: Vec<u32> = same.iter().map(|token| token / 2).collect();
    let both = &mut [(&mut first, other.as_slice()), (&mut copy, same)];
    let found = step(model.as_mut(), &mut pages, both)?;
    let mut found = found[other.len() * VOCABULARY..].to_vec();
    step(model.as_mut(), &mut pages, &mut [(&mut first, &other)])?;
    found.extend(step(model.as_mut(), &mut pages, &mut [(&mut copy, more)])?);
    let wanted = &whole[start.len() * VOCABULARY..];
    if !wanted.iter().map(|x| x.to_bits()).eq(found.iter().map(|x| x.to_bits())) {
        let name = &case.name;
        failures.push(format!("{name}: a copy goes on otherwise than what it was made of"));
    }
    copy.state_slot = limits.state_slots as u32;
    match step(model.as_mut(), &mut pages, &mut [(&mut copy, same)]) {
        Err(Error::Limit { .. }) => {}
        Err(other) => failures.push(format!("copies of state: another error: {other}")),
        Ok(_) => failures.push("a state slot that does not exist is accepted".to_owned()),
    }
    Ok(())
}

/// Runs tokens of some sequences, with the logits of all rows.
fn step(
    model: &mut dyn Model,
    pages: &mut Pages,
    sequences: &mut [(&mut Sequence, &[u32])],
) -> Result<Vec<f32>> {
    let mut batch = Batch::default();
    for (sequence, tokens) in sequences {
        pages.append(sequence, tokens, &mut batch);
    }
    batch.outputs = (0..batch.tokens.len() as u32).collect();
    let mut logits = vec![f32::NAN; batch.outputs.len() * VOCABULARY];
    model.forward(&batch, &mut logits)?;
    Ok(logits)
}
