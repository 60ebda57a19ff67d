//! Statistics of a model while it reads a text: activations of each layer, and logits. It must not
//! know the text.

use std::collections::BTreeMap;

use bodkin_backend::{Matmul, Model, Observer};

use crate::error::Result;
use crate::perplexity::Perplexity;
use crate::score::LogSoftmax;

/// Logits whose range is smaller than this are flat.
const FLAT: f32 = 1e-3;
/// A prediction whose top probability is above this is saturated.
const SATURATED: f64 = 0.99999;
/// The largest fraction of saturated predictions on plain text.
const SATURATED_SHARE: f64 = 0.5;
/// The first predictions have too little context to count for the perplexity.
const WARM_UP: usize = 16;

/// The inputs of the products of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The smallest.
    pub min: f32,
    /// The largest.
    pub max: f32,
    /// The count of NaN and infinite values.
    pub not_finite: u64,
}

impl Range {
    /// The largest magnitude.
    pub fn magnitude(&self) -> f32 {
        self.max.max(-self.min)
    }
}

/// Collects the ranges of a step's activations. The head's are those of no layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranges {
    /// By the layer's number.
    pub layers: BTreeMap<Option<usize>, Range>,
}

impl Observer for Ranges {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let none = Range { min: f32::INFINITY, max: f32::NEG_INFINITY, not_finite: 0 };
        let range = self.layers.entry(matmul.weight.layer).or_insert(none);
        for &x in matmul.rows.iter().flat_map(|row| row.values) {
            match x.is_finite() {
                true => (range.min, range.max) = (range.min.min(x), range.max.max(x)),
                false => range.not_finite += 1,
            }
        }
    }
}

/// The logits of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Logits {
    /// Rows counted.
    pub rows: usize,
    /// Rows with a NaN or infinite logit.
    pub not_finite: usize,
    /// Rows whose logits are all the same.
    pub flat: usize,
    /// Rows whose probability is almost all on one token.
    pub saturated: usize,
    /// The largest magnitude of a logit.
    pub magnitude: f32,
}

impl Logits {
    /// Adds a row.
    pub fn add(&mut self, logits: &[f32]) {
        self.rows += 1;
        if !logits.iter().all(|x| x.is_finite()) {
            self.not_finite += 1;
            return;
        }
        let softmax = LogSoftmax::of(logits);
        let min = logits.iter().copied().fold(f32::INFINITY, f32::min);
        self.flat += usize::from(softmax.max - min < FLAT);
        self.saturated += usize::from((-softmax.log_sum).exp() > SATURATED);
        self.magnitude = self.magnitude.max(softmax.max.abs()).max(min.abs());
    }
}

/// The statistics of a model on a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Activation ranges by layer.
    pub ranges: Ranges,
    /// The logits of all predictions.
    pub logits: Logits,
    /// The perplexity of the text.
    pub perplexity: Perplexity,
    /// The logits of some positions, `[positions, vocabulary]`, for a baseline.
    pub kept: Vec<f32>,
}

impl Health {
    /// Reads a text, and stores the logits of the positions that `keep` accepts.
    ///
    /// # Errors
    /// The engine's error.
    pub fn read(
        model: &mut dyn Model,
        tokens: &[u32],
        keep: impl Fn(usize) -> bool,
    ) -> Result<Health> {
        let (vocabulary, step) = (model.plan().output_width(), model.limits().tokens);
        let mut health = Health::default();
        let mut ranges = Ranges::default();
        let observer: Option<&mut dyn Observer> = Some(&mut ranges);
        bodkin_engine::steps(
            model,
            tokens,
            step,
            |_| true,
            observer,
            |positions, rows| {
                for (&position, row) in positions.iter().zip(rows.chunks_exact(vocabulary)) {
                    health.logits.add(row);
                    if let Some(&next) = tokens.get(position + 1).filter(|_| position >= WARM_UP) {
                        let log_probability =
                            LogSoftmax::of(row).log_probability(row[next as usize]);
                        health.perplexity.add(log_probability);
                    }
                    if keep(position) {
                        health.kept.extend(row);
                    }
                }
            },
        )?;
        health.ranges = ranges;
        Ok(health)
    }

    /// One line for each fault.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (layer, range) in &self.ranges.layers {
            let name = layer.map_or("the head".to_owned(), |layer| format!("layer {layer}"));
            if range.not_finite > 0 {
                faults.push(format!("{name}: {} activations are not finite", range.not_finite));
            } else if range.magnitude() == 0.0 {
                faults.push(format!("{name}: all activations are zero"));
            }
        }
        let Logits { rows, not_finite, flat, saturated, .. } = self.logits;
        if not_finite > 0 {
            faults.push(format!("{not_finite} of {rows} rows of logits are not finite"));
        }
        if flat > 0 {
            faults.push(format!("{flat} of {rows} rows of logits are flat"));
        }
        if saturated as f64 > SATURATED_SHARE * rows as f64 {
            faults.push(format!("{saturated} of {rows} rows of logits are saturated"));
        }
        faults
    }
}
