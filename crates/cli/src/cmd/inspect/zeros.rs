//! The shares of zeros in tensors: of each, of each kind, and of all.

use std::io::Write;

use anyhow::Result;
use bodkin_gguf::{File, Tensor, printable};

use crate::text;

/// The number of zeros in a tensor. Counting reads all values, except those of sparse formats.
fn count(file: &File, tensor: &Tensor) -> u64 {
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

/// The fraction of zeros in a tensor of a sparse format, or, with `counts`, in any other.
pub(super) fn share(file: &File, tensor: &Tensor, counts: bool) -> Option<f64> {
    let is_known = tensor.format.base().is_some() || counts;
    is_known.then(|| count(file, tensor) as f64 / tensor.elements() as f64)
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
pub(super) fn print_summary(out: &mut dyn Write, file: &File) -> Result<()> {
    let mut kinds: Vec<Kind> = Vec::new();
    let mut all = Kind::new("all".to_owned());
    for tensor in file.tensors() {
        let name = kind(&tensor.name);
        let index = kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
            kinds.push(Kind::new(name));
            kinds.len() - 1
        });
        let (zeros, elements) = (count(file, tensor), tensor.elements());
        kinds[index].add(1, zeros, elements);
        all.add(1, zeros, elements);
    }
    kinds.iter().try_for_each(|kind| kind.print(out))?;
    writeln!(out)?;
    all.print(out)
}

/// `blk.*.ffn_up.weight` of `blk.7.ffn_up.weight`.
fn kind(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
