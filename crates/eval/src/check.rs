//! Sanity checks of a model: its generated text, its activations and logits, its behaviour at the
//! window and context limits, and its difference from an earlier run. Each part is a module. The
//! modules decide what is a fault; the caller decides what is shown.

pub mod baseline;
pub mod coherence;
pub mod embeddings;
pub mod health;
pub mod limits;
pub mod suite;

use bodkin_engine::{Engine, Event, FinishReason, Request, SamplerOptions, Usage};

/// Prompts to continue or to answer: a fact, a list, code, a story, a sum.
pub const PROMPTS: [&str; 5] = [
    "The capital of France is",
    "Name three animals that live in the sea, and say one thing about each of them.",
    "Write a function in Python that returns the largest number of a list.",
    "Once upon a time, in a small house at the edge of the forest,",
    "If a train leaves at nine and travels for three hours, when does it arrive? Explain.",
];

/// A plain text of about three hundred tokens, for perplexity and activations.
pub const TEXT: &str = include_str!("check/text.txt");

/// Every run samples with the same random numbers.
const SEED: u64 = 42;

/// A generated answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The tokens, the end token included.
    pub ids: Vec<u32>,
    /// The text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
}

/// Generates from a prompt with the model's recommended sampling and a fixed seed: small models
/// repeat themselves with greedy sampling.
///
/// # Errors
/// The engine's error for the request.
pub fn answer(
    engine: &Engine,
    prompt: Vec<u32>,
    sampling: &SamplerOptions,
    max_tokens: Option<usize>,
) -> Result<Answer, bodkin_engine::Error> {
    let sampling = SamplerOptions { seed: Some(SEED), ..sampling.clone() };
    // Without a limit, the test is whether generation ends with the context.
    let ignore_end = max_tokens.is_none();
    let request = Request { prompt, sampling, max_tokens, ignore_end, ..Request::default() };
    let (mut ids, mut text) = (Vec::new(), String::new());
    for event in engine.submit(request)? {
        match event {
            Event::Prefill { .. } | Event::PromptToken { .. } => (),
            Event::Token { id, text: new, .. } => {
                ids.push(id);
                text.push_str(&new);
            }
            Event::Done { reason, text: rest, usage, .. } => {
                text.push_str(&rest);
                return Ok(Answer { ids, text, reason, usage });
            }
            Event::Error(error) => return Err(error),
        }
    }
    Err(bodkin_engine::Error::Failed("the engine ended without an answer".to_owned()))
}
