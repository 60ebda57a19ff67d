//! A loaded model that embeds texts.

use bodkin_backend::{Backend, Limits, PAGE_TOKENS};
use bodkin_engine::{Embedder, Stats, Tokenizer, longest_text};
use bodkin_gguf::Metadata;
use bodkin_model::{Plan, Pooling};

use crate::backends::backend;
use crate::builder::Builder;
use crate::embeddings::{EmbeddingOptions, Embeddings, Finishing, Submitted};
use crate::error::{Error, Result};
use crate::memory::total_bytes;
use crate::model_file::{ModelFile, longest_that_fits};
use crate::options::{MAX_BATCH_TOKENS, Options, within};
use crate::tokenizers::LazyTokenizer;

/// The tokens of a text, at least, if a step is to be full.
const TEXT_TOKENS: usize = 8;

/// A loaded model that embeds texts: an encoder such as BERT, or a decoder whose hidden states are
/// pooled. It runs on a thread of its own, and packs the texts of all its callers into its steps;
/// a vector depends on its own text alone.
pub struct Encoder {
    embedder: Embedder,
    name: String,
    tokenizer: LazyTokenizer,
    options: EmbeddingOptions,
    is_reranker: bool,
    bytes: u64,
}

impl Encoder {
    /// Loads a model by its name with default options.
    ///
    /// # Errors
    /// Those of [`Builder::load_encoder`].
    pub fn load(name: &str) -> Result<Encoder> {
        Builder::new(name).load_encoder()
    }

    /// Loads a model whose file is open, for texts of up to the context size: by default the
    /// model's own, or, of a decoder, what fits into half of the free memory.
    ///
    /// # Errors
    /// If its file has no plan for embeddings, an option is out of range, or it does not fit.
    pub fn open(file: ModelFile, options: &Options) -> Result<Encoder> {
        let is_decoder = !file.plan.is_encoder();
        let mut file = file.embedder(options.embedding.pooling)?;
        options.embedding.width(file.plan.output_width())?;
        let parallel = within("parallel", options.parallel, MAX_BATCH_TOKENS)?;
        let backend = backend(options, file.reporter())?;
        file = file.with_memory_limit(options.memory_bytes);
        let step = match is_decoder {
            true => options.step_tokens()?,
            false => options.encoder_step_tokens(backend.as_ref())?,
        };
        let longest = longest_text(&file.plan).map_err(Error::engine(&file.name))?;
        let context = match options.context()? {
            Some(context) => context.min(longest),
            None if is_decoder => {
                let budget = file.available_memory(backend.as_ref()) / 2;
                let bytes =
                    |context| bytes(&file, backend.as_ref(), &limits(&file.plan, context, step));
                longest_that_fits(longest, |context| bytes(context) <= budget)
            }
            None => longest,
        };
        file.plan_for(context)?;
        let limits = limits(&file.plan, context, step);
        let bytes = bytes(&file, backend.as_ref(), &limits);
        let model = file.load(backend.as_ref(), &limits)?;
        let embedder = Embedder::open(model, context, parallel, options.queue);
        let tokenizer = LazyTokenizer::new(&file.file, options);
        let prefix = prompt(file.file.metadata(), &options.embedding.prefix);
        if !prefix.is_empty() && !prefix.contains([' ', ':']) {
            let note = "has no such prompt: it stands before each text as it is";
            file.reporter().note(&format!("prefix `{prefix}`: {} {note}", file.name));
        }
        Ok(Encoder {
            embedder: embedder.map_err(Error::engine(&file.name))?,
            is_reranker: file.pooling()? == Pooling::Rank,
            name: file.name,
            tokenizer,
            options: EmbeddingOptions { prefix, ..options.embedding.clone() },
            bytes,
        })
    }

    /// The bytes that it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Elements of a vector.
    pub fn width(&self) -> usize {
        self.options.dimensions.unwrap_or(self.embedder.width())
    }

    /// The most tokens of a text.
    pub fn context(&self) -> usize {
        self.embedder.longest_text()
    }

    /// Whether its vectors are scores of a classifier.
    pub fn is_reranker(&self) -> bool {
        self.is_reranker
    }

    /// How it embeds texts.
    pub fn options(&self) -> &EmbeddingOptions {
        &self.options
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// If the file has none that is usable.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.get()
    }

    /// The tokens of a text behind the prefix, with those that mark its start and end.
    ///
    /// # Errors
    /// If the file has no usable tokenizer, or the text is longer than 512 MiB.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer.get()?;
        Ok(match self.options.prefix.as_str() {
            "" => tokenizer.try_encode(text, true, false)?,
            prefix => tokenizer.try_encode(&format!("{prefix}{text}"), true, false)?,
        })
    }

    /// One vector for each text: `[width]`.
    ///
    /// # Errors
    /// As [`Encoder::tokenize`] and [`Encoder::submit`].
    pub fn embed(&self, texts: &[impl AsRef<str>]) -> Result<Vec<Vec<f32>>> {
        let tokens = texts.iter().map(|text| self.tokenize(text.as_ref()));
        self.submit(tokens.collect::<Result<Vec<_>>>()?)?.collect()
    }

    /// Queues texts, given as token ids.
    ///
    /// # Errors
    /// If a text is empty, longer than the context, or has an unknown token, if the queue is full,
    /// or if a step has failed.
    pub fn submit(&self, texts: Vec<Vec<u32>>) -> Result<Embeddings> {
        self.submit_with(texts, &self.options)
    }

    /// As [`Encoder::submit`], with other vectors and another treatment of long texts than it was
    /// loaded with.
    ///
    /// # Errors
    /// As [`Encoder::submit`], and if the vectors have fewer dimensions.
    pub fn submit_with(
        &self,
        mut texts: Vec<Vec<u32>>,
        options: &EmbeddingOptions,
    ) -> Result<Embeddings> {
        let (finish, tokens, truncated) = self.prepare(&mut texts, options)?;
        let pooled = self.embedder.submit(texts).map_err(Error::engine(&self.name))?;
        Ok(Embeddings { pooled, model: self.name.clone(), finish, tokens, truncated })
    }

    /// As [`Encoder::submit_with`], with vectors that go to `sink` in any order, on the model's
    /// thread, each with the index of its text, or why the request ends. It returns false if nobody
    /// reads them.
    ///
    /// # Errors
    /// As [`Encoder::submit_with`].
    pub fn submit_to(
        &self,
        mut texts: Vec<Vec<u32>>,
        options: &EmbeddingOptions,
        mut sink: impl FnMut(Result<(usize, Vec<f32>)>) -> bool + Send + 'static,
    ) -> Result<Submitted> {
        let (finish, tokens, truncated) = self.prepare(&mut texts, options)?;
        let model = self.name.clone();
        let sink = Box::new(move |pooled: bodkin_engine::Result<(usize, Vec<f32>)>| {
            let vector = pooled.map(|(i, vector)| (i, finish.finish(vector)));
            sink(vector.map_err(Error::engine(&model)))
        });
        let canceller = self.embedder.submit_to(texts, sink).map_err(Error::engine(&self.name))?;
        Ok(Submitted { tokens, truncated, canceller })
    }

    /// What is made of the rows of texts, their tokens, and how many were cut.
    fn prepare(
        &self,
        texts: &mut [Vec<u32>],
        options: &EmbeddingOptions,
    ) -> Result<(Finishing, usize, usize)> {
        let width = options.width(self.embedder.width())?;
        let truncated = if options.truncate { self.truncate(texts)? } else { 0 };
        let finish = Finishing { width, normalize: options.normalize && !self.is_reranker };
        Ok((finish, texts.iter().map(Vec::len).sum(), truncated))
    }

    /// Cuts texts to the context; the token that marks a text's end stays the last. Returns how
    /// many were cut.
    fn truncate(&self, texts: &mut [Vec<u32>]) -> Result<usize> {
        let context = self.context();
        let long = texts.iter_mut().filter(|text| text.len() > context);
        let mut count = 0;
        for text in long {
            let end = text.last().copied();
            text.truncate(context);
            if end == self.tokenizer.get()?.encode("", true, false).last().copied() {
                text.pop();
                text.extend(end);
            }
            count += 1;
        }
        Ok(count)
    }

    /// The tokens of a query and each document as a reranker reads them.
    ///
    /// # Errors
    /// If the model is no reranker, or as [`Encoder::tokenize`].
    pub fn tokenize_pairs(
        &self,
        query: &str,
        documents: &[impl AsRef<str>],
    ) -> Result<Vec<Vec<u32>>> {
        if !self.is_reranker {
            return Err(Error::NoReranker { model: self.name.clone() });
        }
        let tokenizer = self.tokenizer.get()?;
        let pairs =
            documents.iter().map(|document| tokenizer.encode_pair(query, document.as_ref()));
        Ok(pairs.collect::<Result<_, _>>()?)
    }

    /// How well each document answers a query: the higher the better.
    ///
    /// # Errors
    /// As [`Encoder::tokenize_pairs`] and [`Encoder::submit`].
    pub fn rank(&self, query: &str, documents: &[impl AsRef<str>]) -> Result<Vec<f32>> {
        let scores = self.submit(self.tokenize_pairs(query, documents)?)?;
        scores.map(|scores| Ok(scores?[0])).collect()
    }

    /// The state of its queue, and totals; does not wait for a step.
    pub fn stats(&self) -> Stats {
        self.embedder.stats()
    }

    /// Why it embeds no more texts; none while it does.
    pub fn failed(&self) -> Option<&str> {
        self.embedder.failed()
    }
}

impl Builder {
    /// Sets how texts are embedded.
    pub fn embedding(mut self, embedding: EmbeddingOptions) -> Builder {
        self.options.embedding = embedding;
        self
    }

    /// Loads a model that embeds texts.
    ///
    /// # Errors
    /// If the model is not found, its file has no plan for embeddings, or it does not fit.
    pub fn load_encoder(self) -> Result<Encoder> {
        Encoder::open(self.find()?, &self.options)
    }
}

/// What a prefix stands for: the prompt of this name in the file, or the name of a task as models
/// read it, or else itself.
fn prompt(metadata: &Metadata, prefix: &str) -> String {
    const TASKS: [&str; 4] = ["search_document", "search_query", "clustering", "classification"];
    let strings = |key| metadata.strings(key).ok().flatten().unwrap_or_default();
    let (names, texts) = (strings("bodkin.prompt.names"), strings("bodkin.prompt.texts"));
    let mut own = names.iter().zip(texts).filter(|(name, _)| !name.is_empty());
    let own = own.find(|(name, _)| name.as_ref() == prefix.as_bytes());
    match own.and_then(|(_, text)| std::str::from_utf8(text).ok()) {
        Some(text) => text.to_owned(),
        None if TASKS.contains(&prefix) => format!("{prefix}: "),
        None => prefix.to_owned(),
    }
}

/// The sizes of a model for texts of up to `context` tokens in steps of `step` tokens, or of one
/// text that is longer.
fn limits(plan: &Plan, context: usize, step: usize) -> Limits {
    let tokens = context.max(step);
    let texts = tokens.div_ceil(TEXT_TOKENS);
    // Each text may end in the middle of a page.
    let pages = tokens / PAGE_TOKENS + texts;
    Limits {
        tokens,
        // A text behind a stored prefix has an output for each of its tokens.
        outputs: if plan.gives_sums() { texts.max(step) } else { texts },
        pages: vec![pages; plan.windows().len()],
        state_slots: if plan.states.is_empty() { 0 } else { texts },
    }
}

/// Without cached experts: with less memory, fewer are.
fn bytes(file: &ModelFile, backend: &dyn Backend, limits: &Limits) -> u64 {
    let memory = file.memory(backend, limits);
    total_bytes(&memory) - memory.cached_expert_bytes
}
