//! SparseGPT: prunes weights column by column and updates the later columns to compensate for the
//! error, with the inverse Hessian of the inputs ("SparseGPT: Massive Language Models Can Be
//! Accurately Pruned in One-Shot", Frantar and Alistarh, 2023). Rows are pruned independently of
//! each other.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2};

use super::linear::{factor_of_inverse, part, part_mut};
use super::structure::{Structure, lowest};

/// Columns whose errors are collected before the later columns are updated.
const BLOCK: usize = 128;

/// The damping, relative to the mean of the Hessian's diagonal.
const DAMPING: f32 = 0.01;

/// The inverse Hessian of a matrix's inputs, factored.
pub(super) struct Correlations {
    /// The factor of the inverse Hessian, `[cols, cols]`, upper triangular.
    factor: Array2<f32>,
    /// Dead columns, whose input was always zero: their weights have no effect.
    dead: Vec<usize>,
}

impl Correlations {
    /// From the Gram matrix of the inputs, `[cols, cols]`, whose lower triangle is read. None if it
    /// is not finite.
    pub(super) fn new(sums: ArrayView2<f32>) -> Option<Correlations> {
        let mut hessian = sums.to_owned();
        let cols = hessian.nrows();
        let mean = hessian.diag().iter().map(|&d| f64::from(d)).sum::<f64>() / cols as f64;
        let dead: Vec<usize> = (0..cols).filter(|&i| hessian[(i, i)] <= 0.0).collect();
        let damping = DAMPING * mean as f32;
        hessian.diag_mut().mapv_inplace(|d| d + damping);
        dead.iter().for_each(|&i| hessian[(i, i)] = damping.max(1.0));
        let mut damping = damping;
        // Nearly collinear inputs need more damping.
        for _ in 0..4 {
            if let Some(factor) = factor_of_inverse(hessian.view()) {
                return Some(Correlations { factor, dead });
            }
            hessian.diag_mut().mapv_inplace(|d| d + 9.0 * damping);
            damping *= 10.0;
        }
        None
    }

    /// Prunes rows, `[rows, cols]`, to `zeros` zeros each, and updates the remaining weights.
    pub(super) fn prune(&self, mut rows: ArrayViewMut2<f32>, structure: Structure, zeros: usize) {
        let cols = rows.ncols();
        for &column in &self.dead {
            rows.column_mut(column).fill(0.0);
        }
        let mut left: Vec<usize> = vec![zeros; rows.nrows()];
        let block = match structure {
            Structure::Unstructured => BLOCK,
            Structure::Groups { of, .. } => BLOCK / of * of,
        };
        for from in (0..cols).step_by(block) {
            let to = cols.min(from + block);
            let mut errors = Array2::zeros((rows.nrows(), to - from));
            for (i, left) in left.iter_mut().enumerate() {
                let row = rows.row_mut(i).into_slice().expect("rows are contiguous");
                let errors = errors.row_mut(i).into_slice().expect("rows are contiguous");
                *left -= self.prune_block(row, from..to, structure, *left, errors);
            }
            let behind = part(self.factor.view(), from..to, to..cols);
            let count = rows.nrows();
            let mut rest = part_mut(rows.view_mut(), 0..count, to..cols);
            general_mat_mul(-1.0, &errors, &behind, 1.0, &mut rest);
        }
    }

    /// Prunes some columns of a row, whose remaining columns still need `left` zeros. Returns the
    /// number of weights pruned.
    fn prune_block(
        &self,
        row: &mut [f32],
        columns: std::ops::Range<usize>,
        structure: Structure,
        left: usize,
        errors: &mut [f32],
    ) -> usize {
        let (from, to) = (columns.start, columns.end);
        let worth = |row: &[f32], j: usize| (row[j] / self.factor[(j, j)]).powi(2);
        let mut order = Vec::new();
        let mut is_cut = [false; BLOCK];
        if structure == Structure::Unstructured {
            // Ranks all remaining columns, but prunes only this block: later updates change the
            // ranks of later columns.
            let scores: Vec<f32> = (from..row.len()).map(|j| worth(row, j)).collect();
            let here =
                lowest(&scores, left, &mut order).iter().filter(|&&j| (j as usize) < to - from);
            here.for_each(|&j| is_cut[j as usize] = true);
        }
        let mut count = 0;
        for j in from..to {
            if let Structure::Groups { kept, of } = structure
                && j % of == 0
            {
                let scores: Vec<f32> = (j..j + of).map(|j| worth(row, j)).collect();
                let cut = lowest(&scores, of - kept, &mut order);
                cut.iter().for_each(|&k| is_cut[j - from + k as usize] = true);
            }
            if !is_cut[j - from] {
                continue;
            }
            count += 1;
            let loss = row[j] / self.factor[(j, j)];
            errors[j - from] = loss;
            row[j] = 0.0;
            let factors = self.factor.row(j).into_iter().skip(j + 1);
            row[j + 1..to].iter_mut().zip(factors).for_each(|(w, factor)| *w -= loss * factor);
        }
        count
    }
}
