//! How far a model's predictions lie from those of a base model on the same text: the
//! Kullback-Leibler divergence, the change of the right token's probability, and how often both
//! prefer the same token; with llama-perplexity's definitions.

use crate::kld::BaseRow;
use crate::score::{LogSoftmax, Row};

/// Base log-probabilities at or below this are excluded from the divergence: the file clamps them.
const SMALLEST_LOG_PROBABILITY: f32 = -16.0;

/// The normalised mean squared error: the squared error relative to the squared reference.
pub fn nmse(found: &[f32], wanted: &[f32]) -> f64 {
    let pairs = found.iter().zip(wanted).map(|(&f, &w)| (f64::from(f), f64::from(w)));
    let (error, size) =
        pairs.fold((0.0, 0.0), |(error, size), (f, w)| (error + (f - w).powi(2), size + w * w));
    error / size
}

/// The comparison of one prediction with the base model's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Values {
    /// The log-probability of the next token.
    pub log_probability: f64,
    /// The base model's log-probability of it.
    pub base_log_probability: f64,
    /// The KL divergence of the prediction from the base model's.
    pub divergence: f64,
    /// Whether both have the same most probable token.
    pub has_same_top: bool,
}

impl Values {
    /// Compares a prediction with the base's.
    pub fn of(row: Row<'_>, base: BaseRow<'_>) -> Values {
        let softmax = LogSoftmax::of(row.logits);
        let mut divergence = 0.0;
        let (mut top, mut base_top) = ((0, f32::NEG_INFINITY), (0, f32::NEG_INFINITY));
        for (i, (&logit, log_base)) in row.logits.iter().zip(base.log_probabilities()).enumerate() {
            if logit > top.1 {
                top = (i, logit);
            }
            if log_base > base_top.1 {
                base_top = (i, log_base);
            }
            if log_base > SMALLEST_LOG_PROBABILITY {
                let difference = f64::from(log_base) - softmax.log_probability(logit);
                divergence += f64::from(log_base.exp()) * difference;
            }
        }
        Values {
            log_probability: softmax.log_probability(row.logits[row.next as usize]),
            base_log_probability: f64::from(base.log_probability(row.next)),
            divergence,
            has_same_top: top.0 == base_top.0,
        }
    }

    /// The change of the next token's probability from the base.
    pub fn probability_change(&self) -> f64 {
        self.log_probability.exp() - self.base_log_probability.exp()
    }
}

/// A value and its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Its standard error; 0 if there are too few values to estimate it.
    pub error: f64,
}

/// The values of a text's predictions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Divergence {
    values: Vec<Values>,
}

impl Divergence {
    /// Adds a prediction.
    pub fn add(&mut self, values: Values) {
        self.values.push(values);
    }

    /// Predictions counted.
    pub fn count(&self) -> usize {
        self.values.len()
    }

    /// The mean negative log-likelihood, whose exponential is the perplexity.
    pub fn log_perplexity(&self) -> Estimate {
        self.mean(|v| -v.log_probability)
    }

    /// The base model's mean negative log-likelihood.
    pub fn base_log_perplexity(&self) -> Estimate {
        self.mean(|v| -v.base_log_probability)
    }

    /// The covariance of the means of both.
    pub fn covariance(&self) -> f64 {
        let n = self.values.len() as f64;
        if n < 10.0 {
            return 0.0;
        }
        let (a, b) = (self.log_perplexity().value, self.base_log_perplexity().value);
        let product = self.mean(|v| v.log_probability * v.base_log_probability).value;
        (product - a * b) / (n - 1.0)
    }

    /// The logarithm of the perplexity relative to the base's.
    pub fn log_ratio(&self) -> Estimate {
        let (a, b) = (self.log_perplexity(), self.base_log_perplexity());
        let variance = a.error.powi(2) + b.error.powi(2) - 2.0 * self.covariance();
        Estimate { value: a.value - b.value, error: variance.max(0.0).sqrt() }
    }

    /// The mean divergence.
    pub fn mean_divergence(&self) -> Estimate {
        self.mean(|v| v.divergence)
    }

    /// The mean change of the next token's probability.
    pub fn mean_change(&self) -> Estimate {
        self.mean(Values::probability_change)
    }

    /// The root of the mean square change of the next token's probability.
    pub fn change_rms(&self) -> Estimate {
        let square = self.mean(|v| v.probability_change().powi(2));
        let value = square.value.sqrt();
        Estimate { value, error: if value > 0.0 { 0.5 / value * square.error } else { 0.0 } }
    }

    /// The fraction of predictions with the same most probable token.
    pub fn same_top(&self) -> Estimate {
        let n = self.values.len() as f64;
        let value = self.values.iter().filter(|v| v.has_same_top).count() as f64 / n;
        let variance = if n > 1.0 { value * (1.0 - value) / (n - 1.0) } else { 0.0 };
        Estimate { value, error: variance.sqrt() }
    }

    /// All divergences, ascending.
    pub fn divergences(&self) -> Vec<f64> {
        self.sorted(|v| v.divergence)
    }

    /// All changes of the next token's probability, ascending.
    pub fn changes(&self) -> Vec<f64> {
        self.sorted(Values::probability_change)
    }

    fn sorted(&self, of: impl Fn(&Values) -> f64) -> Vec<f64> {
        let mut values: Vec<f64> = self.values.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    }

    fn mean(&self, of: impl Fn(&Values) -> f64) -> Estimate {
        let n = self.values.len() as f64;
        let (sum, square) = self
            .values
            .iter()
            .map(of)
            .fold((0.0, 0.0), |(sum, square), x| (sum + x, square + x * x));
        let variance = square / n - (sum / n).powi(2);
        let has_error = variance > 0.0 && self.values.len() > 10;
        let error = if has_error { (variance / (n - 1.0)).sqrt() } else { 0.0 };
        Estimate { value: sum / n, error }
    }

    /// The percentile `part` (0 to 1) of ascending values, linearly interpolated.
    ///
    /// # Panics
    /// If there are no values.
    pub fn percentile(ascending: &[f64], part: f64) -> f64 {
        assert!(!ascending.is_empty(), "a percentile of nothing");
        let place = part.clamp(0.0, 1.0) * (ascending.len() - 1) as f64;
        let (below, fraction) = (place as usize, place.fract());
        let above = (below + 1).min(ascending.len() - 1);
        (1.0 - fraction) * ascending[below] + fraction * ascending[above]
    }
}
