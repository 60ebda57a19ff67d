//! Attention to entries that an indexer selects or that blocks are compressed to, in chunks, and
//! the layers around it: hyper-connections, clamps, experts that a table chooses. A backend may
//! refuse these cases.

use bodkin_gguf::Format;
use bodkin_model::{Attention, Compression, EmbedBy, Entries, Gating, Indexer, KvSlot, Op, Rope};
use bodkin_model::{RecurrentState, RopeScaling, RopeStyle, Routing, SlotId, Value};

use super::case::{Case, FLOAT, Maker, VOCABULARY, usual_attention};

/// More than two KV splits of any backend need.
const LONG: usize = 300;
const TOKENS: usize = 75;
const WIDTH: usize = 64;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads, dim) in [(1, 1, 8), (4, 2, 16), (20, 1, 24), (17, 1, 64)] {
        for (index_heads, index_dim, top_k, tokens) in
            [(1, 8, 1, TOKENS), (5, 20, 12, TOKENS), (40, 64, 270, LONG)]
        {
            let indexer = Indexer { heads: index_heads, dim: index_dim, top_k };
            cases.push(selected(usual_attention(heads, kv_heads, dim), indexer, tokens));
        }
    }
    for (ratio, overlaps, top_k) in [
        (1, true, None),
        (4, true, Some(5)),
        (5, false, None),
        (64, false, Some(2)),
        (128, true, None),
    ] {
        cases.push(compressed(ratio, overlaps, top_k, LONG));
    }
    for window in [1, 16, 40] {
        let a = Attention { window: Some(window), chunked: true, ..usual_attention(4, 2, 16) };
        let (mut maker, input) = Maker::start(format!("attention in chunks of {window}"), WIDTH);
        let value = maker.attention(input, Format::F32, a);
        maker.logits(value);
        cases.push(maker.finish(FLOAT, TOKENS));
    }
    for (inverse, block) in [(true, 1), (false, 4), (true, 128)] {
        cases.push(rotation(inverse, block));
    }
    for streams in [1, 4, 7] {
        cases.push(hyper_connections(streams));
    }
    cases.push(clamps());
    for (gating, normalize) in [(Gating::SqrtSoftplus, true), (Gating::Softmax, false)] {
        cases.push(chosen(gating, normalize));
    }
    cases.into_iter().map(Case::optional).collect()
}

fn select(maker: &mut Maker, input: Value, k: Value, indexer: Indexer, ratio: usize) -> Value {
    let q = maker.linear(input, Format::F32, indexer.heads * indexer.dim);
    let weights = maker.linear(input, Format::F32, indexer.heads);
    let slot = slot(maker, indexer.dim, 0, ratio);
    maker.push(Op::Select { q, k, weights, indexer, slot }, indexer.top_k)
}

fn slot(maker: &mut Maker, key_dim: usize, value_dim: usize, ratio: usize) -> SlotId {
    maker.slot(KvSlot { kv_heads: 1, key_dim, value_dim, window: None, ratio })
}

/// Attention to the tokens that an indexer selects.
fn selected(a: Attention, indexer: Indexer, tokens: usize) -> Case {
    let (mut maker, input) = Maker::start(format!("{indexer:?} {} heads", a.heads), WIDTH);
    let k = maker.linear(input, Format::F32, indexer.dim);
    let entries = Entries::Selected(select(&mut maker, input, k, indexer, 1));
    let value = maker.attention(input, Format::F32, Attention { entries, ..a });
    maker.logits(value);
    maker.finish(FLOAT, tokens)
}

fn compress(maker: &mut Maker, input: Value, c: Compression) -> Value {
    let width = if c.overlaps { 2 * c.dim } else { c.dim };
    let rows = maker.linear(input, Format::F32, width);
    let a = maker.linear(input, Format::F32, width);
    let table = maker.matrix(Format::F32, c.ratio, width);
    let b = maker.push(Op::Embed { table, by: EmbedBy::PositionModulo }, width);
    let scores = maker.push(Op::Add { a, b }, width);
    let state = maker.state(RecurrentState::Compression(c));
    maker.push(Op::Compress { input: rows, scores, compression: c, state }, c.dim)
}

/// Attention to a window and to compressed blocks: all, or those that an indexer selects.
pub(super) fn compressed(
    ratio: usize,
    overlaps: bool,
    top_k: Option<usize>,
    tokens: usize,
) -> Case {
    let name = format!("blocks of {ratio} overlapping {overlaps} best {top_k:?}");
    let (mut maker, input) = Maker::start(name, WIDTH);
    let (heads, dim) = (18, 24);
    let selected = top_k.map(|top_k| {
        let indexer = Indexer { heads: 3, dim: 20, top_k };
        let k = compress(&mut maker, input, Compression { ratio, dim: indexer.dim, overlaps });
        select(&mut maker, input, k, indexer, ratio)
    });
    let blocks = compress(&mut maker, input, Compression { ratio, dim, overlaps });
    let slot = slot(&mut maker, dim, dim, ratio);
    let entries = Entries::TokensAndBlocks { blocks, slot, selected };
    let sinks = Some(maker.vector(heads, 0.0));
    let a = Attention { window: Some(20), entries, sinks, ..usual_attention(heads, 1, dim) };
    let value = maker.attention(input, Format::F32, a);
    maker.logits(value);
    maker.finish(FLOAT, tokens)
}

fn rotation(inverse: bool, block: usize) -> Case {
    let name = format!("rope inverse {inverse} by {block} tokens");
    let (mut maker, input) = Maker::start(name, 48);
    let (style, scaling, factors) = (RopeStyle::Norm, RopeScaling::None, None);
    let rope = Rope { style, dims: 8, base: 100.0, scaling, factors, inverse, block };
    let value = maker.push(Op::Rope { input, heads: 3, head_dim: 16, rope }, 48);
    maker.logits(value);
    maker.finish(FLOAT, TOKENS)
}

/// Two layers that read and write several streams.
fn hyper_connections(streams: usize) -> Case {
    let (mut maker, x) = Maker::start(format!("{streams} hyper-connections"), WIDTH);
    let mut all = x;
    for _ in 1..streams {
        let width = maker.width(all) + WIDTH;
        all = maker.push(Op::Concat { a: all, b: x, groups: 1 }, width);
    }
    let (mixed, iterations, eps) = (streams * (streams + 2), 3, 1e-3);
    for _ in 0..2 {
        let input = maker.linear(all, Format::F32, mixed);
        let (scale, base) = (maker.vector(3, 1.0), maker.vector(mixed, 0.0));
        let op = Op::HyperWeights { input, scale, base, streams, iterations, eps };
        let input = maker.push(op, mixed);
        let op = Op::Slice { input, groups: 1, start: 0, len: streams };
        let weights = maker.push(op, streams);
        let h = maker.push(Op::Mix { input: all, weights, results: 1 }, WIDTH);
        let h = maker.linear(h, Format::F32, WIDTH);
        let len = streams * (streams + 1);
        let op = Op::Slice { input, groups: 1, start: streams, len };
        let weights = maker.push(op, len);
        let op = Op::Concat { a: h, b: all, groups: 1 };
        let input = maker.push(op, (streams + 1) * WIDTH);
        all = maker.push(Op::Mix { input, weights, results: streams }, streams * WIDTH);
    }
    let input = maker.linear(all, Format::F32, streams);
    let (scale, base) = (maker.vector(1, 1.0), maker.vector(streams, 0.0));
    let op = Op::HyperWeights { input, scale, base, streams, iterations, eps };
    let weights = maker.push(op, streams);
    let value = maker.push(Op::Mix { input: all, weights, results: 1 }, WIDTH);
    maker.logits(value);
    maker.finish(FLOAT, 19)
}

fn clamps() -> Case {
    let (mut maker, input) = Maker::start("clamps", WIDTH);
    let a = maker.push(Op::Clamp { input, low: f32::NEG_INFINITY, high: 0.5 }, WIDTH);
    let b = maker.push(Op::Clamp { input, low: -0.25, high: 0.75 }, WIDTH);
    let value = maker.push(Op::Add { a, b }, WIDTH);
    maker.logits(value);
    maker.finish(FLOAT, 19)
}

/// Experts that a table chooses, and the weights that the scores give them.
fn chosen(gating: Gating, normalize: bool) -> Case {
    let (experts, used, width) = (6, 2, WIDTH);
    let (mut maker, x) = Maker::start(format!("chosen experts {gating:?}"), width);
    let numbers = (0..VOCABULARY * used).map(|i| (i * 7 % experts) as i32);
    let data = numbers.flat_map(i32::to_le_bytes).collect();
    let table = maker.stored(Format::I32, VOCABULARY, used, data);
    let chosen = Some(maker.push(Op::Embed { table, by: EmbedBy::Token }, used));
    let input = maker.linear(x, Format::F32, experts);
    let (groups, groups_used, scale) = (1, 1, 1.5);
    let routing = Routing { experts, used, gating, groups, groups_used, normalize, scale };
    let route = maker.push(Op::Route { input, chosen, bias: None, routing }, 2 * used);
    let weight = maker.matrix(Format::F32, experts * width, width);
    let op = Op::ExpertLinear { input: x, route: Some(route), weight, bias: None, experts };
    let input = maker.push(op, used * width);
    let value = maker.push(Op::ExpertSum { input, route }, width);
    maker.logits(value);
    maker.finish(FLOAT, 19)
}
