//! Layers with recurrent state: the mixers of Mamba 1 (Gu and Dao 2023) and Mamba 2 (Dao and Gu
//! 2024), and the gated short convolution of LFM2.

use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::{StateId, Value};
use crate::op::{Act, NormKind, Op, Scan};
use crate::plan::RecurrentState;

use super::Builder;

/// The sizes of a Mamba 2 mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaMixer {
    /// Taps of the convolution, at least 2.
    pub kernel: usize,
    /// Heads, groups, widths.
    pub scan: Scan,
    /// The epsilon of the norm, if the file has one.
    pub eps: f32,
}

impl MambaMixer {
    /// The settings of all Mamba 2 layers of a model.
    pub fn new(m: &HyperParameters<'_>, eps: f32) -> Result<MambaMixer> {
        let kernel = m.kernel("ssm.conv_kernel")?;
        let (inner, heads) = (m.size("ssm.inner_size")?, m.size("ssm.time_step_rank")?);
        if inner % heads != 0 {
            let problem = format!("{heads} heads do not divide the width of {inner}");
            return Err(m.error("ssm.time_step_rank", problem));
        }
        let groups = m.size("ssm.group_count")?;
        if heads % groups != 0 {
            let problem = format!("{groups} does not divide the {heads} heads");
            return Err(m.error("ssm.group_count", problem));
        }
        let head_dim = inner / heads;
        let state = m.size("ssm.state_size")?;
        let scan = Scan { heads, head_dim, groups, state, is_channelwise: false };
        Ok(MambaMixer { kernel, scan, eps })
    }
}

/// The sizes of a Mamba 1 mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectiveMixer {
    /// Taps of the convolution, at least 2.
    pub kernel: usize,
    /// Heads, widths.
    pub scan: Scan,
    /// Width of the row from which the time steps are projected.
    pub dt_rank: usize,
    /// The epsilon of the norms of time steps, B and C.
    pub eps: f32,
}

impl SelectiveMixer {
    /// The settings of all Mamba 1 layers of a model.
    pub fn new(m: &HyperParameters<'_>, eps: f32) -> Result<SelectiveMixer> {
        let (inner, state) = (m.size("ssm.inner_size")?, m.size("ssm.state_size")?);
        // The widest heads up to 64 that are a power of two, which backends run well.
        let head_dim = (1 << inner.trailing_zeros()).min(64);
        let heads = inner / head_dim;
        let scan = Scan { heads, head_dim, groups: 1, state, is_channelwise: true };
        let (kernel, dt_rank) = (m.kernel("ssm.conv_kernel")?, m.size("ssm.time_step_rank")?);
        Ok(SelectiveMixer { kernel, scan, dt_rank, eps })
    }
}

impl Builder<'_> {
    /// A Mamba 1 mixer: the input projection to x and gate, a convolution of x, projections to time
    /// steps, B and C, each normed, the scan, the gate, the output projection.
    pub fn selective_mixer(&mut self, input: Value, mixer: SelectiveMixer) -> Result<Value> {
        let SelectiveMixer { kernel, scan, dt_rank, eps } = mixer;
        let (inner, state) = (scan.heads * scan.head_dim, scan.state);
        let both = self.linear(input, "ssm_in", 2 * inner)?;
        let x = self.slice(both, 0, inner);
        let gate = self.slice(both, inner, inner);
        let x = self.conv(x, "ssm_conv1d", kernel)?;
        let x = self.push(Op::Act { input: x, act: Act::Silu }, inner);
        let all = self.linear(x, "ssm_x", dt_rank + 2 * state)?;
        let dt = self.slice(all, 0, dt_rank);
        let b = self.slice(all, dt_rank, state);
        let c = self.slice(all, dt_rank + state, state);
        let dt = self.rms_norm(dt, "ssm_dt_norm", eps)?;
        let b = self.rms_norm(b, "ssm_b_norm", eps)?;
        let c = self.rms_norm(c, "ssm_c_norm", eps)?;
        // The scan adds its bias.
        let weight = self.weight("ssm_dt", dt_rank, inner)?;
        let dt = self.push(Op::Linear { input: dt, weight, bias: None }, inner);
        // The names of these tensors do not end in `.weight`.
        let a = self.find(&format!("{}ssm_a", self.prefix), state, inner)?;
        let d = self.find(&format!("{}ssm_d", self.prefix), inner, 1)?;
        let dt_bias = self.find(&format!("{}ssm_dt.bias", self.prefix), inner, 1)?;
        let state = self.state(RecurrentState::Scan(scan));
        let up = self.push(Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state }, inner);
        let y = self.push(Op::Glu { gate, up, act: Act::Silu }, inner);
        self.linear(y, "ssm_out", self.width(input))
    }

    /// A Mamba 2 mixer: the input projection to gate, x, B, C and time steps, a convolution of x, B
    /// and C, the scan, the gate, an optional group norm, the output projection.
    pub fn mixer(&mut self, input: Value, mixer: MambaMixer) -> Result<Value> {
        let MambaMixer { kernel, scan, eps } = mixer;
        let (inner, bc_width) = (scan.heads * scan.head_dim, scan.groups * scan.state);
        let conv_width = inner + 2 * bc_width;
        let all = self.linear(input, "ssm_in", inner + conv_width + scan.heads)?;
        let gate = self.slice(all, 0, inner);
        let dt = self.slice(all, inner + conv_width, scan.heads);
        let xbc = self.slice(all, inner, conv_width);
        let xbc = self.conv(xbc, "ssm_conv1d", kernel)?;
        let xbc = self.push(Op::Act { input: xbc, act: Act::Silu }, conv_width);
        let x = self.slice(xbc, 0, inner);
        let b = self.slice(xbc, inner, bc_width);
        let c = self.slice(xbc, inner + bc_width, bc_width);
        // The names of these tensors do not end in `.weight`.
        let a = self.find(&format!("{}ssm_a", self.prefix), 1, scan.heads)?;
        let d = self.find(&format!("{}ssm_d", self.prefix), 1, scan.heads)?;
        let dt_bias = self.find(&format!("{}ssm_dt.bias", self.prefix), scan.heads, 1)?;
        let state = self.state(RecurrentState::Scan(scan));
        let up = self.push(Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state }, inner);
        let y = self.push(Op::Glu { gate, up, act: Act::Silu }, inner);
        let y = self.group_norm(y, "ssm_norm", scan.groups, eps)?;
        self.linear(y, "ssm_out", self.width(input))
    }

    /// A short convolution between two gates: one projection to both gates and the input.
    pub fn short_conv(&mut self, input: Value, kernel: usize) -> Result<Value> {
        let width = self.width(input);
        let all = self.linear(input, "shortconv.in_proj", 3 * width)?;
        let before = self.slice(all, 0, width);
        let after = self.slice(all, width, width);
        let x = self.slice(all, 2 * width, width);
        let act = Act::Identity;
        let x = self.push(Op::Glu { gate: before, up: x, act }, width);
        let x = self.conv(x, "shortconv.conv", kernel)?;
        let x = self.push(Op::Glu { gate: after, up: x, act }, width);
        self.linear(x, "shortconv.out_proj", width)
    }

    pub(super) fn conv(&mut self, input: Value, name: &str, kernel: usize) -> Result<Value> {
        let width = self.width(input);
        let weight = self.weight(name, kernel, width)?;
        let bias = self.bias(name, width)?;
        let state = self.state(RecurrentState::Conv { kernel, width });
        Ok(self.push(Op::Conv { input, weight, bias, state }, width))
    }

    /// A norm of each group of a row with separate weights, `[width / groups, groups]`. The input
    /// itself if the file has none.
    fn group_norm(&mut self, input: Value, name: &str, groups: usize, eps: f32) -> Result<Value> {
        if !self.has(name) {
            return Ok(input);
        }
        let width = self.width(input);
        let weight = Some(self.weight(name, width / groups, groups)?);
        let (kind, bias) = (NormKind::Rms, None);
        Ok(self.push(Op::Norm { input, kind, weight, bias, eps, groups }, width))
    }

    pub(super) fn state(&mut self, state: RecurrentState) -> StateId {
        self.plan.states.push(state);
        StateId(self.plan.states.len() - 1)
    }
}
