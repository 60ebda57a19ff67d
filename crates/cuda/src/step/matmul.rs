//! Matmuls, the choice of experts, and the sum of their results. A matmul multiplies `[rows, cols]`
//! inputs with one or several weights of `[weight rows, cols]`, or each row with the weights of its
//! experts. A tile is 16 weight rows, a chunk 64 columns of a tile; a slice is one split-K part of
//! a tile's chunks, summed in order, and a slot is what a warp copies to shared memory at once.

use bodkin_backend::Result;
use bodkin_model::{Gating, WeightId};

use super::launch_shape::gemv_work;
use super::rows::act_number;
use super::{Step, THREADS};
use crate::constants::{GEMV_F32_ROWS, GEMV_F32_THREADS, GEMV_ROWS};
use crate::lower::{Content, Epilogue, InputNorm, Matmul, Operand, Route, Value};
use crate::packed::{MmaLayout, PackedLayout, Shape};
use crate::parameters as p;
use crate::shared_memory::{gemv_bytes, route_bytes};

/// Threads of a block that chooses experts.
const ROUTE_THREADS: usize = 512;

impl Step<'_> {
    pub(super) fn matmul(&self, rows: usize, matmul: &Matmul) -> Result<()> {
        let shape = &self.weights[matmul.operands[0].weight.0].shape;
        let parameters = self.matmul_parameters(rows, matmul);
        match shape.layout {
            PackedLayout::F32 => self.launch_f32(&parameters, shape.rows),
            PackedLayout::Mma(layout) => {
                if !self.is_gemv(rows, matmul, layout) {
                    return self.launch_gemm(&parameters, matmul, layout);
                }
                debug_assert!(!self.is_swizzled(matmul.input), "only GEMMs read swizzled inputs");
                self.launch_gemv(&parameters, (layout, shape), matmul.is_gated())
            }
        }
    }

    /// The parameters of a matmul.
    pub(super) fn matmul_parameters(&self, rows: usize, matmul: &Matmul) -> p::Matmul {
        let Matmul { input, gathers_outputs, norm, operands, epilogue, experts } = matmul;
        let first = &self.weights[operands[0].weight.0];
        let mut parameters = p::Matmul {
            input: self.address(*input),
            metadata: if *gathers_outputs { self.at.metadata } else { 0 },
            input_stride: self.stride(*input),
            matrix_count: operands.len() as u32,
            chunks: first.shape.chunks() as u32,
            slice_chunks: first.shape.slice_chunks() as u32,
            slices: first.shape.slices() as u32,
            rows: rows as u32,
            cols: first.shape.cols as u32,
            chunk_bytes: first.shape.layout.chunk_bytes() as u32,
            persistent_slot_bytes: first.shape.layout.slot_bytes() as u32,
            factor: 1.0,
            ..p::Matmul::default()
        };
        if let (Some(norm), true) = (norm, self.inlines_norms()) {
            self.set_input_norm(&mut parameters, norm);
        }
        let (is_gated, used) = (matmul.is_gated(), matmul.used());
        for (matrix, operand) in parameters.matrices.iter_mut().zip(operands) {
            let weight = &self.weights[operand.weight.0];
            let address = |value| self.result_address(value, &weight.shape, used);
            let (out, out_stride) = operand.out.map_or((0, 0), address);
            *matrix = p::Matrix {
                packed: weight.packed,
                exponents: weight.exponents,
                bias: self.vector(operand.bias),
                out,
                out_stride,
                rows: weight.shape.rows as u32,
                tiles: weight.shape.tiles() as u32,
                first_tile: if is_gated { 0 } else { parameters.tiles },
            };
            parameters.tiles =
                if is_gated { matrix.tiles } else { parameters.tiles + matrix.tiles };
        }
        self.set_peers(&mut parameters, operands);
        match epilogue {
            Epilogue::None => {}
            Epilogue::Add { residual, factor } => {
                parameters.factor = *factor;
                (parameters.residual, parameters.residual_stride) =
                    self.result_address(*residual, &first.shape, used);
            }
            Epilogue::Gate { act, out } | Epilogue::Act { act, out } => {
                (parameters.act, parameters.has_act_epilogue) =
                    (act_number(*act), u32::from(!is_gated));
                let (address, stride) = self.result_address(*out, &first.shape, used);
                if let Content::F16(_) = self.content(*out) {
                    parameters.half_out = address;
                    parameters.half_stride = stride | self.swizzled_mark(*out);
                } else {
                    parameters.matrices[0].out = address;
                    parameters.matrices[0].out_stride = stride;
                }
            }
        }
        if let Some(experts) = experts {
            (parameters.route, parameters.route_stride) = self.place(experts.route);
            parameters.experts = experts.count as u32;
            parameters.experts_used = experts.used as u32;
            parameters.shares_input = u32::from(experts.shares_input);
        }
        parameters
    }

    /// Makes a matmul store its results on the other devices, too, if all its weights are sharded.
    fn set_peers(&self, matmul: &mut p::Matmul, operands: &[Operand]) {
        let shapes = operands.iter().map(|operand| self.weights[operand.weight.0].shape);
        if shapes.map(|shape| (shape.rows, shape.full_rows)).all(|(own, all)| own < all) {
            matmul.peers = self.at.arrivals.len() as u32;
            matmul.peer_offsets = self.peer_offsets();
        }
    }

    /// Makes a matmul compute the norm of its input.
    pub(super) fn set_input_norm(&self, matmul: &mut p::Matmul, norm: &InputNorm) {
        matmul.norm_input = self.address(norm.input);
        matmul.norm_weight = self.vector(Some(norm.weight));
        matmul.norm_eps = norm.eps;
    }

    /// Where the results of a device's rows of a weight are in a value: the address of the first,
    /// and the elements from one result to the next. `used` of them lie side by side in a row.
    pub(crate) fn result_address(&self, value: Value, shape: &Shape, used: usize) -> (u64, u32) {
        let content = self.content(self.program.base(value));
        let offset = content.element_bytes() * shape.first_row;
        (self.address(value) + offset as u64, (content.row_stride() / used) as u32)
    }

    /// Launches a matmul with f32 weights.
    fn launch_f32(&self, matmul: &p::Matmul, weight_rows: usize) -> Result<()> {
        let rows = matmul.rows as usize;
        let row_blocks = match matmul.experts_used {
            0 => rows.div_ceil(GEMV_F32_ROWS),
            used => rows * used as usize,
        };
        // With many input rows, a block takes four weight rows.
        let (kernel, blocks) = match rows > GEMV_ROWS {
            true => (self.kernels.gemv_f32[1], weight_rows.div_ceil(4)),
            false => (self.kernels.gemv_f32[0], weight_rows),
        };
        // SAFETY: the weights have these shapes, and values room for the step's rows.
        unsafe { self.device.launch(kernel, [blocks, row_blocks, 1], GEMV_F32_THREADS, 0, matmul) }
    }

    fn launch_gemv(
        &self,
        matmul: &p::Matmul,
        (layout, shape): (MmaLayout, &Shape),
        is_gated: bool,
    ) -> Result<()> {
        let rows = matmul.rows as usize;
        // With experts, each (row, expert) pair is a matmul of its own.
        let (wide, pairs) = match matmul.experts_used {
            0 => (usize::from(rows > 8), 1),
            used => (0, rows * used as usize),
        };
        let blocks = self.gemv_blocks(matmul, layout, is_gated).div_ceil(pairs);
        let grid = [gemv_work(matmul, shape).min(blocks), pairs, 1];
        let kernel = self.kernels.of(layout).gemv_mma[wide][usize::from(is_gated)];
        let rows_per_block = if matmul.experts_used == 0 { rows } else { 1 };
        // A single row of input is staged in shared memory, too.
        let stages_input = matmul.experts_used == 0 && rows == 1;
        let staged_cols = if stages_input { matmul.input_stride as usize } else { 0 };
        let shared = gemv_bytes(layout, is_gated, rows_per_block, staged_cols);
        // SAFETY: the weights have these shapes, values room for the step's rows, and routes
        // hold ids of existing experts.
        unsafe { self.device.launch(kernel, grid, THREADS, shared, matmul) }
    }

    pub(super) fn route(&self, rows: usize, route: &Route) -> Result<()> {
        let (grid, shared) = ([rows, 1, 1], route_bytes(&route.routing));
        let parameters = self.route_parameters(route);
        // SAFETY: there are counts of all experts.
        unsafe {
            self.device.launch(self.kernels.route, grid, ROUTE_THREADS, shared, &parameters)?;
        }
        self.cache_chosen_experts(route.index)
    }

    /// The parameters of a choice of experts.
    pub(super) fn route_parameters(&self, route: &Route) -> p::Route {
        let Route { input, bias, routing, index, out } = route;
        p::Route {
            scores: self.address(*input),
            bias: self.vector(*bias),
            out: self.address(*out),
            counts: self.at.expert_counts[*index],
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
                Gating::SqrtSoftplus => 3,
            },
            normalize: u32::from(routing.normalize),
            padding: 0,
        }
    }

    pub(super) fn scale_experts(
        &self,
        rows: usize,
        route: Value,
        weight: WeightId,
        out: Value,
    ) -> Result<()> {
        let parameters = p::ScaleExperts {
            route: self.address(route),
            scales: self.vector(Some(weight)),
            out: self.address(out),
            stride: self.stride(route),
            out_stride: self.stride(out),
            // A row of a route is weights, then the ids.
            experts_used: self.stride(route) / 2,
            padding: 0,
        };
        // SAFETY: values have room for the step's rows, and routes hold ids of existing experts.
        unsafe { self.device.launch(self.kernels.scale_experts, [rows, 1, 1], 32, 0, &parameters) }
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
