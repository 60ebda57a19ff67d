//! Alternating updates (AltUp, Baykal et al. 2023) of Gemma 3n: several residual streams, of which
//! a block computes with the first, after it has predicted all of them from each other.

use crate::error::Result;
use crate::ids::Value;
use crate::op::{Act, Op};

use super::Builder;

impl Builder<'_> {
    /// `count` streams: the embeddings, and projections of them of the same length.
    pub fn altup_streams(&mut self, x: Value, count: usize) -> Result<Vec<Value>> {
        let (width, more) = (self.width(x), count - 1);
        let weight = self.expert_matrices("altup_proj", width, width, more)?;
        let input = self.push(Op::Linear { input: x, weight, bias: None }, more * width);
        let all = self.push(Op::Rescale { input, like: x }, more * width);
        let rest = (0..more).map(|i| self.slice(all, i * width, width));
        Ok([x].into_iter().chain(rest).collect())
    }

    /// All streams, each plus a sum of all with weights that the first one determines.
    pub fn altup_predict(&mut self, streams: &[Value], eps: f32) -> Result<Vec<Value>> {
        let count = streams.len();
        let modalities = self.altup_modalities(streams[0], count, eps)?;
        let weights = self.linear(modalities, "altup_predict_coef", count * count)?;
        let predicted = (0..count).map(|j| {
            streams.iter().enumerate().fold(streams[j], |sum, (i, &stream)| {
                let term = self.times_column(stream, weights, count * j + i);
                self.add(sum, term)
            })
        });
        Ok(predicted.collect())
    }

    /// The predicted streams, each corrected by what the block has added to the first.
    pub fn altup_correct(
        &mut self,
        predicted: &[Value],
        computed: Value,
        eps: f32,
    ) -> Result<Vec<Value>> {
        let modalities = self.altup_modalities(computed, predicted.len(), eps)?;
        let weights = self.linear(modalities, "altup_correct_coef", predicted.len())?;
        let negative = self.scale(predicted[0], Some(-1.0));
        let change = self.add(computed, negative);
        let corrected = predicted.iter().enumerate().map(|(j, &stream)| {
            let more = self.times_column(change, weights, j);
            let sum = self.add(stream, change);
            self.add(sum, more)
        });
        Ok(corrected.collect())
    }

    /// The mean of the first stream and of projections of the others, which have its length.
    pub fn altup_merge(&mut self, streams: &[Value]) -> Result<Value> {
        let (first, width, experts) = (streams[0], self.width(streams[0]), streams.len() - 1);
        let concat = |a, &b| {
            let sum = self.width(a) + width;
            self.push(Op::Concat { a, b, groups: 1 }, sum)
        };
        let input = streams[2..].iter().fold(streams[1], concat);
        let weight = self.expert_matrices("altup_unembd_proj", width, width, experts)?;
        let op = Op::ExpertLinear { input, route: None, weight, bias: None, experts };
        let input = self.push(op, experts * width);
        let rest = self.push(Op::Rescale { input, like: first }, experts * width);
        let sum = (0..experts).fold(first, |sum, i| {
            let stream = self.slice(rest, i * width, width);
            self.add(sum, stream)
        });
        Ok(self.scale(sum, Some(1.0 / streams.len() as f32)))
    }

    /// A learned augmented residual (LAuReL): a row plus its normed low-rank projection.
    pub fn laurel(&mut self, x: Value, eps: f32) -> Result<Value> {
        let (width, rank) = (self.width(x), self.rows("laurel_l").unwrap_or(0));
        let h = self.linear(x, "laurel_l", rank)?;
        let h = self.linear(h, "laurel_r", width)?;
        let h = self.rms_norm(h, "laurel_post_norm", eps)?;
        Ok(self.add(x, h))
    }

    fn altup_modalities(&mut self, x: Value, count: usize, eps: f32) -> Result<Value> {
        let h = self.rms_norm(x, "altup_router_norm", eps)?;
        let h = self.scale(h, Some(1.0 / self.width(h) as f32));
        let h = self.linear(h, "altup_router", count)?;
        // With a cap of 1, this is the tanh.
        Ok(self.softcap(h, Some(1.0)))
    }

    /// A row times a column of `weights`.
    fn times_column(&mut self, x: Value, weights: Value, column: usize) -> Value {
        let (gate, width) = (self.slice(weights, column, 1), self.width(x));
        self.push(Op::Glu { gate, up: x, act: Act::Identity }, width)
    }
}
