//! Observers see the inputs of all matmuls: activation statistics, calibration and checks of
//! numeric health are observers. This file must not know them.

use bodkin_model::Weight;

/// One input row of a matmul.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputRow<'a> {
    /// The index of the weight's matrix that the row is multiplied with, less than
    /// [`Matmul::experts`].
    pub expert: usize,
    /// `[weight.cols]`, as computed, before any rounding that a backend does for its kernels.
    pub values: &'a [f32],
}

/// A matmul that is about to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Matmul<'a> {
    /// One matrix, or the stacked matrices of all experts.
    pub weight: &'a Weight,
    /// The number of matrices, 1 for a weight that belongs to no experts.
    pub experts: usize,
    /// One for each token, one for each pair of a token and an expert that it chose (those of a
    /// token side by side), or, at the head, one for each output of the step.
    pub rows: &'a [InputRow<'a>],
}

/// Sees the matmuls of a step, see [`crate::Step::observer`].
pub trait Observer: Send {
    /// Called once for each matmul of the plan, in its order.
    fn matmul(&mut self, matmul: &Matmul<'_>);
}

/// Lends an observer to a part of a step.
pub(crate) fn reborrow<'a>(
    observer: &'a mut Option<&mut dyn Observer>,
) -> Option<&'a mut dyn Observer> {
    match observer {
        Some(observer) => Some(&mut **observer),
        None => None,
    }
}
