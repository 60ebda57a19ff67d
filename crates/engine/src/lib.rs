//! Text in, events out: tokenizer, chat template, sampler, pages, scheduler and the loop that runs
//! a model for all requests. It must not know any backend by name, nor HTTP, nor the terminal.

#![forbid(unsafe_code)]

mod client;
mod embed;
mod embedder;
mod engine;
mod error;
mod events;
mod grammar;
mod logits;
mod logits_rows;
mod logprobs;
mod nonfinite;
mod pages;
mod prefill_budget;
mod prefix_store;
mod prefix_sums;
mod reasoning;
mod request;
mod restore;
pub mod sampler;
mod scheduler;
mod shared_prefix;
mod single_sequence;
mod stats;
mod stop;
pub mod stream;
pub mod template;
pub mod tokenizer;
mod tools;
mod worker;

pub use embed::{embed, embedding_limits, longest_text, normalize};
pub use embedder::{Embedder, EmbeddingSink, Embeddings};
pub use engine::{Engine, EngineOptions};
pub use error::{Error, Result};
pub use events::{Canceller, EventDecoder, Events, Update, UpdateSink};
pub use grammar::{Constraint, Grammar, ToolGrammar};
pub use logits::{logits, steps};
pub use nonfinite::{FirstNonFinite, error as non_finite_error};
pub use pages::{Pages, Sequence};
pub use prefix_store::PrefixStore;
pub use reasoning::{Reasoning, ReasoningMarkers};
pub use request::{Event, FinishReason, Logprobs, Request, Timings, Usage};
pub use sampler::{Sampler, SamplerOptions};
pub use stats::{ExpertReport, Stats};
pub use stream::TextStream;
pub use template::{TEMPLATE_THREAD, Template};
pub use tokenizer::Tokenizer;
pub use tools::{Tool, ToolCall, ToolDelta, ToolFormat, ToolParser};
