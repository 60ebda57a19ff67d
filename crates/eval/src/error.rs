//! Why a model could not be measured.

use std::path::PathBuf;

/// The result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in an evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine could not run the model.
    #[error(transparent)]
    Engine(#[from] bodkin_engine::Error),
    /// A GGUF file could not be read or written.
    #[error(transparent)]
    File(#[from] bodkin_gguf::Error),
    /// A text is shorter than two windows.
    #[error(
        "the text has {tokens} tokens; windows of {window} need {} at least",
        2 * window
    )]
    ShortText {
        /// In the text.
        tokens: usize,
        /// Of a window.
        window: usize,
    },
    /// A window has no second half to score.
    #[error("expected a context of 4 tokens at least, found {found}")]
    ShortWindow {
        /// What was asked for.
        found: usize,
    },
    /// A model predicts nothing.
    #[error("chunk {chunk}: the logits of this model are no numbers")]
    NoNumbers {
        /// From 1 on.
        chunk: usize,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// What was to be kept cannot be written.
    #[error("cannot keep predictions: {0}")]
    Keep(#[from] std::io::Error),
    /// A file of log-probabilities contradicts its format, itself or the model.
    #[error("{}: {item}: expected {expected}, found {found}", file.display())]
    Base {
        /// The file.
        file: PathBuf,
        /// A field of it.
        item: &'static str,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
}
