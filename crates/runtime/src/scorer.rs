//! A loaded model for the logits of given tokens.

use bodkin_backend::{Limits, Model};
use bodkin_engine::Pages;

use crate::backends::backend;
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::model_file::ModelFile;
use crate::options::Options;
use crate::tokenizers::LazyTokenizer;

/// The most logits of one step: rows of them take at most 64 MiB.
const STEP_LOGITS: usize = 1 << 24;

/// A loaded model that scores tokens instead of generating them.
pub struct Scorer {
    model: Box<dyn Model>,
    name: String,
    tokenizer: LazyTokenizer,
}

impl Scorer {
    /// Loads a model by its name with default options.
    ///
    /// # Errors
    /// Those of [`Builder::load_scorer`].
    pub fn load(name: &str) -> Result<Scorer> {
        Builder::new(name).load_scorer()
    }

    /// Loads a model whose file is open.
    ///
    /// # Errors
    /// If it is an encoder, or does not fit.
    pub fn open(file: ModelFile, options: &Options) -> Result<Scorer> {
        let mut file = file.decoder()?;
        let backend = backend(options, file.reporter())?;
        let context = match options.context()? {
            Some(context) => context,
            None => file.engine_options(options, backend.as_ref())?.context,
        };
        file.plan_for(context)?;
        let tokens = options.step_tokens()?.min(context);
        let outputs = (STEP_LOGITS / file.plan.output_width()).clamp(1, tokens);
        let pages = Pages::needed(&file.plan.windows(), context, tokens, 1);
        let limits = Limits { tokens, outputs, pages, state_slots: 1 };
        let model = file.load(backend.as_ref(), &limits)?;
        let tokenizer = LazyTokenizer::new(&file.file, options);
        Ok(Scorer { model, name: file.name, tokenizer })
    }

    /// The tokens of a text, with those that mark its start and end, and with special tokens
    /// parsed.
    ///
    /// # Errors
    /// If the file has no usable tokenizer, or the text is longer than 512 MiB.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.get()?.try_encode(text, true, true)?)
    }

    /// The text of tokens, special tokens included.
    ///
    /// # Errors
    /// If the file has no usable tokenizer.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.tokenizer.get()?.decode(tokens, true)).into_owned())
    }

    /// The logits after each token of one sequence: `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// If a token is unknown, or the sequence is longer than the context.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::with_capacity(tokens.len());
        self.logits_at(tokens, |_| true, |_, row| rows.push(row.to_vec()))?;
        Ok(rows)
    }

    /// Calls `each` with the position and the logits (`[vocabulary]`) of every position that
    /// `wanted` accepts, in order.
    ///
    /// # Errors
    /// If a token is unknown, or the sequence is longer than the context.
    pub fn logits_at(
        &mut self,
        tokens: &[u32],
        wanted: impl Fn(usize) -> bool,
        each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let step = self.model.limits().tokens;
        bodkin_engine::logits(self.model.as_mut(), tokens, step, wanted, each)
            .map_err(Error::engine(&self.name))
    }
}

impl Builder {
    /// Loads a model for the logits of given tokens.
    ///
    /// # Errors
    /// If the model is not found, is an encoder, or does not fit.
    pub fn load_scorer(self) -> Result<Scorer> {
        Scorer::open(self.find()?, &self.options)
    }
}
