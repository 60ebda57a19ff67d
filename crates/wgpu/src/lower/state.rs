//! Operations with recurrent state.

use bodkin_backend::Result;
use bodkin_model::Op;

use super::{Lowering, THREADS, at_most, vector};
use crate::program::{BufferId, Depth, Kernel};

/// The widest head of a delta rule.
const MAX_DELTA_DIM: usize = 256;

impl Lowering<'_> {
    pub(super) fn recurrent(&mut self) -> Result<()> {
        let (out, width) = (self.out(), self.width());
        let words = |numbers: &[usize]| numbers.iter().map(|&x| x as u32).collect::<Vec<u32>>();
        let (kernel, buffers, params, groups) = match self.plan.ops[self.op] {
            Op::Conv { input, weight, bias, state } => {
                let kernel = self.plan.weight(weight).cols;
                let params = words(&[width, kernel, usize::from(bias.is_some())]);
                let weight = BufferId::Vector(weight);
                let state = BufferId::State(state.0);
                let buffers = vec![self.value(input), weight, vector(bias), state, out];
                (Kernel::Conv, buffers, params, width.div_ceil(THREADS))
            }
            Op::Compress { input, scores, compression: c, state } => {
                let params = words(&[c.dim, c.ratio, usize::from(c.overlaps)]);
                let state = BufferId::State(state.0);
                let buffers = vec![self.value(input), self.value(scores), state, out];
                (Kernel::Compress, buffers, params, c.dim.div_ceil(THREADS))
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan: s, state } => {
                let params =
                    [s.heads, s.head_dim, s.groups, s.state, usize::from(s.is_channelwise)];
                let mut buffers: Vec<BufferId> =
                    [x, b, c, dt].map(|value| self.value(value)).to_vec();
                let weights = BufferId::Concatenated(vec![a, d, dt_bias]);
                buffers.extend([weights, BufferId::State(state.0), out]);
                (Kernel::Scan, buffers, words(&params), width.div_ceil(THREADS))
            }
            Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps, rule: r, state } => {
                at_most("delta rules of width", r.head_dim, MAX_DELTA_DIM)?;
                let flags = [r.is_cyclic, r.is_channelwise].map(usize::from);
                let mut params =
                    words(&[r.key_heads, r.value_heads, r.head_dim, flags[0], flags[1]]);
                params.push(eps.to_bits());
                let mut buffers: Vec<BufferId> =
                    [qkv, decay, beta].map(|value| self.value(value)).to_vec();
                let weights = [a, dt_bias].map(BufferId::Vector);
                buffers.extend(weights.into_iter().chain([BufferId::State(state.0), out]));
                (Kernel::DeltaRule, buffers, params, r.value_heads)
            }
            ref op => unreachable!("{op:?} has no state"),
        };
        self.push(kernel, buffers, params, groups, Depth::Spans);
        Ok(())
    }
}
