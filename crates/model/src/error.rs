//! What can be wrong with a file that reads well but describes no model that we can run.

/// Why no plan could be made of a file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The metadata could not be read as the type that a key has.
    #[error(transparent)]
    Gguf(#[from] bodkin_gguf::Error),
    /// The architecture has no file in `arch/`.
    #[error("unknown architecture `{}`; known: {known}", found.escape_debug())]
    UnknownArchitecture {
        /// What `general.architecture` says.
        found: String,
        /// The names in the table, comma-separated.
        known: String,
    },
    /// A tensor that the architecture needs is not in the file.
    #[error("tensor `{0}` is missing")]
    MissingTensor(String),
    /// A tensor has another shape than the metadata implies.
    #[error("tensor `{name}` has shape {found:?}, the plan wants {wanted:?}")]
    Shape {
        /// The tensor's name.
        name: String,
        /// Columns first, as in the file.
        found: Vec<u64>,
        /// Columns first, as in the file.
        wanted: Vec<u64>,
    },
    /// A key has a value that makes no sense for the architecture.
    #[error("metadata key `{key}`: {problem}")]
    Key {
        /// The key with its architecture prefix.
        key: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// The model uses something that no plan can express yet.
    #[error("{0} is not supported")]
    Unsupported(String),
}

/// The result of making a plan.
pub type Result<T> = std::result::Result<T, Error>;
