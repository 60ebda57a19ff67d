//! A loaded model that embeds texts.

use bodkin_backend::{Limits, Model, PAGE_TOKENS};
use bodkin_engine::{embed_until, embedding_limits, longest_text};

use crate::backends::backend;
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::memory::total_bytes;
use crate::model_file::{LazyTokenizer, ModelFile};
use crate::options::Options;

/// The most texts that share a step.
const STEP_TEXTS: usize = 64;

/// A loaded encoder, such as BERT.
pub struct Encoder {
    model: Box<dyn Model>,
    name: String,
    tokenizer: LazyTokenizer,
    bytes: u64,
}

impl Encoder {
    /// Loads an encoder by its name with default options.
    ///
    /// # Errors
    /// Those of [`Builder::load_encoder`].
    pub fn load(name: &str) -> Result<Encoder> {
        Builder::new(name).load_encoder()
    }

    /// Loads an encoder whose file is open, for texts of up to the context size.
    ///
    /// # Errors
    /// If it is no encoder, or does not fit.
    pub fn open(mut file: ModelFile, options: &Options) -> Result<Encoder> {
        let context = planned_context(&mut file, options)?;
        let tokens = context.max(options.step_tokens()?);
        let outputs = STEP_TEXTS.min(tokens);
        // Each text may end in the middle of a page.
        let pages = tokens / PAGE_TOKENS + outputs;
        let limits = Limits {
            tokens,
            outputs,
            pages: vec![pages; file.plan.windows().len()],
            state_slots: if file.plan.states.is_empty() { 0 } else { outputs },
        };
        Encoder::with_limits(file, options, &limits)
    }

    /// As [`Encoder::open`], in the memory that exactly these texts need.
    ///
    /// # Errors
    /// If it is no encoder, does not fit, or a text has no embedding.
    pub fn for_texts(
        mut file: ModelFile,
        options: &Options,
        texts: &[Vec<u32>],
    ) -> Result<Encoder> {
        planned_context(&mut file, options)?;
        let limits = embedding_limits(&file.plan, texts, options.step_tokens()?);
        let limits = limits.map_err(Error::engine(&file.name))?;
        Encoder::with_limits(file, options, &limits)
    }

    fn with_limits(file: ModelFile, options: &Options, limits: &Limits) -> Result<Encoder> {
        let backend = backend(options, file.reporter())?;
        let file = file.with_memory_limit(options.memory_bytes);
        let bytes = total_bytes(&file.memory(backend.as_ref(), limits));
        let model = file.load(backend.as_ref(), limits)?;
        let tokenizer = LazyTokenizer::new(&file, options);
        Ok(Encoder { model, name: file.name, tokenizer, bytes })
    }

    /// The bytes that it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tokens of a text, with those that mark its start and end.
    ///
    /// # Errors
    /// If the file has no usable tokenizer, or the text is longer than 512 MiB.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.get()?.try_encode(text, true, false)?)
    }

    /// One embedding for each text: `[output_width]`, of length 1. Texts are never truncated.
    ///
    /// # Errors
    /// If the file has no usable tokenizer, or a text is empty or longer than the context.
    pub fn embed(&mut self, texts: &[impl AsRef<str>]) -> Result<Vec<Vec<f32>>> {
        let tokens = texts.iter().map(|text| self.tokenize(text.as_ref()));
        let tokens = tokens.collect::<Result<Vec<_>>>()?;
        let mut embeddings = Vec::with_capacity(texts.len());
        self.embed_tokens(&tokens, |_, embedding| embeddings.push(embedding.to_vec()))?;
        Ok(embeddings)
    }

    /// Calls `each` with the index and the embedding of each text, in order.
    ///
    /// # Errors
    /// If a text is empty, longer than the context, or has an unknown token.
    pub fn embed_tokens(
        &mut self,
        texts: &[Vec<u32>],
        each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.embed_tokens_until(texts, || false, each)
    }

    /// As [`Encoder::embed_tokens`], but asks `is_cancelled` before each step whether to end
    /// without the other texts.
    ///
    /// # Errors
    /// As [`Encoder::embed_tokens`].
    pub fn embed_tokens_until(
        &mut self,
        texts: &[Vec<u32>],
        is_cancelled: impl Fn() -> bool,
        each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let result = embed_until(self.model.as_mut(), texts, is_cancelled, each);
        result.map_err(Error::engine(&self.name))
    }
}

impl Builder {
    /// Loads a model that embeds texts.
    ///
    /// # Errors
    /// If the model is not found, is no encoder, or does not fit.
    pub fn load_encoder(self) -> Result<Encoder> {
        Encoder::open(self.find()?, &self.options)
    }
}

/// The most tokens of a text. Plans the model for the context that the options give, if any.
fn planned_context(file: &mut ModelFile, options: &Options) -> Result<usize> {
    let longest = longest_text(&file.plan).map_err(Error::engine(&file.name))?;
    let Some(context) = options.context()? else { return Ok(longest) };
    file.plan_for(context.min(longest))?;
    Ok(context.min(longest))
}
