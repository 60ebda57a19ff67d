//! Saliency scores of the methods without compensation: magnitude, Wanda and RIA. It must not know
//! how many weights are pruned.

/// A method and the statistics that it needs besides the row.
pub(super) enum Score<'a> {
    /// The weight's magnitude.
    Magnitude,
    /// Magnitude times the norm of the column's input, `[cols]`: "A Simple and Effective Pruning
    /// Approach for Large Language Models", Sun and others, 2023.
    Wanda { norms: &'a [f32] },
    /// Magnitude relative to the sums of its row and its column, `[cols]`, times the square root of
    /// the norm of the column's input: "Plug-and-Play: An Efficient Post-training Pruning Method
    /// for Large Language Models", Zhang and others, 2024.
    Ria { norms: &'a [f32], column_sums: &'a [f32] },
}

impl Score<'_> {
    /// Computes the score of each weight of a row. Only the order within the row is meaningful.
    pub(super) fn of(&self, row: &[f32], scores: &mut [f32]) {
        let pairs = scores.iter_mut().zip(row);
        match self {
            Score::Magnitude => pairs.for_each(|(score, w)| *score = w.abs()),
            Score::Wanda { norms } => {
                pairs.zip(*norms).for_each(|((score, w), norm)| *score = w.abs() * norm);
            }
            Score::Ria { norms, column_sums } => {
                let row_sum: f32 = row.iter().map(|w| w.abs()).sum();
                let by_row = reciprocal(row_sum);
                let columns = column_sums.iter().zip(*norms);
                for ((score, w), (&sum, norm)) in pairs.zip(columns) {
                    *score = w.abs() * (by_row + reciprocal(sum)) * norm.sqrt();
                }
            }
        }
    }
}

/// `1 / sum`; 0 for an empty sum.
fn reciprocal(sum: f32) -> f32 {
    if sum > 0.0 { 1.0 / sum } else { 0.0 }
}
