//! Experts: the choice in all its variants, products with the chosen matrices, and whole layers.

use bodkin_gguf::Format;
use bodkin_model::{Act, EmbedBy, Gating, Op, Rope, RopeScaling, RopeStyle, Routing};
use bodkin_model::{Value, WeightId};

use super::case::{Case, FLOAT, HALF_STATE, INTEGER, Maker, VOCABULARY, usual_attention};
use super::chains::norm;

const TOKENS: usize = 19;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for routing in routings() {
        cases.push(scores(routing, false, -1.0));
        cases.push(scores(routing, true, -1.0));
        cases.push(ties(routing));
    }
    // The sum of such weights is next to nothing.
    let small = Routing { gating: Gating::Sigmoid, normalize: true, ..usual(16, 3) };
    cases.push(scores(small, true, -15.0));
    products(&mut cases);
    for (n, used) in [(1, 3), (7, 1), (33, 2), (80, 4)] {
        cases.push(sum(n, usual(6, used), false));
        cases.push(sum(n, usual(6, used), true));
    }
    layers(&mut cases);
    for (format, tokens) in
        [(Format::F16, 150), (Format::Q8_0, 250), (Format::Q4_K, 150), (Format::S24_Q8_0, 250)]
    {
        cases.push(crowded(format, tokens));
    }
    let of_chosen = Routing { gating: Gating::SoftmaxOfChosen, ..usual(5, 3) };
    let normalized = Routing { normalize: true, ..usual(40, 6) };
    for (format, act, routing) in [
        (Format::F16, Act::ClampedSwish, of_chosen),
        (Format::Q8_0, Act::Silu, usual(4, 1)),
        (Format::Q4_K, Act::Silu, of_chosen),
        (Format::Q8_0, Act::Silu, normalized),
        (Format::Q4_K, Act::ReluSquared, normalized),
    ] {
        cases.push(wide_decoder(format, act, routing));
    }
    cases
}

fn usual(experts: usize, used: usize) -> Routing {
    let (groups, groups_used, normalize, scale) = (1, 1, false, 1.0);
    Routing { experts, used, gating: Gating::Softmax, groups, groups_used, normalize, scale }
}

fn routings() -> Vec<Routing> {
    let mut routings = Vec::new();
    for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen] {
        for (experts, used) in [(1, 1), (4, 4), (6, 2), (64, 8), (130, 6)] {
            for (normalize, scale) in [(false, 1.0), (true, 2.5)] {
                routings.push(Routing { gating, normalize, scale, ..usual(experts, used) });
            }
        }
        for (experts, groups, groups_used) in [(8, 4, 2), (8, 8, 3), (64, 8, 4), (12, 3, 3)] {
            let normalize = groups != 4;
            routings.push(Routing { gating, groups, groups_used, normalize, ..usual(experts, 3) });
        }
    }
    routings
}

/// Weights and numbers of the chosen, side by side and of one size.
fn show_route(maker: &mut Maker, input: Value, bias: Option<WeightId>, routing: Routing) {
    let Routing { experts, used, .. } = routing;
    let input = maker.push(Op::Route { input, chosen: None, bias, routing }, 2 * used);
    let a = maker.push(Op::Slice { input, groups: 1, start: 0, len: used }, used);
    let numbers = maker.push(Op::Slice { input, groups: 1, start: used, len: used }, used);
    let factor = 1.0 / experts as f32;
    let b = maker.push(Op::Scale { input: numbers, factor }, used);
    let value = maker.push(Op::Concat { a, b, groups: 1 }, 2 * used);
    maker.logits(value);
}

/// Scores that are products, around `mean`.
fn scores(routing: Routing, has_bias: bool, mean: f32) -> Case {
    let name = format!("route {routing} bias {has_bias} mean {mean}");
    let (mut maker, input) = Maker::start(name, 40);
    let weight = maker.matrix(Format::F32, routing.experts, 40);
    let shift = Some(maker.vector(routing.experts, mean));
    let scores = maker.push(Op::Linear { input, weight, bias: shift }, routing.experts);
    let bias = has_bias.then(|| maker.vector(routing.experts, 0.0));
    show_route(&mut maker, scores, bias, routing);
    maker.finish(FLOAT, TOKENS)
}

/// Scores of which many are the same.
fn ties(routing: Routing) -> Case {
    let mut maker = Maker::empty(format!("route {routing} ties"));
    let values = (0..VOCABULARY * routing.experts).map(|_| maker.random.below(3) as f32 - 1.0);
    let data = values.flat_map(f32::to_le_bytes).collect();
    let table = maker.stored(Format::F32, VOCABULARY, routing.experts, data);
    let input = maker.push(Op::Embed { table, by: EmbedBy::Token }, routing.experts);
    show_route(&mut maker, input, None, routing);
    maker.finish(FLOAT, TOKENS)
}

fn tolerance(format: Format) -> f64 {
    if format.block_elements() == 1 { FLOAT } else { INTEGER }
}

const FORMATS: [Format; 6] =
    [Format::F32, Format::F16, Format::Q8_0, Format::Q4_K, Format::MXFP4, Format::BITMAP_Q8_0];

/// A product of expert matrices, alone: one input for all experts, or a part for each.
fn products(cases: &mut Vec<Case>) {
    let block = [(256, 17, 6, 2), (256, 40, 4, 4)];
    let odd = [(7, 1, 3, 1), (33, 17, 6, 2), (64, 40, 40, 3), (80, 5, 4, 4)];
    for format in FORMATS {
        let shapes = block.iter().chain(&odd);
        for &(cols, n, experts, used) in
            shapes.filter(|(cols, ..)| usize::is_multiple_of(*cols, format.block_elements()))
        {
            for has_bias in [false, true] {
                for has_parts in [false, true] {
                    let name = format!(
                        "expert_linear {} [{experts} x {n}, {cols}] used {used} bias {has_bias} \
                         parts {has_parts}",
                        format.name()
                    );
                    let (mut maker, x) = Maker::start(name, cols);
                    let route = route(&mut maker, x, usual(experts, used));
                    let width = if has_parts { used * cols } else { cols };
                    let input = if has_parts { maker.linear(x, Format::F32, width) } else { x };
                    let shape = (experts, n, cols);
                    let value = product(&mut maker, input, Some(route), format, shape, has_bias);
                    maker.logits(value);
                    cases.push(maker.finish(tolerance(format), TOKENS));
                }
            }
        }
        let (experts, n, cols) = (3, 17, 256);
        let name = format!("expert_linear {} [{experts} x {n}, {cols}] all", format.name());
        let (mut maker, input) = Maker::start(name, experts * cols);
        let value = product(&mut maker, input, None, format, (experts, n, cols), false);
        maker.logits(value);
        cases.push(maker.finish(tolerance(format), TOKENS));
    }
}

/// Enough rows that experts get more than a block takes.
fn crowded(format: Format, tokens: usize) -> Case {
    let (cols, hidden, experts, used) = (256, 256, 3, 2);
    let name = format!("experts {} crowded by {tokens} tokens", format.name());
    let (mut maker, x) = Maker::start(name, cols);
    let route = route(&mut maker, x, usual(experts, used));
    let up = product(&mut maker, x, Some(route), format, (experts, hidden, cols), false);
    let gate = product(&mut maker, x, Some(route), format, (experts, hidden, cols), false);
    let h = maker.push(Op::Glu { gate, up, act: Act::Silu }, used * hidden);
    let value = product(&mut maker, h, Some(route), format, (experts, 33, hidden), true);
    maker.logits(value);
    maker.finish(if tolerance(format) == FLOAT { FLOAT } else { 2.0 * INTEGER }, tokens)
}

/// Two blocks with experts, normed queries and keys and a wide head: what a backend may run in one
/// piece where it has one row.
fn wide_decoder(format: Format, act: Act, routing: Routing) -> Case {
    let (width, hidden, vocabulary, head_dim) = (512, 768, 4224, 64);
    let name = format!("wide decoder {} with experts {act:?} {routing}", format.name());
    let mut maker = Maker::speaking(name, vocabulary);
    let table = maker.matrix(format, vocabulary, width);
    let embedded = maker.push(Op::Embed { table, by: EmbedBy::Token }, width);
    let mut x = embedded;
    for _ in 0..2 {
        let h = norm(&mut maker, x, 1);
        let [q, k, v] = [8, 2, 2].map(|heads| maker.linear(h, format, heads * head_dim));
        let (style, dims, scaling, factors) = (RopeStyle::Neox, head_dim, RopeScaling::None, None);
        let rope = Rope { style, dims, base: 10_000.0, scaling, factors, inverse: false, block: 1 };
        let [q, k] = [(q, 8), (k, 2)].map(|(x, heads)| {
            let input = norm(&mut maker, x, heads);
            maker.push(Op::Rope { input, heads, head_dim, rope }, heads * head_dim)
        });
        let h = maker.attend(q, k, v, usual_attention(8, 2, head_dim));
        let h = maker.linear(h, format, width);
        x = maker.push(Op::Add { a: x, b: h }, width);
        let h = norm(&mut maker, x, 1);
        let (experts, used) = (routing.experts, routing.used);
        // By rounding, other experts might be chosen behind the first block.
        let scored = norm(&mut maker, embedded, 1);
        let route = route(&mut maker, scored, routing);
        let (inner, outer) = ((experts, hidden, width), (experts, width, hidden));
        let has_bias = act == Act::ClampedSwish;
        let up = product(&mut maker, h, Some(route), format, inner, has_bias);
        let is_gated = act != Act::ReluSquared;
        let activated = if is_gated {
            let gate = product(&mut maker, h, Some(route), format, inner, has_bias);
            maker.push(Op::Glu { gate, up, act }, used * hidden)
        } else {
            maker.push(Op::Act { input: up, act }, used * hidden)
        };
        let input = product(&mut maker, activated, Some(route), format, outer, has_bias);
        let mut b = maker.push(Op::ExpertSum { input, route }, width);
        if !is_gated {
            // Beside an expert that all tokens share.
            let up = maker.linear(h, format, hidden);
            let activated = maker.push(Op::Act { input: up, act }, hidden);
            let shared = maker.linear(activated, format, width);
            b = maker.push(Op::Add { a: b, b: shared }, width);
        }
        x = maker.push(Op::Add { a: x, b }, width);
    }
    let input = norm(&mut maker, x, 1);
    maker.push(Op::Logits { input, weight: table, bias: None }, vocabulary);
    maker.finish(if tolerance(format) == FLOAT { HALF_STATE } else { 5.0 * INTEGER }, 40)
}

fn route(maker: &mut Maker, x: Value, routing: Routing) -> Value {
    let input = maker.linear(x, Format::F32, routing.experts);
    maker.push(Op::Route { input, chosen: None, bias: None, routing }, 2 * routing.used)
}

/// The products of `(experts, rows, cols)` matrices.
fn product(
    maker: &mut Maker,
    input: Value,
    route: Option<Value>,
    format: Format,
    (experts, n, cols): (usize, usize, usize),
    has_bias: bool,
) -> Value {
    let weight = maker.matrix(format, experts * n, cols);
    let bias = has_bias.then(|| {
        let values = maker.random.normals(experts * n);
        let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        maker.stored(Format::F32, experts, n, data)
    });
    let used = route.map_or(experts, |route| maker.width(route) / 2);
    maker.push(Op::ExpertLinear { input, route, weight, bias, experts }, used * n)
}

fn sum(n: usize, routing: Routing, is_scaled: bool) -> Case {
    let name = format!("expert_sum {routing} of {n} scaled {is_scaled}");
    let (mut maker, x) = Maker::start(name, 40);
    let mut route = route(&mut maker, x, routing);
    if is_scaled {
        let weight = maker.vector(routing.experts, 1.0);
        route = maker.push(Op::ScaleExperts { route, weight }, 2 * routing.used);
    }
    let input = maker.linear(x, Format::F32, routing.used * n);
    let value = maker.push(Op::ExpertSum { input, route }, n);
    maker.logits(value);
    maker.finish(FLOAT, TOKENS)
}

/// Layers of experts as models have them, added to their input, for prompts of several lengths.
fn layers(cases: &mut Vec<Case>) {
    let few = Routing { normalize: true, ..usual(6, 2) };
    let many = Routing { gating: Gating::SoftmaxOfChosen, ..usual(64, 4) };
    for (act, routing) in [(Act::Silu, few), (Act::ClampedSwish, many), (Act::ReluSquared, few)] {
        for format in [Format::F32, Format::Q8_0, Format::MXFP4] {
            for tokens in [1, 3, 75] {
                cases.push(layer(act, routing, format, tokens));
            }
        }
    }
}

fn layer(act: Act, routing: Routing, format: Format, tokens: usize) -> Case {
    let (width, hidden) = (64, 96);
    let name = format!("experts {} {act:?} {routing} {tokens} tokens", format.name());
    let (mut maker, x) = Maker::start(name, width);
    let route = route(&mut maker, x, routing);
    let (experts, used) = (routing.experts, routing.used);
    let (inner, outer) = ((experts, hidden, width), (experts, width, hidden));
    let has_bias = act == Act::ClampedSwish;
    let up = product(&mut maker, x, Some(route), format, inner, has_bias);
    let h = if act == Act::ReluSquared {
        maker.push(Op::Act { input: up, act }, used * hidden)
    } else {
        let gate = product(&mut maker, x, Some(route), format, inner, has_bias);
        maker.push(Op::Glu { gate, up, act }, used * hidden)
    };
    let h = product(&mut maker, h, Some(route), format, outer, has_bias);
    let sum = maker.push(Op::ExpertSum { input: h, route }, width);
    let value = maker.push(Op::Add { a: x, b: sum }, width);
    maker.logits(value);
    maker.finish(if tolerance(format) == FLOAT { FLOAT } else { 2.0 * INTEGER }, tokens)
}
