//! Errors of tokenization, chat templates and requests.

use std::any::Any;

use bodkin_gguf::quoted;

/// The result of the engine's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model's metadata could not be read as the engine needs it.
    #[error(transparent)]
    Metadata(#[from] bodkin_gguf::Error),
    /// The backend could not load or run the model.
    #[error(transparent)]
    Backend(#[from] bodkin_backend::Error),
    /// The model's tokenizer type is unknown.
    #[error("tokenizer.ggml.model: expected one of {known}, found {}", quoted(found))]
    UnknownTokenizer {
        /// The name in the metadata.
        found: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// The metadata or the `assume` option names a pre-tokenizer that the engine does not know.
    #[error("unknown pre-tokenizer {}; those known are {known}", quoted(found))]
    UnknownPreTokenizer {
        /// The given name.
        found: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// Two parts of the vocabulary contradict each other.
    #[error("{key}: expected {expected}, found {found}")]
    Vocabulary {
        /// The metadata key.
        key: &'static str,
        /// The valid values.
        expected: String,
        /// The actual value.
        found: String,
    },
    /// A chat template does not parse, fails, or refuses a conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// An option of the sampler is out of range.
    #[error("sampling option {option}: expected {expected}, found {found}")]
    Sampling {
        /// The option's name.
        option: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The given value.
        found: String,
    },
    /// A constraint is not valid, is not supported, or exceeds a limit, maybe within an answer.
    #[error("{field}: {message}")]
    Constraint {
        /// The field or flag that it comes from.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// A text is too long for the tokenizer's 32-bit offsets.
    #[error("text of {bytes} bytes, at most {limit}")]
    LongText {
        /// Of the text.
        bytes: usize,
        /// The longest that is tokenized.
        limit: usize,
    },
    /// Looking for the special tokens of a text would take too long.
    #[error(
        "text of {bytes} bytes in which looking for the vocabulary's special tokens takes too \
         long: expected a shorter text"
    )]
    SpecialTokenSearch {
        /// Of the text.
        bytes: usize,
    },
    /// The prompt of a request is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A prompt holds a token id outside of the vocabulary.
    #[error("token id {id}: the model has {vocabulary} tokens")]
    UnknownToken {
        /// In the prompt.
        id: u32,
        /// The number of token ids.
        vocabulary: usize,
    },
    /// A prompt fills the whole context.
    #[error("the prompt has {tokens} tokens, the context has room for {limit}")]
    PromptTooLong {
        /// In the prompt.
        tokens: usize,
        /// The largest valid count.
        limit: usize,
    },
    /// An encoder was asked to generate text.
    #[error("a {architecture} model is an encoder: it makes embeddings and no text")]
    NoText {
        /// The model's architecture.
        architecture: String,
    },
    /// A decoder was asked for embeddings.
    #[error("a {architecture} model makes text and no embeddings; an encoder, such as BERT, does")]
    NoEmbeddings {
        /// The model's architecture.
        architecture: String,
    },
    /// A text to embed has no tokens.
    #[error("text {text} has no tokens")]
    EmptyText {
        /// The first text is number 1.
        text: usize,
    },
    /// A text to embed exceeds the model's limit; texts are never truncated.
    #[error("text {text} has {tokens} tokens, the model takes {limit} at most")]
    TextTooLong {
        /// The first text is number 1.
        text: usize,
        /// Tokens of the text, special tokens included.
        tokens: usize,
        /// The largest valid count.
        limit: usize,
    },
    /// The KV cache has no page for another token of any request.
    #[error("out of pages: {tokens} tokens do not fit into the context memory")]
    OutOfPages {
        /// Tokens of all running requests.
        tokens: usize,
    },
    /// An embedding or a row of logits holds NaN or infinity.
    #[error("the model's output is not finite: NaN or infinity first appears in {place}")]
    NonFinite {
        /// The layer and the tensor.
        place: String,
    },
    /// A step failed or the engine's thread panicked. All requests end with the cause, and the
    /// model must be loaded again.
    #[error("{0}")]
    Failed(String),
    /// The engine takes no more requests than those that run and wait.
    #[error("the queue is full: {limit} requests wait already")]
    QueueFull {
        /// The most that wait.
        limit: usize,
    },
    /// Requests that belong together are more than can ever run and wait.
    #[error("{count} answers in one request: at most {limit} run and wait at a time")]
    TooManyRequests {
        /// The requests.
        count: usize,
        /// The most that run and wait.
        limit: usize,
    },
    /// The engine's thread did not start.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
}

/// The text of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
