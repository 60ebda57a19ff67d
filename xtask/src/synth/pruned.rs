//! Rows of formats whose rows differ in length: a few are made once for each width, and tensors are
//! filled with them in random order. Equal rows do not matter to speed.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use bodkin_gguf::Format;

use super::blocks::{DEVIATION, prune};
use crate::random::Random;

/// Elements that are made for each width.
const ELEMENTS: usize = 1 << 20;

/// Rows by their number of columns.
pub(super) struct PrunedRows {
    format: Format,
    seed: u64,
    rows: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl PrunedRows {
    /// Rows of these widths, of whose elements a share of `sparsity` is zero.
    pub(super) fn new(
        format: Format,
        sparsity: f64,
        seed: u64,
        widths: impl Iterator<Item = usize>,
    ) -> Result<PrunedRows> {
        let base = format.base().context("a sparse format")?;
        let mut random = Random::new(seed);
        let mut rows = BTreeMap::new();
        for cols in widths {
            if rows.contains_key(&cols) {
                continue;
            }
            let row = |_| {
                let mut values: Vec<f32> = (0..cols).map(|_| DEVIATION * random.normal()).collect();
                prune(&mut values, sparsity);
                format.sparsify_row(&base.encode(&values, cols)?)
            };
            let made: Result<_, _> = (0..(ELEMENTS / cols).max(16)).map(row).collect();
            rows.insert(cols, made?);
        }
        Ok(PrunedRows { format, seed, rows })
    }

    /// The data of a tensor of `rows` rows, others for each `tensor`.
    pub(super) fn data(&self, tensor: u64, rows: usize, cols: usize) -> Vec<u8> {
        let rows: Vec<_> = self.picked(tensor, rows, cols).cloned().collect();
        self.format.join_rows(&rows)
    }

    /// How many bytes those are.
    pub(super) fn bytes(&self, tensor: u64, rows: usize, cols: usize) -> u64 {
        let index = self.format.join_rows(&[]).len() as u64;
        self.picked(tensor, rows, cols).map(|row| row.len() as u64 + index).sum::<u64>() + index
    }

    fn picked(&self, tensor: u64, rows: usize, cols: usize) -> impl Iterator<Item = &Vec<u8>> {
        let mut random = Random::new(self.seed ^ tensor.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let made = &self.rows[&cols];
        (0..rows).map(move |_| &made[(random.bits() % made.len() as u64) as usize])
    }
}
