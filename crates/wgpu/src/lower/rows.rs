//! Operations on rows: matmuls, norms, elementwise operations, routing.

use bodkin_backend::Result;
use bodkin_model::{
    Act, EmbedBy, Gating, NormKind, Op, PoolKind, RopeStyle, Value, WeightId, Xielu,
};

use super::{Lowering, THREADS, at_most, vector};
use crate::layout::chunks;
use crate::program::{BufferId, Depth, Elementwise, Kernel, MAX_EXPERTS};

/// The activation functions' numbers in `functions.wgsl`, and their parameters.
pub(super) fn activation(act: Act) -> [u32; 5] {
    let number = match act {
        Act::Identity => 0,
        Act::Silu => 1,
        Act::Sigmoid => 2,
        Act::Gelu => 3,
        Act::GeluTanh => 4,
        Act::ReluSquared => 5,
        Act::Softplus => 6,
        Act::Xielu(_) => 7,
        Act::ClampedSwish => 8,
    };
    let parameters = match act {
        Act::Xielu(Xielu { positive, negative, beta, eps }) => [positive, negative, beta, eps],
        _ => [0.0; 4],
    };
    let [a, b, c, d] = parameters.map(f32::to_bits);
    [number, a, b, c, d]
}

impl Lowering<'_> {
    /// Operations with a shader of their own, that look at rows alone.
    pub(super) fn rows(&mut self) -> Result<()> {
        let (out, width, depth) = (self.out(), self.width(), self.depth());
        match self.plan.ops[self.op] {
            Op::Embed { table, by } => self.embed(table, by),
            Op::Norm { input, kind, weight, bias, eps, groups } => {
                let cols = |id: Option<WeightId>| {
                    let weight = id.map(|id| self.plan.weight(id));
                    weight.map_or(0, |w| (w.rows * w.cols) as u32)
                };
                let kind = if kind == NormKind::Rms { 0 } else { 1 };
                let part = (width / groups) as u32;
                let mut params =
                    vec![part, groups as u32, kind, cols(weight), cols(bias), eps.to_bits()];
                let mut buffers = vec![self.value(input), vector(weight), vector(bias), out];
                let mut kernel = Kernel::Norm;
                let quads = if groups == 1 { self.byte_chunk_quads() } else { None };
                if let Some(quads) = quads {
                    kernel = Kernel::NormBytes(quads);
                    params.push(chunks(width, quads) as u32);
                    buffers.push(BufferId::Bytes);
                    self.bytes = Some((Value(self.op), quads));
                }
                self.push(kernel, buffers, params, groups, depth);
            }
            Op::Rescale { input, like } => {
                let part = self.plan.width(like);
                let params = vec![part as u32, (width / part) as u32, 2, 0, 0, 0];
                let buffers = vec![self.value(input), self.value(like), BufferId::None, out];
                self.push(Kernel::Norm, buffers, params, width / part, depth);
            }
            Op::Cutoff { input, deviations } => {
                let params = vec![width as u32, 1, 3, 0, 0, deviations.to_bits()];
                let buffers = vec![self.value(input), BufferId::None, BufferId::None, out];
                self.push(Kernel::Norm, buffers, params, 1, depth);
            }
            Op::Rope { input, head_dim, rope, .. } => {
                let angles = BufferId::Angles(self.rope_index(&rope));
                let is_norm = u32::from(rope.style == RopeStyle::Norm);
                let params = vec![width as u32, head_dim as u32, (rope.dims / 2) as u32, is_norm];
                let buffers = vec![self.value(input), angles, out];
                self.push(Kernel::Rope, buffers, params, width.div_ceil(THREADS), depth);
            }
            Op::HyperWeights { input, scale, base, streams, iterations, eps } => {
                let params = vec![width as u32, streams as u32, iterations as u32, eps.to_bits()];
                let [scale, base] = [scale, base].map(BufferId::Vector);
                let buffers = vec![self.value(input), scale, base, out];
                self.push(Kernel::HyperWeights, buffers, params, 1, depth);
            }
            Op::Pool { input, kind } => {
                let kind = match kind {
                    PoolKind::Mean => 0,
                    PoolKind::First => 1,
                    PoolKind::Last => 2,
                    PoolKind::Sum => 3,
                };
                let buffers = vec![self.value(input), out];
                let tiles = width.div_ceil(THREADS);
                self.push(Kernel::Pool, buffers, vec![width as u32, kind], tiles, Depth::Outputs);
            }
            ref op => unreachable!("{op:?} has no shader of its own"),
        }
        Ok(())
    }

    fn embed(&mut self, table: WeightId, by: EmbedBy) {
        let by = match by {
            EmbedBy::Token => 0,
            EmbedBy::Position => 1,
            EmbedBy::PositionModulo => 2,
            EmbedBy::First => 3,
        };
        let rows = self.plan.weight(table).rows as u32;
        let tiles = self.width().div_ceil(4).div_ceil(THREADS);
        let matrix = self.matrix(table);
        for (i, &part) in matrix.parts.iter().enumerate() {
            let params = [matrix.params(part), vec![by, rows]].concat();
            let buffers = vec![BufferId::Matrix(table, i), self.out()];
            self.push(Kernel::Embed(matrix.layout), buffers, params, tiles, Depth::Tokens);
        }
    }

    pub(super) fn route(&mut self) -> Result<()> {
        let Op::Route { input, chosen, bias, routing: r } = self.plan.ops[self.op] else {
            unreachable!("only routings are lowered here")
        };
        at_most("experts", r.experts, MAX_EXPERTS)?;
        at_most("groups of experts", r.groups, 256)?;
        let gating = match r.gating {
            Gating::Softmax => 0,
            Gating::Sigmoid => 1,
            Gating::SoftmaxOfChosen => 2,
            Gating::SqrtSoftplus => 3,
        };
        let counts_at = self.program.counts;
        self.program.counts += r.experts;
        let numbers = [r.experts, r.used, gating, r.groups, r.groups_used];
        let params = [
            numbers.map(|x| x as u32).to_vec(),
            vec![u32::from(r.normalize), r.scale.to_bits()],
            vec![u32::from(bias.is_some()), u32::from(chosen.is_some()), counts_at as u32],
        ];
        let chosen = chosen.map_or(BufferId::None, |chosen| self.value(chosen));
        let buffers = vec![self.value(input), vector(bias), chosen, self.out(), BufferId::Counts];
        self.push(Kernel::Route, buffers, params.concat(), 1, Depth::Tokens);
        self.update_cache(counts_at);
        Ok(())
    }

    /// Operations of `elementwise.wgsl`.
    pub(super) fn elementwise(&mut self) {
        use Elementwise as E;
        let width = self.width();
        let of = |value: Value| self.plan.width(value);
        let float = f32::to_bits;
        let (op, a, b, own): (_, _, _, Vec<u32>) = match self.plan.ops[self.op] {
            Op::Act { input, act } => (E::Act, input, None, activation(act).to_vec()),
            Op::Glu { gate, up, act } => (E::Glu, gate, Some(up), activation(act).to_vec()),
            Op::Add { a, b } => (E::Add, a, Some(b), Vec::new()),
            Op::Scale { input, factor } => (E::Scale, input, None, vec![float(factor)]),
            Op::Softcap { input, cap } => (E::Softcap, input, None, vec![float(cap)]),
            Op::Clamp { input, low, high } => {
                // Infinities are no numbers that every device compares with.
                let bounds = [low, high].map(|x| float(x.clamp(f32::MIN, f32::MAX)));
                (E::Clamp, input, None, bounds.to_vec())
            }
            Op::Slice { input, groups, start, len } => {
                let own = [start, of(input) / groups, len].map(|x| x as u32);
                (E::Slice, input, None, own.to_vec())
            }
            Op::Concat { a, b, groups } => {
                let part = of(a) / groups;
                let own = [part, width / groups - part].map(|x| x as u32);
                (E::Concat, a, Some(b), own.to_vec())
            }
            Op::Mix { input, weights, results } => {
                let own = [width / results, of(weights) / results, results].map(|x| x as u32);
                (E::Mix, input, Some(weights), own.to_vec())
            }
            Op::ScaleBy { input, weight } => {
                let w = self.plan.weight(weight);
                let own = vec![(w.rows * w.cols) as u32];
                return self.push_elementwise(E::ScaleBy, input, BufferId::Vector(weight), own);
            }
            Op::ScaleExperts { route, weight } => {
                let weight = BufferId::Vector(weight);
                return self.push_elementwise(E::ScaleExperts, route, weight, Vec::new());
            }
            ref op => unreachable!("{op:?} is not elementwise"),
        };
        let b_width = b.map_or(0, of);
        let b = b.map_or(BufferId::None, |b| self.value(b));
        self.push_with_widths(op, (a, of(a)), (b, b_width), own);
    }

    fn push_elementwise(&mut self, op: Elementwise, a: Value, b: BufferId, own: Vec<u32>) {
        let width = self.plan.width(a);
        self.push_with_widths(op, (a, width), (b, 0), own);
    }

    fn push_with_widths(
        &mut self,
        op: Elementwise,
        (a, a_width): (Value, usize),
        (b, b_width): (BufferId, usize),
        own: Vec<u32>,
    ) {
        let (width, depth) = (self.width(), self.depth());
        let widths = [width, a_width, b_width].map(|x| x as u32);
        let params = [vec![op as u32], widths.to_vec(), own].concat();
        let buffers = vec![self.value(a), b, self.out()];
        self.push(Kernel::Elementwise, buffers, params, width.div_ceil(THREADS), depth);
    }
}
