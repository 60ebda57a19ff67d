//! What encoders have and decoders have not: tables by position and of one row, attention both
//! ways, and pooled rows. Such sequences come whole.

use bodkin_gguf::Format;
use bodkin_model::{Act, Attention, EmbedBy, NormKind, Op, PoolKind, Value};

use super::case::{Case, FLOAT, HALF_STATE, INTEGER, Maker, usual_attention};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (by, rows) in [(EmbedBy::Position, 80), (EmbedBy::First, 1), (EmbedBy::First, 3)] {
        for (format, width) in [(Format::F32, 33), (Format::F16, 80), (Format::Q8_0, 64)] {
            let name = format!("embed {} {by:?} [{rows}, {width}]", format.name());
            let (mut maker, a) = Maker::start(name, width);
            let table = maker.matrix(format, rows, width);
            let b = maker.push(Op::Embed { table, by }, width);
            let value = maker.push(Op::Add { a, b }, width);
            maker.logits(value);
            cases.push(maker.finish(FLOAT, 75));
        }
    }
    for (heads, kv_heads, dim) in [(1, 1, 8), (4, 2, 16), (3, 3, 24), (2, 1, 80)] {
        for tokens in [1, 2, 33, 75] {
            let attention = both_ways(heads, kv_heads, dim);
            let name = format!("attention both ways {heads}/{kv_heads}x{dim} {tokens} tokens");
            let (mut maker, input) = Maker::start(name, 48);
            let value = maker.attention(input, Format::F32, attention);
            maker.logits(value);
            cases.push(maker.finish(HALF_STATE, tokens));
        }
    }
    // Windows whose half is no page, a page, and longer than a block of positions of some kernels.
    for (window, tokens) in [(1, 5), (2, 33), (24, 75), (64, 150), (65, 150), (300, 330)] {
        for format in [Format::F32, Format::F16] {
            for (heads, kv_heads, dim) in [(4, 2, 16), (2, 1, 64)] {
                let a = both_ways(heads, kv_heads, dim);
                let name = format!(
                    "{} window {window} both ways {heads}/{kv_heads}x{dim} {tokens} tokens",
                    format.name()
                );
                let (mut maker, input) = Maker::start(name, 48);
                let value = maker.attention(input, format, Attention { window: Some(window), ..a });
                maker.logits(value);
                cases.push(maker.finish(HALF_STATE, tokens));
            }
        }
    }
    for kind in [PoolKind::Mean, PoolKind::First, PoolKind::Last, PoolKind::Sum] {
        for (width, tokens) in [(1, 5), (33, 1), (64, 19), (80, 75)] {
            cases.push(pool(kind, width, tokens, 0));
        }
        cases.push(encoder(kind, Format::F32, false, HALF_STATE));
        cases.push(encoder(kind, Format::Q8_0, false, 5.0 * INTEGER));
        // Pooled hidden states of a decoder.
        cases.push(encoder(kind, Format::F32, true, HALF_STATE));
        cases.push(encoder(kind, Format::Q8_0, true, 5.0 * INTEGER));
    }
    // Behind a prefix.
    cases.push(pool(PoolKind::Sum, 80, 75, 1000));
    cases
}

fn pool(kind: PoolKind, width: usize, tokens: usize, position: usize) -> Case {
    let name = format!("pool {kind:?} {width} from {position}");
    let (mut maker, input) = Maker::start(name, width);
    let input = maker.linear(input, Format::F32, width);
    maker.push(Op::Pool { input, kind }, width);
    Case { position, ..maker.finish(FLOAT, tokens) }
}

fn both_ways(heads: usize, kv_heads: usize, dim: usize) -> Attention {
    Attention { causal: false, ..usual_attention(heads, kv_heads, dim) }
}

fn norm(maker: &mut Maker, input: Value, width: usize) -> Value {
    let (weight, bias) = (Some(maker.vector(width, 1.0)), Some(maker.vector(width, 0.0)));
    let kind = NormKind::Layer;
    maker.push(Op::Norm { input, kind, weight, bias, eps: 1e-12, groups: 1 }, width)
}

/// Two blocks whose norms come last, as in BERT.
fn encoder(kind: PoolKind, format: Format, causal: bool, tolerance: f64) -> Case {
    let (width, hidden) = (64, 96);
    let direction = if causal { " causal" } else { "" };
    let name = format!("encoder{direction} {} {kind:?}", format.name());
    let (mut maker, token) = Maker::start(name, width);
    let table = maker.matrix(Format::F32, 40, width);
    let position = maker.push(Op::Embed { table, by: EmbedBy::Position }, width);
    let x = maker.push(Op::Add { a: token, b: position }, width);
    let mut x = norm(&mut maker, x, width);
    for _ in 0..2 {
        let h = maker.attention(x, format, Attention { causal, ..both_ways(4, 4, 16) });
        let h = maker.linear(h, format, width);
        let h = maker.push(Op::Add { a: h, b: x }, width);
        x = norm(&mut maker, h, width);
        let h = maker.linear(x, format, hidden);
        let h = maker.push(Op::Act { input: h, act: Act::Gelu }, hidden);
        let h = maker.linear(h, format, width);
        let h = maker.push(Op::Add { a: h, b: x }, width);
        x = norm(&mut maker, h, width);
    }
    maker.push(Op::Pool { input: x, kind }, width);
    maker.finish(tolerance, 37)
}
