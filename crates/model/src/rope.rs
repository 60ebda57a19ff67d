//! Rotary position embedding: which frequencies a model rotates with. The methods are those of
//! RoFormer (Su et al. 2021), position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023),
//! LongRoPE (Ding et al. 2024) and Llama 3's per-frequency factors.

use std::f64::consts::PI;
use std::fmt;

use crate::plan::WeightId;

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Norm,
    /// Elements `i` and `i + dims / 2`.
    Neox,
}

/// How frequencies are stretched beyond the context that a model was first trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All positions divided by `factor`.
    Linear {
        /// At least 1 in real files.
        factor: f32,
    },
    /// Low frequencies interpolated, high ones kept, a ramp between them.
    Yarn {
        /// How much longer the context became.
        factor: f32,
        /// Tokens of context before the stretch.
        original_context: u32,
        /// Rotations within the original context above which a frequency is kept.
        beta_fast: f32,
        /// Rotations below which a frequency is interpolated in full.
        beta_slow: f32,
        /// Multiplies the rotated values on top of YaRN's own `1 + 0.1 ln(factor)`.
        attn_factor: f32,
    },
    /// LongRoPE: all that it does to frequencies is in [`Rope::factors`].
    Long {
        /// Multiplies the rotated values.
        attn_factor: f32,
    },
}

/// Everything about a rotation but the position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Elements at the start of a head that are rotated; even.
    pub dims: usize,
    /// The wavelength base, 10 000 in the first models.
    pub base: f32,
    /// Context extension.
    pub scaling: RopeScaling,
    /// `[dims / 2]`: each frequency is divided by its factor.
    pub factors: Option<WeightId>,
}

/// The numbers that a backend needs to rotate.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position of each pair, `[dims / 2]`.
    pub frequencies: Vec<f64>,
    /// Multiplies sine and cosine.
    pub magnitude: f32,
}

impl RopeTable {
    /// Write cosine and sine, times the magnitude, of every pair at `position`.
    ///
    /// `cos` and `sin` are `[dims / 2]`.
    pub fn rotate_at(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for ((&f, c), s) in self.frequencies.iter().zip(cos).zip(sin) {
            let (sine, cosine) = (f * f64::from(position)).sin_cos();
            *c = cosine as f32 * self.magnitude;
            *s = sine as f32 * self.magnitude;
        }
    }
}

impl Rope {
    /// The frequencies, given the values of `factors` if the rope has any.
    pub fn table(&self, factors: Option<&[f32]>) -> RopeTable {
        assert_eq!(factors.is_some(), self.factors.is_some(), "factors go with their weight");
        let pairs = self.dims / 2;
        let mut frequencies: Vec<f64> = (0..pairs)
            .map(|i| f64::from(self.base).powf(-((2 * i) as f64) / self.dims as f64))
            .collect();
        if let Some(factors) = factors {
            frequencies.iter_mut().zip(factors).for_each(|(f, &x)| *f /= f64::from(x));
        }
        let mut magnitude = 1.0;
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                frequencies.iter_mut().for_each(|f| *f /= f64::from(factor));
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attn_factor } => {
                let low = self.yarn_dim(original_context, beta_fast).floor().max(0.0);
                let high = self.yarn_dim(original_context, beta_slow).ceil();
                let high = high.min(self.dims as f64 - 1.0);
                for (i, f) in frequencies.iter_mut().enumerate() {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *f = *f * (1.0 - ramp) + *f / f64::from(factor) * ramp;
                }
                magnitude = attn_factor * (1.0 + 0.1 * factor.ln());
            }
            RopeScaling::Long { attn_factor } => magnitude = attn_factor,
        }
        RopeTable { frequencies, magnitude }
    }

    /// The pair, as a real number, that turns `rotations` times within `context` tokens.
    fn yarn_dim(&self, context: u32, rotations: f32) -> f64 {
        let turns = f64::from(context) / (f64::from(rotations) * 2.0 * PI);
        self.dims as f64 * turns.ln() / (2.0 * f64::from(self.base).ln())
    }
}

impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let style = match self.style {
            RopeStyle::Norm => "norm",
            RopeStyle::Neox => "neox",
        };
        write!(f, "{style} dims {} base {}", self.dims, self.base)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => write!(f, " linear {factor}"),
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attn_factor } => {
                write!(
                    f,
                    " yarn {factor} from {original_context} beta {beta_fast}/{beta_slow} \
                     attn {attn_factor}"
                )
            }
            RopeScaling::Long { attn_factor } => write!(f, " long attn {attn_factor}"),
        }
    }
}
