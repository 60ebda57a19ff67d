//! Stages with recurrent state: convolutions, state-space layers and delta rules.

use bodkin_backend::Result;

use super::rows::act_number;
use super::{Step, THREADS};
use crate::constants::{
    CONV_ROWS, MAX_RULE_DIM, RECURRENT_THREADS, RULE_BLOCK, SCAN_DECODE_ROWS, SCAN_ROWS,
};
use crate::lower::{Conv, DeltaRuleStage, ScanStage};
use crate::parameters as p;

impl Step<'_> {
    pub(super) fn conv(&self, conv: &Conv) -> Result<()> {
        let parameters = self.conv_parameters(conv);
        let width = parameters.width as usize;
        // Decode steps have a row of each sequence.
        let row_blocks = (self.size.tokens - self.size.spans + 1).div_ceil(CONV_ROWS);
        let grid = [self.size.spans, width.div_ceil(THREADS), row_blocks];
        // SAFETY: every span has a state slot of its own.
        unsafe { self.device.launch(self.kernels.conv, grid, THREADS, 0, &parameters) }
    }

    /// The parameters of a convolution.
    pub(super) fn conv_parameters(&self, conv: &Conv) -> p::Conv {
        let Conv { input, weight, bias, state, act, out } = conv;
        let width = self.content(*out).stride();
        p::Conv {
            x: self.address(*input),
            weight: self.vector(Some(*weight)),
            bias: self.vector(*bias),
            metadata: self.at.metadata,
            states: self.at.states[*state],
            out: self.address(*out),
            stride: self.stride(*input),
            out_stride: self.stride(*out),
            width: width as u32,
            taps: (self.weights[weight.0].len / width) as u32,
            act: act_number(*act),
            padding: 0,
        }
    }

    pub(super) fn scan(&self, stage: &ScanStage) -> Result<()> {
        let (parameters, s) = (self.scan_parameters(stage), &stage.scan);
        let (scans, is_decode) = (&self.kernels.scans, self.size.tokens == self.size.spans);
        let (kernel, rows) = match (s.is_channelwise, is_decode, s.state) {
            (true, ..) => (scans.by_channel, SCAN_ROWS),
            (false, true, ..=128) => (scans.decode_up_to_128, SCAN_DECODE_ROWS),
            (false, true, _) => (scans.decode_up_to_256, SCAN_DECODE_ROWS),
            (false, false, ..=128) => (scans.up_to_128, SCAN_ROWS),
            (false, false, _) => (scans.up_to_256, SCAN_ROWS),
        };
        let row_blocks = s.head_dim.div_ceil(RECURRENT_THREADS / 32 * rows);
        let grid = [self.size.spans * s.heads, row_blocks, 1];
        // SAFETY: every span has a state slot of its own.
        unsafe { self.device.launch(kernel, grid, RECURRENT_THREADS, 0, &parameters) }
    }

    /// The parameters of a scan.
    pub(super) fn scan_parameters(&self, stage: &ScanStage) -> p::Scan {
        let [x, b, c, dt] = stage.inputs.map(|value| self.address(value));
        let strides = stage.inputs.map(|value| self.stride(value));
        let [a, d, dt_bias] = stage.weights.map(|id| self.vector(Some(id)));
        let s = &stage.scan;
        let (gate, gate_stride, act) = self.gate(stage.gate);
        let (out, out_stride) = self.place(stage.out);
        let (half_out, half_stride) = self.half_place(stage.half_out);
        p::Scan {
            x,
            b,
            c,
            dt,
            a,
            d,
            dt_bias,
            metadata: self.at.metadata,
            states: self.at.states[stage.state],
            gate,
            out,
            half_out,
            gate_stride,
            half_stride,
            act,
            padding: 0,
            x_stride: strides[0],
            b_stride: strides[1],
            c_stride: strides[2],
            dt_stride: strides[3],
            out_stride,
            heads: s.heads as u32,
            head_dim: s.head_dim as u32,
            groups: s.groups as u32,
            state_dim: s.state as u32,
            is_channelwise: s.is_channelwise.into(),
        }
    }

    pub(super) fn delta_rule(&self, stage: &DeltaRuleStage) -> Result<()> {
        let (parameters, r) = (self.rule_parameters(stage), &stage.rule);
        let rules = &self.kernels.delta_rules;
        let kernels = if r.head_dim <= 128 { rules.up_to_128 } else { rules.up_to_256 };
        let kernel = kernels[usize::from(r.is_channelwise)];
        let blocks = r.head_dim.div_ceil(RULE_BLOCK);
        let grid = [self.size.spans * r.value_heads, blocks, 1];
        // SAFETY: every span has a state slot of its own.
        unsafe { self.device.launch(kernel, grid, RECURRENT_THREADS, 0, &parameters) }
    }

    /// The parameters of a delta rule.
    pub(super) fn rule_parameters(&self, stage: &DeltaRuleStage) -> p::DeltaRule {
        let [qkv, decay, beta] = stage.inputs.map(|value| self.address(value));
        let strides = stage.inputs.map(|value| self.stride(value));
        let [a, dt_bias] = stage.weights.map(|id| self.vector(Some(id)));
        let r = &stage.rule;
        assert!(r.head_dim <= MAX_RULE_DIM, "wider heads are refused at load");
        p::DeltaRule {
            qkv,
            decay,
            beta,
            a,
            dt_bias,
            metadata: self.at.metadata,
            states: self.at.states[stage.state],
            out: self.address(stage.out),
            qkv_stride: strides[0],
            decay_stride: strides[1],
            beta_stride: strides[2],
            out_stride: self.stride(stage.out),
            eps: stage.eps,
            key_heads: r.key_heads as u32,
            heads: r.value_heads as u32,
            head_dim: r.head_dim as u32,
            is_cyclic: r.is_cyclic.into(),
            is_channelwise: r.is_channelwise.into(),
        }
    }
}
