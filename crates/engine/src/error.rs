//! Why text could not become tokens, or a request could not be answered.

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
    /// The model's tokenizer is of a kind that the engine does not know.
    #[error("tokenizer.ggml.model: expected one of {known}, found `{found}`")]
    UnknownTokenizer {
        /// The name in the metadata.
        found: String,
        /// The names that would have been right.
        known: String,
    },
    /// The model, or whoever assumed one in its place, names a way to split text that the engine
    /// does not know.
    #[error("unknown pre-tokenizer `{found}`; those known are {known}")]
    UnknownPreTokenizer {
        /// The name that was given.
        found: String,
        /// The names that would have been right.
        known: String,
    },
    /// A part of the vocabulary contradicts another.
    #[error("{key}: expected {expected}, found {found}")]
    Vocabulary {
        /// The metadata key.
        key: &'static str,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A chat template does not parse, fails, or refuses a conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// An option of the sampler makes no sense.
    #[error("sampling option {option}: expected {expected}, found {found}")]
    Sampling {
        /// The option's name.
        option: &'static str,
        /// What would have been right.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// A request has no tokens to go on from.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A prompt has a token that the model does not have.
    #[error("token id {id}: the model has {vocabulary} tokens")]
    UnknownToken {
        /// In the prompt.
        id: u32,
        /// The number of token ids.
        vocabulary: usize,
    },
    /// A request wants no answer.
    #[error("the answer may have 0 tokens, it must be allowed 1 at least")]
    NoTokens,
    /// A prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, the context has room for {limit}")]
    PromptTooLong {
        /// In the prompt.
        tokens: usize,
        /// The most there may be.
        limit: usize,
    },
    /// Text was asked of a model that makes none.
    #[error("a {architecture} model is an encoder: it makes embeddings and no text")]
    NoText {
        /// What the model is.
        architecture: String,
    },
    /// Embeddings were asked of a model that makes none.
    #[error("a {architecture} model makes text and no embeddings; an encoder, such as BERT, does")]
    NoEmbeddings {
        /// What the model is.
        architecture: String,
    },
    /// A text to embed has no tokens.
    #[error("text {text} has no tokens")]
    EmptyText {
        /// The first text is number 1.
        text: usize,
    },
    /// A text to embed is longer than the model takes; texts are never cut.
    #[error("text {text} has {tokens} tokens, the model takes {limit} at most")]
    TextTooLong {
        /// The first text is number 1.
        text: usize,
        /// In the text, with those that mark its start and end.
        tokens: usize,
        /// The most there may be.
        limit: usize,
    },
    /// There is no memory for another token of any request.
    #[error("out of pages: {tokens} tokens do not fit into the context memory")]
    OutOfPages {
        /// Tokens of all running requests.
        tokens: usize,
    },
    /// A step failed; all requests that were part of it end with the same message.
    #[error("{0}")]
    Step(String),
    /// The engine's thread did not start.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
}
