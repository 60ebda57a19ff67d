//! The only list of backends.

use anyhow::{Context, Result, bail};
use bodkin_backend::{Backend, LayerSplit};
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

/// The backend for `--device`, `--gpu-layers`, `--threads`, `--no-repack`, `--sparse`,
/// `--activation-sparsity` and `--kv-type`. `auto` takes the first GPU if there is one that works
/// and no flag means the processor, and says on stderr why it does not take one that is there.
pub(crate) fn choose(machine: &Machine) -> Result<Box<dyn Backend>> {
    let skipped = machine.activation_sparsity;
    let device = machine.device.as_str();
    let kind = device.split_once(':').unwrap_or((device, ""));
    if let Some(layers) = machine.gpu_layers {
        let numbers = match kind {
            ("auto", "") => "",
            ("cuda", numbers) => numbers,
            _ => bail!("--gpu-layers: expected --device auto or cuda[:N,..], found `{device}`"),
        };
        if skipped.is_some() {
            bail!("--activation-sparsity: expected --device cpu, found --gpu-layers");
        }
        let (first, second) = (cpu(machine)?, cuda(machine, numbers)?);
        return Ok(Box::new(LayerSplit::new(first, second, layers)));
    }
    let forced = !matches!(machine.sparse, SparseWeights::Auto);
    let means_cpu = machine.threads.is_some() || machine.no_repack || forced || skipped.is_some();
    match kind {
        ("cpu", "") => cpu(machine),
        ("auto", "") if !Cuda::is_installed() => cpu(machine),
        ("auto", "") if means_cpu => {
            let flags = "--threads, --no-repack, --sparse or --activation-sparsity";
            eprintln!("computing on the processor, as {flags} means; --device cuda takes the GPU");
            cpu(machine)
        }
        ("auto", "") => match Cuda::open(0) {
            Ok(cuda) => Ok(Box::new(cuda.keeping(machine.kv_type))),
            Err(error) => {
                eprintln!("{error}; computing on the processor");
                cpu(machine)
            }
        },
        ("cuda", _) if skipped.is_some() => {
            bail!("--activation-sparsity: expected --device cpu, found `{device}`")
        }
        ("cuda", numbers) => cuda(machine, numbers),
        _ => bail!("--device: expected auto, cpu or cuda[:N,..], found `{device}`"),
    }
}

/// The processor, as the flags want it.
fn cpu(machine: &Machine) -> Result<Box<dyn Backend>> {
    let sparse = match machine.sparse {
        SparseWeights::Auto => Sparse::Auto,
        SparseWeights::Always => Sparse::Always,
        SparseWeights::Never => Sparse::Never,
    };
    let (repack, skip_inputs) = (!machine.no_repack, machine.activation_sparsity.is_some());
    let kv_type = machine.kv_type;
    let all = Cpu::new(machine.threads)?;
    let backend = Box::new(Cpu { repack, sparse, skip_inputs, kv_type, ..all });
    Ok(match machine.activation_sparsity {
        Some(share) => Box::new(Skipping { backend, share }),
        None => backend,
    })
}

/// The GPUs of these numbers, the first without one.
fn cuda(machine: &Machine, numbers: &str) -> Result<Box<dyn Backend>> {
    let ordinals = match numbers {
        "" => vec![0],
        numbers => bodkin_cuda::ordinals(numbers).with_context(|| {
            format!(
                "--device: expected numbers after `cuda:`, divided by commas, found `{numbers}`"
            )
        })?,
    };
    Ok(Box::new(Cuda::open_all(&ordinals)?.keeping(machine.kv_type)))
}

/// Whether all of a model is computed on a GPU.
pub(crate) fn is_gpu(backend: &dyn Backend) -> bool {
    backend.name().starts_with("cuda")
}
