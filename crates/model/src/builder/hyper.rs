//! Hyper-connections: several residual streams, which each layer reads and writes with weights of
//! its own for every token.

use crate::error::Result;
use crate::ids::Value;
use crate::op::Op;

use super::Builder;

/// The settings of hyper-connections besides their tensors.
#[derive(Clone, Copy, Debug)]
pub struct HyperConnections {
    /// Residual streams.
    pub streams: usize,
    /// See [`Op::HyperWeights`].
    pub iterations: usize,
    /// Added to weights and sums.
    pub eps: f32,
    /// The epsilon of the norm over all streams.
    pub norm_eps: f32,
}

impl Builder<'_> {
    /// All streams, each a copy of the input.
    pub fn streams(&mut self, input: Value, streams: usize) -> Value {
        let width = self.width(input);
        (1..streams).fold(input, |all, _| self.concat(all, input, 1, width))
    }

    /// The input of a layer, a sum of the streams, and the weights with which
    /// [`Builder::write_streams`] adds its output. `name` is that of the layer in tensor names.
    pub fn read_streams(
        &mut self,
        streams: Value,
        name: &str,
        h: &HyperConnections,
    ) -> Result<[Value; 2]> {
        let n = h.streams;
        let weights = self.hyper_weights(streams, name, n * (n + 2), 3, h)?;
        let reads = self.slice(weights, 0, n);
        let writes = self.slice(weights, n, n * (n + 1));
        Ok([self.mix(streams, reads, n, 1), writes])
    }

    /// The new streams: sums of the output of a layer and of the old streams.
    pub fn write_streams(
        &mut self,
        output: Value,
        streams: Value,
        writes: Value,
        h: &HyperConnections,
    ) -> Value {
        let all = self.concat(output, streams, 1, self.width(streams));
        self.mix(all, writes, h.streams + 1, h.streams)
    }

    /// The sum of the streams before the final norm.
    pub fn join_streams(&mut self, streams: Value, h: &HyperConnections) -> Result<Value> {
        self.leave_blocks();
        let weights = self.hyper_weights(streams, "output_hc", h.streams, 1, h)?;
        Ok(self.mix(streams, weights, h.streams, 1))
    }

    fn hyper_weights(
        &mut self,
        streams: Value,
        name: &str,
        width: usize,
        scales: usize,
        h: &HyperConnections,
    ) -> Result<Value> {
        let normed = self.weightless_norm(streams, 1, h.norm_eps);
        let input = self.linear(normed, &format!("{name}_fn"), width)?;
        let scale = self.weight(&format!("{name}_scale"), scales, 1)?;
        let base = self.weight(&format!("{name}_base"), width, 1)?;
        let &HyperConnections { streams, iterations, eps, .. } = h;
        Ok(self.push(Op::HyperWeights { input, scale, base, streams, iterations, eps }, width))
    }

    fn mix(&mut self, input: Value, weights: Value, parts: usize, results: usize) -> Value {
        let width = self.width(input) / parts * results;
        self.push(Op::Mix { input, weights, results }, width)
    }
}
