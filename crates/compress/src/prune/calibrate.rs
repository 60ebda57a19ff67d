//! Calibration statistics for pruning, collected by observing a model: the importance matrix, and
//! for SparseGPT the Gram matrix `transpose(X) * X` of a weight's inputs. It must not know the
//! calibration text.

use std::collections::{BTreeMap, BTreeSet};

use bodkin_backend::{Matmul, Observer};
use bodkin_model::{Op, Plan};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis};

use super::linear::{part, part_mut};
use crate::error::{Error, Result};
use crate::imatrix::Imatrix;

/// Rows of a Gram matrix in one piece of work.
const PANEL: usize = 128;

/// Collects statistics of the inputs of layers' weights.
#[derive(Debug, Default)]
pub struct Calibration {
    /// Sums of squared inputs.
    pub imatrix: Imatrix,
    threads: usize,
    /// Gram matrices by weight name, `[cols, cols]`, the lower triangle.
    sums: BTreeMap<String, Array2<f32>>,
    /// For each weight that needs a Gram matrix, the first weight with the same input.
    owners: BTreeMap<String, String>,
}

impl Calibration {
    /// Collects squares of all inputs, and Gram matrices for the weights of a plan with these
    /// names, which must not be experts, on `threads` threads. Weights with the same input share a
    /// matrix.
    pub fn new(plan: &Plan, wanted: &BTreeSet<String>, threads: usize) -> Calibration {
        let (mut owners, mut first) = (BTreeMap::new(), BTreeMap::new());
        for op in &plan.ops {
            let Op::Linear { input, weight, .. } = op else { continue };
            let name = &plan.weight(*weight).name;
            if wanted.contains(name) {
                let owner = first.entry(*input).or_insert_with(|| name.clone());
                // A weight with several inputs has a Gram matrix of its own.
                let owners = owners.entry(name.clone()).or_insert_with(|| owner.clone());
                if owners != owner {
                    owners.clone_from(name);
                }
            }
        }
        Calibration { owners, threads, ..Calibration::default() }
    }

    /// A calibration with an importance matrix alone.
    pub fn of(imatrix: Imatrix) -> Calibration {
        Calibration { imatrix, ..Calibration::default() }
    }

    /// Fails if an input was NaN or infinite.
    ///
    /// # Errors
    /// One line that names the first weight whose inputs were not all finite.
    pub fn check(&self) -> Result<()> {
        for (name, entry) in &self.imatrix.entries {
            if let Some(sum) = entry.square_sums.iter().find(|sum| !sum.is_finite()) {
                let found = format!("a sum of squares of {sum}");
                return Err(Error::invalid(format!("inputs of {name}"), "finite numbers", found));
            }
        }
        Ok(())
    }

    /// The Gram matrix of a weight's inputs: the lower triangle.
    pub(super) fn products(&self, name: &str) -> Option<ArrayView2<'_, f32>> {
        self.sums.get(self.owners.get(name)?).map(|sums| sums.view())
    }
}

impl Observer for Calibration {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let name = &matmul.weight.name;
        if !name.starts_with("blk.") {
            return;
        }
        self.imatrix.matmul(matmul);
        if self.owners.get(name) == Some(name) {
            let values = matmul.rows.iter().flat_map(|row| row.values.iter().copied());
            let (rows, cols) = (matmul.rows.len(), matmul.weight.cols);
            let input = Array2::from_shape_vec((rows, cols), values.collect());
            let input = input.expect("rows of the weight's width");
            let zeros = || Array2::zeros((cols, cols));
            let sums = self.sums.entry(name.to_string()).or_insert_with(zeros);
            add_lower(sums, &input, self.threads);
        }
    }
}

/// Adds `transpose(x) * x` to the lower triangle of `sums`.
fn add_lower(sums: &mut Array2<f32>, x: &Array2<f32>, threads: usize) {
    // Later panels are longer, so they are dealt to the threads round-robin.
    let mut shares: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
    let panels = sums.axis_chunks_iter_mut(Axis(0), PANEL).enumerate();
    panels.for_each(|(i, panel)| shares[i % threads].push((i, panel)));
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || {
                for (i, mut panel) in share {
                    let (from, height, all) = (i * PANEL, panel.nrows(), x.nrows());
                    let to = from + height;
                    let (own, left) =
                        (part(x.view(), 0..all, from..to), part(x.view(), 0..all, 0..to));
                    let mut lower = part_mut(panel.view_mut(), 0..height, 0..to);
                    general_mat_mul(1.0, &own.t(), &left, 1.0, &mut lower);
                }
            });
        }
    });
}
