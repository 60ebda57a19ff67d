//! From a model's name to its file and plan, and from there to a loaded model: the context that
//! fits, the check of free memory, and progress while weights are read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Limits, Memory, Model, WeightLayout};
use bodkin_engine::{EngineOptions, Request, SamplerOptions, Template, Tokenizer};
use bodkin_gguf::File;
use bodkin_model::{HyperParameters, Plan, Pooling};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::memory::{experts_note, human_bytes, more_checkpoints, takes_larger_steps, total_bytes};
use crate::options::{MAX_BATCH_TOKENS, Options, within};
use crate::progress::Reporter;
use crate::read_ahead::ReadAhead;
use crate::source::{self, Check, Layer, Recommendation, Resolved};
use crate::tokenizers::tokenizer;

/// The shortest context that is chosen because a longer one does not fit.
const MIN_CONTEXT: usize = 2048;
/// The most tokens of a step, if no batch size is given, of a model that reads experts from outside
/// the device in every step.
const STREAMING_STEP_TOKENS: usize = 2048;
/// Smaller models load too quickly for a progress bar.
const MIN_REPORTED_BYTES: u64 = 200_000_000;

/// A model whose header is read, before any weight is.
#[derive(Clone)]
pub struct ModelFile {
    /// The path, for messages.
    pub name: String,
    /// The mapped file.
    pub file: Arc<File>,
    /// The operations that compute the model.
    pub plan: Arc<Plan>,
    reporter: Reporter,
    /// The most bytes that it may take when it is loaded.
    memory_limit: Option<u64>,
    recommended: Recommendation,
    purpose: Purpose,
}

/// What a model is planned for.
#[derive(Clone, Copy, PartialEq)]
enum Purpose {
    /// Text of a decoder, embeddings of an encoder.
    Own,
    /// Embeddings, pooled as the file says if not otherwise.
    Embeddings(Option<Pooling>),
}

impl ModelFile {
    /// Finds a model by any name that [`source::find`] accepts, and reads its header. The reporter
    /// receives the events of the download, and of every later load.
    ///
    /// # Errors
    /// If there is no such model, or its file has no plan.
    pub fn find(model: &str, reporter: &Reporter) -> Result<ModelFile> {
        ModelFile::of(&source::find(model, Check::Size, reporter)?, reporter)
    }

    /// Opens a model that is found, with what its source recommends for requests.
    ///
    /// # Errors
    /// If its file cannot be read, or has no plan.
    pub fn of(found: &Resolved, reporter: &Reporter) -> Result<ModelFile> {
        let (path, size) = (found.path.display(), human_bytes(found.bytes));
        reporter.detail(&format!("{path}: {size}, source: {}", found.source));
        let (file, recommended) = (ModelFile::open(&found.path, reporter)?, &found.recommended);
        let has_template = |layer: &Layer| layer.kind == "template";
        let metadata = file.file.metadata();
        if metadata.get("tokenizer.chat_template").is_none()
            && found.layers.iter().any(has_template)
        {
            reporter.note("the file has no chat template, and that of Ollama is not used");
        }
        Ok(ModelFile { recommended: recommended.clone(), ..file })
    }

    /// Opens the file at a path.
    ///
    /// # Errors
    /// If it cannot be read, or has no plan.
    pub fn open(path: &Path, reporter: &Reporter) -> Result<ModelFile> {
        ModelFile::from_file(bodkin_model::open(path)?, reporter)
    }

    /// The model of an open file.
    ///
    /// # Errors
    /// If it has no plan.
    pub fn from_file(file: File, reporter: &Reporter) -> Result<ModelFile> {
        let name = file.path().display().to_string();
        let (file, plan) = planned(file, &name)?;
        reporter.detail(&format!(
            "header read: GGUF version {}, {} tensors; {}: {} parameters, {} layers, {} operations",
            file.version(),
            file.tensors().len(),
            plan.architecture,
            plan.cost().parameters,
            plan.layers(),
            plan.ops.len(),
        ));
        Ok(ModelFile {
            name,
            file,
            plan,
            reporter: reporter.clone(),
            memory_limit: None,
            recommended: Recommendation::default(),
            purpose: Purpose::Own,
        })
    }

    /// The same model with the weights of another file.
    ///
    /// # Errors
    /// If the other file has no plan.
    pub fn with_file(self, file: File) -> Result<ModelFile> {
        let (file, plan) = planned(file, &self.name)?;
        Ok(ModelFile { file, plan, ..self })
    }

    /// This model, if it generates text.
    ///
    /// # Errors
    /// If it is an encoder.
    pub fn decoder(self) -> Result<ModelFile> {
        match self.plan.is_encoder() {
            false => Ok(self),
            true => Err(Error::Encoder {
                architecture: self.plan.architecture.clone(),
                model: self.name,
            }),
        }
    }

    /// This model, planned to embed texts: instead of an output head, a decoder has its hidden
    /// states pooled. `pooling` is used instead of the file's if one is given.
    ///
    /// # Errors
    /// If the file has no such plan.
    pub fn embedder(mut self, pooling: Option<Pooling>) -> Result<ModelFile> {
        self.purpose = Purpose::Embeddings(pooling);
        self.replan(None)?;
        Ok(self)
    }

    /// Whether the model was made to embed texts: an encoder, or a decoder whose file says how they
    /// are pooled.
    pub fn is_embedder(&self) -> bool {
        let key = format!("{}.pooling_type", self.plan.architecture);
        self.plan.is_encoder() || self.file.metadata().get(&key).is_some()
    }

    /// How texts are pooled.
    ///
    /// # Errors
    /// If the file says something unknown.
    pub fn pooling(&self) -> Result<Pooling> {
        let pooling = match self.purpose {
            Purpose::Own => None,
            Purpose::Embeddings(pooling) => pooling,
        };
        let keys = HyperParameters::new(self.file.metadata());
        let pooling = keys.and_then(|keys| keys.with_pooling(pooling).pooling());
        pooling.map_err(|source| Error::Plan { model: self.name.clone(), source })
    }

    /// The same model, which may take at most this many bytes when it is loaded.
    pub fn with_memory_limit(self, bytes: Option<u64>) -> ModelFile {
        ModelFile { memory_limit: bytes, ..self }
    }

    /// The same model, whose events go elsewhere.
    pub(crate) fn with_reporter(self, reporter: &Reporter) -> ModelFile {
        ModelFile { reporter: reporter.clone(), ..self }
    }

    /// Bytes that the model can have.
    pub(crate) fn available_memory(&self, backend: &dyn Backend) -> u64 {
        let limit = self.memory_limit.unwrap_or(u64::MAX);
        backend.available_memory().map_or(limit, |bytes| bytes.min(limit))
    }

    /// What tells the KV caches of this model on this kind of device from those of others: a hash
    /// of the plan, the ends of all tensors, the number of the pages' layout, and what computes.
    pub(crate) fn fingerprint(&self, options: &Options, backend: &dyn Backend) -> String {
        const END_BYTES: usize = 64;
        let mut hash = Sha256::new();
        hash.update(concat!(env!("CARGO_PKG_VERSION"), " pages 3"));
        hash.update(self.plan.to_string());
        for tensor in self.file.tensors() {
            let data = self.file.data(tensor);
            let end = data.len().min(END_BYTES);
            hash.update(&tensor.name);
            hash.update(data.len().to_le_bytes());
            hash.update(&data[..end]);
            hash.update(&data[data.len() - end..]);
        }
        for device in backend.devices() {
            hash.update(device.name);
        }
        // Both change what the cache holds, or how.
        let gpu_layers = options.gpu_layers.filter(|layers| *layers > 0);
        hash.update(format!("{gpu_layers:?} {:?}", options.activation_sparsity));
        hash.update(backend.kv_type().name());
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The name of the format of most weights, such as `Q4_K`.
    pub fn main_format(&self) -> &'static str {
        let mut bytes = BTreeMap::<&str, u64>::new();
        for weight in &self.plan.weights {
            *bytes.entry(weight.format.name()).or_default() += weight.bytes;
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("", |(name, _)| name)
    }

    /// The tensors of the file that the model does not read, whatever its context.
    pub fn unread(&self) -> BTreeSet<String> {
        let (metadata, tensors) = (self.file.metadata(), self.file.tensors());
        let mut unread = self.plan.unread(tensors);
        // Of some tensors a file has one for short contexts and one for long ones.
        if let Ok(short) = bodkin_model::plan_for(metadata, tensors, 1) {
            let unread_too = short.unread(tensors);
            unread.retain(|name| unread_too.contains(name));
        }
        unread
    }

    /// The receiver of progress events.
    pub fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    /// The file's tokenizer, with the pre-tokenizer `assume_pre` instead of the file's own if one
    /// is given.
    ///
    /// # Errors
    /// If the file has no tokenizer, or one that the engine does not have.
    pub fn tokenizer(&self, assume_pre: Option<&str>) -> Result<Arc<Tokenizer>> {
        tokenizer(&self.file, assume_pre)
    }

    /// The file's chat template, if it has one.
    ///
    /// # Errors
    /// If the template does not parse.
    pub fn template(&self, tokenizer: &Tokenizer) -> Result<Option<Template>> {
        Template::from_metadata(self.file.metadata(), tokenizer).map_err(Error::engine(&self.name))
    }

    /// A request with the sampling parameters and stop strings that the model's file and its source
    /// recommend, and no limit but the context.
    ///
    /// # Errors
    /// If a recommendation in the file has a wrong type.
    pub fn request(&self) -> Result<Request> {
        let sampling = SamplerOptions::from_metadata(self.file.metadata());
        let mut sampling = sampling.map_err(Error::engine(&self.name))?;
        self.recommended.apply(&mut sampling);
        Ok(Request { sampling, stop: self.recommended.stop.clone(), ..Request::default() })
    }

    /// The system prompt of a chat that has none of its own, if the model's source has one.
    pub fn system(&self) -> Option<&str> {
        self.recommended.system.as_deref()
    }

    /// A note if a context is longer than any that the model was trained with.
    pub fn note_untrained(&self, context: usize) {
        let trained = self.plan.context_length;
        if context > trained {
            self.reporter.note(&format!(
                "a context of {context} tokens: the model was trained for {trained}, and answers \
                 beyond them may make no sense"
            ));
        }
    }

    /// The sizes of an engine: the context that `options` give, or the longest up to the model's
    /// own that takes at most half of the free memory. Plans the model for that context.
    ///
    /// # Errors
    /// If an option is out of range, or the file has no plan for the context.
    pub fn engine_options(
        &mut self,
        options: &Options,
        backend: &dyn Backend,
    ) -> Result<EngineOptions> {
        let step_tokens = options.step_tokens()?;
        let parallel = within("parallel", options.parallel, MAX_BATCH_TOKENS)?;
        let (queue, cache_tokens) = (options.queue, options.cache_tokens);
        let sized = |context| EngineOptions {
            context,
            step_tokens,
            parallel,
            queue,
            cache_tokens,
            more_checkpoints: 0,
        };
        let context = match options.context()? {
            Some(1) => return Err(Error::option("ctx_size", "at least 2 tokens", 1)),
            Some(context) => {
                self.note_untrained(context);
                context
            }
            None => {
                let budget = self.available_memory(backend) / 2;
                let memory = |context| self.memory(backend, &sized(context).limits(&self.plan));
                // No context is worth reading experts from outside the device.
                let have_room = memory(MIN_CONTEXT).expert_slots.is_none();
                let fits = |context| {
                    let memory = memory(context);
                    // Where experts are cached anyway, fewer are with a longer context.
                    total_bytes(&memory) - memory.cached_expert_bytes <= budget
                        && (memory.expert_slots.is_none() || !have_room)
                };
                longest_that_fits(self.plan.context_length, fits)
            }
        };
        self.plan_for(context)?;
        let with_steps = |step_tokens| EngineOptions { step_tokens, ..sized(context) };
        let limits = |step_tokens| with_steps(step_tokens).limits(&self.plan);
        let sizes = with_steps(self.step_tokens(options, backend, limits)?);
        let limits = sizes.limits(&self.plan);
        let memory = self.memory(backend, &limits);
        let available = self.available_memory(backend);
        let free = available.saturating_sub(total_bytes(&memory));
        // Of a model on two devices, one may have no room; what is free may be unknown.
        let has_room = memory.expert_slots.is_none() && options.gpu_layers.is_none();
        let more_checkpoints = match has_room && available < u64::MAX {
            true => more_checkpoints(&self.plan, backend, &limits, free),
            false => 0,
        };
        let sizes = EngineOptions { more_checkpoints, ..sizes };
        let chosen = format!("context of {context} tokens, batches of {}", sizes.step_tokens);
        self.reporter.detail(&chosen);
        Ok(sizes)
    }

    /// The most tokens of a step with these options, for a model whose limits with steps of any
    /// size are `limits`.
    ///
    /// # Errors
    /// If the batch size is out of range.
    pub fn step_tokens(
        &self,
        options: &Options,
        backend: &dyn Backend,
        limits: impl Fn(usize) -> Limits,
    ) -> Result<usize> {
        let tokens = options.step_tokens()?;
        if options.batch_size.is_some() {
            return Ok(tokens);
        }
        let [small, large] =
            [tokens, STREAMING_STEP_TOKENS].map(|tokens| self.memory(backend, &limits(tokens)));
        let takes_large = takes_larger_steps(&small, &large, self.available_memory(backend));
        Ok(if takes_large { STREAMING_STEP_TOKENS } else { tokens })
    }

    /// Plans the model again for sequences of up to `context` tokens: the position encoding of some
    /// models depends on it.
    ///
    /// # Errors
    /// If the file has no such plan.
    pub fn plan_for(&mut self, context: usize) -> Result<()> {
        self.replan(Some(context))
    }

    fn replan(&mut self, context: Option<usize>) -> Result<()> {
        let (metadata, tensors) = (self.file.metadata(), self.file.tensors());
        let plan = match (self.purpose, context) {
            (Purpose::Embeddings(pooling), context) => {
                bodkin_model::embedding_plan(metadata, tensors, context, pooling)
            }
            (Purpose::Own, Some(context)) => bodkin_model::plan_for(metadata, tensors, context),
            (Purpose::Own, None) => bodkin_model::plan(metadata, tensors),
        };
        let failed = |source| Error::Plan { model: self.name.clone(), source };
        self.plan = Arc::new(plan.map_err(failed)?);
        Ok(())
    }

    /// The bytes that [`ModelFile::load`] allocates.
    pub fn memory(&self, backend: &dyn Backend, limits: &Limits) -> Memory {
        backend.memory(&self.plan, limits)
    }

    /// Reads the weights, after a check that everything fits into the free memory.
    ///
    /// # Errors
    /// If it does not fit, or the backend cannot run the plan.
    pub fn load(&self, backend: &dyn Backend, limits: &Limits) -> Result<Box<dyn Model>> {
        let memory = self.memory(backend, limits);
        let available_bytes = self.available_memory(backend);
        self.reporter.detail(&format!(
            "memory: {} weights, {} context, {} scratch; {} are free",
            human_bytes(memory.weight_bytes),
            human_bytes(memory.state_bytes),
            human_bytes(memory.scratch_bytes),
            human_bytes(available_bytes),
        ));
        if total_bytes(&memory) > available_bytes {
            return Err(Error::OutOfMemory { model: self.name.clone(), memory, available_bytes });
        }
        self.check_host_memory(&memory)?;
        if let Some(note) = experts_note(&memory) {
            self.reporter.note(&note);
        }
        let bytes = self.plan.cost().weight_bytes;
        let phase =
            (bytes > MIN_REPORTED_BYTES).then(|| self.reporter.begin("loading", Some(bytes)));
        let ahead = ReadAhead::start(&self.file, &self.plan, !memory.maps_experts);
        let progress = |done, _| {
            ahead.loaded(done);
            phase.iter().for_each(|phase| phase.set(done));
        };
        let model = backend.load(Arc::clone(&self.plan), &self.file, limits, &progress);
        let model = model.map_err(|source| Error::Load { model: self.name.clone(), source })?;
        drop(ahead);
        drop(phase);
        self.reporter.detail("weights loaded");
        let stats = model.stats();
        if stats.maps_experts && !memory.maps_experts && memory.host_expert_bytes > 0 {
            self.reporter.note(&format!(
                "the driver has no {} of the host's memory for experts; they are read from the \
                 file when they are needed",
                human_bytes(memory.host_expert_bytes),
            ));
        }
        if let Some(summary) = sparse_summary(&stats.weight_layouts) {
            self.reporter.note(&summary);
        }
        Ok(model)
    }

    /// Checks that the host has memory for the experts that are not on the device.
    fn check_host_memory(&self, memory: &Memory) -> Result<()> {
        let available = bodkin_cpu::available_memory().unwrap_or(u64::MAX);
        if memory.host_expert_bytes > available {
            return Err(Error::HostMemory {
                model: self.name.clone(),
                host_expert_bytes: memory.host_expert_bytes,
                available_bytes: available,
            });
        }
        Ok(())
    }
}

/// The longest context up to `longest`, halved until it fits.
pub(crate) fn longest_that_fits(longest: usize, fits: impl Fn(usize) -> bool) -> usize {
    let mut context = longest;
    while context > MIN_CONTEXT && !fits(context) {
        context = (context / 2).max(MIN_CONTEXT);
    }
    context
}

fn planned(file: File, name: &str) -> Result<(Arc<File>, Arc<Plan>)> {
    let plan = bodkin_model::plan(file.metadata(), file.tensors());
    let plan = plan.map_err(|source| Error::Plan { model: name.to_owned(), source })?;
    Ok((Arc::new(file), Arc::new(plan)))
}

/// The kernels of weights in sparse formats, in one line: `sparse kernels for 96 tensors (1.21x to
/// 1.48x as fast as dense), dense kernels for 16 tensors (sparse: 0.94x to 0.97x)`. The speedups
/// are those of a sample.
fn sparse_summary(layouts: &[WeightLayout]) -> Option<String> {
    let part = |sparse: bool, kernels: &str| {
        let chosen: Vec<&WeightLayout> = layouts.iter().filter(|c| c.sparse == sparse).collect();
        let speedups = || chosen.iter().filter_map(|c| c.speedup);
        let range = speedups().reduce(f64::min).zip(speedups().reduce(f64::max));
        let range = range.map(|(a, b)| match sparse {
            true => format!(" ({a:.2}x to {b:.2}x as fast as dense)"),
            false => format!(" (sparse: {a:.2}x to {b:.2}x)"),
        });
        let range = range.unwrap_or_default();
        let (count, s) = (chosen.len(), if chosen.len() == 1 { "" } else { "s" });
        (count > 0).then(|| format!("{kernels} kernels for {count} tensor{s}{range}"))
    };
    let parts = [part(true, "sparse"), part(false, "dense")];
    parts.into_iter().flatten().reduce(|sparse, dense| format!("{sparse}, {dense}"))
}
