//! Perplexity: the exponential of the mean negative log-likelihood of a text's tokens.

/// Sums over the tokens scored so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    sum: f64,
    square_sum: f64,
    count: u64,
}

impl Perplexity {
    /// Adds a token with this log-probability.
    pub fn add(&mut self, log_probability: f64) {
        self.sum -= log_probability;
        self.square_sum += log_probability * log_probability;
        self.count += 1;
    }

    /// Tokens counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The perplexity.
    pub fn value(&self) -> f64 {
        (self.sum / self.count as f64).exp()
    }

    /// Its standard error to first order: the standard error of the mean times the perplexity. None
    /// if the variance cannot be estimated.
    pub fn standard_error(&self) -> Option<f64> {
        let mean = self.sum / self.count as f64;
        let variance = self.square_sum / self.count as f64 - mean * mean;
        let of_mean = (variance / (self.count as f64 - 1.0)).sqrt();
        (of_mean > 0.0 && of_mean.is_finite()).then(|| of_mean * self.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_die_has_the_perplexity_of_its_faces() {
        let mut die = Perplexity::default();
        (0..10).for_each(|_| die.add((1.0f64 / 6.0).ln()));
        assert!((die.value() - 6.0).abs() < 1e-12);
        let mut coins = Perplexity::default();
        [0.5f64, 0.25, 0.5, 0.25].into_iter().for_each(|p| coins.add(p.ln()));
        let wanted = 8.0f64.sqrt();
        assert!((coins.value() - wanted).abs() < 1e-12);
        // The mean of ln 2, ln 4 twice has the standard deviation ln 2 / 2, and three degrees.
        let error = wanted * 2.0f64.ln() / 2.0 / 3.0f64.sqrt();
        assert!((coins.standard_error().unwrap() - error).abs() < 1e-12);
    }
}
