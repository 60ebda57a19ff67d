//! Stages whose kernels take single rows: embeddings, norms, RoPE, elementwise functions, slices
//! and concatenations, pooling.

use bodkin_backend::Result;
use bodkin_model::{Act, EmbedBy, NormKind, PoolKind, RopeStyle, WeightId};

use super::{Step, THREADS};
use crate::constants::{NORM_THREADS, SHORT_LAYER_NORM, SHORT_NORM};
use crate::lower::{Content, F16Rows, Function, Gate, Norm, Rotate, SliceConcat, Value};
use crate::parameters as p;

const _: () = assert!(NORM_THREADS == 2 * THREADS, "a thread of `gemv_mma` does the work of two");

impl Step<'_> {
    pub(super) fn angles(&self, rope: usize) -> Result<()> {
        let (frequencies, magnitude) = self.at.inverse_frequencies[rope];
        let pairs = self.program.ropes[rope].dims / 2;
        let parameters = p::RopeAngles {
            frequencies,
            metadata: self.at.metadata,
            out: self.at.angles[rope],
            magnitude,
            rotary_pairs: pairs as u32,
            block: self.program.ropes[rope].block as u32,
            padding: 0,
        };
        let (kernel, grid) = (self.kernels.rope_angles, [self.size.tokens, 1, 1]);
        // SAFETY: there are frequencies for all pairs, and angles for the most tokens.
        unsafe { self.device.launch(kernel, grid, 64, 0, &parameters) }
    }

    pub(super) fn embed(
        &self,
        rows: usize,
        table: WeightId,
        by: EmbedBy,
        out: Value,
    ) -> Result<()> {
        let weight = &self.weights[table.0];
        let parameters = p::Embed {
            packed: weight.packed,
            exponents: weight.exponents,
            metadata: self.at.metadata,
            out: self.address(out),
            stride: self.stride(out),
            cols: weight.shape.cols as u32,
            chunks: weight.shape.chunks() as u32,
            by: match by {
                EmbedBy::Token => 0,
                EmbedBy::Position => 1,
                EmbedBy::First => 2,
                EmbedBy::PositionModulo => 3,
            },
            rows: weight.shape.full_rows as u32,
            padding: 0,
        };
        let kernel = self.kernels.embed(weight.shape.layout);
        let grid = self.elements(rows, weight.shape.cols);
        // SAFETY: token ids and positions are rows of the table: the step was checked.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }

    pub(super) fn norm(&self, rows: usize, norm: &Norm) -> Result<()> {
        let parameters = self.norm_parameters(norm);
        let n = parameters.n as usize;
        let threads = if n <= SHORT_NORM { 32 } else { NORM_THREADS };
        // Vectors of four elements that a thread holds.
        let vectors = n.div_ceil(4 * threads);
        let (kernel, threads) = match norm.kind {
            NormKind::Layer if (SHORT_NORM + 1..=SHORT_LAYER_NORM).contains(&n) => {
                (self.kernels.layer_norm_rows, 32)
            }
            NormKind::Rms if vectors <= 4 && is_vectorizable(&parameters) => {
                (self.kernels.rms_norm[usize::from(vectors > 2)], threads)
            }
            _ => (self.kernels.norm_rows, threads),
        };
        let grid = [rows, parameters.groups as usize, 1];
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(kernel, grid, threads, 0, &parameters) }
    }

    /// The parameters of a norm.
    pub(super) fn norm_parameters(&self, norm: &Norm) -> p::Norm {
        let Norm { input, kind, weight, bias, eps, groups, out, half_out, .. } = norm;
        let (out, out_stride) = self.place(*out);
        let (half_out, half_stride) = self.half_place(*half_out);
        let (gate, gate_stride, act) = self.gate(norm.gate);
        let (residual, residual_stride) = self.place(norm.residual.map(|residual| residual.to));
        p::Norm {
            x: self.address(*input),
            weight: self.vector(*weight),
            bias: self.vector(*bias),
            out,
            half_out,
            gate,
            residual,
            sum_scale: self.vector(norm.residual.and_then(|residual| residual.scale)),
            gate_stride,
            residual_stride,
            act,
            padding: 0,
            eps: *eps,
            stride: self.stride(*input),
            out_stride,
            half_stride,
            n: (self.content(*input).stride() / groups) as u32,
            groups: *groups as u32,
            weight_len: weight.map_or(0, |weight| self.weights[weight.0].len as u32),
            is_layer: u32::from(*kind == NormKind::Layer),
        }
    }

    /// The address of a gate, the distance of its rows, and its activation; zeros for none.
    pub(super) fn gate(&self, gate: Option<Gate>) -> (u64, u32, u32) {
        let (address, stride) = self.place(gate.map(|gate| gate.by));
        (address, stride, gate.map_or(0, |gate| act_number(gate.act)))
    }

    pub(super) fn convert_input(
        &self,
        rows: usize,
        input: Value,
        halves: F16Rows,
        out: Value,
    ) -> Result<()> {
        let parameters = self.convert_input_parameters(input, halves, out);
        let (kernel, grid) = (self.kernels.convert_input, [rows, halves.parts, 1]);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }

    /// The parameters of a conversion to matmul inputs.
    pub(super) fn convert_input_parameters(
        &self,
        input: Value,
        F16Rows { parts, cols }: F16Rows,
        out: Value,
    ) -> p::ConvertInput {
        p::ConvertInput {
            x: self.address(input),
            out: self.address(out),
            stride: self.stride(input),
            out_stride: self.stride(out),
            cols: cols as u32,
            parts: parts as u32,
        }
    }

    pub(super) fn elementwise(&self, rows: usize, parameters: &p::Elementwise) -> Result<()> {
        let grid = self.elements(rows, parameters.width as usize);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.elementwise, grid, THREADS, 0, parameters) }
    }

    /// The parameters of a function of single elements.
    pub(super) fn elementwise_parameters(
        &self,
        function: Function,
        (a, b): (Value, Option<Value>),
        (out, half_out): (Option<Value>, Option<Value>),
    ) -> p::Elementwise {
        let (mut xielu, mut least) = (None, 0.0);
        let (op, act, factor) = match function {
            Function::Act(Act::Xielu(x)) => (6, 0, xielu.insert(x).positive),
            Function::Act(act) => (0, act_number(act), 0.0),
            Function::Glu(act) => (1, act_number(act), 0.0),
            Function::GluOfParts(act) => (2, act_number(act), 0.0),
            Function::Add => (3, 0, 0.0),
            Function::Scale(factor) => (4, 0, factor),
            Function::Softcap(cap) => (5, 0, cap),
            Function::Clamp(low, high) => {
                least = low;
                (7, 0, high)
            }
        };
        let width = match out.or(half_out).map(|value| self.content(value)) {
            Some(Content::F16(halves)) => halves.cols,
            content => content.map_or(0, Content::stride),
        };
        let (b, b_stride) = self.place(b);
        let (out, out_stride) = self.place(out);
        let (half_out, half_stride) = self.half_place(half_out);
        p::Elementwise {
            a: self.address(a),
            b,
            out,
            half_out,
            factor,
            a_stride: self.stride(a),
            b_stride,
            out_stride,
            half_stride,
            width: width as u32,
            op,
            act,
            part: (width / self.content(a).stride()) as u32,
            negative: xielu.map_or(0.0, |x| x.negative),
            beta: xielu.map_or(0.0, |x| x.beta),
            eps: xielu.map_or(0.0, |x| x.eps),
            low: least,
            padding: 0,
        }
    }

    /// Multiplies rows by a weight: the elementwise kernel gates one by the other.
    pub(super) fn scale_by(
        &self,
        rows: usize,
        input: Value,
        weight: WeightId,
        out: Value,
    ) -> Result<()> {
        self.elementwise(rows, &self.scale_by_parameters(input, weight, out))
    }

    /// The parameters of that.
    pub(super) fn scale_by_parameters(
        &self,
        input: Value,
        weight: WeightId,
        out: Value,
    ) -> p::Elementwise {
        let (values, weights) = (self.place(Some(input)), (self.vector(Some(weight)), 0));
        let is_one = self.weights[weight.0].len == 1;
        let (a, b) = if is_one { (weights, values) } else { (values, weights) };
        let width = self.content(out).stride();
        p::Elementwise {
            a: a.0,
            b: b.0,
            out: self.address(out),
            a_stride: a.1,
            b_stride: b.1,
            out_stride: self.stride(out),
            width: width as u32,
            op: if is_one { 2 } else { 1 },
            act: act_number(Act::Identity),
            part: width as u32,
            ..p::Elementwise::default()
        }
    }

    pub(super) fn rescale(&self, rows: usize, input: Value, like: Value, out: Value) -> Result<()> {
        let width = self.content(like).stride();
        let parameters = p::Rescale {
            x: self.address(input),
            like: self.address(like),
            out: self.address(out),
            stride: self.stride(input),
            like_stride: self.stride(like),
            out_stride: self.stride(out),
            width: width as u32,
        };
        let grid = [rows, self.content(out).stride() / width, 1];
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.rescale, grid, THREADS, 0, &parameters) }
    }

    pub(super) fn cutoff(
        &self,
        rows: usize,
        input: Value,
        deviations: f32,
        out: Value,
    ) -> Result<()> {
        let parameters = p::Cutoff {
            x: self.address(input),
            out: self.address(out),
            stride: self.stride(input),
            out_stride: self.stride(out),
            width: self.content(out).stride() as u32,
            deviations,
        };
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.cutoff, [rows, 1, 1], THREADS, 0, &parameters) }
    }

    pub(super) fn slice_concat(&self, rows: usize, slice_concat: &SliceConcat) -> Result<()> {
        let parameters = self.slice_concat_parameters(slice_concat);
        let grid = self.elements(rows, self.content(slice_concat.out).stride());
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.slice_concat, grid, THREADS, 0, &parameters) }
    }

    /// The parameters of a slice or a concatenation.
    pub(super) fn slice_concat_parameters(&self, slice_concat: &SliceConcat) -> p::SliceConcat {
        let &SliceConcat { a, b, groups, start, out } = slice_concat;
        let (width, a_width) = (self.content(out).stride(), self.content(a).stride() / groups);
        let a_len = if b.is_some() { a_width } else { width / groups };
        let b_len = width / groups - a_len;
        let is_b_shared = b.is_some_and(|b| self.content(b).stride() == b_len);
        let (b, b_stride) = self.place(b);
        p::SliceConcat {
            a: self.address(a),
            b,
            out: self.address(out),
            a_stride: self.stride(a),
            b_stride,
            out_stride: self.stride(out),
            groups: groups as u32,
            a_width: a_width as u32,
            a_start: start as u32,
            a_len: a_len as u32,
            b_len: b_len as u32,
            is_b_shared: u32::from(is_b_shared),
            padding: 0,
        }
    }

    pub(super) fn rotate(&self, rows: usize, rotate: &Rotate) -> Result<()> {
        let parameters = self.rotate_parameters(rotate);
        let grid = self.elements(rows, parameters.width as usize);
        // SAFETY: values and angles have room for the step's rows.
        unsafe { self.device.launch(self.kernels.rope, grid, THREADS, 0, &parameters) }
    }

    /// The parameters of a rotation.
    pub(super) fn rotate_parameters(&self, rotate: &Rotate) -> p::Rotate {
        let Rotate { input, head_dim, style, rope, out } = rotate;
        p::Rotate {
            x: self.address(*input),
            cos_sin: self.at.angles[*rope],
            out: self.address(*out),
            stride: self.stride(*input),
            out_stride: self.stride(*out),
            width: self.content(*out).stride() as u32,
            head_dim: *head_dim as u32,
            rotary_pairs: (self.program.ropes[*rope].dims / 2) as u32,
            is_neox: u32::from(*style == RopeStyle::Neox),
        }
    }

    pub(super) fn pool(&self, rows: usize, input: Value, kind: PoolKind, out: Value) -> Result<()> {
        let parameters = p::Pool {
            x: self.address(input),
            metadata: self.at.metadata,
            out: self.address(out),
            stride: self.stride(input),
            out_stride: self.stride(out),
            width: self.content(out).stride() as u32,
            kind: match kind {
                PoolKind::Mean => 0,
                PoolKind::First => 1,
                PoolKind::Last => 2,
                PoolKind::Sum => 3,
            },
        };
        // SAFETY: outputs are rows of the step.
        unsafe { self.device.launch(self.kernels.pool, [rows, 1, 1], THREADS, 0, &parameters) }
    }
}

/// Whether a norm has neither bias nor gate, and its rows and groups begin at multiples of 16
/// bytes, so that vectors of four floats are aligned.
fn is_vectorizable(norm: &p::Norm) -> bool {
    let p::Norm { x, weight, bias, out, half_out, gate, residual, .. } = *norm;
    let strides = [norm.n, norm.stride, norm.out_stride, norm.half_stride, norm.residual_stride];
    (bias, gate) == (0, 0)
        && strides.iter().all(|stride| stride.is_multiple_of(4))
        && [x, weight, out, half_out, residual].iter().all(|at| at.is_multiple_of(16))
}

/// The code of a function in `kernels/device.cuh`.
pub(super) fn act_number(act: Act) -> u32 {
    match act {
        Act::Identity => 0,
        Act::Silu => 1,
        Act::Sigmoid => 2,
        Act::Gelu => 3,
        Act::GeluTanh => 4,
        Act::ReluSquared => 5,
        Act::ClampedSwish => 6,
        Act::Softplus => 7,
        Act::Xielu(_) => panic!("xIELU is the activation of no gate"),
    }
}
