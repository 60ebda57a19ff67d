//! The checks of a model that generates text: activations, sliding window, context, answers, a
//! suite, and agreement with a server.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bodkin::ModelFile;
use bodkin_backend::{Backend, Model};
use bodkin_engine::{Engine, EngineOptions, SamplerOptions, Template, Tokenizer};
use bodkin_eval::check::baseline::Record;
use bodkin_eval::check::coherence::{self, Rules};
use bodkin_eval::check::health::Health;
use bodkin_eval::check::limits::{long_sequence, past_context, past_window};
use bodkin_eval::check::suite::AnswerCase;
use bodkin_eval::check::{PROMPTS, TEXT, answer};
use serde_json::{Map, json};

use super::arguments::{Args, Thresholds};
use super::reference::{self, Agreement};
use super::table::{Cases, Report};
use crate::errors;

/// Context size of the engine that is run to its end; longer prompts get a larger one.
const CONTEXT: usize = 256;
/// Rows of logits of a model in a baseline.
const KEPT_ROWS: usize = 32;

/// Checks without an engine: activations, sliding window, and agreement with a server.
pub(super) fn numbers(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Tokenizer,
    report: &mut Report,
) -> Result<Record> {
    let tokens = tokenizer.try_encode(TEXT, true, false)?;
    ensure!(
        tokens.len() >= KEPT_ROWS,
        "expected at least {KEPT_ROWS} tokens of text, found {}",
        tokens.len()
    );
    let max = args.machine.context()?.unwrap_or(usize::MAX).max(tokens.len());
    let long = long_sequence(&opened.plan, max.min(opened.plan.context_length));
    let size = long.max(tokens.len());
    opened.plan_for(size)?;
    let limits = bodkin_eval::limits(&opened.plan, size, args.machine.step_tokens()?);
    let mut model = opened.load(backend, &limits)?;
    let every = tokens.len() / KEPT_ROWS;
    let mut health = Health::read(model.as_mut(), &tokens, |position| {
        position % every == 0 && position / every < KEPT_ROWS
    })?;
    report.faults.extend(health.faults());
    let long_tokens: Vec<u32> = tokens.iter().copied().cycle().take(long).collect();
    report.faults.extend(past_window(model.as_mut(), &long_tokens)?);
    report.long_tokens = Some(long);
    if let Some(url) = &args.reference {
        match compare_with_server(args, url, model.as_mut(), tokenizer) {
            Ok(agreement) => {
                let limit = args.thresholds.max_logprob_difference;
                report.faults.extend(agreement.faults(limit));
                report.agreement = Some(agreement);
            }
            Err(error) => report.faults.push(errors::causes(&error)),
        }
    }
    let record = Record {
        name: report.model.clone(),
        perplexity: Some(health.perplexity.value()),
        rows: std::mem::take(&mut health.kept),
        width: opened.plan.output_width(),
        tokens,
        speed: None,
    };
    report.health = Some(health);
    Ok(record)
}

fn compare_with_server(
    args: &Args,
    url: &str,
    model: &mut dyn Model,
    tokenizer: &Tokenizer,
) -> Result<Agreement> {
    let server = reference::Server::new(url, &args.reference_model);
    let mut agreement = Agreement::default();
    for prompt in PROMPTS {
        let theirs = server.complete(prompt, reference::TOKENS)?;
        let ids = tokenizer.try_encode(prompt, true, false)?;
        let near_tie = args.thresholds.near_tie;
        agreement.follow(model, tokenizer, ids, &theirs, near_tie)?;
    }
    Ok(agreement)
}

/// Checks with an engine: answers, and the end of the context.
pub(super) fn words(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Arc<Tokenizer>,
    report: &mut Report,
) -> Result<()> {
    let sampling = opened.request()?.sampling;
    let template = Template::from_metadata(opened.file.metadata(), tokenizer)?;
    let prompts = PROMPTS.map(|prompt| encode(None, prompt, template.as_ref(), tokenizer));
    let prompts = prompts.into_iter().collect::<Result<Vec<_>>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let max_tokens = args.thresholds.max_tokens;
    let context = CONTEXT.max(longest + max_tokens + 1);
    let engine = engine(args, backend, opened, tokenizer, context)?;
    let Thresholds { max_repetition, max_foreign_letters, .. } = args.thresholds;
    let rules = Rules { repetition: max_repetition, foreign_letters: max_foreign_letters };
    let mut good = 0;
    for (prompt, text) in prompts.into_iter().zip(PROMPTS) {
        let answer = answer(&engine, prompt, &sampling, Some(max_tokens))?;
        let faults = coherence::faults(&answer.text, &answer.ids, &rules);
        good += usize::from(faults.is_empty());
        report.faults.extend(faults.iter().map(|fault| format!("answer to `{text}`: {fault}")));
    }
    report.answers = Some(Cases { good, all: PROMPTS.len() });
    let text = tokenizer.try_encode(TEXT, true, false)?;
    let prompt: Vec<u32> = text.iter().copied().cycle().take(context * 3 / 4).collect();
    report.faults.extend(past_context(&engine, &prompt, context, &sampling)?);
    report.context = Some(context);
    Ok(())
}

/// Checks the answers of a suite.
pub(super) fn suite(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Arc<Tokenizer>,
    cases: &[AnswerCase],
    report: &mut Report,
) -> Result<()> {
    ensure!(!cases.is_empty(), "--suite: expected [[answer]] for a model that generates text");
    let template = Template::from_metadata(opened.file.metadata(), tokenizer)?;
    let max_tokens = |case: &AnswerCase| case.max_tokens.unwrap_or(args.thresholds.max_tokens);
    let prompt = |case: &AnswerCase| {
        let prompt = encode(case.system.as_deref(), &case.prompt, template.as_ref(), tokenizer);
        prompt.with_context(|| format!("--suite: `{}`", case.prompt))
    };
    let prompts = cases.iter().map(prompt).collect::<Result<Vec<_>>>()?;
    let sizes = prompts.iter().zip(cases).map(|(prompt, case)| prompt.len() + max_tokens(case) + 1);
    let context = sizes.max().unwrap_or(CONTEXT);
    let engine = engine(args, backend, opened, tokenizer, context)?;
    let greedy = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
    let mut good = 0;
    for (prompt, case) in prompts.into_iter().zip(cases) {
        let answer = answer(&engine, prompt, &greedy, Some(max_tokens(case)))?;
        let faults = case.faults(&answer.text);
        good += usize::from(faults.is_empty());
        let text = &case.prompt;
        report.faults.extend(faults.iter().map(|fault| format!("suite: `{text}`: {fault}")));
    }
    report.suite = Some(Cases { good, all: cases.len() });
    Ok(())
}

/// An engine for one request at a time.
fn engine(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Arc<Tokenizer>,
    context: usize,
) -> Result<Engine> {
    opened.plan_for(context)?;
    let step_tokens = args.machine.step_tokens()?;
    let options = EngineOptions::single(context, step_tokens);
    let model = opened.load(backend, &options.limits(&opened.plan))?;
    Ok(Engine::open(model, Arc::clone(tokenizer), options)?)
}

/// The tokens of a prompt, as a chat if the model has a template.
fn encode(
    system: Option<&str>,
    prompt: &str,
    template: Option<&Template>,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>> {
    let Some(template) = template else {
        ensure!(system.is_none(), "expected a chat template for the system prompt, found none");
        return Ok(tokenizer.try_encode(prompt, true, true)?);
    };
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = system.map(|text| message("system", text)).into_iter();
    let messages = messages.chain([message("user", prompt)]).collect();
    let text = template.render(&messages, None, true, &Map::new())?;
    let ids = tokenizer.try_encode(&text, false, true)?;
    if ids.is_empty() {
        bail!("expected a prompt from the chat template, found no tokens");
    }
    Ok(ids)
}
