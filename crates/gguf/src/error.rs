//! The one error of this crate. Every message is one line that names the file, the thing inside it,
//! what was expected and what was found. It must not know how a caller will show it.

use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a GGUF file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing under the name.
    #[error("{}: missing file", file.display())]
    Missing {
        /// The file as it was named by the caller.
        file: PathBuf,
    },
    /// The name belongs to a directory.
    #[error("{}: is a directory, expected a GGUF file", file.display())]
    Directory {
        /// The file as it was named by the caller.
        file: PathBuf,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// What was tried: "open", "map", "write tensor `x`".
        action: String,
        /// What the system said.
        source: io::Error,
    },
    /// The first four bytes are not those of a GGUF file.
    #[error(
        "{}: not a GGUF file (magic \"{}\", expected \"GGUF\")",
        file.display(),
        found.escape_ascii()
    )]
    Magic {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The file ends before something that its header promises.
    #[error(
        "{}: truncated: {item} needs {expected} bytes, the file has {actual}",
        file.display()
    )]
    Truncated {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// What did not fit.
        item: String,
        /// The bytes that the file needs at least, from its start.
        expected: u64,
        /// The bytes that it has.
        actual: u64,
    },
    /// Something in the file contradicts the format or itself.
    #[error("{}: {item}: expected {expected}, found {found}", file.display())]
    Invalid {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// The key, tensor or field.
        item: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A metadata key that the caller needs is absent.
    #[error("metadata key `{key}`: expected {expected}, found no such key")]
    MissingKey {
        /// The full key.
        key: String,
        /// The type that the caller asked for.
        expected: &'static str,
    },
    /// A metadata key holds another type or a value out of range.
    #[error("metadata key `{key}`: expected {expected}, found {found}")]
    WrongType {
        /// The full key.
        key: String,
        /// The type that the caller asked for.
        expected: &'static str,
        /// The type, and where it is short the value, that the file holds.
        found: String,
    },
    /// The format is read but not written by this crate.
    #[error("format {format}: expected a format with a quantiser, found none")]
    NoQuantizer {
        /// Name of the format.
        format: &'static str,
    },
    /// Values that a sparse format cannot hold, because too few of them are zero.
    #[error("format {format}: expected {expected}, found more values")]
    NotSparse {
        /// Name of the format.
        format: &'static str,
        /// What the format can hold.
        expected: &'static str,
    },
}

impl Error {
    /// Builds [`Error::Invalid`] from anything that can be shown.
    pub(crate) fn invalid(
        file: &Path,
        item: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::Invalid {
            file: file.to_path_buf(),
            item: item.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// Builds [`Error::Io`], or the plainer [`Error::Missing`] where that is what happened.
    pub(crate) fn io(file: &Path, action: impl Into<String>, source: io::Error) -> Error {
        let file = file.to_path_buf();
        match source.kind() {
            io::ErrorKind::NotFound => Error::Missing { file },
            io::ErrorKind::IsADirectory => Error::Directory { file },
            _ => Error::Io { file, action: action.into(), source },
        }
    }
}
