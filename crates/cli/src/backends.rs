//! The only list of backends.

use anyhow::{Context, Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::{Cpu, Sparse};
use bodkin_cuda::Cuda;

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
/// `auto` takes the first GPU if there is one that works, and says on stderr why it does not take
/// one that is there.
pub(crate) fn choose(
    device: &str,
    threads: Option<usize>,
    repack: bool,
    sparse: SparseWeights,
    skipped: Option<f64>,
) -> Result<Box<dyn Backend>> {
    // Who sets what only the processor knows means the processor.
    let wants_cpu =
        threads.is_some() || !repack || skipped.is_some() || !matches!(sparse, SparseWeights::Auto);
    let sparse = match sparse {
        SparseWeights::Auto => Sparse::Auto,
        SparseWeights::Always => Sparse::Always,
        SparseWeights::Never => Sparse::Never,
    };
    let cpu = || -> Result<Box<dyn Backend>> {
        let cpu = Cpu { repack, sparse, skip_inputs: skipped.is_some(), ..Cpu::new(threads)? };
        Ok(Box::new(cpu))
    };
    let backend = match device.split_once(':').unwrap_or((device, "")) {
        ("cpu", "") => cpu()?,
        ("auto", "") if wants_cpu || !Cuda::is_installed() => cpu()?,
        ("auto", "") => match Cuda::open(0) {
            Ok(cuda) => Box::new(cuda),
            Err(error) => {
                eprintln!("{error}; computing on the processor");
                cpu()?
            }
        },
        ("cuda", "") => Box::new(Cuda::open(0)?),
        ("cuda", number) => {
            let number = number.parse().with_context(|| {
                format!("--device: expected a number after `cuda:`, found `{number}`")
            })?;
            Box::new(Cuda::open(number)?)
        }
        _ => bail!("--device: expected auto, cpu or cuda[:N], found `{device}`"),
    };
    Ok(match skipped {
        Some(share) => Box::new(Skipping { backend, share }),
        None => backend,
    })
}
