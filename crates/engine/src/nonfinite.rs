//! Where the values of a model stop being finite. NaN and infinities, of weights or of activations
//! that overflow, spread to all that is computed from them, so errors name the first place.

use bodkin_backend::{Matmul, Model, Observer};

use crate::error::{Error, Result};
use crate::pages::Pages;
use crate::single_sequence::run_sequence;

/// Remembers the first matmul whose input holds NaN or infinity.
#[derive(Default)]
pub struct FirstNonFinite {
    place: Option<String>,
    /// The matmul that was seen last.
    last: String,
}

impl FirstNonFinite {
    /// Fails if there was one.
    ///
    /// # Errors
    /// [`Error::NonFinite`], which names its layer and weight.
    pub fn check(&self) -> Result<()> {
        match self.place.clone() {
            Some(place) => Err(Error::NonFinite { place }),
            None => Ok(()),
        }
    }
}

impl Observer for FirstNonFinite {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let is_finite = || matmul.rows.iter().flat_map(|row| row.values).all(|x| x.is_finite());
        if self.place.is_none() && !is_finite() {
            let layer = matmul.weight.layer.map(|layer| format!("layer {layer}"));
            let layer = layer.as_deref().unwrap_or("the head");
            self.place = Some(format!("{layer}, the input of {}", matmul.weight.name));
        }
        self.last.clone_from(&matmul.weight.name);
    }
}

/// The error of a sequence of `tokens` whose output is not finite. Runs it again in pages of its
/// own, to find the first value that is not.
pub fn error(model: &mut dyn Model, pages: &mut Pages, tokens: &[u32]) -> Error {
    let mut first = FirstNonFinite::default();
    let step = model.limits().tokens;
    let is_last = |i| i + 1 == tokens.len();
    let place = match run_sequence(model, pages, tokens, step, is_last, Some(&mut first), |_, _| ())
    {
        Ok(()) => first.place.unwrap_or_else(|| format!("the output of {}", first.last)),
        Err(error) => format!("a place that another run does not show: {error}"),
    };
    Error::NonFinite { place }
}
