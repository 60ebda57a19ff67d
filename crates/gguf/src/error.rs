//! The error type of this crate. Every message is one line that names the file, the item inside it,
//! what was expected and what was found.

use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a GGUF file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file does not exist.
    #[error("{}: missing file", file.display())]
    Missing {
        /// The file as it was named by the caller.
        file: PathBuf,
    },
    /// The path is a directory.
    #[error("{}: is a directory, expected a GGUF file", file.display())]
    Directory {
        /// The file as it was named by the caller.
        file: PathBuf,
    },
    /// The operating system returned an error.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// The operation: "open", "map", "write tensor `x`".
        action: String,
        /// The system's error.
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
    /// The file ends before an item that its header declares.
    #[error(
        "{}: truncated or damaged: {item} needs {expected} bytes, the file has {actual}",
        file.display()
    )]
    Truncated {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// The item that is incomplete.
        item: String,
        /// The least size of the file, in bytes.
        expected: u64,
        /// The size of the file, in bytes.
        actual: u64,
    },
    /// Another process has written to the file.
    #[error("{}: written to by another process since it was opened", file.display())]
    Changed {
        /// The file as it was named by the caller.
        file: PathBuf,
    },
    /// The file contradicts the format or itself.
    #[error("{}: {item}: expected {expected}, found {found}", file.display())]
    Invalid {
        /// The file as it was named by the caller.
        file: PathBuf,
        /// The key, tensor or field.
        item: String,
        /// The valid values.
        expected: String,
        /// The value in the file.
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
    /// This crate reads the format but has no quantiser for it.
    #[error("format {format}: expected a format with a quantiser, found none")]
    NoQuantizer {
        /// Name of the format.
        format: &'static str,
    },
    /// A sparse format cannot hold the values: too few of them are zero.
    #[error("format {format}: expected {expected}, found more values")]
    NotSparse {
        /// Name of the format.
        format: &'static str,
        /// The sparsity that the format requires.
        expected: &'static str,
    },
}

impl Error {
    /// Builds [`Error::Invalid`].
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

    /// Builds [`Error::Io`], or [`Error::Missing`] or [`Error::Directory`] by the kind of `source`.
    pub(crate) fn io(file: &Path, action: impl Into<String>, source: io::Error) -> Error {
        let file = file.to_path_buf();
        match source.kind() {
            io::ErrorKind::NotFound => Error::Missing { file },
            io::ErrorKind::IsADirectory => Error::Directory { file },
            _ => Error::Io { file, action: action.into(), source },
        }
    }
}

/// A shape or an index that contradicts its format, before the file and the tensor are known.
pub(crate) struct Mismatch {
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl Mismatch {
    /// The error of the tensor `name` of a file.
    pub(crate) fn in_tensor(self, file: &Path, name: &str) -> Error {
        Error::invalid(file, format!("tensor {}", quoted(name)), self.expected, self.found)
    }
}

/// A name from a file, escaped to one line and cut to 80 characters.
pub fn quoted(name: &str) -> String {
    let mut shown: String = name.chars().take(80).collect();
    if name.chars().nth(80).is_some() {
        shown.push_str("...");
    }
    format!("`{}`", printable(&shown))
}

/// Text from a file on one line: line ends, characters that command a terminal and invisible ones
/// are escaped.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\'' | '\\' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    shown
}
