//! The flags that say how texts are embedded.

use bodkin::{EmbeddingOptions, Pooling};

/// How texts are embedded.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct EmbeddingArgs {
    /// Pooling: mean, cls, last or rank [default: the model's]
    #[arg(long, value_name = "KIND")]
    pooling: Option<Pooling>,
    /// Leave vectors at the length that the model gives them
    #[arg(long)]
    no_normalize: bool,
    /// Cut vectors to their first N dimensions (Matryoshka)
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,
    /// Text before each text, or the name of a prompt or of a task
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prefix: String,
    /// Cut texts that are longer than the context
    #[arg(long)]
    truncate: bool,
}

impl EmbeddingArgs {
    /// What of it holds for a reranker: whether long texts are cut.
    #[cfg(feature = "flight")]
    pub(crate) fn truncation(&self) -> EmbeddingOptions {
        EmbeddingOptions { truncate: self.truncate, ..EmbeddingOptions::default() }
    }

    /// The same as options of the runtime.
    pub(crate) fn options(&self) -> EmbeddingOptions {
        EmbeddingOptions {
            pooling: self.pooling,
            normalize: !self.no_normalize,
            dimensions: self.dimensions,
            prefix: self.prefix.clone(),
            truncate: self.truncate,
        }
    }
}
