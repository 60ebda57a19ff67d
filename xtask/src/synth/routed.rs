//! Tensors of a model that follows a routing trace. Random weights choose experts without locality;
//! with these, token id `v` chooses what step `v % steps` of the trace chose, and greedy decoding
//! goes on with the next step.
//!
//! The code of a step is a row of a Walsh-Hadamard matrix with random signs, so the codes of all
//! steps are orthogonal. Embeddings are codes, so large that what the layers add does not matter.
//! A router's row is the sum of the codes of the steps that choose its expert (a linear associative
//! memory), and the head's row of a token is the code of the step before.

use std::io::{self, Write};

use anyhow::{Result, ensure};
use bodkin_eval::RoutingTrace;
use bodkin_gguf::Format;

use super::blocks::DEVIATION;
use super::shape::{Kind, Shape};
use crate::random::Random;

/// The magnitude of embeddings. Layers add about 1 each.
const EMBEDDING: f32 = 256.0;
/// The score of the first chosen expert, and how much less the last one has. Others have 0.
const SCORE: f32 = 10.0;
const RANKS: f32 = 2.0;

/// The trace with the codes of its steps.
pub(super) struct Routed {
    trace: RoutingTrace,
    /// Layers before the first with experts.
    dense_layers: usize,
    /// Columns of the embedding, of which the first power of two of them hold the codes.
    width: usize,
    /// `[steps, codes' columns]`, 1 or -1.
    codes: Vec<Vec<f32>>,
}

impl Routed {
    /// The first steps of a trace, up to the number of orthogonal codes and of ordinary tokens.
    pub(super) fn new(trace: RoutingTrace, shape: &Shape, seed: u64) -> Result<Routed> {
        let (experts, used, dense_layers) = match shape.kind {
            Kind::Experts { count, used } | Kind::Sinks { count, used, .. } => (count, used, 0),
            Kind::SharedExpert { count, used, .. } | Kind::Latent { count, used, .. } => {
                (count, used, 1)
            }
            _ => anyhow::bail!("--routing: expected a shape with experts"),
        };
        let [found, chosen] = [trace.experts(), trace.used()];
        ensure!(
            (found, chosen) == (experts as usize, used as usize),
            "--routing: expected {used} of {experts} experts, as the shape has, found {chosen} of \
             {found}"
        );
        let (layers, found) = (shape.layers as usize - dense_layers, trace.layers().len());
        ensure!(
            found >= layers,
            "--routing: expected {layers} layers or more, as the shape has, found {found}"
        );
        let width = shape.width as usize;
        let cols = 1 << width.ilog2();
        // The last two tokens are special.
        let steps = trace.tokens().min(cols).min(shape.vocabulary as usize - 2);
        let mut random = Random::new(seed);
        let signs: Vec<u64> = (0..cols).map(|_| random.bits() & 1).collect();
        let code = |step: usize| {
            let sign = |(i, sign): (usize, &u64)| ((step & i).count_ones() as u64 + sign) % 2;
            let signs = signs.iter().enumerate().map(sign);
            signs.map(|sign| if sign == 0 { 1.0 } else { -1.0 }).collect()
        };
        let codes = (0..steps).map(code).collect();
        Ok(Routed { trace, dense_layers, width, codes })
    }

    /// What writes the data of a tensor, and its format; none if its weights are random.
    pub(super) fn tensor(
        &self,
        name: &str,
        table_format: Format,
        vocabulary: u32,
    ) -> Result<Option<(Format, Source)>> {
        let (steps, vocabulary) = (self.codes.len(), vocabulary as usize);
        let row = |code: &[f32], scale: f32| {
            let mut values: Vec<f32> = code.iter().map(|sign| scale * sign).collect();
            values.resize(self.width, 0.0);
            Ok(table_format.encode(&values, self.width)?)
        };
        let rows = |scale: f32| -> Result<Vec<Vec<u8>>> {
            self.codes.iter().map(|code| row(code, scale)).collect()
        };
        if name == "token_embd.weight" {
            let rows = rows(EMBEDDING)?;
            let all = move |out: &mut dyn Write| {
                (0..vocabulary).try_for_each(|token| out.write_all(&rows[token % steps]))
            };
            return Ok(Some((table_format, Box::new(all))));
        }
        if name == "output.weight" {
            let (rows, none) = (rows(DEVIATION)?, row(&[], 0.0)?);
            let all = move |out: &mut dyn Write| {
                let row =
                    |token| if token < steps { &rows[(token + steps - 1) % steps] } else { &none };
                (0..vocabulary).try_for_each(|token| out.write_all(row(token)))
            };
            return Ok(Some((table_format, Box::new(all))));
        }
        let layer = name.strip_prefix("blk.").and_then(|name| name.split_once('.'));
        let Some((layer, "ffn_gate_inp.weight")) = layer else { return Ok(None) };
        let data = self.router(layer.parse::<usize>()? - self.dense_layers);
        Ok(Some((Format::F32, Box::new(move |out: &mut dyn Write| out.write_all(&data)))))
    }

    /// The router of a layer with experts, `[experts, width]` in F32.
    fn router(&self, layer: usize) -> Vec<u8> {
        let (width, cols) = (self.width, self.codes[0].len());
        // A normalised code has elements of (width / cols)^0.5 in `cols` columns.
        let unit = 1.0 / ((width * cols) as f32).sqrt();
        let mut router = vec![0f32; self.trace.experts() * width];
        for (step, code) in self.codes.iter().enumerate() {
            for (rank, &expert) in self.trace.chosen(step, layer).iter().enumerate() {
                let score = SCORE - RANKS * rank as f32 / self.trace.used() as f32;
                let row = &mut router[usize::from(expert) * width..][..cols];
                row.iter_mut().zip(code).for_each(|(weight, sign)| *weight += score * unit * sign);
            }
        }
        router.iter().flat_map(|weight| weight.to_le_bytes()).collect()
    }
}

/// Writes the data of a tensor.
pub(super) type Source = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()>>;

#[cfg(test)]
mod tests;
