//! What an observer sees of a step: the inputs of products, which lie in their buffers as floats
//! until the stage of their products has ended.

use bodkin_backend::{InputRow, Matmul};
use bodkin_model::Rows;

use crate::program::{Operand, Stage};
use crate::step::context::{ObserveFn, StepContext};

impl StepContext<'_> {
    /// Shows the inputs of a stage's products. Other threads may be computing them already: they
    /// write other buffers.
    pub(crate) fn observe_linears(&self, stage: &Stage, observe: ObserveFn<'_>) {
        let (experts, rows, linears) = match stage {
            Stage::Matmul { rows, input, linears } => (1, self.input_rows(*rows, *input), linears),
            Stage::GroupedGemm { input, cols, permutation, linears } => {
                let experts = self.program.permutations[*permutation].experts;
                (experts, self.expert_rows(*input, *cols, *permutation), linears)
            }
            _ => return,
        };
        for linear in linears {
            observe(&Matmul { weight: self.plan.weight(linear.weight), experts, rows: &rows });
        }
    }

    fn input_rows(&self, rows: Rows, input: Operand) -> Vec<InputRow<'_>> {
        let row = |row: usize| InputRow { expert: 0, values: self.read(input, row) };
        match rows {
            Rows::Tokens => (0..self.batch.tokens.len()).map(row).collect(),
            Rows::Outputs => self.batch.outputs.iter().map(|&i| row(i as usize)).collect(),
        }
    }

    fn expert_rows(&self, input: Operand, cols: usize, permutation: usize) -> Vec<InputRow<'_>> {
        let permutation = &self.program.permutations[permutation];
        let pairs = (0..self.batch.tokens.len()).flat_map(|token| {
            let route = permutation.route.map(|route| &self.read(route, token)[permutation.used..]);
            // One part of the input for each expert, or the whole for all of them.
            let parts = self.read(input, token).chunks_exact(cols).cycle();
            parts.take(permutation.used).enumerate().map(move |(i, values)| InputRow {
                expert: route.map_or(i, |route| route[i] as usize),
                values,
            })
        });
        pairs.collect()
    }
}
