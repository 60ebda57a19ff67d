//! Behaviour at limits: past the sliding window, where KV pages are released, and past the context
//! length.

use bodkin_backend::{Model, PAGE_TOKENS};
use bodkin_engine::{Engine, Error, FinishReason, SamplerOptions};
use bodkin_model::Plan;

use super::{Answer, answer};
use crate::check::health::Logits;
use crate::error::Result;

/// Tokens that a model without a window reads.
const LONG: usize = 640;
/// The size of the small prefill chunks.
const SMALL_STEP: usize = 48;

/// The length of a sequence that exceeds the plan's largest window by enough for pages to be
/// released; at most `most`.
pub fn long_sequence(plan: &Plan, most: usize) -> usize {
    let window = plan.windows().into_iter().flatten().max().unwrap_or(0);
    (window + 3 * PAGE_TOKENS).max(LONG).min(most).min(plan.max_positions())
}

/// Reads a long sequence in large chunks and in small ones: the last logits must be bit-identical,
/// finite and not flat. Returns the faults.
///
/// # Errors
/// The engine's error.
pub fn past_window(model: &mut dyn Model, tokens: &[u32]) -> Result<Vec<String>> {
    let mut last = |step: usize| -> Result<Vec<f32>> {
        let mut found = Vec::new();
        let wanted = |position| position + 1 == tokens.len();
        bodkin_engine::logits(model, tokens, step, wanted, |_, row| found = row.to_vec())?;
        Ok(found)
    };
    let (large, small) = (last(usize::MAX)?, last(SMALL_STEP)?);
    let mut logits = Logits::default();
    logits.add(&large);
    let n = tokens.len();
    let mut faults = Vec::new();
    if logits.not_finite + logits.flat > 0 {
        faults.push(format!("logits after {n} tokens are flat or not finite"));
    }
    if !large.iter().map(|x| x.to_bits()).eq(small.iter().map(|x| x.to_bits())) {
        faults.push(format!("logits after {n} tokens depend on the steps in which they are read"));
    }
    Ok(faults)
}

/// Generates to the end of a context of `context` tokens, submits a prompt that does not fit, and
/// repeats the first request. `prompt` must be shorter than the context and longer than half of it.
///
/// # Errors
/// The engine's error for a request that fits.
pub fn past_context(
    engine: &Engine,
    prompt: &[u32],
    context: usize,
    sampling: &SamplerOptions,
) -> Result<Vec<String>> {
    assert!((context / 2..context).contains(&prompt.len()), "a prompt of half the context");
    let mut faults = Vec::new();
    let first = answer(engine, prompt.to_vec(), sampling, None)?;
    faults.extend(ends_with_context(&first, context));
    let long = [prompt, prompt].concat();
    match answer(engine, long.clone(), sampling, None) {
        Err(Error::PromptTooLong { .. }) => (),
        Err(error) => faults.push(format!("a prompt past the context: {error}")),
        Ok(_) => {
            let tokens = long.len();
            faults.push(format!("a prompt of {tokens} tokens fits into a context of {context}"));
        }
    }
    let second = answer(engine, prompt.to_vec(), sampling, None)?;
    if second.ids != first.ids {
        faults.push("another text after the context was full".to_owned());
    }
    Ok(faults)
}

fn ends_with_context(answer: &Answer, context: usize) -> Option<String> {
    let tokens = answer.usage.prompt_tokens + answer.usage.generated_tokens;
    let is_good =
        answer.reason == FinishReason::Context && (context..=context + 1).contains(&tokens);
    (!is_good)
        .then(|| format!("a context of {context} tokens ended after {tokens}: {:?}", answer.reason))
}
