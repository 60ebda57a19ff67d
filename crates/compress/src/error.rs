//! The one error of this crate: every message is one line that names the thing, what was expected
//! and what was found.

use std::io;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a file could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source cannot be read, or the result cannot be written.
    #[error(transparent)]
    Gguf(#[from] bodkin_gguf::Error),
    /// The source is not a model.
    #[error(transparent)]
    Model(#[from] bodkin_model::Error),
    /// The result cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A tensor of the source holds NaN or an infinity.
    #[error("{tensor}: expected finite values, found {found} in row {row}")]
    NotFinite {
        /// Its name.
        tensor: String,
        /// The first such value.
        found: f32,
        /// Its row, from 0.
        row: usize,
    },
    /// An option, tensor or entry is invalid.
    #[error("{item}: expected {expected}, found {found}")]
    Invalid {
        /// The flag, tensor or entry.
        item: String,
        /// The valid values.
        expected: String,
        /// The actual value.
        found: String,
    },
}

impl Error {
    /// Builds [`Error::Invalid`].
    pub(crate) fn invalid(
        item: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::Invalid { item: item.into(), expected: expected.into(), found: found.into() }
    }
}
