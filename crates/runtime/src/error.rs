//! Why a model could not be found, fetched, loaded or run.

use std::io;

use bodkin_backend::Memory;
use bodkin_gguf::{printable, quoted};

use crate::memory::{human_bytes, total_bytes};

/// The result of the runtime's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range, or contradicts another option.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// The name of a field of [`crate::Options`].
        option: &'static str,
        /// The values that are accepted.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// A model name has none of the forms that [`crate::source::find`] accepts.
    #[error("`{name}`: expected {expected}")]
    Name {
        /// The name as it was given.
        name: String,
        /// The form that it should have.
        expected: &'static str,
    },
    /// A name is neither a path, nor a known model, nor in the Ollama store or registry.
    #[error("`{name}` is not on this machine, and {reason}{hint}")]
    UnknownModel {
        /// The name as it was given.
        name: String,
        /// The answer of the registry.
        reason: Box<Error>,
        /// The name that may be meant, or where the hub has it, after a semicolon.
        hint: String,
    },
    /// There is no connection to a source.
    #[error("{hosts} could not be reached")]
    Unreachable {
        /// Names of servers.
        hosts: String,
    },
    /// A file or a record on disk does not have the expected content.
    #[error("{item}: expected {expected}, found {found}")]
    Mismatch {
        /// The file, or the field of a record.
        item: String,
        /// The content that it should have.
        expected: String,
        /// The content that it has.
        found: String,
    },
    /// Weights of another format cannot be converted.
    #[error(transparent)]
    Convert(#[from] bodkin_convert::Error),
    /// The operating system refused an action.
    #[error("{action}: {source}")]
    Io {
        /// The file, or the action and the file.
        action: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A remote source or its client refused a download.
    #[error("{from}: {reason}")]
    Download {
        /// A repository or a package.
        from: String,
        /// The reason that the source or its client gave.
        reason: String,
    },
    /// No source delivered the model.
    #[error("{} could not be fetched{}", printable(name), reasons(attempts))]
    Unavailable {
        /// The name as it was given.
        name: String,
        /// Each source with its failure.
        attempts: Vec<(&'static str, String)>,
    },
    /// The model file cannot be read.
    #[error(transparent)]
    File(#[from] bodkin_model::Error),
    /// The file does not describe a model that has a plan.
    #[error("{model}: {source}")]
    Plan {
        /// The model's path.
        model: String,
        /// The reason.
        source: bodkin_model::Error,
    },
    /// The tokenizer, the chat template or the engine rejects the model.
    #[error("{model}: {source}")]
    Engine {
        /// The model's path.
        model: String,
        /// The reason.
        source: Box<bodkin_engine::Error>,
    },
    /// The engine rejects a request.
    #[error(transparent)]
    Request(#[from] bodkin_engine::Error),
    /// The engine's thread ended in the middle of a request.
    #[error("expected the end of the answer, found that the engine has stopped")]
    EngineStopped,
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] bodkin_backend::Error),
    /// The device cannot run the model.
    #[error("{model}: {source}")]
    Load {
        /// The model's path.
        model: String,
        /// The reason.
        source: bodkin_backend::Error,
    },
    /// The file names a pre-tokenizer that the engine does not have.
    #[error("{model}: tokenizer.ggml.pre: expected one of {known}, found {}", quoted(found))]
    PreTokenizer {
        /// The model's path.
        model: String,
        /// The name in the file.
        found: String,
        /// The names that `assume_pre` accepts.
        known: String,
    },
    /// Text or logits were asked of an encoder.
    #[error("{model}: expected a model that generates text, found the encoder {architecture}")]
    Encoder {
        /// The model's path.
        model: String,
        /// The architecture's name.
        architecture: String,
    },
    /// Scores were asked of a model that makes none.
    #[error("{model}: expected a reranker, whose pooling is `rank`, found another model")]
    NoReranker {
        /// The model's path.
        model: String,
    },
    /// A chat was asked of a model whose file has no chat template.
    #[error("{model}: expected a chat template, found none in the file")]
    NoTemplate {
        /// The model's path.
        model: String,
    },
    /// The model does not fit into the device's free memory.
    #[error(
        "{model}: needs {} ({} weights, {} context, {} scratch), {} are free, {} are missing",
        human_bytes(total_bytes(memory)),
        human_bytes(memory.weight_bytes),
        human_bytes(memory.state_bytes),
        human_bytes(memory.scratch_bytes),
        human_bytes(*available_bytes),
        human_bytes(total_bytes(memory).saturating_sub(*available_bytes))
    )]
    OutOfMemory {
        /// The model's path.
        model: String,
        /// The bytes that the model would allocate.
        memory: Memory,
        /// The bytes of the device that are free.
        available_bytes: u64,
    },
    /// The experts that do not fit on the device do not fit into memory of the host either.
    #[error(
        "{model}: its experts do not all fit on the device and need {} of the host's memory, {} \
         are free",
        human_bytes(*host_expert_bytes),
        human_bytes(*available_bytes)
    )]
    HostMemory {
        /// The model's path.
        model: String,
        /// The bytes of all experts.
        host_expert_bytes: u64,
        /// The bytes of the host that are free.
        available_bytes: u64,
    },
}

impl Error {
    /// Builds [`Error::Option`].
    pub(crate) fn option(
        option: &'static str,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Error {
        Error::Option { option, expected: expected.into(), found: found.to_string() }
    }

    /// Builds [`Error::Mismatch`].
    pub(crate) fn mismatch(
        item: impl std::fmt::Display,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Error {
        Error::Mismatch {
            item: item.to_string(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// Turns a system error into [`Error::Io`] about `action`.
    pub(crate) fn io<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Error {
        move |source| Error::Io { action: action.into(), source: source.into() }
    }

    /// Turns an engine error into [`Error::Engine`] about `model`.
    pub(crate) fn engine(model: &str) -> impl FnOnce(bodkin_engine::Error) -> Error + '_ {
        move |source| Error::Engine { model: model.to_owned(), source: Box::new(source) }
    }
}

/// The reason of one source, or an indented line for each of several.
fn reasons(attempts: &[(&'static str, String)]) -> String {
    let on_one_line = |(source, reason): &(_, String)| format!("{source}: {}", printable(reason));
    match attempts {
        [attempt] => format!(": {}", on_one_line(attempt)),
        _ => attempts.iter().map(|attempt| format!("\n  {}", on_one_line(attempt))).collect(),
    }
}
