//! What clients send and what they get back.

use std::sync::Arc;

use crate::error::Error;
use crate::grammar::Constraint;
use crate::reasoning::Reasoning;
use crate::sampler::SamplerOptions;

/// A prompt, and how to go on from it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Token ids; special tokens are part of them.
    pub prompt: Vec<u32>,
    /// How tokens are sampled.
    pub sampling: SamplerOptions,
    /// The most generated tokens; without it, generation stops at the end of the context. With 0
    /// the prompt is read and nothing is generated.
    pub max_tokens: Option<usize>,
    /// What the answer must be. It ends where nothing more may follow, also with `ignore_end`.
    pub constraint: Option<Arc<Constraint>>,
    /// How the answer may begin with reasoning, to which the constraint does not apply; without it
    /// the constraint applies from the first token.
    pub reasoning: Option<Reasoning>,
    /// Stop where one of these texts begins; it is not part of the output.
    pub stop: Vec<String>,
    /// Stop at one of these tokens, besides the model's own end tokens.
    pub stop_tokens: Vec<u32>,
    /// Go on past the model's own end tokens.
    pub ignore_end: bool,
    /// Show special tokens as text; markers of reasoning and tool calls always are.
    pub show_special: bool,
    /// Report the log-probability of each token, and of this many of the most probable ones.
    pub logprobs: Option<usize>,
    /// Report the log-probabilities of the prompt's tokens, too, each with this many of the most
    /// probable ones, and that of the end token. The whole prompt is computed, whatever is cached.
    pub prompt_logprobs: Option<usize>,
}

/// Something that happened to a request.
#[derive(Debug)]
pub enum Event {
    /// Prefill begins or goes on: sent when a request is admitted, and after each step that leaves
    /// a part of the prompt to be read.
    Prefill {
        /// Tokens of the prompt in the KV cache.
        done: usize,
        /// Tokens of the whole prompt.
        total: usize,
    },
    /// A token of the prompt, from the second on, if the request asks for its log-probabilities.
    PromptToken {
        /// The token's id.
        id: u32,
        /// Given the tokens before it.
        logprobs: Box<Logprobs>,
    },
    /// A token was generated. `text` holds the characters that are complete now: it can be empty.
    Token {
        /// The token's id.
        id: u32,
        /// What can be shown.
        text: String,
        /// If the request asks for it.
        logprobs: Option<Box<Logprobs>>,
    },
    /// The last event of a request that ended well.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was held back, in case it was the start of a stop string.
        text: String,
        /// Token counts.
        usage: Usage,
        /// Durations.
        timings: Timings,
    },
    /// The last event of a request that failed.
    Error(Error),
}

/// Natural logarithms of probabilities, before constraints, penalties, temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the sampled token, or of the prompt's.
    pub sampled: f32,
    /// Token ids with theirs, the most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's own end token, one of the request's stop tokens, or the end of its constraint.
    End,
    /// This stop string.
    Stop(String),
    /// The request's `max_tokens`.
    Length,
    /// The end of the context.
    Context,
    /// The client cancelled it.
    Cancelled,
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In the prompt.
    pub prompt_tokens: usize,
    /// Of those, stored already by other requests.
    pub cached_tokens: usize,
    /// Generated, the end token included.
    pub generated_tokens: usize,
}

/// Durations of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From submission until the request was admitted.
    pub queue_ms: f64,
    /// From submission to the first generated token.
    pub prompt_ms: f64,
    /// From the first generated token to the last.
    pub generate_ms: f64,
}
