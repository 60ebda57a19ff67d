//! Errors of files that are valid GGUF but have no plan.

use bodkin_gguf::quoted;

/// Why a file has no plan.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read, or a key has another type.
    #[error(transparent)]
    Gguf(#[from] bodkin_gguf::Error),
    /// The architecture has no file in `arch/`.
    #[error("unknown architecture {}; {nearest}", quoted(found))]
    UnknownArchitecture {
        /// What `general.architecture` says.
        found: String,
        /// The nearest known architecture and what it does not read of the file, or all names.
        nearest: String,
    },
    /// The file has the part of a model that encodes images or sound, and not the model.
    #[error(
        "this is a projector (mmproj), which turns images or sound into the input of a language \
         model; bodkin runs the text part of models alone: expected the file of the language model"
    )]
    Projector,
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
    /// The model needs something that no plan can express.
    #[error("{0} is not supported")]
    Unsupported(String),
}

/// The result of building a plan.
pub type Result<T> = std::result::Result<T, Error>;
