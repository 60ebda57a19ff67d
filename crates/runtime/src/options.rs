//! How a model is loaded and run.

use std::path::PathBuf;

use bodkin_backend::{Backend, DeviceKind, ExpertBudget, ExpertStore, KvType};
use bodkin_cpu::Sparse;

use crate::embeddings::EmbeddingOptions;
use crate::error::{Error, Result};

/// The largest `ctx_size`, so that no sum of bytes overflows.
pub const MAX_TOKENS: usize = 1 << 30;

/// The largest `batch_size`.
pub const MAX_BATCH_TOKENS: usize = 1 << 16;

/// The most tokens of a step if no `batch_size` is given.
const STEP_TOKENS: usize = 512;
/// Tokens of an encoder's step on a GPU by default: enough rows for all multiprocessors.
const GPU_ENCODER_STEP_TOKENS: usize = 8192;

/// How a model is loaded and run. The defaults suit one conversation on any machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// `auto`, `cpu`, `cuda` with optional device numbers: `cuda:0,1`, or `wgpu` with an optional
    /// one: `wgpu:1`. `auto` is NVIDIA's first GPU through CUDA, else the first discrete or Apple
    /// GPU through wgpu, else the CPU.
    pub device: String,
    /// Put only the last layers on the GPU, and the others on the CPU. None at all need no GPU,
    /// unless `device` names one.
    pub gpu_layers: Option<usize>,
    /// How much memory of a device the experts of a model may take. A GPU reads the others from
    /// memory of the host or from the file, a CPU from the file.
    pub expert_budget: ExpertBudget,
    /// Where a GPU finds the experts without a slot; a CPU always reads them from the file.
    pub expert_store: ExpertStore,
    /// CPU threads, at most one for each core; all cores by default.
    pub threads: Option<usize>,
    /// Tokens of context; by default the model's own, or what fits into half of the free memory.
    pub ctx_size: Option<usize>,
    /// The most tokens of one step, of a prompt or of several texts; by default 512, or 8192 of an
    /// encoder on a GPU, which short texts fill no other way. Of an engine's model whose experts do
    /// not all have room on the device 2048, if the scratch of those leaves most of the slots.
    pub batch_size: Option<usize>,
    /// The most requests that run at the same time.
    pub parallel: usize,
    /// The most requests that wait for those to end.
    pub queue: usize,
    /// Tokens in the KV cache, of running requests and of cached prefixes together; by default
    /// those of `parallel` full contexts.
    pub cache_tokens: Option<usize>,
    /// A folder for pages of the KV cache, which are found again after a restart.
    pub cache_dir: Option<PathBuf>,
    /// The most bytes of these pages.
    pub cache_dir_bytes: u64,
    /// The most bytes that a model may take; what is free on the device by default.
    pub memory_bytes: Option<u64>,
    /// Leave weights in the file's layout: less memory, slower.
    pub no_repack: bool,
    /// Use the built-in launch shapes of a GPU's matmuls instead of measuring them when a model is
    /// loaded.
    pub no_tune: bool,
    /// Whether weights of sparse formats are stored without their zeros.
    pub sparse: Sparse,
    /// Share of the inputs of down projections that is skipped, `0 <= x < 1`.
    pub activation_sparsity: Option<f64>,
    /// Data type of the KV cache.
    pub kv_type: KvType,
    /// The pre-tokenizer to use instead of the file's own.
    pub assume_pre: Option<String>,
    /// The chat template to use instead of the file's own.
    pub chat_template: Option<String>,
    /// How texts are embedded.
    pub embedding: EmbeddingOptions,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            device: "auto".to_owned(),
            gpu_layers: None,
            expert_budget: ExpertBudget::Auto,
            expert_store: ExpertStore::Auto,
            threads: None,
            ctx_size: None,
            batch_size: None,
            parallel: 1,
            queue: 512,
            cache_tokens: None,
            cache_dir: None,
            cache_dir_bytes: 10_000_000_000,
            memory_bytes: None,
            no_repack: false,
            no_tune: false,
            sparse: Sparse::Auto,
            activation_sparsity: None,
            kv_type: KvType::Auto,
            assume_pre: None,
            chat_template: None,
            embedding: EmbeddingOptions::default(),
        }
    }
}

impl Options {
    /// The context size, if one is given. 0 is none, as in llama.cpp.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn context(&self) -> Result<Option<usize>> {
        self.ctx_size
            .filter(|&tokens| tokens > 0)
            .map(|tokens| within("ctx_size", tokens, MAX_TOKENS))
            .transpose()
    }

    /// The most tokens of one step.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn step_tokens(&self) -> Result<usize> {
        within("batch_size", self.batch_size.unwrap_or(STEP_TOKENS), MAX_BATCH_TOKENS)
    }

    /// The most tokens of one step of an encoder.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn encoder_step_tokens(&self, backend: &dyn Backend) -> Result<usize> {
        let is_on_gpu = backend.devices().iter().any(|device| device.kind != DeviceKind::Cpu);
        match self.batch_size {
            None if is_on_gpu => Ok(GPU_ENCODER_STEP_TOKENS),
            _ => self.step_tokens(),
        }
    }
}

/// Checks that an option is at least 1 and at most `max`.
///
/// # Errors
/// If it is not.
pub fn within(option: &'static str, value: usize, max: usize) -> Result<usize> {
    match (1..=max).contains(&value) {
        true => Ok(value),
        false => Err(Error::option(option, format!("1 to {max}"), value)),
    }
}
