//! How texts are embedded, and their vectors as they are computed.

use bodkin_engine::{Canceller, Embeddings as Pooled, normalize};
use bodkin_model::Pooling;

use crate::error::{Error, Result};

/// How texts are embedded. The defaults are the model's own pooling and whole vectors of length 1.
#[derive(Clone, Debug)]
pub struct EmbeddingOptions {
    /// How the hidden states of a text become its vector, instead of the file's way. It is chosen
    /// when a model is loaded.
    pub pooling: Option<Pooling>,
    /// Scale vectors to length 1. The scores of a reranker stay as they are.
    pub normalize: bool,
    /// Cut vectors to their first dimensions, before they are scaled (Matryoshka).
    pub dimensions: Option<usize>,
    /// Put before each text: the name of a prompt that the file has, such as `query`, or of a task,
    /// such as `search_document`, or the text itself.
    pub prefix: String,
    /// Cut a text that is longer than the context, instead of refusing it.
    pub truncate: bool,
}

impl Default for EmbeddingOptions {
    fn default() -> EmbeddingOptions {
        EmbeddingOptions {
            pooling: None,
            normalize: true,
            dimensions: None,
            prefix: String::new(),
            truncate: false,
        }
    }
}

impl EmbeddingOptions {
    /// Elements of a vector whose model makes `width` of them.
    ///
    /// # Errors
    /// If the model makes fewer than `dimensions`, or that is zero.
    pub(crate) fn width(&self, width: usize) -> Result<usize> {
        match self.dimensions {
            None => Ok(width),
            Some(dimensions) if (1..=width).contains(&dimensions) => Ok(dimensions),
            Some(found) => Err(Error::option("dimensions", format!("1 to {width}"), found)),
        }
    }
}

/// What is known of a request when it is queued.
pub struct Submitted {
    /// Tokens of all texts, without what was cut.
    pub tokens: usize,
    /// Texts that were cut to the context.
    pub truncated: usize,
    /// Ends the request at its next step.
    pub canceller: Canceller,
}

/// What is made of a pooled row.
#[derive(Clone, Copy)]
pub(crate) struct Finishing {
    pub(crate) width: usize,
    pub(crate) normalize: bool,
}

impl Finishing {
    pub(crate) fn finish(self, mut vector: Vec<f32>) -> Vec<f32> {
        vector.truncate(self.width);
        if self.normalize {
            normalize(&mut vector);
        }
        vector
    }
}

/// The vectors of a request in the order of its texts, each as soon as it and those before it are
/// computed. After an error there are no more. Dropping it ends the request at its next step.
pub struct Embeddings {
    pub(crate) pooled: Pooled,
    /// The model's path.
    pub(crate) model: String,
    pub(crate) finish: Finishing,
    pub(crate) tokens: usize,
    pub(crate) truncated: usize,
}

impl Iterator for Embeddings {
    type Item = Result<Vec<f32>>;

    fn next(&mut self) -> Option<Result<Vec<f32>>> {
        let vector = self.pooled.next()?.map(|vector| self.finish.finish(vector));
        Some(vector.map_err(Error::engine(&self.model)))
    }
}

impl Embeddings {
    /// Tokens of all texts, without what was cut.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Texts that were cut to the context.
    pub fn truncated(&self) -> usize {
        self.truncated
    }

    /// Something that ends the request from elsewhere; its vectors then end early.
    pub fn canceller(&self) -> Canceller {
        self.pooled.canceller()
    }
}
