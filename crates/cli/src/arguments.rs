//! The arguments that commands share: how a model is loaded and run, and how text is tokenized.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use bodkin::source::{self, Check};
use bodkin::{ExpertBudget, ExpertStore, KvType, ModelFile, Options, Sparse, limit_threads};
use bodkin_backend::Backend;
use bodkin_compress::mixture::FILE_TYPES;
use bodkin_engine::Tokenizer;
use bodkin_gguf::File;

use crate::progress::reporter;

/// Flags of every command that runs a model.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Machine {
    /// Device: auto, cpu, cuda[:N,..] or wgpu[:N]
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: String,
    /// Layers on the GPU: the last N, the others on the CPU
    #[arg(long, value_name = "N", alias = "n-gpu-layers")]
    pub(crate) gpu_layers: Option<usize>,
    /// Memory for experts, such as 24G or 40%
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = expert_budget)]
    pub(crate) expert_budget: ExpertBudget,
    /// Other experts of a GPU: auto, mmap[:SIZE]
    #[arg(long, value_name = "WHERE", default_value = "auto", value_parser = expert_store)]
    pub(crate) experts: ExpertStore,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Context size in tokens [default: the largest that fits]
    #[arg(short, long, value_name = "N")]
    pub(crate) ctx_size: Option<usize>,
    /// Batch size: tokens per prefill chunk [default: 512 or 2048]
    #[arg(long, short_alias = 'b', alias = "ubatch-size", value_name = "N")]
    pub(crate) batch_size: Option<usize>,
    /// Keep weights in the file's layout: less memory, slower
    #[arg(long)]
    pub(crate) no_repack: bool,
    /// Use built-in launch shapes on GPUs instead of measuring them
    #[arg(long)]
    pub(crate) no_tune: bool,
    /// Sparse kernels: always, never or auto
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = sparse)]
    pub(crate) sparse: Sparse,
    /// Fraction of the inputs of down projections to skip
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    pub(crate) activation_sparsity: Option<f64>,
    /// KV cache data type: auto, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = kv_type)]
    pub(crate) kv_type: KvType,
}

impl Machine {
    /// The same as options of the runtime.
    pub(crate) fn options(&self) -> Options {
        Options {
            device: self.device.clone(),
            gpu_layers: self.gpu_layers,
            expert_budget: self.expert_budget,
            expert_store: self.experts,
            threads: self.threads,
            ctx_size: self.ctx_size,
            batch_size: self.batch_size,
            no_repack: self.no_repack,
            no_tune: self.no_tune,
            sparse: self.sparse,
            activation_sparsity: self.activation_sparsity,
            kv_type: self.kv_type,
            ..Options::default()
        }
    }

    /// The backend that these flags select.
    pub(crate) fn backend(&self) -> Result<Box<dyn Backend>> {
        Ok(bodkin::backend(&self.options(), reporter())?)
    }

    /// The context size, if one is given.
    pub(crate) fn context(&self) -> Result<Option<usize>> {
        Ok(self.options().context()?)
    }

    /// The most tokens of one step.
    pub(crate) fn step_tokens(&self) -> Result<usize> {
        Ok(self.options().step_tokens()?)
    }
}

/// Parses a fraction that may be left out.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..1.0).contains(fraction));
    fraction.ok_or_else(|| "expected 0 <= x < 1".to_owned())
}

/// Parses a number of bytes such as `32M` or `24G`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: f64 = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1.0,
        "K" | "KB" => 1e3,
        "M" | "MB" => 1e6,
        "G" | "GB" => 1e9,
        "T" | "TB" => 1e12,
        _ => f64::NAN,
    };
    let bytes = digits.parse::<f64>().map_or(f64::NAN, |n| n * unit);
    match (0.0..1e18).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err("expected a number of bytes such as 32M or 24G".to_owned()),
    }
}

/// Parses the memory of a device, for which a number without a unit is a mistake.
pub(crate) fn device_bytes(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        bytes @ 1000.. => Ok(bytes),
        found => Err(format!("expected 1K or more, such as 24G, found {found} bytes")),
    }
}

/// Parses a budget for experts: `auto`, a number of bytes, or a percentage of all experts.
pub(crate) fn expert_budget(text: &str) -> Result<ExpertBudget, String> {
    let percent = || text.strip_suffix('%')?.parse::<f64>().ok();
    match text {
        "auto" => Ok(ExpertBudget::Auto),
        _ if text.ends_with('%') => match percent().filter(|p| (0.0..=100.0).contains(p)) {
            Some(percent) => Ok(ExpertBudget::Share(percent / 100.0)),
            None => Err("expected auto, 0% to 100%, or a number of bytes such as 24G".to_owned()),
        },
        _ => bytes(text).map(ExpertBudget::Bytes).map_err(|error| format!("{error}, or 40%")),
    }
}

/// Parses the place of experts without room on a GPU.
pub(crate) fn expert_store(text: &str) -> Result<ExpertStore, String> {
    match text {
        "auto" => Ok(ExpertStore::Auto),
        "mmap" => Ok(ExpertStore::Mmap(None)),
        _ => match text.strip_prefix("mmap:") {
            Some(size) => bytes(size).map(|bytes| ExpertStore::Mmap(Some(bytes))),
            None => Err("expected auto, mmap, or mmap:SIZE such as mmap:16G".to_owned()),
        },
    }
}

/// Parses a limit: a finite number that is not negative.
pub(crate) fn limit(text: &str) -> Result<f64, String> {
    let limit = text.parse().ok().filter(|limit: &f64| limit.is_finite() && *limit >= 0.0);
    limit.ok_or_else(|| "expected a finite number x >= 0".to_owned())
}

/// Parses the largest fraction that is accepted of something.
pub(crate) fn largest_fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or_else(|| "expected 0 <= x <= 1".to_owned())
}

/// Parses the data type of the KV cache.
pub(crate) fn kv_type(text: &str) -> Result<KvType, String> {
    let found = KvType::ALL.into_iter().find(|kv_type| kv_type.name() == text);
    found.ok_or_else(|| "expected auto, f16 or q8_0".to_owned())
}

/// Parses whether kernels skip the zeros of sparse formats.
pub(crate) fn sparse(text: &str) -> Result<Sparse, String> {
    match text {
        "auto" => Ok(Sparse::Auto),
        "always" => Ok(Sparse::Always),
        "never" => Ok(Sparse::Never),
        _ => Err("expected always, never or auto".to_owned()),
    }
}

/// Flags of every command that turns text into tokens or back.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TokenizerArgs {
    /// Use this pre-tokenizer instead of the file's
    #[arg(long, value_name = "NAME")]
    assume_pre: Option<String>,
}

impl TokenizerArgs {
    /// The pre-tokenizer to use instead of the file's.
    pub(crate) fn assume_pre(&self) -> Option<&str> {
        self.assume_pre.as_deref()
    }

    /// The tokenizer of a file, whose weights may be absent or of any architecture.
    pub(crate) fn open(&self, file: &File) -> Result<Arc<Tokenizer>> {
        let tokenizer = bodkin::tokenizer(file, self.assume_pre.as_deref())?;
        reporter().detail(&format!("tokenizer built: {} tokens", tokenizer.vocab_size()));
        Ok(tokenizer)
    }
}

/// The number of threads that `--threads` selects.
pub(crate) fn threads(asked: Option<usize>) -> Result<usize> {
    match asked {
        Some(threads) => Ok(limit_threads(threads, reporter())?),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

/// The path of the model that a MODEL argument names, which is fetched if need be.
pub(crate) fn find_path(model: &str) -> Result<PathBuf> {
    Ok(source::find(model, Check::Size, reporter())?.path)
}

/// The model that a MODEL argument names.
pub(crate) fn find(model: &str) -> Result<ModelFile> {
    Ok(ModelFile::find(model, reporter())?)
}

/// The model that a MODEL argument names, if it generates text.
pub(crate) fn find_decoder(model: &str) -> Result<ModelFile> {
    Ok(find(model)?.decoder()?)
}

/// Architecture, size and file type as llama-bench prints them: `llama 135M Q4_1`.
pub(crate) fn describe(model: &ModelFile) -> String {
    let parameters = model.plan.cost().parameters as f64;
    let size = match parameters {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n => format!("{:.0}M", n / 1e6),
    };
    let id = model.file.metadata().u32("general.file_type").ok().flatten();
    let kind = id.and_then(|id| FILE_TYPES.iter().find(|kind| kind.id == id));
    let kind = kind.map_or_else(|| model.main_format(), |kind| kind.name);
    format!("{} {size} {kind}", model.plan.architecture)
}

/// Parses a number of 1 or more.
pub(crate) fn positive(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a number of 1 or more".to_owned())
}

/// Parses a time such as `300`, `30s`, `5m` or `1h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => f64::NAN,
    };
    let seconds = digits.parse::<f64>().map_or(f64::NAN, |n| n * unit);
    Duration::try_from_secs_f64(seconds).map_err(|_| "expected a time such as 30s, 5m or 1h".into())
}
