//! A look at what flows through a model: the inputs of all products with weights. Activation
//! statistics, calibration and checks of numeric health read it. It must not know what is made of
//! them.

use bodkin_model::Weight;

/// One input row of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputRow<'a> {
    /// Which of the weight's matrices the row meets, less than [`Matmul::experts`].
    pub expert: usize,
    /// `[weight.cols]`, as computed, before any rounding that a backend does for its kernels.
    pub values: &'a [f32],
}

/// A product that is about to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Matmul<'a> {
    /// What the rows are multiplied with: one matrix, or one for each expert below each other.
    pub weight: &'a Weight,
    /// The number of matrices, 1 for a weight that belongs to no experts.
    pub experts: usize,
    /// One for each token, one for each pair of a token and an expert that it chose (those of a
    /// token side by side), or, at the head, one for each output of the step.
    pub rows: &'a [InputRow<'a>],
}

/// Told about the products of a step, see [`crate::Model::observe`].
pub trait Observer: Send {
    /// Called once for each product of the plan, in its order.
    fn matmul(&mut self, matmul: &Matmul<'_>);
}
