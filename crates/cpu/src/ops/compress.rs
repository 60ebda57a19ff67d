//! The compression of blocks of tokens: a softmax over the tokens of a block for each column, one
//! token after the other, so that results do not depend on where a step ends. Per token and column,
//! an exponential.

use std::ops::Range;

use bodkin_model::Compression;

/// The softmax of one column over the tokens so far.
#[derive(Clone, Copy)]
struct ColumnSoftmax {
    max: f32,
    denominator: f32,
    numerator: f32,
}

const EMPTY: ColumnSoftmax =
    ColumnSoftmax { max: f32::NEG_INFINITY, denominator: 0.0, numerator: 0.0 };

/// Some columns of a token.
pub(crate) struct CompressPart<'a> {
    /// The whole row.
    pub(crate) x: &'a [f32],
    /// The whole row.
    pub(crate) scores: &'a [f32],
    /// Columns of the result.
    pub(crate) columns: Range<usize>,
    /// The token's.
    pub(crate) position: usize,
}

impl CompressPart<'_> {
    /// Adds the token to the softmaxes of its columns, `[columns, 3]`, or `[columns, 6]` with those
    /// of the next block, and writes the results if it ends its block, zeros if not.
    pub(crate) fn add(&self, c: &Compression, softmaxes: &mut [f32], out: &mut [f32]) {
        let is_first = self.position.is_multiple_of(c.ratio);
        let is_last = (self.position + 1).is_multiple_of(c.ratio);
        let per_column = softmaxes.len() / out.len();
        let columns = softmaxes.chunks_exact_mut(per_column).zip(self.columns.clone());
        for ((softmaxes, column), out) in columns.zip(out) {
            let mut own = ColumnSoftmax::read(softmaxes);
            if is_first {
                own = EMPTY;
            }
            if c.overlaps {
                let mut next = ColumnSoftmax::read(&softmaxes[3..]);
                if is_first {
                    own = if self.position == 0 { EMPTY } else { next };
                    next = EMPTY;
                }
                next.add(self.scores[column], self.x[column]);
                next.write(&mut softmaxes[3..]);
            }
            let from = if c.overlaps { c.dim + column } else { column };
            own.add(self.scores[from], self.x[from]);
            own.write(softmaxes);
            *out = if is_last { own.numerator / own.denominator } else { 0.0 };
        }
    }
}

impl ColumnSoftmax {
    fn read(from: &[f32]) -> ColumnSoftmax {
        ColumnSoftmax { max: from[0], denominator: from[1], numerator: from[2] }
    }

    fn write(self, to: &mut [f32]) {
        to[..3].copy_from_slice(&[self.max, self.denominator, self.numerator]);
    }

    fn add(&mut self, score: f32, x: f32) {
        if score > self.max {
            let keep = (self.max - score).exp();
            self.denominator = self.denominator * keep + 1.0;
            self.numerator = self.numerator * keep + x;
            self.max = score;
        } else {
            let weight = (score - self.max).exp();
            self.denominator += weight;
            self.numerator += weight * x;
        }
    }
}
