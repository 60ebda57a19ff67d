//! What pruning needs to know of a model's activations, collected by observing it: the importance
//! matrix, and for methods that make up for what they cut the sums of products of inputs. It must
//! not know which text is read.

use std::collections::{BTreeMap, BTreeSet};

use bodkin_backend::{Observer, Product};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis};

use super::linear::{part, part_mut};
use crate::imatrix::Imatrix;

/// Rows of the sums that a thread takes at a time.
const PANEL: usize = 128;

/// Collects statistics of the inputs of layers' weights.
#[derive(Debug, Default)]
pub struct Calibration {
    /// The inputs' squares.
    pub imatrix: Imatrix,
    wanted: BTreeSet<String>,
    threads: usize,
    /// By name, `[cols, cols]`, the lower triangle.
    sums: BTreeMap<String, Array2<f32>>,
    /// Weights whose inputs are those of another, which has the sums.
    shared: BTreeMap<String, String>,
    /// Who had the last input, and its rows: often the next product has the same.
    last: Option<(String, Array2<f32>)>,
}

impl Calibration {
    /// Will collect squares of all inputs, and products of the inputs of the weights with these
    /// names, which belong to no experts, on so many threads.
    pub fn new(wanted: BTreeSet<String>, threads: usize) -> Calibration {
        Calibration { wanted, threads, ..Calibration::default() }
    }

    /// Of squares alone, from wherever they are.
    pub fn of(imatrix: Imatrix) -> Calibration {
        Calibration { imatrix, ..Calibration::default() }
    }

    /// Sums of the products of a weight's inputs: the lower triangle.
    pub(super) fn products(&self, name: &str) -> Option<ArrayView2<'_, f32>> {
        let owner = self.shared.get(name).map_or(name, String::as_str);
        self.sums.get(owner).map(|sums| sums.view())
    }

    fn add_products(&mut self, name: &str, input: Array2<f32>) {
        if let Some((owner, last)) = &self.last
            && !self.sums.contains_key(name)
            && *last == input
        {
            self.shared.insert(name.to_string(), owner.clone());
            return;
        }
        let cols = input.ncols();
        let sums = self.sums.entry(name.to_string()).or_insert_with(|| Array2::zeros((cols, cols)));
        add_lower(sums, &input, self.threads);
        self.last = Some((name.to_string(), input));
    }
}

impl Observer for Calibration {
    fn product(&mut self, product: &Product<'_>) {
        let name = &product.weight.name;
        if !name.starts_with("blk.") {
            return;
        }
        self.imatrix.product(product);
        if self.wanted.contains(name) {
            let values = product.rows.iter().flat_map(|row| row.values.iter().copied());
            let shape = (product.rows.len(), product.weight.cols);
            let input = Array2::from_shape_vec(shape, values.collect());
            self.add_products(name, input.expect("rows of the weight's width"));
        }
    }
}

/// Adds `transpose(x) * x` to the lower triangle of `sums`.
fn add_lower(sums: &mut Array2<f32>, x: &Array2<f32>, threads: usize) {
    // Later panels are longer: threads take them in turn.
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
