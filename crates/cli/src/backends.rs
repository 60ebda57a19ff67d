//! The only list of backends.

use anyhow::{Context, Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::{Cpu, Sparse};
use bodkin_cuda::Cuda;

use crate::load::Machine;
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
/// `auto` takes the first GPU if there is one that works and no flag means the processor, and says
/// on stderr why it does not take one that is there.
pub(crate) fn choose(machine: &Machine) -> Result<Box<dyn Backend>> {
    let Machine { threads, sparse, activation_sparsity: skipped, .. } = *machine;
    let (device, repack) = (machine.device.as_str(), !machine.no_repack);
    let cpu = || -> Result<Box<dyn Backend>> {
        let sparse = match sparse {
            SparseWeights::Auto => Sparse::Auto,
            SparseWeights::Always => Sparse::Always,
            SparseWeights::Never => Sparse::Never,
        };
        let skip_inputs = skipped.is_some();
        let backend = Box::new(Cpu { repack, sparse, skip_inputs, ..Cpu::new(threads)? });
        Ok(match skipped {
            Some(share) => Box::new(Skipping { backend, share }),
            None => backend,
        })
    };
    let forced = !matches!(sparse, SparseWeights::Auto);
    let means_cpu = threads.is_some() || !repack || forced || skipped.is_some();
    match device.split_once(':').unwrap_or((device, "")) {
        ("cpu", "") => cpu(),
        ("auto", "") if !Cuda::is_installed() => cpu(),
        ("auto", "") if means_cpu => {
            let flags = "--threads, --no-repack, --sparse or --activation-sparsity";
            eprintln!("computing on the processor, as {flags} means; --device cuda takes the GPU");
            cpu()
        }
        ("auto", "") => match Cuda::open(0) {
            Ok(cuda) => Ok(Box::new(cuda)),
            Err(error) => {
                eprintln!("{error}; computing on the processor");
                cpu()
            }
        },
        ("cuda", _) if skipped.is_some() => {
            bail!("--activation-sparsity: expected --device cpu, found `{device}`")
        }
        ("cuda", "") => Ok(Box::new(Cuda::open(0)?)),
        ("cuda", number) => {
            let number = number.parse().with_context(|| {
                format!("--device: expected a number after `cuda:`, found `{number}`")
            })?;
            Ok(Box::new(Cuda::open(number)?))
        }
        _ => bail!("--device: expected auto, cpu or cuda[:N], found `{device}`"),
    }
}
