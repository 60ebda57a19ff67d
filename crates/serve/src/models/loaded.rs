//! A model in memory, and what is known of one that is not.

use std::sync::Arc;
use std::time::Duration;

use bodkin::source::{self, Check};
use bodkin::{DeviceKind, Encoder, Error as RuntimeError, Model, ModelFile, Options, Reporter};
use bodkin_engine::{Stats, Tokenizer};
use bodkin_gguf::File;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::experts::ExpertSample;
use crate::sampling::{self, Defaults};

/// A model in memory.
pub(crate) struct Loaded {
    pub(crate) kind: Kind,
    /// The bytes that it holds.
    pub(crate) bytes: u64,
    /// What people want to know of it.
    pub(crate) details: Arc<Details>,
    /// The file whose mapped weights it computes with; none on a GPU that has copies of all.
    mapped: Option<Arc<File>>,
    /// What requests start from.
    pub(crate) defaults: Arc<Defaults>,
    pub(crate) experts: ExpertSample,
}

/// What a model computes.
pub(crate) enum Kind {
    Text(Box<Model>),
    Encoder(Box<Encoder>),
}

/// Facts of a model's file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    pub(crate) architecture: String,
    pub(crate) parameters: u64,
    /// Bytes of its weights in the file.
    pub(crate) weight_bytes: u64,
    pub(crate) context: usize,
    /// The context that it was trained for.
    pub(crate) trained_context: usize,
    /// The name of its licence, if the file has it.
    pub(crate) licence: Option<String>,
    pub(crate) path: String,
    /// The format of most weights, such as `Q4_K`.
    pub(crate) format: &'static str,
    pub(crate) is_on_gpu: bool,
    /// Whether it generates text; others embed texts.
    pub(crate) makes_text: bool,
    /// The source of the chat template; empty if there is none.
    pub(crate) template: String,
    /// The text of the token that begins a text; empty if there is none.
    pub(crate) bos_token: String,
    /// The text of the token that ends a text; empty if there is none.
    pub(crate) eos_token: String,
}

/// What is known of a model whose file has been read, loaded or not.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) details: Arc<Details>,
    pub(crate) defaults: Arc<Defaults>,
}

/// How the models of a server are loaded.
#[derive(Clone)]
pub(super) struct LoadOptions {
    pub(super) options: Options,
    /// Whether models that were made for text embed texts instead.
    pub(super) embeds: bool,
    /// What requests start from, as the server was given it.
    pub(super) defaults: Map<String, Value>,
    pub(super) reporter: Reporter,
}

impl Loaded {
    /// Why the engine answers no more requests.
    pub(super) fn failure(&self) -> Option<String> {
        if let Some(Err(error)) = self.mapped.as_ref().map(|file| file.check_unchanged()) {
            return Some(error.to_string());
        }
        match &self.kind {
            Kind::Text(model) => model.engine().failed().map(str::to_owned),
            Kind::Encoder(encoder) => encoder.failed().map(str::to_owned),
        }
    }

    /// The state of the queue, and totals.
    pub(crate) fn stats(&self) -> Stats {
        match &self.kind {
            Kind::Text(model) => model.engine().stats(),
            Kind::Encoder(encoder) => encoder.stats(),
        }
    }

    /// Whether a step takes too long.
    pub(super) fn hang(&self, step_timeout: Duration) -> Option<String> {
        let age = self.stats().step_age.filter(|age| *age > step_timeout)?;
        Some(format!("a step has been running for {} s", age.as_secs()))
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        Ok(match &self.kind {
            Kind::Text(model) => model.engine().tokenizer(),
            Kind::Encoder(encoder) => encoder.tokenizer()?,
        })
    }

    /// Bytes that its steps had to read, of weights and of the state of sequences.
    pub(super) fn read_bytes(&self) -> u64 {
        match &self.kind {
            Kind::Text(model) => model.read_bytes(),
            Kind::Encoder(encoder) => encoder.stats().weight_bytes,
        }
    }
}

impl Details {
    /// The facts of a file whose header is read. A load chooses a shorter context where memory is
    /// short.
    fn of(file: &ModelFile, load: &LoadOptions) -> Details {
        let (metadata, options) = (file.file.metadata(), &load.options);
        let text = |key: &str| metadata.str(key).ok().flatten().unwrap_or_default().to_owned();
        let tokens = metadata.strings("tokenizer.ggml.tokens").ok().flatten().unwrap_or_default();
        let token = |key: &str| {
            let id = metadata.u32(key).ok().flatten();
            let bytes = id.and_then(|id| tokens.get(id as usize)).map(|token| &**token);
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        let (plan, cost) = (&file.plan, file.plan.cost());
        let context = options.ctx_size.filter(|&tokens| tokens > 0);
        Details {
            architecture: plan.architecture.clone(),
            parameters: cost.parameters,
            weight_bytes: cost.weight_bytes,
            context: context.unwrap_or(plan.context_length),
            trained_context: plan.context_length,
            licence: metadata.str("general.license").ok().flatten().map(str::to_owned),
            path: file.name.clone(),
            format: file.main_format(),
            is_on_gpu: false,
            makes_text: !load.embeds && !file.is_embedder(),
            template: match &options.chat_template {
                Some(template) => template.clone(),
                None => text("tokenizer.chat_template"),
            },
            bos_token: token("tokenizer.ggml.bos_token_id"),
            eos_token: token("tokenizer.ggml.eos_token_id"),
        }
    }
}

/// What the file of a model tells before it is loaded; none if it is not on this machine, or cannot
/// be read, which its load will say.
pub(super) fn known(model: &str, load: &LoadOptions) -> Option<Known> {
    // What is noted is noted again when the model is loaded.
    let silent = Reporter::default();
    let found = source::on_machine(model, &silent).ok().flatten()?;
    let file = ModelFile::of(&found, &silent).ok()?;
    let details = Arc::new(Details::of(&file, load));
    let defaults = sampling::defaults(&load.defaults, file.request().ok()?).ok()?;
    Some(Known { details, defaults: Arc::new(defaults) })
}

/// Why a model was not loaded, and the path of its file, which clients are not told.
pub(super) struct LoadError {
    pub(super) error: RuntimeError,
    pub(super) path: Option<String>,
}

/// Loads a model: one that was made for text also embeds instead, if it is to.
pub(super) fn load(model: &str, load: &LoadOptions) -> std::result::Result<Loaded, Box<LoadError>> {
    let mut path = None;
    load_from(model, load, &mut path).map_err(|error| Box::new(LoadError { error, path }))
}

fn load_from(model: &str, load: &LoadOptions, path: &mut Option<String>) -> bodkin::Result<Loaded> {
    let LoadOptions { options, embeds, reporter, .. } = load;
    let found = source::find(model, Check::Size, reporter)?;
    *path = Some(found.path.display().to_string());
    let file = ModelFile::of(&found, reporter)?;
    let mapped = Arc::clone(&file.file);
    let mut details = Details::of(&file, load);
    let mut defaults = Defaults::default();
    let mut is_mapped = true;
    let (kind, bytes) = if *embeds || file.is_embedder() {
        let encoder = Encoder::open(file, options)?;
        details.context = encoder.context();
        let bytes = encoder.bytes();
        (Kind::Encoder(Box::new(encoder)), bytes)
    } else {
        let model = Model::open(file, options)?;
        details.context = model.context();
        details.is_on_gpu = model.backend().devices().iter().all(|d| d.kind != DeviceKind::Cpu);
        is_mapped = !details.is_on_gpu || model.maps_experts();
        let bytes = model.bytes();
        defaults.request = model.request();
        (Kind::Text(Box::new(model)), bytes)
    };
    let mapped = is_mapped.then_some(mapped);
    let (details, experts) = (Arc::new(details), ExpertSample::default());
    Ok(Loaded { kind, bytes, details, mapped, defaults: Arc::new(defaults), experts })
}
