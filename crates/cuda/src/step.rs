//! One step: every stage as the kernels that run it, with their parameters. All sizes of grids
//! follow from the number of rows and outputs, so that a step can be recorded once and sent again
//! for other tokens.

use bodkin_backend::Result;
use bodkin_model::{Act, EmbedBy, Gating, NormKind, Plan, PoolKind, RopeStyle, Rows, WeightId};

use crate::driver::Device;
use crate::kernels::{DOT_SHARED_BYTES, Kernels, MUL_SHARED_BYTES};
use crate::lower::{After, Content, Function, Program, Rotation, ScanStage, Stage, Value, Work};
use crate::parameters as p;
use crate::planes::Kind;
use crate::sizes::{SEGMENT, Sizes, key_stride, value_stride};
use crate::weights::Placed;

/// Threads of a block of most kernels.
const THREADS: usize = 256;
/// Blocks of `dot` that fit a multiprocessor.
const DOT_BLOCKS: usize = 2;
/// Rows of input up to which products read every weight once.
const DOT_ROWS: usize = 16;

/// Addresses of what steps read and write besides weights.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) arena: u64,
    pub(crate) feed: u64,
    pub(crate) partials: u64,
    /// Counts of blocks of attention, zero between steps.
    pub(crate) arrivals: u64,
    /// Keys and values of each slot.
    pub(crate) kv: Vec<[u64; 2]>,
    /// The page table of each slot.
    pub(crate) tables: Vec<usize>,
    pub(crate) states: Vec<u64>,
    /// Half turns a position of each rotation, and the factor of sines and cosines.
    pub(crate) turns: Vec<(u64, f32)>,
    pub(crate) angles: Vec<u64>,
    /// Counts of each routing.
    pub(crate) counts: Vec<u64>,
}

/// A step of so many rows on a loaded model.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a Device,
    pub(crate) kernels: &'a Kernels,
    pub(crate) plan: &'a Plan,
    pub(crate) program: &'a Program,
    pub(crate) sizes: &'a Sizes,
    pub(crate) weights: &'a [Placed],
    pub(crate) at: &'a Addresses,
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    pub(crate) spans: usize,
}

impl Step<'_> {
    fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Outputs => self.outputs,
        }
    }

    /// The address of a value.
    pub(crate) fn address(&self, value: Value) -> u64 {
        self.at.arena + self.sizes.arena.offsets[value.0]
    }

    fn content(&self, value: Value) -> Content {
        self.program.values[value.0].content
    }

    /// The distance of a value's rows, in elements.
    fn stride(&self, value: Value) -> u32 {
        self.content(value).stride() as u32
    }

    /// Address and distance of rows of a value that may be none.
    fn place(&self, value: Option<Value>) -> (u64, u32) {
        value.map_or((0, 0), |value| (self.address(value), self.stride(value)))
    }

    fn vector(&self, id: Option<WeightId>) -> u64 {
        id.map_or(0, |id| self.weights[id.0].vector)
    }

    /// A grid of rows by columns, for kernels whose threads take single elements.
    fn elements(&self, rows: usize, width: usize) -> [usize; 3] {
        let per_thread = if rows > DOT_ROWS { 4 } else { 1 };
        [rows, width.div_ceil(per_thread * THREADS).clamp(1, 256), 1]
    }

    /// Sends a stage.
    pub(crate) fn run(&self, stage: &Stage) -> Result<()> {
        let rows = self.rows(stage.rows);
        if rows == 0 {
            return Ok(());
        }
        let (k, d) = (self.kernels, self.device);
        match &stage.work {
            Work::Angles { rope } => self.angles(*rope),
            Work::Embed { table, by, out } => self.embed(rows, *table, *by, *out),
            Work::Norm { is_inlined: true, .. } if self.tokens == 1 => Ok(()),
            Work::Norm { .. } => self.norm(rows, &stage.work),
            Work::Prepare { input, out } => self.prepare(rows, *input, *out),
            Work::Product { .. } => self.product(rows, &stage.work),
            Work::Rotate { input, head_dim, style, rope, out } => {
                let width = self.content(*out).stride();
                let parameters = p::Rotate {
                    x: self.address(*input),
                    angles: self.at.angles[*rope],
                    out: self.address(*out),
                    stride: self.stride(*input),
                    out_stride: self.stride(*out),
                    width: width as u32,
                    head_dim: *head_dim as u32,
                    pairs: (self.program.ropes[*rope].dims / 2) as u32,
                    is_neox: u32::from(*style == RopeStyle::Neox),
                };
                // SAFETY: values and angles have room for the step's rows.
                unsafe { d.launch(k.rotate, self.elements(rows, width), THREADS, 0, &parameters) }
            }
            Work::Store { k, v, slot, rotation } => self.store(rows, (*k, *v), *slot, *rotation),
            Work::Attend { .. } => self.attend(rows, &stage.work),
            Work::Elementwise { function, a, b, out } => {
                self.elementwise(rows, *function, (*a, *b), *out)
            }
            Work::Slice { .. } | Work::Concat { .. } => self.arrange(rows, &stage.work),
            Work::Pool { input, kind, out } => {
                let width = self.content(*out).stride();
                let kind = match kind {
                    PoolKind::Mean => 0,
                    PoolKind::First => 1,
                    PoolKind::Last => 2,
                };
                let parameters = p::Pool {
                    x: self.address(*input),
                    feed: self.at.feed,
                    out: self.address(*out),
                    stride: self.stride(*input),
                    out_stride: self.stride(*out),
                    width: width as u32,
                    kind,
                };
                // SAFETY: outputs are rows of the step.
                unsafe { d.launch(k.pool, [rows, 1, 1], THREADS, 0, &parameters) }
            }
            Work::Route { .. } => self.route(rows, &stage.work),
            Work::ExpertSum { input, route, out } => {
                let width = self.content(*out).stride();
                let parameters = p::ExpertSum {
                    x: self.address(*input),
                    route: self.address(*route),
                    out: self.address(*out),
                    stride: self.stride(*input),
                    route_stride: self.stride(*route),
                    out_stride: self.stride(*out),
                    width: width as u32,
                    used: self.stride(*route) / 2,
                    padding: 0,
                };
                let grid = self.elements(rows, width);
                // SAFETY: values have room for the step's rows.
                unsafe { d.launch(k.expert_sum, grid, THREADS, 0, &parameters) }
            }
            Work::Conv { .. } => self.conv(&stage.work),
            Work::Scan(scan) => self.scan(scan),
        }
    }

    fn angles(&self, rope: usize) -> Result<()> {
        let (turns, magnitude) = self.at.turns[rope];
        let pairs = self.program.ropes[rope].dims / 2;
        let parameters = p::Angles {
            turns,
            feed: self.at.feed,
            out: self.at.angles[rope],
            magnitude,
            pairs: pairs as u32,
        };
        let (kernel, grid) = (self.kernels.angles, [self.tokens, 1, 1]);
        // SAFETY: there are turns for all pairs, and angles for the most tokens.
        unsafe { self.device.launch(kernel, grid, 64, 0, &parameters) }
    }

    fn embed(&self, rows: usize, table: WeightId, by: EmbedBy, out: Value) -> Result<()> {
        let weight = &self.weights[table.0];
        let parameters = p::Embed {
            planes: weight.planes,
            scales: weight.scales,
            feed: self.at.feed,
            out: self.address(out),
            stride: self.stride(out),
            cols: weight.shape.cols as u32,
            chunks: weight.shape.chunks() as u32,
            by: match by {
                EmbedBy::Token => 0,
                EmbedBy::Position => 1,
                EmbedBy::First => 2,
            },
        };
        let kernel = self.kernels.embed(weight.shape.kind);
        // SAFETY: token ids and positions are rows of the table: the step was checked.
        unsafe { self.device.launch(kernel, [rows, 1, 1], THREADS, 0, &parameters) }
    }

    fn norm(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Norm { input, kind, weight, bias, eps, groups, out, half_out, .. } = work else {
            unreachable!("called for norms");
        };
        let n = self.content(*input).stride() / groups;
        let (out, out_stride) = self.place(*out);
        let (half_out, half_stride) = self.place(*half_out);
        let parameters = p::Norm {
            x: self.address(*input),
            weight: self.vector(Some(*weight)),
            bias: self.vector(*bias),
            out,
            half_out,
            eps: *eps,
            stride: self.stride(*input),
            out_stride,
            half_stride,
            n: n as u32,
            groups: *groups as u32,
            weight_len: self.weights[weight.0].len as u32,
            is_layer: u32::from(*kind == NormKind::Layer),
        };
        let threads = if n > 256 { THREADS } else { 32 };
        let grid = [rows, *groups, 1];
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.normalize, grid, threads, 0, &parameters) }
    }

    fn prepare(&self, rows: usize, input: Value, out: Value) -> Result<()> {
        let Content::Halves { parts, cols } = self.content(out) else {
            unreachable!("inputs of products are halves");
        };
        let parameters = p::Prepare {
            x: self.address(input),
            out: self.address(out),
            stride: self.stride(input),
            out_stride: self.stride(out),
            cols: cols as u32,
            parts: parts as u32,
        };
        let (kernel, grid) = (self.kernels.prepare, [rows, parts, 1]);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }

    fn product(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Product { input, is_outputs, norm, factors, after, experts } = work else {
            unreachable!("called for products");
        };
        let first = &self.weights[factors[0].weight.0];
        let mut parameters = p::Product {
            input: self.address(*input),
            feed: self.at.feed,
            input_stride: self.stride(*input),
            count: factors.len() as u32,
            chunks: first.shape.chunks() as u32,
            part: first.shape.part() as u32,
            rows: rows as u32,
            is_outputs: u32::from(*is_outputs),
            cols: first.shape.cols as u32,
            ..p::Product::default()
        };
        if let (Some(norm), 1) = (norm, self.tokens) {
            parameters.norm_x = self.address(norm.input);
            parameters.norm_weight = self.vector(Some(norm.weight));
            parameters.norm_eps = norm.eps;
        }
        let is_gated = matches!(after, After::Gate { .. });
        for (matrix, factor) in parameters.matrices.iter_mut().zip(factors) {
            let weight = &self.weights[factor.weight.0];
            let (out, out_stride) = self.place(factor.out);
            *matrix = p::Matrix {
                planes: weight.planes,
                scales: weight.scales,
                bias: self.vector(factor.bias),
                out,
                // Experts' results lie side by side, each as a row of its own.
                out_stride: experts.map_or(out_stride, |e| out_stride / e.used as u32),
                rows: weight.shape.rows as u32,
                tiles: weight.shape.tiles() as u32,
                first_tile: if is_gated { 0 } else { parameters.tiles },
            };
            parameters.tiles =
                if is_gated { matrix.tiles } else { parameters.tiles + matrix.tiles };
        }
        match after {
            After::Nothing => {}
            After::Add(value) => {
                (parameters.residual, parameters.residual_stride) = self.place(Some(*value));
            }
            After::Gate { act, out } => {
                parameters.act = act_number(*act);
                match self.content(*out) {
                    Content::Halves { .. } => {
                        (parameters.half_out, parameters.half_stride) = self.place(Some(*out));
                    }
                    Content::Floats(_) => {
                        parameters.matrices[0].out = self.address(*out);
                        parameters.matrices[0].out_stride = first.shape.rows as u32;
                    }
                }
            }
        }
        if let Some(experts) = experts {
            (parameters.route, parameters.route_stride) = self.place(experts.route);
            parameters.used = experts.used as u32;
            parameters.is_shared = u32::from(experts.is_shared);
        }
        self.send_product(&parameters, first, is_gated)
    }

    fn send_product(&self, product: &p::Product, first: &Placed, is_gated: bool) -> Result<()> {
        let (rows, tiles) = (product.rows as usize, product.tiles as usize);
        if first.shape.kind == Kind::F32 {
            let grid = [first.shape.rows.div_ceil(8), rows * product.used.max(1) as usize, 1];
            // SAFETY: the weights have these shapes, and values room for the step's rows.
            return unsafe { self.device.launch(self.kernels.exact, grid, THREADS, 0, product) };
        }
        let kernels = self.kernels.of(first.shape.kind);
        if product.used == 0 && rows > DOT_ROWS {
            let tiles_of_block = if is_gated { 4 } else { 8 };
            let grid = [tiles.div_ceil(tiles_of_block), rows.div_ceil(128), 1];
            let kernel = kernels.mul[usize::from(is_gated)];
            // SAFETY: the weights have these shapes, and values room for the step's rows.
            return unsafe { self.device.launch(kernel, grid, THREADS, MUL_SHARED_BYTES, product) };
        }
        let (wide, columns) = match product.used {
            0 => (usize::from(rows > 8), 1),
            used => (0, rows * used as usize),
        };
        let blocks = (DOT_BLOCKS * self.device.processors as usize).div_ceil(columns);
        let tiles_of_block = THREADS / 32 / first.shape.warps();
        let grid = [tiles.div_ceil(tiles_of_block).min(blocks), columns, 1];
        let kernel = kernels.dot[wide][usize::from(is_gated)];
        // Of a row that is normalised on the way.
        let normalized = if product.norm_x == 0 { 0 } else { 2 * product.input_stride as usize };
        let shared = DOT_SHARED_BYTES[wide] + normalized;
        // SAFETY: as above; the routed experts are below their number.
        unsafe { self.device.launch(kernel, grid, THREADS, shared, product) }
    }

    fn store(
        &self,
        rows: usize,
        (k, v): (Value, Value),
        slot: usize,
        rotation: Option<Rotation>,
    ) -> Result<()> {
        let shape = &self.plan.slots[slot];
        let mut parameters = p::Store {
            k: self.address(k),
            v: self.address(v),
            keys: self.at.kv[slot][0],
            values: self.at.kv[slot][1],
            feed: self.at.feed,
            k_stride: self.stride(k),
            v_stride: self.stride(v),
            kv_heads: shape.kv_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            table: self.at.tables[slot] as u32,
            ..p::Store::default()
        };
        let mut width = self.content(k).stride() + self.content(v).stride();
        if let Some(Rotation { q, q_out, style, rope }) = rotation {
            (parameters.q, parameters.q_stride) = self.place(Some(q));
            (parameters.q_out, parameters.q_out_stride) = self.place(Some(q_out));
            parameters.heads = self.stride(q) / parameters.key_dim;
            parameters.angles = self.at.angles[rope];
            parameters.pairs = (self.program.ropes[rope].dims / 2) as u32;
            parameters.is_neox = u32::from(style == RopeStyle::Neox);
            width += self.content(q).stride();
        }
        let (kernel, grid) = (self.kernels.store, self.elements(rows, width));
        // SAFETY: the step's pages are pages of the slot, and each belongs to one row's sequence.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }

    fn attend(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Attend { q, attention: a, slot, out, half_out } = work else {
            unreachable!("called for attention");
        };
        let shape = &self.plan.slots[*slot];
        let is_spread = rows <= self.sizes.spread_rows && self.sizes.segments > 1;
        let (out, out_stride) = self.place(*out);
        let (half_out, half_stride) = self.place(*half_out);
        let parameters = p::Attend {
            q: self.address(*q),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            feed: self.at.feed,
            sinks: self.vector(a.sinks),
            out,
            half_out,
            partials: self.at.partials,
            arrivals: self.at.arrivals,
            scale: a.scale,
            softcap: a.softcap.unwrap_or(0.0),
            q_stride: self.stride(*q),
            out_stride,
            half_stride,
            heads: a.heads as u32,
            kv_heads: a.kv_heads as u32,
            key_dim: a.key_dim as u32,
            value_dim: a.value_dim as u32,
            window: a.window.unwrap_or(0) as u32,
            is_causal: u32::from(a.causal),
            table: self.at.tables[*slot] as u32,
            segments: self.sizes.segments as u32,
            is_spread: u32::from(is_spread),
        };
        let group = a.heads / a.kv_heads;
        let heads = if group == 1 { 1 } else { 4 };
        let (keys, values) = (key_stride(shape), value_stride(shape));
        let splits = if values / 8 >= 128 { 1 } else { 128 / (values / 8) };
        let shared = 4 * heads * (keys + SEGMENT + (splits + 1) * values);
        let spread = if is_spread { self.sizes.segments.min(64) } else { 1 };
        let grid = [rows, a.kv_heads * group.div_ceil(heads), spread];
        let kernel = self.kernels.attend[usize::from(group > 1)];
        // SAFETY: the tables cover what the rows see; partials have room for as many segments.
        unsafe { self.device.launch(kernel, grid, SEGMENT, shared, &parameters) }
    }

    fn elementwise(
        &self,
        rows: usize,
        function: Function,
        (a, b): (Value, Option<Value>),
        out: Value,
    ) -> Result<()> {
        let (op, act, factor) = match function {
            Function::Act(act) => (0, act_number(act), 0.0),
            Function::Glu(act) => (1, act_number(act), 0.0),
            Function::GluOfRow(act) => (2, act_number(act), 0.0),
            Function::Add => (3, 0, 0.0),
            Function::Scale(factor) => (4, 0, factor),
            Function::Softcap(cap) => (5, 0, cap),
        };
        let width = self.content(out).stride();
        let (b, b_stride) = self.place(b);
        let parameters = p::Elementwise {
            a: self.address(a),
            b,
            out: self.address(out),
            factor,
            a_stride: self.stride(a),
            b_stride,
            out_stride: self.stride(out),
            width: width as u32,
            op,
            act,
            padding: 0,
        };
        let grid = self.elements(rows, width);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.elementwise, grid, THREADS, 0, &parameters) }
    }

    fn arrange(&self, rows: usize, work: &Work) -> Result<()> {
        let (a, b, groups, start, out) = match work {
            Work::Slice { input, groups, start, out } => (*input, None, *groups, *start, *out),
            Work::Concat { a, b, groups, out } => (*a, Some(*b), *groups, 0, *out),
            _ => unreachable!("called for slices and concatenations"),
        };
        let (width, a_part) = (self.content(out).stride(), self.content(a).stride() / groups);
        let taken = if b.is_some() { a_part } else { width / groups };
        let b_part = width / groups - taken;
        let is_shared = b.is_some_and(|b| self.content(b).stride() == b_part);
        let (b, b_stride) = self.place(b);
        let parameters = p::Arrange {
            a: self.address(a),
            b,
            out: self.address(out),
            a_stride: self.stride(a),
            b_stride,
            out_stride: self.stride(out),
            groups: groups as u32,
            a_part: a_part as u32,
            start: start as u32,
            taken: taken as u32,
            b_part: b_part as u32,
            b_is_shared: u32::from(is_shared),
            padding: 0,
        };
        let grid = self.elements(rows, width);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.arrange, grid, THREADS, 0, &parameters) }
    }

    fn route(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Route { input, bias, routing, number, out } = work else {
            unreachable!("called for routings");
        };
        let parameters = p::Route {
            scores: self.address(*input),
            bias: self.vector(*bias),
            out: self.address(*out),
            counts: self.at.counts[*number],
            scale: routing.scale,
            stride: self.stride(*input),
            out_stride: self.stride(*out),
            experts: routing.experts as u32,
            used: routing.used as u32,
            groups: routing.groups as u32,
            groups_used: routing.groups_used as u32,
            gating: match routing.gating {
                Gating::Softmax => 0,
                Gating::Sigmoid => 1,
                Gating::SoftmaxOfChosen => 2,
            },
            normalize: u32::from(routing.normalize),
            padding: 0,
        };
        let shared = 4 * (2 * routing.experts + routing.groups);
        // SAFETY: there are counts of all experts.
        unsafe { self.device.launch(self.kernels.route, [rows, 1, 1], 32, shared, &parameters) }
    }

    fn conv(&self, work: &Work) -> Result<()> {
        let Work::Conv { input, weight, bias, state, out } = work else {
            unreachable!("called for convolutions");
        };
        let width = self.content(*out).stride();
        let parameters = p::Conv {
            x: self.address(*input),
            weight: self.vector(Some(*weight)),
            bias: self.vector(*bias),
            feed: self.at.feed,
            cells: self.at.states[*state],
            out: self.address(*out),
            stride: self.stride(*input),
            out_stride: self.stride(*out),
            width: width as u32,
            taps: (self.weights[weight.0].len / width) as u32,
        };
        let grid = [self.spans, width.div_ceil(THREADS), 1];
        // SAFETY: every span has a cell of its own.
        unsafe { self.device.launch(self.kernels.conv, grid, THREADS, 0, &parameters) }
    }

    fn scan(&self, stage: &ScanStage) -> Result<()> {
        let [x, b, c, dt] = stage.inputs.map(|value| self.address(value));
        let strides = stage.inputs.map(|value| self.stride(value));
        let [a, d, dt_bias] = stage.weights.map(|id| self.vector(Some(id)));
        let s = &stage.scan;
        let parameters = p::Scan {
            x,
            b,
            c,
            dt,
            a,
            d,
            dt_bias,
            feed: self.at.feed,
            cells: self.at.states[stage.state],
            out: self.address(stage.out),
            x_stride: strides[0],
            b_stride: strides[1],
            c_stride: strides[2],
            dt_stride: strides[3],
            out_stride: self.stride(stage.out),
            heads: s.heads as u32,
            head_dim: s.head_dim as u32,
            groups: s.groups as u32,
            state: s.state as u32,
            padding: 0,
        };
        let grid = [self.spans * s.heads, s.head_dim.div_ceil(THREADS / 32), 1];
        // SAFETY: every span has a cell of its own.
        unsafe { self.device.launch(self.kernels.scan, grid, THREADS, 0, &parameters) }
    }
}

/// The number of a function in `kernels/common.cuh`.
fn act_number(act: Act) -> u32 {
    match act {
        Act::Identity => 0,
        Act::Silu => 1,
        Act::Sigmoid => 2,
        Act::Gelu => 3,
        Act::GeluTanh => 4,
        Act::ReluSquared => 5,
        Act::ClampedSwish => 6,
    }
}
