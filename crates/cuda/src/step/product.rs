//! Products with weights, and the choice of experts and the sum of their results around them.

use bodkin_backend::Result;
use bodkin_model::{Gating, Routing};

use super::rows::act_number;
use super::{DOT_ROWS, Step, THREADS};
use crate::kernels::dot_shared_bytes;
use crate::lower::{After, Content, InputNorm, Value, Work};
use crate::parameters as p;
use crate::planes::{Kind, Shape};
use crate::weights::Placed;

/// Threads of a block of `exact`, and rows of input that it takes.
const EXACT_THREADS: usize = 512;
const EXACT_ROWS: usize = 8;
/// Threads of a block that chooses experts.
const ROUTE_THREADS: usize = 512;
/// Blocks of `dot` for each multiprocessor.
const DOT_BLOCKS: usize = 2;

impl Step<'_> {
    pub(super) fn product(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Product { factors, after, .. } = work else {
            unreachable!("called for products");
        };
        let first = &self.weights[factors[0].weight.0];
        let is_gated = matches!(after, After::Gate { .. });
        let product = self.product_parameters(rows, work);
        if first.shape.kind == Kind::F32 {
            return self.send_exact(&product, first.shape.rows);
        }
        if rows > DOT_ROWS {
            return self.send_many(&product, work, is_gated);
        }
        self.send_dot(&product, first, is_gated)
    }

    /// What a product is told.
    pub(crate) fn product_parameters(&self, rows: usize, work: &Work) -> p::Matmul {
        let Work::Product { input, is_outputs, norm, factors, after, experts } = work else {
            unreachable!("called for products");
        };
        let first = &self.weights[factors[0].weight.0];
        let mut parameters = p::Matmul {
            input: self.address(*input),
            metadata: self.at.feed,
            input_stride: self.stride(*input),
            matrix_count: factors.len() as u32,
            chunks: first.shape.chunks() as u32,
            slice_chunks: first.shape.part() as u32,
            slices: first.shape.parts() as u32,
            rows: rows as u32,
            gathers_outputs: u32::from(*is_outputs),
            cols: first.shape.cols as u32,
            ..p::Matmul::default()
        };
        if let (Some(norm), true) = (norm, self.inlines_norms()) {
            self.normalize_input(&mut parameters, norm);
        }
        let is_gated = matches!(after, After::Gate { .. });
        let used = experts.map_or(1, |e| e.used);
        for (matrix, factor) in parameters.matrices.iter_mut().zip(factors) {
            let weight = &self.weights[factor.weight.0];
            let own = |value| self.columns(value, &weight.shape, used);
            let (out, out_stride) = factor.out.map_or((0, 0), own);
            *matrix = p::Matrix {
                packed: weight.planes,
                scales: weight.scales,
                bias: self.vector(factor.bias),
                out,
                out_stride,
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
                (parameters.residual, parameters.residual_stride) =
                    self.columns(*value, &first.shape, used);
            }
            After::Gate { act, out } => {
                parameters.act = act_number(*act);
                let (address, stride) = self.columns(*out, &first.shape, used);
                match self.content(*out) {
                    Content::Halves { .. } => {
                        (parameters.half_out, parameters.half_stride) = (address, stride);
                    }
                    Content::Floats(_) => {
                        parameters.matrices[0].out = address;
                        parameters.matrices[0].out_stride = stride;
                    }
                }
            }
        }
        if let Some(experts) = experts {
            (parameters.route, parameters.route_stride) = self.place(experts.route);
            parameters.experts_used = experts.used as u32;
            parameters.shares_input = u32::from(experts.is_shared);
        }
        parameters
    }

    /// Lets a product make the norm of its input.
    pub(crate) fn normalize_input(&self, product: &mut p::Matmul, norm: &InputNorm) {
        product.norm_input = self.address(norm.input);
        product.norm_weight = self.vector(Some(norm.weight));
        product.norm_eps = norm.eps;
    }

    /// Where the results of a device's rows of a weight begin in a value that has `used` of them in
    /// a row, side by side, and their distance in elements.
    pub(crate) fn columns(&self, value: Value, shape: &Shape, used: usize) -> (u64, u32) {
        let content = self.content(value);
        let offset = content.element_bytes() * shape.first;
        (self.address(value) + offset as u64, content.result_stride(used) as u32)
    }

    /// Sends a product with so many rows of weights in f32.
    fn send_exact(&self, product: &p::Matmul, weights: usize) -> Result<()> {
        let rows = product.rows as usize;
        let inputs = match product.experts_used {
            0 => rows.div_ceil(EXACT_ROWS),
            used => rows * used as usize,
        };
        // Where there are many, a block takes four rows of weights.
        let (kernel, weights) = match rows > DOT_ROWS {
            true => (self.kernels.exact[1], weights.div_ceil(4)),
            false => (self.kernels.exact[0], weights),
        };
        // SAFETY: the weights have these shapes, and values room for the step's rows.
        unsafe { self.device.launch(kernel, [weights, inputs, 1], EXACT_THREADS, 0, product) }
    }

    fn send_dot(&self, product: &p::Matmul, first: &Placed, is_gated: bool) -> Result<()> {
        let (rows, tiles) = (product.rows as usize, product.tiles as usize);
        let kernels = self.kernels.of(first.shape.kind);
        let (wide, columns) = match product.experts_used {
            0 => (usize::from(rows > 8), 1),
            used => (0, rows * used as usize),
        };
        let processors = self.device.processors as usize;
        let work = tiles.div_ceil(first.shape.teams());
        let blocks = (DOT_BLOCKS * processors).div_ceil(columns);
        let grid = [work.min(blocks), columns, 1];
        let kernel = kernels.dot[wide][usize::from(is_gated)];
        let cols = if product.experts_used == 0 { rows } else { 1 };
        // A single row of input is held too.
        let is_held = product.experts_used == 0 && rows == 1;
        let held = if is_held { product.input_stride as usize } else { 0 };
        let kind = first.shape.kind;
        let shared = dot_shared_bytes(kind, is_gated, cols, held);
        // SAFETY: the weights have these shapes, values room for the step's rows, and the routed
        // experts are below their number.
        unsafe { self.device.launch(kernel, grid, THREADS, shared, product) }
    }

    pub(super) fn route(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Route { routing, .. } = work else {
            unreachable!("called for routings");
        };
        let (grid, shared) = ([rows, 1, 1], route_shared_bytes(routing));
        let parameters = self.route_parameters(work);
        // SAFETY: there are counts of all experts.
        unsafe { self.device.launch(self.kernels.route, grid, ROUTE_THREADS, shared, &parameters) }
    }

    /// What a choice of experts is told.
    pub(crate) fn route_parameters(&self, work: &Work) -> p::Route {
        let Work::Route { input, bias, routing, number, out } = work else {
            unreachable!("called for routings");
        };
        p::Route {
            scores: self.address(*input),
            bias: self.vector(*bias),
            out: self.address(*out),
            counts: self.at.counts[*number],
            scale: routing.scale,
            stride: self.stride(*input),
            out_stride: self.stride(*out),
            experts: routing.experts as u32,
            experts_used: routing.used as u32,
            groups: routing.groups as u32,
            groups_used: routing.groups_used as u32,
            gating: match routing.gating {
                Gating::Softmax => 0,
                Gating::Sigmoid => 1,
                Gating::SoftmaxOfChosen => 2,
            },
            normalize: u32::from(routing.normalize),
            padding: 0,
        }
    }

    pub(super) fn expert_sum(
        &self,
        rows: usize,
        input: Value,
        route: Value,
        out: Value,
    ) -> Result<()> {
        let width = self.content(out).stride();
        let parameters = p::ExpertSum {
            x: self.address(input),
            route: self.address(route),
            out: self.address(out),
            stride: self.stride(input),
            route_stride: self.stride(route),
            out_stride: self.stride(out),
            width: width as u32,
            experts_used: self.stride(route) / 2,
            padding: 0,
        };
        let grid = self.elements(rows, width);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.expert_sum, grid, THREADS, 0, &parameters) }
    }
}

/// Shared memory of a block that chooses experts.
pub(crate) fn route_shared_bytes(routing: &Routing) -> usize {
    4 * (2 * route_places(routing) + routing.groups + 2 * routing.used)
}

/// Places of experts there, as in `kernels/route.cuh`.
pub(crate) fn route_places(routing: &Routing) -> usize {
    routing.experts.next_multiple_of(16)
}
