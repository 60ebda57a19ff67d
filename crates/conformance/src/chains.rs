//! Whole blocks of a decoder, where buffers are reused, products share their input, and layers
//! with and without a window stand side by side.

use bodkin_gguf::Format;
use bodkin_model::{Act, Attention, EmbedBy, NormKind, Op, Rope, RopeScaling, RopeStyle, Value};

use super::case::{Case, HALF_STATE, INTEGER, Maker, usual_attention};

const TOKENS: usize = 75;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;

pub(super) fn cases() -> Vec<Case> {
    vec![
        decoder("decoder F32", [Format::F32; 3], None, HALF_STATE),
        decoder("decoder F16", [Format::F16; 3], None, HALF_STATE),
        decoder("decoder Q8_0, window", [Format::Q8_0; 3], Some(40), 5.0 * INTEGER),
        // Integer and float products of one input.
        decoder(
            "decoder mixed, window",
            [Format::Q4_0, Format::F16, Format::Q8_0],
            Some(9),
            5.0 * INTEGER,
        ),
        decoder(
            "decoder sparse, window",
            [Format::BITMAP_Q4_0, Format::CSR_F16, Format::S24_Q8_0],
            Some(9),
            5.0 * INTEGER,
        ),
        fused_projection(),
        wide_decoder(usual_attention(8, 2, 64), (RopeStyle::Neox, 64), 20, false),
        wide_decoder(usual_attention(8, 2, 64), (RopeStyle::Norm, 32), 20, true),
        // An odd number of heads that share a key head, dimensions of an odd number of eights, and
        // KV splits in a window.
        wide_decoder(
            Attention { value_dim: 48, window: Some(70), ..usual_attention(10, 2, 40) },
            (RopeStyle::Neox, 40),
            150,
            false,
        ),
        // Dimensions of no whole eights, of which some are rotated, and values of more than 64.
        wide_decoder(
            Attention { value_dim: 76, softcap: Some(20.0), ..usual_attention(8, 4, 36) },
            (RopeStyle::Norm, 20),
            150,
            false,
        ),
        long_norm(),
        many_rows(Format::F16, HALF_STATE),
        many_rows(Format::Q4_0, 5.0 * INTEGER),
        long_projection(),
        long_gate(),
    ]
}

pub(super) fn norm(maker: &mut Maker, input: Value, groups: usize) -> Value {
    let width = maker.width(input);
    let weight = Some(maker.vector(width / groups, 1.0));
    let kind = NormKind::Rms;
    maker.push(Op::Norm { input, kind, weight, bias: None, eps: 1e-6, groups }, width)
}

/// Three blocks, the middle one with a window; the head's softcap last.
fn decoder(name: &str, formats: [Format; 3], window: Option<usize>, tolerance: f64) -> Case {
    let (mut maker, x) = Maker::start(name, WIDTH);
    let mut x = maker.push(Op::Scale { input: x, factor: 2.0 }, WIDTH);
    for layer in 0..3 {
        let h = norm(&mut maker, x, 1);
        let q = maker.linear(h, formats[0], WIDTH);
        let k = maker.linear(h, formats[1], WIDTH / 2);
        let v = maker.linear(h, formats[2], WIDTH / 2);
        let q = norm(&mut maker, q, 4);
        let (style, scaling, factors) = (RopeStyle::Neox, RopeScaling::None, None);
        let base = if layer == 1 { 100.0 } else { 10_000.0 };
        let rope = Rope { style, dims: 16, base, scaling, factors, inverse: false, block: 1 };
        let q = maker.push(Op::Rope { input: q, heads: 4, head_dim: 16, rope }, WIDTH);
        let k = maker.push(Op::Rope { input: k, heads: 2, head_dim: 16, rope }, WIDTH / 2);
        let window = window.filter(|_| layer == 1);
        let attention = Attention { softcap: Some(20.0), window, ..usual_attention(4, 2, 16) };
        let h = maker.attend(q, k, v, attention);
        let h = maker.linear(h, formats[0], WIDTH);
        x = maker.push(Op::Add { a: x, b: h }, WIDTH);
        let h = norm(&mut maker, x, 1);
        let gate = maker.linear(h, formats[1], HIDDEN);
        let up = maker.linear(h, formats[0], HIDDEN);
        let h = maker.push(Op::Glu { gate, up, act: Act::Silu }, HIDDEN);
        let h = maker.linear(h, formats[2], WIDTH);
        x = maker.push(Op::Add { a: x, b: h }, WIDTH);
    }
    let x = norm(&mut maker, x, 1);
    let input = maker.logits(x);
    maker.push(Op::Softcap { input, cap: 3.0 }, super::case::VOCABULARY);
    maker.finish(tolerance, TOKENS)
}

/// Two blocks of plain stages and a wide head, all quantised: what a backend may run in one piece
/// where it has one row. The result of a block may be multiplied by a weight.
fn wide_decoder(
    attention: Attention,
    (style, dims): (RopeStyle, usize),
    tokens: usize,
    is_scaled: bool,
) -> Case {
    let (format, width, hidden, vocabulary) = (Format::Q8_0, 512, 768, 4224);
    let Attention { heads, kv_heads, key_dim, value_dim, .. } = attention;
    let scaled = if is_scaled { ", scaled" } else { "" };
    let name = format!("wide decoder Q8_0, heads of {key_dim} + {value_dim}{scaled}");
    let mut maker = Maker::speaking(name, vocabulary);
    let table = maker.matrix(format, vocabulary, width);
    let mut x = maker.push(Op::Embed { table, by: EmbedBy::Token }, width);
    // The second layer sees all.
    for window in [attention.window, None] {
        let h = norm(&mut maker, x, 1);
        let q = maker.linear(h, format, heads * key_dim);
        let k = maker.linear(h, format, kv_heads * key_dim);
        let v = maker.linear(h, format, kv_heads * value_dim);
        let (scaling, factors) = (RopeScaling::None, None);
        let rope = Rope { style, dims, base: 10_000.0, scaling, factors, inverse: false, block: 1 };
        let rotated = |input, heads| Op::Rope { input, heads, head_dim: key_dim, rope };
        let q = maker.push(rotated(q, heads), heads * key_dim);
        let k = maker.push(rotated(k, kv_heads), kv_heads * key_dim);
        let h = maker.attend(q, k, v, Attention { window, ..attention });
        let h = maker.linear(h, format, width);
        x = maker.push(Op::Add { a: x, b: h }, width);
        let h = norm(&mut maker, x, 1);
        let gate = maker.linear(h, format, hidden);
        let up = maker.linear(h, format, hidden);
        let h = maker.push(Op::Glu { gate, up, act: Act::Silu }, hidden);
        let h = maker.linear(h, format, width);
        x = maker.push(Op::Add { a: x, b: h }, width);
        if is_scaled {
            let weight = maker.floats(&[0.75]);
            x = maker.push(Op::ScaleBy { input: x, weight }, width);
        }
    }
    let input = norm(&mut maker, x, 1);
    maker.push(Op::Logits { input, weight: table, bias: None }, vocabulary);
    maker.finish(5.0 * INTEGER, tokens)
}

/// A norm of a long row before two products: every way to run it has to sum the squares alike.
fn long_norm() -> Case {
    let (mut maker, x) = Maker::start("products of a long normed row", 1088);
    let h = norm(&mut maker, x, 1);
    let a = maker.linear(h, Format::Q8_0, WIDTH);
    let b = maker.linear(h, Format::Q8_0, WIDTH);
    let x = maker.push(Op::Add { a, b }, WIDTH);
    maker.logits(x);
    maker.finish(INTEGER, 8)
}

/// A gated feed-forward and a head with more rows of input and of weights than the other cases
/// have, and an odd number of columns' chunks.
fn many_rows(format: Format, tolerance: f64) -> Case {
    let (width, hidden, vocabulary) = (320, 2144, 4256);
    let mut maker = Maker::speaking(format!("many rows {}", format.name()), vocabulary);
    let table = maker.matrix(format, vocabulary, width);
    let x = maker.push(Op::Embed { table, by: EmbedBy::Token }, width);
    let h = norm(&mut maker, x, 1);
    let gate = maker.linear(h, format, hidden);
    let up = maker.linear(h, format, hidden);
    let h = maker.push(Op::Glu { gate, up, act: Act::Silu }, hidden);
    let h = maker.linear(h, format, width);
    let x = maker.push(Op::Add { a: x, b: h }, width);
    let input = norm(&mut maker, x, 1);
    maker.push(Op::Logits { input, weight: table, bias: None }, vocabulary);
    maker.finish(tolerance, 200)
}

/// Several rows of input times few weight rows of many columns, whose sums GPUs share among blocks:
/// queries, keys and values.
fn long_projection() -> Case {
    let (mut maker, x) = Maker::start("queries, keys and values of a long row", 2048);
    let input = norm(&mut maker, x, 1);
    let q = maker.linear(input, Format::Q4_0, 24);
    let k = maker.linear(input, Format::Q4_0, 8);
    let v = maker.linear(input, Format::Q4_0, 24);
    let a = Attention { value_dim: 24, scale: 0.4, ..usual_attention(3, 1, 8) };
    let value = maker.attend(q, k, v, a);
    maker.logits(value);
    maker.finish(5.0 * INTEGER, 40)
}

/// A gate and an up projection, likewise.
fn long_gate() -> Case {
    let (mut maker, x) = Maker::start("gate and up projection of a long row", 2048);
    let input = norm(&mut maker, x, 1);
    let gate = maker.linear(input, Format::Q4_0, 72);
    let up = maker.linear(input, Format::Q4_0, 72);
    let value = maker.push(Op::Glu { gate, up, act: Act::Silu }, 72);
    maker.logits(value);
    maker.finish(5.0 * INTEGER, 40)
}

/// Queries, keys and values cut out of one product.
fn fused_projection() -> Case {
    let (mut maker, x) = Maker::start("slices of a fused projection", WIDTH);
    let input = maker.linear(x, Format::F32, 56);
    let q = maker.push(Op::Slice { input, groups: 1, start: 0, len: 24 }, 24);
    let k = maker.push(Op::Slice { input, groups: 1, start: 24, len: 8 }, 8);
    let v = maker.push(Op::Slice { input, groups: 1, start: 32, len: 24 }, 24);
    let a = Attention { value_dim: 24, scale: 0.4, ..usual_attention(3, 1, 8) };
    let value = maker.attend(q, k, v, a);
    maker.logits(value);
    maker.finish(HALF_STATE, TOKENS)
}
