//! The only list of backends.

use anyhow::{Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::{Cpu, Sparse};

/// Whether weights of sparse formats are read without their zeros.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum SparseWeights {
    /// As is faster, measured while loading
    Auto,
    /// Always without
    Always,
    /// Never: they are made dense while loading
    Never,
}

/// The backend for `--device`, `--threads`, `--no-repack` and `--sparse`.
pub(crate) fn choose(
    device: &str,
    threads: Option<usize>,
    repack: bool,
    sparse: SparseWeights,
) -> Result<Box<dyn Backend>> {
    match device {
        "auto" | "cpu" => {
            let sparse = match sparse {
                SparseWeights::Auto => Sparse::Auto,
                SparseWeights::Always => Sparse::Always,
                SparseWeights::Never => Sparse::Never,
            };
            Ok(Box::new(Cpu { repack, sparse, ..Cpu::new(threads)? }))
        }
        other => bail!("--device: expected auto or cpu, found `{other}`"),
    }
}
