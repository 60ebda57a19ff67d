//! The only list of backends.

use std::path::PathBuf;

use bodkin_backend::{Backend, ExpertBudget, LayerSplit, Mock};
use bodkin_cpu::{Cpu, MAX_THREADS, Sparse};
use bodkin_cuda::Cuda;
use bodkin_wgpu::Wgpu;

use crate::activation_sparsity::ActivationSparsity;
use crate::error::{Error, Result};
use crate::options::{Options, within};
use crate::progress::Reporter;
use crate::source::user_folder;

/// The devices of this machine, one line each; for GPUs that cannot be used, why.
pub fn device_lines() -> Vec<String> {
    let cpu = Cpu::new(None).map_or_else(|error| error.to_string(), |cpu| cpu.name());
    let gpus = bodkin_cuda::device_names().unwrap_or_else(|error| vec![error.to_string()]);
    [vec![cpu], gpus].concat()
}

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// As [`Options::device`] names it.
    pub option: String,
    /// What it is, with its driver where there is a choice.
    pub name: String,
}

/// All devices that [`Options::device`] can name. A GPU may be there through several drivers.
pub fn devices() -> Vec<Device> {
    let cpu = Cpu::new(None).map(|cpu| cpu.name()).into_iter();
    let cpu = cpu.map(|name| Device { option: "cpu".to_owned(), name });
    let numbered = |kind: &str, names: Vec<String>| {
        let device = |(i, name)| Device { option: format!("{kind}:{i}"), name };
        names.into_iter().enumerate().map(device).collect::<Vec<_>>()
    };
    let cuda = numbered("cuda", bodkin_cuda::device_names().unwrap_or_default());
    cpu.chain(cuda).chain(numbered("wgpu", bodkin_wgpu::device_names())).collect()
}

/// Opens the backend that `options` choose. `auto` takes NVIDIA's first GPU, else the first
/// discrete or Apple GPU, else the CPU, which some options imply; notes say why a GPU is not used.
///
/// # Errors
/// If options contradict each other, or the device cannot be opened.
pub fn backend(options: &Options, reporter: &Reporter) -> Result<Box<dyn Backend>> {
    let backend = open(options, reporter)?;
    reporter.detail(&format!("device opened: {}", backend.name()));
    Ok(backend)
}

fn open(options: &Options, reporter: &Reporter) -> Result<Box<dyn Backend>> {
    let skips_inputs = options.activation_sparsity.is_some();
    let device = options.device.as_str();
    let kind = device.split_once(':').unwrap_or((device, ""));
    let expects_cpu =
        |found: &str| Err(Error::option("activation_sparsity", "device `cpu`", found));
    if options.gpu_layers == Some(0) && matches!(kind, ("auto" | "cpu", "")) {
        // What has no layer on a GPU needs none.
        return cpu(options, reporter);
    }
    if let Some(layers) = options.gpu_layers {
        if skips_inputs {
            return expects_cpu("gpu_layers");
        }
        let gpu = match kind {
            ("auto", "") => match first_gpu(options, reporter) {
                Some(gpu) => gpu,
                None => {
                    reporter.note("no GPU is used; all layers run on the CPU");
                    return cpu(options, reporter);
                }
            },
            ("cuda", ordinals) => cuda(options, ordinals)?,
            ("wgpu", number) => wgpu(options, number, reporter)?,
            _ => {
                let expected = "device `auto`, `cuda[:N,..]` or `wgpu[:N]`";
                return Err(Error::option("gpu_layers", expected, format!("`{device}`")));
            }
        };
        // The budget is that of the GPU; the layers of the CPU are loaded whole.
        let options = Options { expert_budget: ExpertBudget::Share(1.0), ..options.clone() };
        return Ok(Box::new(LayerSplit::new(cpu(&options, reporter)?, gpu, layers)));
    }
    let sparse_is_set = !matches!(options.sparse, Sparse::Auto);
    let implies_cpu =
        options.threads.is_some() || options.no_repack || sparse_is_set || skips_inputs;
    match kind {
        ("cpu", "") => cpu(options, reporter),
        ("auto", "") if implies_cpu => {
            if Cuda::is_installed() {
                reporter.note(
                    "running on the CPU, which threads, no-repack, sparse and activation-sparsity \
                     imply; device `cuda` selects the GPU",
                );
            }
            cpu(options, reporter)
        }
        ("auto", "") => first_gpu(options, reporter).map_or_else(|| cpu(options, reporter), Ok),
        // Not for people: servers are measured with it, and tested with calls that go wrong.
        ("mock", fault) => mock(fault),
        ("cuda" | "wgpu", _) if skips_inputs => expects_cpu(&format!("`{device}`")),
        ("cuda", ordinals) => cuda(options, ordinals),
        ("wgpu", number) => wgpu(options, number, reporter),
        _ => {
            let expected = "auto, cpu, cuda[:N,..] or wgpu[:N]";
            Err(Error::option("device", expected, format!("`{device}`")))
        }
    }
}

fn cpu(options: &Options, reporter: &Reporter) -> Result<Box<dyn Backend>> {
    let threads = options.threads.map(|threads| limit_threads(threads, reporter)).transpose()?;
    let cpu = Cpu::new(threads)?;
    let backend = Box::new(Cpu {
        repack: !options.no_repack,
        sparse: options.sparse,
        skip_inputs: options.activation_sparsity.is_some(),
        kv_type: options.kv_type,
        expert_budget: options.expert_budget,
        memory_limit: options.memory_bytes,
        ..cpu
    });
    Ok(match options.activation_sparsity {
        Some(share) if !(0.0..1.0).contains(&share) => {
            return Err(Error::option("activation_sparsity", "0 <= x < 1", share));
        }
        Some(share) => Box::new(ActivationSparsity { backend, share, reporter: reporter.clone() }),
        None => backend,
    })
}

/// The number of CPU threads where this many are asked for: at most one for each core, because
/// threads without a core of their own keep the others waiting at every barrier. A note says so.
///
/// # Errors
/// If it is out of range.
pub fn limit_threads(asked: usize, reporter: &Reporter) -> Result<usize> {
    let asked = within("threads", asked, MAX_THREADS)?;
    let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if asked > cores {
        let note = format!("{asked} threads on {cores} cores: runs {cores}, which is faster");
        reporter.note(&note);
    }
    Ok(asked.min(cores))
}

/// The GPU that `auto` takes: NVIDIA's first one through CUDA, else the first discrete or Apple GPU
/// through wgpu. Notes say why a GPU of the machine is not used, or not through CUDA.
fn first_gpu(options: &Options, reporter: &Reporter) -> Option<Box<dyn Backend>> {
    if Cuda::is_installed() {
        match cuda(options, "") {
            Ok(gpu) => return Some(gpu),
            Err(error) => reporter.note(&format!("CUDA is not used: {error}")),
        }
    }
    match Wgpu::open_fast() {
        Ok(wgpu) => {
            let wgpu = wgpu?;
            // Where both share the memory, the CPU needs less: it leaves experts in the file.
            let shares = options.expert_budget.is_limit() && wgpu.shares_host_memory();
            if shares || lacks_cache(&wgpu, options) {
                let reason = if shares { "shares the host's memory" } else { "caches no experts" };
                let name = wgpu.name();
                reporter.note(&format!("{name} {reason}; running on the CPU"));
                return None;
            }
            let backend = limited(wgpu, options);
            reporter.note(&format!("running on {}; device `cpu` selects the CPU", backend.name()));
            Some(backend)
        }
        Err(error) => {
            reporter.note(&format!("wgpu is not used: {error}"));
            None
        }
    }
}

/// The GPUs of a list of device numbers; the first GPU if the list is empty.
fn cuda(options: &Options, ordinals: &str) -> Result<Box<dyn Backend>> {
    let ordinals = match ordinals {
        "" => vec![0],
        list => bodkin_cuda::ordinals(list).ok_or_else(|| {
            let expected = "device numbers after `cuda:`, separated by commas";
            Error::option("device", expected, format!("`{list}`"))
        })?,
    };
    let cuda = Cuda::open_all(&ordinals)?.keeping(options.kv_type);
    let cuda = cuda.with_tuning(tuning_folder(options));
    let cuda = cuda.with_memory_limit(options.memory_bytes);
    let cuda = cuda.with_expert_budget(options.expert_budget);
    Ok(Box::new(cuda.with_expert_store(options.expert_store, bodkin_cpu::available_memory)))
}

/// The GPU of this number among those that Vulkan, Metal or DX12 drive; the first one if there is
/// none.
fn wgpu(options: &Options, number: &str, reporter: &Reporter) -> Result<Box<dyn Backend>> {
    let number = match number {
        "" => 0,
        number => number.parse().map_err(|_| {
            Error::option("device", "a device number after `wgpu:`", format!("`{number}`"))
        })?,
    };
    let wgpu = Wgpu::open(number)?;
    if wgpu.is_software() {
        let name = wgpu.name();
        reporter.note(&format!("{name} is a program of the CPU and slow; device `cpu` is faster"));
    }
    if lacks_cache(&wgpu, options) {
        let expected = "a device that can read the experts in the host's memory";
        return Err(Error::option("expert_budget", expected, wgpu.name()));
    }
    Ok(limited(wgpu, options))
}

/// Whether there is a limit for experts, and the GPU cannot cache them.
fn lacks_cache(wgpu: &Wgpu, options: &Options) -> bool {
    options.expert_budget.is_limit() && !wgpu.caches_experts()
}

/// The folder of what is measured of GPUs; none for built-in launch shapes, which a user without a
/// cache folder has, too.
fn tuning_folder(options: &Options) -> Option<PathBuf> {
    let cache = if options.no_tune { None } else { user_folder().ok() };
    cache.map(|cache| cache.join("tuning"))
}

/// The GPU, with the memory, the budget of experts and the type of the KV cache that `options` ask
/// for.
fn limited(wgpu: Wgpu, options: &Options) -> Box<dyn Backend> {
    let wgpu = wgpu.with_host_memory(bodkin_cpu::available_memory);
    // Software would take longer to compile what is measured than it could gain.
    let tuning = tuning_folder(options).filter(|_| !wgpu.is_software());
    let wgpu = wgpu.with_tuning(tuning);
    let wgpu = wgpu.with_memory_limit(options.memory_bytes);
    Box::new(wgpu.keeping(options.kv_type).with_expert_budget(options.expert_budget))
}

/// The mock backend, with a fault if one is named.
fn mock(fault: &str) -> Result<Box<dyn Backend>> {
    match fault {
        "" => Ok(Box::new(Mock::default())),
        fault => match Mock::failing(fault) {
            Some(mock) => Ok(Box::new(mock)),
            None => Err(Error::option("device", "error@N, panic@N or hang@N after `mock:`", fault)),
        },
    }
}
