//! What an observer sees of a step: the inputs of products, which lie in their buffers as floats
//! until the stage of their products has ended.

use bodkin_backend::{InputRow, Matmul};
use bodkin_model::Rows;

use crate::lower::{Place, Stage};
use crate::step::Step;

/// Tells an observer of a product. The first thread of a step calls it.
pub(crate) type Show<'a> = &'a (dyn Fn(&Matmul<'_>) + Sync);

impl Step<'_> {
    /// Shows the inputs of a stage's products. Other threads may be computing them already: they
    /// write other buffers.
    pub(crate) fn show_products(&self, stage: &Stage, show: Show<'_>) {
        let (experts, rows, products) = match stage {
            Stage::Multiply { rows, input, products } => {
                (1, self.input_rows(*rows, *input), products)
            }
            Stage::Experts { input, cols, sorting, products } => {
                let experts = self.program.sortings[*sorting].experts;
                (experts, self.expert_rows(*input, *cols, *sorting), products)
            }
            _ => return,
        };
        for product in products {
            show(&Matmul { weight: self.plan.weight(product.weight), experts, rows: &rows });
        }
    }

    fn input_rows(&self, rows: Rows, input: Place) -> Vec<InputRow<'_>> {
        let row = |row: usize| InputRow { expert: 0, values: self.read(input, row) };
        match rows {
            Rows::Tokens => (0..self.batch.tokens.len()).map(row).collect(),
            Rows::Outputs => self.batch.outputs.iter().map(|&i| row(i as usize)).collect(),
        }
    }

    fn expert_rows(&self, input: Place, cols: usize, sorting: usize) -> Vec<InputRow<'_>> {
        let sorting = &self.program.sortings[sorting];
        let pairs = (0..self.batch.tokens.len()).flat_map(|token| {
            let route = sorting.route.map(|route| &self.read(route, token)[sorting.used..]);
            // One part of the input for each expert, or the whole for all of them.
            let parts = self.read(input, token).chunks_exact(cols).cycle();
            parts.take(sorting.used).enumerate().map(move |(i, values)| InputRow {
                expert: route.map_or(i, |route| route[i] as usize),
                values,
            })
        });
        pairs.collect()
    }
}
