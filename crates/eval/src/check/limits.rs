//! What happens where something ends: past the sliding window, where keys and values are given
//! back, and past the context, where there is no room for more.

use bodkin_backend::{Model, PAGE_TOKENS};
use bodkin_engine::{Engine, Error, Finish, SamplerOptions};
use bodkin_model::Plan;

use super::{Answer, answer};
use crate::check::health::Logits;
use crate::error::Result;

/// A model without a window reads so many tokens.
const LONG: usize = 640;
/// The steps in which a long text is read, apart from the largest: of many tokens and of few.
const SMALL_STEP: usize = 48;

/// The tokens of a sequence that goes past the plan's largest window, by enough for pages to be
/// given back; at most `most`.
pub fn long_sequence(plan: &Plan, most: usize) -> usize {
    let window = plan.windows().into_iter().flatten().max().unwrap_or(0);
    (window + 3 * PAGE_TOKENS).max(LONG).min(most).min(plan.max_positions())
}

/// Reads a long sequence in large steps and in small ones: the last logits must have the same
/// bits, and make sense. Returns what is wrong.
///
/// # Errors
/// What the engine says about the model.
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

/// Lets an engine of `context` tokens run to the end of its context, asks for more than fits, and
/// asks once more for what does. `prompt` must have fewer tokens than the context, more than half.
///
/// # Errors
/// What the engine says where it should have answered.
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
    let is_good = answer.reason == Finish::Length && (context..=context + 1).contains(&tokens);
    (!is_good)
        .then(|| format!("a context of {context} tokens ended after {tokens}: {:?}", answer.reason))
}
