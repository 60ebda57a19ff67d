//! Sparsity structures: given scores, which weights of a row become zero. Zeros are unstructured,
//! or semi-structured (N:M). It must not know where the scores come from.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Where zeros may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// Anywhere in a row.
    Unstructured,
    /// N:M: `kept` of every `of` consecutive weights remain.
    Groups {
        /// At least 1, less than `of`.
        kept: usize,
        /// At most 32.
        of: usize,
    },
}

impl FromStr for Structure {
    type Err = Error;

    fn from_str(text: &str) -> Result<Structure> {
        let error = || {
            let expected =
                "unstructured, or N:M such as 2:4, with N of every M weights kept, M at most 32";
            Error::invalid("pattern", expected, format!("`{text}`"))
        };
        if text == "unstructured" {
            return Ok(Structure::Unstructured);
        }
        let (kept, of) = text.split_once(':').ok_or_else(error)?;
        let (kept, of) = (kept.parse().map_err(|_| error())?, of.parse().map_err(|_| error())?);
        if kept == 0 || kept >= of || of > 32 {
            return Err(error());
        }
        Ok(Structure::Groups { kept, of })
    }
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Structure::Unstructured => f.write_str("unstructured"),
            Structure::Groups { kept, of } => write!(f, "{kept}:{of}"),
        }
    }
}

/// Indices of the `count` lowest scores; ties go to the first. `order` is scratch space.
pub(super) fn lowest<'a>(scores: &[f32], count: usize, order: &'a mut Vec<u32>) -> &'a [u32] {
    order.clear();
    order.extend(0..scores.len() as u32);
    if count < order.len() {
        order.select_nth_unstable_by(count, |&a, &b| {
            scores[a as usize].total_cmp(&scores[b as usize]).then(a.cmp(&b))
        });
    }
    &order[..count]
}

impl Structure {
    /// The number of zeros in a row of `cols` weights at this sparsity.
    pub(super) fn zeros(self, cols: usize, sparsity: f32) -> usize {
        match self {
            Structure::Unstructured => (f64::from(sparsity) * cols as f64).round() as usize,
            Structure::Groups { kept, of } => cols / of * (of - kept),
        }
    }

    /// Sets the weights with the lowest scores to zero.
    pub(super) fn cut(self, row: &mut [f32], scores: &[f32], zeros: usize, order: &mut Vec<u32>) {
        match self {
            Structure::Unstructured => {
                lowest(scores, zeros, order).iter().for_each(|&i| row[i as usize] = 0.0);
            }
            Structure::Groups { kept, of } => {
                for (row, scores) in row.chunks_exact_mut(of).zip(scores.chunks_exact(of)) {
                    let cut = lowest(scores, of - kept, order);
                    cut.iter().for_each(|&i| row[i as usize] = 0.0);
                }
            }
        }
    }
}
