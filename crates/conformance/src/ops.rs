//! Every operation, alone between a token table and a head, in its variants and odd shapes.

use bodkin_gguf::Format;
use bodkin_model::{Act, Attention, NormKind, Op, Rope, RopeScaling, RopeStyle};
use bodkin_model::{Temperature, Xielu};

use super::case::usual_attention as usual;
use super::case::{Case, FLOAT, HALF_STATE, INTEGER, Maker, VOCABULARY};

/// Tokens of a prompt; more than a page where state is kept.
const TOKENS: usize = 19;
const LONG: usize = 75;

/// The functions of one value, and of gates.
const ACTS: [Act; 7] = [
    Act::Identity,
    Act::Silu,
    Act::Sigmoid,
    Act::Gelu,
    Act::GeluTanh,
    Act::ReluSquared,
    Act::Softplus,
];
/// With a bound of the exponent that inputs exceed, and one that they do not.
const XIELUS: [Act; 2] = [
    Act::Xielu(Xielu { positive: 0.8, negative: 1.3, beta: 0.5, eps: -1e-6 }),
    Act::Xielu(Xielu { positive: 1.5, negative: 0.7, beta: -0.25, eps: -0.75 }),
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for width in [1, 7, 64, 80] {
        let (mut maker, value) = Maker::start(format!("embed width {width}"), width);
        maker.logits(value);
        cases.push(maker.finish(FLOAT, TOKENS));
    }
    norms(&mut cases);
    biases(&mut cases);
    ropes(&mut cases);
    attentions(&mut cases);
    shared_attentions(&mut cases);
    elementwise(&mut cases);
    slices(&mut cases);
    cases
}

fn norms(cases: &mut Vec<Case>) {
    for kind in [NormKind::Rms, NormKind::Layer] {
        let shapes = [
            (1, 7),
            (1, 33),
            (1, 64),
            (1, 80),
            (1, 300),
            (1, 1024),
            (1, 1025),
            // A few elements more than the threads of a GPU's block take at once, or hold.
            (1, 200),
            (1, 2052),
            (1, 4100),
            (1, 8196),
            (2, 2052),
            (2, 300),
            (3, 16),
            (5, 24),
            (2, 80),
        ];
        for (groups, n, weights) in shapes
            .into_iter()
            .flat_map(|(groups, n)| [(groups, n, n), (groups, n, groups * n)])
            .filter(|&(groups, n, weights)| groups > 1 || weights == n)
        {
            for has_bias in [false, true] {
                let name = format!("norm {kind:?} {groups}x{n} by {weights} bias {has_bias}");
                let (mut maker, input) = Maker::start(name, groups * n);
                let weight = Some(maker.vector(weights, 1.0));
                let bias = has_bias.then(|| maker.vector(weights, 0.0));
                let op = Op::Norm { input, kind, weight, bias, eps: 1e-5, groups };
                let value = maker.push(op, groups * n);
                maker.logits(value);
                cases.push(maker.finish(FLOAT, TOKENS));
            }
        }
        for (groups, n) in shapes {
            let (mut maker, input) =
                Maker::start(format!("norm {kind:?} {groups}x{n} without weight"), groups * n);
            let op = Op::Norm { input, kind, weight: None, bias: None, eps: 1e-5, groups };
            let value = maker.push(op, groups * n);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
    }
}

fn biases(cases: &mut Vec<Case>) {
    for (format, tolerance) in [
        (Format::F32, FLOAT),
        (Format::F16, FLOAT),
        (Format::Q8_0, INTEGER),
        (Format::Q4_K, INTEGER),
        (Format::BITMAP_F16, FLOAT),
    ] {
        for rows in [1, 17, 40] {
            let name = format!("linear {} with bias [{rows}, 256]", format.name());
            let (mut maker, input) = Maker::start(name, 256);
            let weight = maker.matrix(format, rows, 256);
            let bias = Some(maker.vector(rows, 0.5));
            let value = maker.push(Op::Linear { input, weight, bias }, rows);
            maker.logits(value);
            cases.push(maker.finish(tolerance, TOKENS));
        }
    }
    let (mut maker, input) = Maker::start("logits with bias, scale and softcap", 64);
    let weight = maker.matrix(Format::F32, VOCABULARY, 64);
    let bias = Some(maker.vector(VOCABULARY, 0.5));
    let input = maker.push(Op::Logits { input, weight, bias }, VOCABULARY);
    let input = maker.push(Op::Scale { input, factor: 3.0 }, VOCABULARY);
    maker.push(Op::Softcap { input, cap: 5.0 }, VOCABULARY);
    cases.push(maker.finish(FLOAT, TOKENS));
}

fn ropes(cases: &mut Vec<Case>) {
    let yarn = |attn_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attn_factor,
    };
    let scalings = [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, yarn(1.0), yarn(0.7)];
    for style in [RopeStyle::Norm, RopeStyle::Neox] {
        for (heads, head_dim, dims) in
            [(1, 8, 8), (3, 16, 16), (2, 24, 24), (3, 80, 80), (2, 80, 32)]
        {
            for scaling in scalings {
                for position in [0, 5000] {
                    let rope = Rope {
                        style,
                        dims,
                        base: 10_000.0,
                        scaling,
                        factors: None,
                        inverse: false,
                        block: 1,
                    };
                    cases.push(rotation(heads, head_dim, rope, position));
                }
            }
        }
        let rope = Rope {
            style,
            dims: 24,
            base: 500_000.0,
            scaling: RopeScaling::None,
            factors: None,
            inverse: false,
            block: 1,
        };
        cases.push(rotation_with_factors(rope));
    }
}

fn rotation(heads: usize, head_dim: usize, rope: Rope, position: usize) -> Case {
    let name = format!("rope {rope} heads {heads}x{head_dim} from {position}");
    let width = heads * head_dim;
    let (mut maker, input) = Maker::start(name, width);
    let value = maker.push(Op::Rope { input, heads, head_dim, rope }, width);
    maker.logits(value);
    Case { position, ..maker.finish(FLOAT, TOKENS) }
}

fn rotation_with_factors(rope: Rope) -> Case {
    let (heads, head_dim) = (2, 24);
    let (mut maker, input) = Maker::start(format!("rope {rope} factors"), heads * head_dim);
    let factors: Vec<f32> = (0..rope.dims / 2).map(|i| 1.0 + 0.5 * i as f32).collect();
    let rope = Rope { factors: Some(maker.floats(&factors)), ..rope };
    let value = maker.push(Op::Rope { input, heads, head_dim, rope }, heads * head_dim);
    maker.logits(value);
    Case { position: 1000, ..maker.finish(FLOAT, TOKENS) }
}

fn attentions(cases: &mut Vec<Case>) {
    let mut variants = Vec::new();
    for (heads, kv_heads) in [(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)] {
        variants.extend([8, 16, 24, 80].map(|dim| (usual(heads, kv_heads, dim), LONG)));
    }
    let one = usual(4, 2, 16);
    for window in [1, 5, 32, 33, 64] {
        variants.push((Attention { window: Some(window), ..one }, LONG));
    }
    variants.push((Attention { softcap: Some(2.0), ..one }, LONG));
    variants.push((Attention { softcap: Some(2.0), window: Some(20), ..usual(6, 3, 24) }, LONG));
    variants.push((Attention { scale: 2.0, ..one }, LONG));
    variants.push((Attention { value_dim: 24, ..one }, LONG));
    variants.push((Attention { value_dim: 8, ..usual(3, 1, 80) }, LONG));
    // The last elements of a head are fewer than share a scale where keys are bytes.
    variants.push((Attention { value_dim: 20, ..usual(6, 2, 36) }, LONG));
    // As wide as kernels for prompts are made for, and long enough for blocks that are all seen.
    variants.push((usual(4, 2, 64), LONG));
    variants.push((usual(4, 2, 128), 150));
    variants.push((usual(2, 1, 256), 150));
    variants.push((Attention { window: Some(140), ..usual(4, 2, 64) }, 330));
    // Prompts longer than the steps of a temperature.
    for a in [one, usual(4, 2, 64), Attention { softcap: Some(2.0), ..usual(6, 3, 24) }] {
        let temperature = Some(Temperature { growth: 0.6, length: 10, offset: 1 });
        variants.push((Attention { temperature, ..a }, LONG));
    }
    // Wider than most heads, and than some kernels take.
    variants.push((usual(2, 1, 200), LONG));
    variants.push((usual(2, 1, 264), LONG));
    variants.push((Attention { value_dim: 72, ..usual(4, 2, 192) }, 150));
    variants.push((Attention { value_dim: 216, ..usual(4, 2, 120) }, 530));
    // Long enough for kernels that divide a sequence into KV splits.
    variants.push((usual(2, 1, 16), 530));
    variants.push((Attention { window: Some(300), ..usual(2, 1, 16) }, 530));
    // One key and value head that is wider than a usual one, as in latent attention.
    variants.push((Attention { value_dim: 32, ..usual(4, 1, 48) }, LONG));
    for (attention, tokens) in variants {
        cases.push(attend(attention, Format::F32, tokens, false));
        cases.push(attend(attention, Format::F16, tokens, false));
    }
    // Wide heads with all that may be beside them.
    for a in [
        Attention { window: Some(100), ..usual(4, 2, 64) },
        Attention { softcap: Some(2.0), ..usual(2, 2, 64) },
        Attention { value_dim: 128, ..usual(2, 1, 192) },
        Attention { window: Some(40), chunked: true, ..usual(2, 1, 64) },
    ] {
        cases.push(attend(a, Format::F16, 150, true));
    }
    for window in [None, Some(1), Some(20)] {
        for a in [usual(1, 1, 8), one, Attention { softcap: Some(2.0), ..usual(6, 3, 24) }] {
            cases.push(attend(Attention { window, ..a }, Format::F32, LONG, true));
        }
    }
}

fn attend(mut a: Attention, format: Format, tokens: usize, has_sinks: bool) -> Case {
    let name = format!("{} {a:?} sinks {has_sinks} {tokens} tokens", format.name());
    let (mut maker, input) = Maker::start(name, 48);
    a.sinks = has_sinks.then(|| maker.vector(a.heads, 1.0));
    let value = maker.attention(input, format, a);
    maker.logits(value);
    maker.finish(HALF_STATE, tokens)
}

/// Layers that attend to the keys and values of an earlier one.
fn shared_attentions(cases: &mut Vec<Case>) {
    for (a, tokens) in [
        (usual(4, 2, 16), LONG),
        (Attention { window: Some(20), ..usual(4, 1, 24) }, LONG),
        (usual(2, 1, 64), 150),
        (usual(2, 1, 16), 530),
    ] {
        for format in [Format::F32, Format::F16] {
            let name = format!("{} shared {a:?} {tokens} tokens", format.name());
            let (mut maker, input) = Maker::start(name, 48);
            let mut x = maker.attention(input, format, a);
            for _ in 0..2 {
                let q = maker.linear(x, format, a.heads * a.key_dim);
                x = maker.attend_again(q, a);
            }
            maker.logits(x);
            cases.push(maker.finish(HALF_STATE, tokens));
        }
    }
}

fn elementwise(cases: &mut Vec<Case>) {
    for width in [1, 7, 33, 80] {
        for act in ACTS.into_iter().chain(XIELUS) {
            let (mut maker, input) = Maker::start(format!("act {act:?} width {width}"), width);
            let input = maker.push(Op::Scale { input, factor: 3.0 }, width);
            let value = maker.push(Op::Act { input, act }, width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
        for (act, gates) in ACTS.into_iter().flat_map(|act| [(act, 1), (act, 3)]) {
            let (name, width) = (format!("{gates} gates {act:?} of {width}"), gates * width);
            let (mut maker, x) = Maker::start(name, width);
            let gate = maker.linear(x, Format::F32, gates);
            let value = maker.push(Op::Glu { gate, up: x, act }, width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
        for act in ACTS.into_iter().chain([Act::ClampedSwish]) {
            let (mut maker, x) = Maker::start(format!("glu {act:?} width {width}"), width);
            // Far enough from zero for the bounds of gates that have some.
            let gate = maker.push(Op::Scale { input: x, factor: 5.0 }, width);
            let up = maker.linear(gate, Format::F32, width);
            let value = maker.push(Op::Glu { gate, up, act }, width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
        let (mut maker, a) = Maker::start(format!("add width {width}"), width);
        let b = maker.linear(a, Format::F32, width);
        let sum = maker.push(Op::Add { a, b }, width);
        let twice = maker.push(Op::Add { a: sum, b: sum }, width);
        maker.logits(twice);
        cases.push(maker.finish(FLOAT, TOKENS));

        for weights in [1, width] {
            let name = format!("scale width {width} by a weight of {weights}");
            let (mut maker, input) = Maker::start(name, width);
            let weight = maker.vector(weights, 1.0);
            let value = maker.push(Op::ScaleBy { input, weight }, width);
            // The operand is read again: it may not have been changed in place.
            let sum = maker.push(Op::Add { a: input, b: value }, width);
            maker.logits(sum);
            cases.push(maker.finish(FLOAT, TOKENS));
        }

        for parts in [1, 3] {
            let name = format!("rescale {parts} parts of width {width}");
            let (mut maker, like) = Maker::start(name, width);
            let input = maker.linear(like, Format::F32, parts * width);
            let value = maker.push(Op::Rescale { input, like }, parts * width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
        if width > 1 {
            let (mut maker, input) = Maker::start(format!("cutoff width {width}"), width);
            let value = maker.push(Op::Cutoff { input, deviations: 0.5 }, width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }

        let (mut maker, x) = Maker::start(format!("scale and softcap width {width}"), width);
        let scaled = maker.push(Op::Scale { input: x, factor: -2.5 }, width);
        let capped = maker.push(Op::Softcap { input: scaled, cap: 1.5 }, width);
        // The operands are read again after both: neither may have been changed in place.
        let sum = maker.push(Op::Add { a: x, b: scaled }, width);
        let sum = maker.push(Op::Add { a: sum, b: capped }, width);
        maker.logits(sum);
        cases.push(maker.finish(FLOAT, TOKENS));
    }
}

fn slices(cases: &mut Vec<Case>) {
    for (width, start, len) in [(7, 0, 3), (7, 6, 1), (33, 1, 32), (80, 16, 48), (80, 0, 80)] {
        for groups in [1, 2, 5] {
            let name = format!("slice {start}..{} of {groups} x {width}", start + len);
            let (mut maker, input) = Maker::start(name, groups * width);
            let value = maker.push(Op::Slice { input, groups, start, len }, groups * len);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
    }
    for (n, m) in [(1, 1), (7, 3), (16, 48), (80, 33)] {
        for (groups, is_shared) in [(1, false), (2, false), (5, false), (2, true), (5, true)] {
            let name = format!("concat {groups} x {n} and {m} shared {is_shared}");
            let (mut maker, a) = Maker::start(name, groups * n);
            let b = maker.linear(a, Format::F32, if is_shared { m } else { groups * m });
            let value = maker.push(Op::Concat { a, b, groups }, groups * (n + m));
            maker.logits(value);
            cases.push(maker.finish(FLOAT, TOKENS));
        }
    }
}
