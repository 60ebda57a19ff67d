//! The shares of zeros in tensors: of each, of each kind, and of all.

use std::collections::HashMap;
use std::io::Write;

use anyhow::Result;
use bodkin_gguf::{File, Tensor, printable};

use crate::text;

/// The zeros of each tensor, or only of those in sparse formats, whose values need not be read.
pub(super) fn count(file: &File, all: bool) -> Vec<Option<u64>> {
    let is_counted = |tensor: &&Tensor| all || tensor.format.base().is_some();
    let tensors = file.tensors().iter();
    tensors.map(|tensor| Some(tensor).filter(is_counted).map(|t| count_one(file, t))).collect()
}

/// The fraction of a tensor's values.
pub(super) fn share(tensor: &Tensor, zeros: u64) -> f64 {
    zeros as f64 / tensor.elements() as f64
}

/// Counting reads all values, except those of sparse formats.
fn count_one(file: &File, tensor: &Tensor) -> u64 {
    let data = &*file.read(tensor);
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let mut values = vec![0.0; cols];
    let zeros = |row: usize| {
        let row = tensor.format.row(data, rows, row);
        match tensor.format.stored_elements(row, cols) {
            Some(stored) => cols.saturating_sub(stored),
            None => {
                tensor.format.dequantize_row(row, &mut values);
                values.iter().filter(|value| **value == 0.0).count()
            }
        }
    };
    (0..rows).map(zeros).sum::<usize>() as u64
}

/// What layers have of one tensor.
struct Kind {
    name: String,
    tensors: usize,
    zeros: u64,
    elements: u64,
}

impl Kind {
    fn new(name: String) -> Kind {
        Kind { name, tensors: 0, zeros: 0, elements: 0 }
    }

    fn add(&mut self, tensors: usize, zeros: u64, elements: u64) {
        self.tensors += tensors;
        self.zeros += zeros;
        self.elements += elements;
    }

    fn print(&self, out: &mut dyn Write) -> Result<()> {
        let (name, tensors) = (printable(&self.name), text::count(self.tensors, "tensor"));
        let share = 100.0 * self.zeros as f64 / self.elements.max(1) as f64;
        Ok(writeln!(out, "{name:<32} {tensors:>12} {share:>6.1} % zeros")?)
    }
}

/// Prints the share of each kind of tensor, in the order of the file, and that of all values.
/// `zeros` are those of each tensor.
pub(super) fn print_summary(out: &mut dyn Write, file: &File, zeros: &[Option<u64>]) -> Result<()> {
    let mut kinds: Vec<Kind> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut all = Kind::new("all".to_owned());
    for (tensor, zeros) in file.tensors().iter().zip(zeros.iter().map(|zeros| zeros.unwrap_or(0))) {
        let name = kind(&tensor.name);
        let index = *places.entry(name).or_insert_with_key(|name| {
            kinds.push(Kind::new(name.clone()));
            kinds.len() - 1
        });
        let elements = tensor.elements();
        kinds[index].add(1, zeros, elements);
        all.add(1, zeros, elements);
    }
    kinds.iter().try_for_each(|kind| kind.print(out))?;
    writeln!(out)?;
    all.print(out)
}

/// `blk.*.ffn_up.weight` of `blk.7.ffn_up.weight`.
fn kind(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
