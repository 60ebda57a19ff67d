//! Functions with parameters, of activations and of positions.

/// xIELU (Huang and Schlag 2024): `positive * x^2 + beta * x` where `x` is positive, elsewhere
/// `negative * (exp(min(x, eps)) - 1 - x) + beta * x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xielu {
    /// The factor of positive inputs.
    pub positive: f32,
    /// The factor of the others.
    pub negative: f32,
    /// The slope at zero.
    pub beta: f32,
    /// The largest exponent.
    pub eps: f32,
}

/// A factor of queries that grows with their position, so that attention stays sharp over many
/// keys (Llama 4): `1 + growth * ln(1 + floor((position + offset) / length))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Multiplies the logarithm.
    pub growth: f32,
    /// Tokens after which the factor grows first.
    pub length: u32,
    /// Added to positions.
    pub offset: u32,
}

impl Temperature {
    /// The factor of a query at `position`.
    pub fn at(&self, position: usize) -> f32 {
        let steps = (position as u64 + u64::from(self.offset)) / u64::from(self.length);
        (1.0 + f64::from(self.growth) * (steps as f64).ln_1p()) as f32
    }
}
