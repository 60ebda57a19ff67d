//! Why a model could not be measured.

use std::path::PathBuf;

/// The result type of this crate.
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
        /// The requested size.
        found: usize,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Predictions cannot be written.
    #[error("cannot write predictions: {0}")]
    Keep(#[from] std::io::Error),
    /// A suite of checks is not as it should be.
    #[error("{item}: expected {expected}, found {found}")]
    Suite {
        /// The file, and the case or line in it.
        item: String,
        /// The valid content.
        expected: String,
        /// The actual content.
        found: String,
    },
    /// A file of log-probabilities contradicts its format, itself or the model.
    #[error("{}: {item}: expected {expected}, found {found}", file.display())]
    Base {
        /// The file.
        file: PathBuf,
        /// A field of it.
        item: &'static str,
        /// The valid values.
        expected: String,
        /// The actual value.
        found: String,
    },
    /// A routing trace contradicts its format, or cannot be recorded.
    #[error("{}: {item}: expected {expected}, found {found}", file.display())]
    Routing {
        /// The file.
        file: PathBuf,
        /// A field of it.
        item: &'static str,
        /// The valid values.
        expected: String,
        /// The actual value.
        found: String,
    },
}

impl Error {
    /// Builds [`Error::Suite`].
    pub(crate) fn suite(item: &str, expected: &str, found: impl std::fmt::Display) -> Error {
        let (item, expected) = (item.to_owned(), expected.to_owned());
        Error::Suite { item, expected, found: found.to_string() }
    }
}
