//! From a model's name to a loaded model: the flags that all commands share, the context that
//! fits, and progress while weights are read.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Once};

use anyhow::{Context, Result, bail, ensure};
use bodkin_backend::{Backend, KvType, Limits, Memory, Model, PAGE_TOKENS, WeightLayout};
use bodkin_engine::{EngineOptions, Error, Tokenizer};
use bodkin_gguf::File;
use bodkin_model::Plan;

use crate::backends::SparseWeights;
use crate::progress::{Progress, human_bytes};
use crate::{backends, source};

/// The most tokens that a flag may ask for, so that no sum of bytes overflows.
pub(crate) const MAX_TOKENS: usize = 1 << 30;

/// The most tokens that a step may have.
pub(crate) const MAX_STEP_TOKENS: usize = 1 << 16;

/// Flags of every command that runs a model.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Machine {
    /// Where to compute: auto, cpu or cuda[:N,..]
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: String,
    /// Only the last N layers on the GPU, the others on the processor
    #[arg(long, value_name = "N")]
    pub(crate) gpu_layers: Option<usize>,
    /// Threads that compute [default: all cores]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Tokens of context [default: the model's, or what fits]
    #[arg(short, long, value_name = "N")]
    pub(crate) ctx_size: Option<usize>,
    /// Tokens of a prompt that are read in one step
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) batch_size: usize,
    /// Leave weights as the file has them: less memory, slower
    #[arg(long)]
    pub(crate) no_repack: bool,
    /// Sparse weights as such: always, never or auto
    #[arg(long, value_name = "WHEN", default_value = "auto", hide_possible_values = true)]
    pub(crate) sparse: SparseWeights,
    /// Skip this share of the inputs of down projections
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) activation_sparsity: Option<f64>,
    /// Type of keys and values: auto, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = kv_type)]
    pub(crate) kv_type: KvType,
}

/// Parses a share that may be skipped.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "expected a share from 0 up to, but not, 1".to_owned())
}

/// Parses what keys and values are kept as.
pub(crate) fn kv_type(text: &str) -> Result<KvType, String> {
    let found = KvType::ALL.into_iter().find(|kv_type| kv_type.name() == text);
    found.ok_or_else(|| "expected auto, f16 or q8_0".to_owned())
}

/// Flags of every command that turns text into tokens or back.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Text {
    /// Cut words as NAME does, not as the file says
    #[arg(long, value_name = "NAME")]
    assume_pre: Option<String>,
}

impl Text {
    /// The tokenizer of a file whose weights may be of any architecture, or absent.
    pub(crate) fn tokenizer(&self, file: &File) -> Result<Arc<Tokenizer>> {
        let path = || file.path().display().to_string();
        if let Some(name) = &self.assume_pre {
            let tokenizer = Tokenizer::from_metadata_assuming(file.metadata(), name);
            return match tokenizer {
                Err(error @ Error::UnknownPreTokenizer { .. }) => {
                    Err(error).context("--assume-pre")
                }
                other => Ok(Arc::new(other.with_context(path)?)),
            };
        }
        match Tokenizer::from_metadata(file.metadata()) {
            Err(Error::UnknownPreTokenizer { found, known }) => bail!(
                "{}: tokenizer.ggml.pre: unknown pre-tokenizer `{found}`; --assume-pre NAME goes \
                 on as if it were NAME, which may be any of {known}",
                path(),
            ),
            other => Ok(Arc::new(other.with_context(path)?)),
        }
    }
}

/// What `general.file_type` says of the usual mixtures, by the names that GGML gives them.
const FILE_TYPES: &[(u32, &str)] = &[
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (25, "IQ4_NL"),
    (30, "IQ4_XS"),
    (32, "BF16"),
    (38, "MXFP4"),
];

/// A file and what its plan says.
pub(crate) struct Opened {
    /// Where it lies, for messages.
    pub(crate) name: String,
    /// The mapped file.
    pub(crate) file: Arc<File>,
    /// What the model computes.
    pub(crate) plan: Arc<Plan>,
}

impl Opened {
    /// Finds a model by any of the names that `source` knows, and reads its header.
    pub(crate) fn find(model: &str) -> Result<Opened> {
        Opened::open(&source::resolve(model)?)
    }

    /// As [`Opened::find`], for commands that need text or logits of the model.
    pub(crate) fn find_decoder(model: &str) -> Result<Opened> {
        let opened = Opened::find(model)?;
        ensure!(
            !opened.plan.is_encoder(),
            "{}: a {} model makes embeddings and no text: use `bodkin embed`",
            opened.name,
            opened.plan.architecture
        );
        Ok(opened)
    }

    /// A model's file under a path.
    pub(crate) fn open(path: &Path) -> Result<Opened> {
        Opened::of(bodkin_model::open(path)?, path.display().to_string())
    }

    /// The same model with another file's weights.
    pub(crate) fn with_file(self, file: File) -> Result<Opened> {
        Opened::of(file, self.name)
    }

    fn of(file: File, name: String) -> Result<Opened> {
        let file = Arc::new(file);
        let plan =
            bodkin_model::plan(file.metadata(), file.tensors()).with_context(|| name.clone())?;
        Ok(Opened { name, file, plan: Arc::new(plan) })
    }

    /// The model in a few words, as llama-bench says it: `llama 135M Q4_1`.
    pub(crate) fn describe(&self) -> String {
        let parameters = self.plan.cost().parameters as f64;
        let size = match parameters {
            n if n >= 1e9 => format!("{:.1}B", n / 1e9),
            n => format!("{:.0}M", n / 1e6),
        };
        let kind = self.file.metadata().u32("general.file_type").ok().flatten();
        let kind = kind.and_then(|kind| FILE_TYPES.iter().find(|(id, _)| *id == kind));
        let kind = kind.map_or_else(|| self.most_common_format(), |(_, name)| name);
        format!("{} {size} {kind}", self.plan.architecture)
    }

    /// The format of most bytes, for files that do not say their type.
    fn most_common_format(&self) -> &'static str {
        let mut bytes: HashMap<&str, u64> = HashMap::new();
        for weight in &self.plan.weights {
            *bytes.entry(weight.format.name()).or_default() += weight.bytes;
        }
        bytes.into_iter().max_by_key(|(name, bytes)| (*bytes, *name)).map_or("", |(name, _)| name)
    }

    /// The sizes of an engine for `parallel` requests: the context that was asked for, or the
    /// longest up to the model's own that leaves half of the free memory to others.
    pub(crate) fn options(
        &mut self,
        machine: &Machine,
        backend: &dyn Backend,
        parallel: usize,
    ) -> Result<EngineOptions> {
        let step_tokens = machine.step_tokens()?;
        let options = |context| EngineOptions { context, step_tokens, parallel };
        if let Some(context) = machine.context()? {
            ensure!(context >= 2, "--ctx-size: expected at least 2 tokens, found {context}");
            self.plan_for(context)?;
            return Ok(options(context));
        }
        let mut context = self.plan.context_length;
        let room = backend.available_memory().map_or(u64::MAX, |bytes| bytes / 2);
        let fits =
            |context| total(&self.memory(backend, &options(context).limits(&self.plan))) <= room;
        while context > 2048 && !fits(context) {
            context = (context / 2).max(2048);
        }
        self.plan_for(context)?;
        Ok(options(context))
    }

    /// Plans anew for sequences of up to `context` tokens: some models rotate otherwise then.
    pub(crate) fn plan_for(&mut self, context: usize) -> Result<()> {
        let plan = bodkin_model::plan_for(self.file.metadata(), self.file.tensors(), context);
        self.plan = Arc::new(plan.with_context(|| self.name.clone())?);
        Ok(())
    }

    /// What the model would hold.
    pub(crate) fn memory(&self, backend: &dyn Backend, limits: &Limits) -> Memory {
        backend.memory(&self.plan, limits)
    }

    /// Reads the weights, after checking that everything fits.
    pub(crate) fn load(&self, backend: &dyn Backend, limits: &Limits) -> Result<Box<dyn Model>> {
        let memory = self.memory(backend, limits);
        if let Some(available) = backend.available_memory()
            && total(&memory) > available
        {
            let is_gpu = backends::is_gpu(backend);
            let other =
                if is_gpu { ", and --gpu-layers leaves layers to the processor" } else { "" };
            bail!(
                "{}: needs {} ({} weights, {} context, {} scratch), {} are free, {} are missing; \
                 a smaller --ctx-size needs less{other}",
                self.name,
                human_bytes(total(&memory)),
                human_bytes(memory.weight_bytes),
                human_bytes(memory.state_bytes),
                human_bytes(memory.scratch_bytes),
                human_bytes(available),
                human_bytes(total(&memory) - available),
            );
        }
        // Small files load before a bar could be read.
        let bytes = self.plan.cost().weight_bytes;
        let progress = (bytes > 200_000_000).then(|| Progress::start("loading", Some(bytes)));
        let report = |done, _| progress.iter().for_each(|p| p.set(done));
        let model = backend.load(Arc::clone(&self.plan), &self.file, limits, &report);
        let model = model.with_context(|| self.name.clone())?;
        drop(progress);
        if let Some(line) = sparse_line(model.weight_layouts()) {
            static SAID: Once = Once::new();
            SAID.call_once(|| eprintln!("{line}"));
        }
        Ok(model)
    }
}

/// How the weights of sparse formats are kept, in a line: `sparse: 96 tensors without their
/// zeros (1.21x to 1.48x), 16 made dense (0.94x to 0.97x)`. Speeds are those of a slice of each,
/// against the same with its zeros.
fn sparse_line(weight_layouts: &[WeightLayout]) -> Option<String> {
    let part = |sparse: bool, what: &str| {
        let chosen: Vec<&WeightLayout> =
            weight_layouts.iter().filter(|c| c.sparse == sparse).collect();
        let speedups = || chosen.iter().filter_map(|c| c.speedup);
        let (least, most) = (speedups().reduce(f64::min), speedups().reduce(f64::max));
        let range = least.zip(most).map(|(a, b)| format!(" ({a:.2}x to {b:.2}x)"));
        let count = chosen.len();
        (count > 0).then(|| format!("{count} {what}{}", range.unwrap_or_default()))
    };
    let parts = [part(true, "tensors without their zeros"), part(false, "made dense")];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("sparse: {}", parts.join(", ")))
}

/// Bytes of keys and values of a sequence of `tokens` tokens: what the last of them reads.
pub(crate) fn kv_bytes(plan: &Plan, backend: &dyn Backend, tokens: usize) -> u64 {
    let elements = |tokens| u128::from(plan.kv_elements(tokens));
    // How precisely it keeps them is the backend's to choose: a page of each slot tells.
    let page_elements = elements(1) * PAGE_TOKENS as u128;
    let bytes = elements(tokens) * u128::from(held(plan, backend, 0));
    // A plan without slots keeps nothing.
    bytes.checked_div(page_elements).unwrap_or(0) as u64
}

/// Bytes of recurrent state of a sequence of any length, which every token reads.
pub(crate) fn cell_bytes(plan: &Plan, backend: &dyn Backend) -> u64 {
    held(plan, backend, 1) - held(plan, backend, 0)
}

/// Bytes of a page of each window, and of some cells of recurrent state.
fn held(plan: &Plan, backend: &dyn Backend, states: usize) -> u64 {
    let pages = vec![1; plan.windows().len()];
    backend.memory(plan, &Limits { tokens: 1, outputs: 1, pages, state_slots: states }).state_bytes
}

/// A number that `flag` gave, if it makes sense.
pub(crate) fn within(flag: &str, number: usize, most: usize) -> Result<usize> {
    ensure!((1..=most).contains(&number), "{flag}: expected 1 to {most}, found {number}");
    Ok(number)
}

/// All bytes together.
pub(crate) fn total(memory: &Memory) -> u64 {
    memory.weight_bytes + memory.state_bytes + memory.scratch_bytes
}

impl Machine {
    /// The backend that these flags choose.
    pub(crate) fn backend(&self) -> Result<Box<dyn Backend>> {
        backends::choose(self)
    }

    /// The context that was asked for, if one was.
    pub(crate) fn context(&self) -> Result<Option<usize>> {
        self.ctx_size.map(|tokens| within("--ctx-size", tokens, MAX_TOKENS)).transpose()
    }

    /// The most tokens of a step.
    pub(crate) fn step_tokens(&self) -> Result<usize> {
        within("--batch-size", self.batch_size, MAX_STEP_TOKENS)
    }
}
