//! The one error of this crate: every message is one line that names the thing, what was expected
//! and what was found.

use std::io;

use bodkin_gguf::printable;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model was not converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The new file is not a valid GGUF.
    #[error(transparent)]
    Gguf(#[from] bodkin_gguf::Error),
    /// A tensor cannot be converted.
    #[error(transparent)]
    Compress(#[from] bodkin_compress::Error),
    /// A file cannot be read.
    #[error("{item}: {source}")]
    Io {
        /// The file.
        item: String,
        /// The reason.
        source: io::Error,
    },
    /// The new file would be no model that runs.
    #[error("{item}: the weights do not fit config.json: {reason}")]
    Plan {
        /// The folder or file that is converted.
        item: String,
        /// What is wrong with which tensor or key of the new file.
        reason: String,
    },
    /// A file, key or tensor is invalid.
    #[error("{item}: expected {expected}, found {found}")]
    Invalid {
        /// The file, with the key or tensor in it.
        item: String,
        /// The valid values.
        expected: String,
        /// The actual value.
        found: String,
    },
}

impl Error {
    /// Builds [`Error::Invalid`]. What files hold is made printable.
    pub(crate) fn invalid(
        item: impl AsRef<str>,
        expected: impl Into<String>,
        found: impl AsRef<str>,
    ) -> Error {
        let (item, found) = (shown(item.as_ref()), shown(found.as_ref()));
        Error::Invalid { item, expected: expected.into(), found }
    }

    /// Builds [`Error::Io`].
    pub(crate) fn io(item: impl AsRef<str>) -> impl FnOnce(io::Error) -> Error {
        let item = printable(item.as_ref());
        move |source| Error::Io { item, source }
    }
}

/// Text of a file on one line, cut where it is longer than names are.
fn shown(text: &str) -> String {
    const MAX: usize = 300;
    match text.char_indices().nth(MAX) {
        Some((end, _)) => printable(&text[..end]) + "...",
        None => printable(text),
    }
}
