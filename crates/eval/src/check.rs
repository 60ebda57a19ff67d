//! Whether a model is sane: what it says, the numbers inside it, its limits, and how far it lies
//! from what it computed before. Each part is a module; what is a fault and what is a number is
//! decided here, what is shown is the caller's.

pub mod baseline;
pub mod coherence;
pub mod health;
pub mod limits;

use bodkin_engine::{Engine, Event, Finish, Request, SamplerOptions, Usage};

/// What models are asked to go on from or to answer: a fact, a list, code, a story, a sum.
pub const PROMPTS: [&str; 5] = [
    "The capital of France is",
    "Name three animals that live in the sea, and say one thing about each of them.",
    "Write a function in Python that returns the largest number of a list.",
    "Once upon a time, in a small house at the edge of the forest,",
    "If a train leaves at nine and travels for three hours, when does it arrive? Explain.",
];

/// A plain text of about three hundred tokens, for perplexity and activations.
pub const TEXT: &str = include_str!("check/text.txt");

/// The same random numbers in every run.
const SEED: u64 = 42;

/// What a model said.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The tokens, the end token included.
    pub ids: Vec<u32>,
    /// The text.
    pub text: String,
    /// Why it ended.
    pub reason: Finish,
    /// Token counts.
    pub usage: Usage,
}

/// Goes on from a prompt with the sampling that the model recommends and random numbers that are
/// always the same: a small model's best tokens alone go round in circles.
///
/// # Errors
/// What the engine says about the request.
pub fn answer(
    engine: &Engine,
    prompt: Vec<u32>,
    sampling: &SamplerOptions,
    max_tokens: Option<usize>,
) -> Result<Answer, bodkin_engine::Error> {
    let sampling = SamplerOptions { seed: Some(SEED), ..sampling.clone() };
    // Without a limit it is the end of the context that is looked for.
    let ignore_end = max_tokens.is_none();
    let request = Request { prompt, sampling, max_tokens, ignore_end, ..Request::default() };
    let (mut ids, mut text) = (Vec::new(), String::new());
    for event in engine.submit(request) {
        match event {
            Event::Token { id, text: new } => {
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
    Err(bodkin_engine::Error::Step("the engine ended without an answer".to_owned()))
}
