//! The only list of backends.

use anyhow::{Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::{Cpu, Sparse};

use crate::skipping::Skipping;

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

/// The backend for `--device`, `--threads`, `--no-repack`, `--sparse` and `--activation-sparsity`.
pub(crate) fn choose(
    device: &str,
    threads: Option<usize>,
    repack: bool,
    sparse: SparseWeights,
    skipped: Option<f64>,
) -> Result<Box<dyn Backend>> {
    let skip_inputs = skipped.is_some();
    let backend: Box<dyn Backend> = match device {
        "auto" | "cpu" => {
            let sparse = match sparse {
                SparseWeights::Auto => Sparse::Auto,
                SparseWeights::Always => Sparse::Always,
                SparseWeights::Never => Sparse::Never,
            };
            Box::new(Cpu { repack, sparse, skip_inputs, ..Cpu::new(threads)? })
        }
        other => bail!("--device: expected auto or cpu, found `{other}`"),
    };
    Ok(match skipped {
        Some(share) => Box::new(Skipping { backend, share }),
        None => backend,
    })
}
