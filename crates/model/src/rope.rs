//! Rotary position embedding: the inverse frequencies that a model rotates with. The methods are
//! RoFormer (Su et al. 2021), position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023),
//! LongRoPE (Ding et al. 2024) and Llama 3's per-frequency factors.

use std::f64::consts::PI;
use std::fmt;

use crate::ids::WeightId;

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Norm,
    /// Elements `i` and `i + dims / 2`.
    Neox,
}

/// How frequencies are scaled to extend the context that a model was first trained with.
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
        /// Extended context length over original context length.
        factor: f32,
        /// Original context length, in tokens.
        original_context: u32,
        /// Rotations within the original context above which a frequency is kept.
        beta_fast: f32,
        /// Rotations below which a frequency is interpolated in full.
        beta_slow: f32,
        /// Multiplies sine and cosine, after YaRN's own `1 + 0.1 ln(factor)`.
        attn_factor: f32,
    },
    /// LongRoPE: [`Rope::factors`] holds the change of every frequency.
    Long {
        /// Multiplies sine and cosine.
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
    /// Theta: the base of the inverse frequencies, 10 000 in the first models.
    pub base: f32,
    /// Context extension.
    pub scaling: RopeScaling,
    /// `[dims / 2]`: each frequency is divided by its factor.
    pub factors: Option<WeightId>,
    /// Whether the rotation is undone.
    pub inverse: bool,
    /// Positions are rounded down to a multiple of it; 1 for none.
    pub block: usize,
}

/// What a backend needs to rotate a head.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position of each pair, `[dims / 2]`.
    pub inverse_frequencies: Vec<f64>,
    /// YaRN's and LongRoPE's attention factor, which multiplies sine and cosine.
    pub attention_factor: f32,
    /// See [`Rope::block`].
    pub block: u32,
}

impl RopeTable {
    /// Writes cosine and sine of every pair at `position`, times the attention factor. `cos` and
    /// `sin` are `[dims / 2]`.
    pub fn cos_sin_at(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        let position = position / self.block * self.block;
        for ((&f, c), s) in self.inverse_frequencies.iter().zip(cos).zip(sin) {
            let (sine, cosine) = (f * f64::from(position)).sin_cos();
            *c = cosine as f32 * self.attention_factor;
            *s = sine as f32 * self.attention_factor;
        }
    }
}

/// YaRN's magnitude scale (mscale), which the logarithm of the scaling factor determines.
pub(crate) fn yarn_mscale(factor: f32, multiplier: f32) -> f32 {
    1.0 + 0.1 * multiplier * factor.ln()
}

impl Rope {
    /// The table, given the values of `factors` if the rope has any.
    pub fn table(&self, factors: Option<&[f32]>) -> RopeTable {
        assert_eq!(factors.is_some(), self.factors.is_some(), "factors go with their weight");
        let pairs = self.dims / 2;
        let mut inverse_frequencies: Vec<f64> = (0..pairs)
            .map(|i| f64::from(self.base).powf(-((2 * i) as f64) / self.dims as f64))
            .collect();
        if let Some(factors) = factors {
            inverse_frequencies.iter_mut().zip(factors).for_each(|(f, &x)| *f /= f64::from(x));
        }
        let mut attention_factor = 1.0;
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                inverse_frequencies.iter_mut().for_each(|f| *f /= f64::from(factor));
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attn_factor } => {
                let low = self.yarn_dim(original_context, beta_fast).floor().max(0.0);
                let high = self.yarn_dim(original_context, beta_slow).ceil();
                let high = high.min(self.dims as f64 - 1.0);
                for (i, f) in inverse_frequencies.iter_mut().enumerate() {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *f = *f * (1.0 - ramp) + *f / f64::from(factor) * ramp;
                }
                attention_factor = attn_factor * yarn_mscale(factor, 1.0);
            }
            RopeScaling::Long { attn_factor } => attention_factor = attn_factor,
        }
        if self.inverse {
            inverse_frequencies.iter_mut().for_each(|f| *f = -*f);
        }
        RopeTable { inverse_frequencies, attention_factor, block: self.block as u32 }
    }

    /// The fractional index of the pair that rotates `rotations` times within `context` tokens.
    fn yarn_dim(&self, context: u32, rotations: f32) -> f64 {
        let tokens_per_radian = f64::from(context) / (f64::from(rotations) * 2.0 * PI);
        self.dims as f64 * tokens_per_radian.ln() / (2.0 * f64::from(self.base).ln())
    }
}

impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let style = match self.style {
            RopeStyle::Norm => "norm",
            RopeStyle::Neox => "neox",
        };
        write!(f, "{style} dims {} base {}", self.dims, self.base)?;
        f.write_str(if self.inverse { " inverse" } else { "" })?;
        if self.block > 1 {
            write!(f, " by {} tokens", self.block)?;
        }
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
