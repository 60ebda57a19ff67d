//! `bodkin check`: the regression suite of one or more models, and its table.

mod reference;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bodkin_backend::{Backend, Model};
use bodkin_engine::{Engine, EngineOptions, Template, Tokenizer};
use bodkin_eval::check::baseline::{self, Record, find, names};
use bodkin_eval::check::coherence::{self, Rules};
use bodkin_eval::check::health::Health;
use bodkin_eval::check::limits::{long_sequence, past_context, past_window};
use bodkin_eval::check::{PROMPTS, TEXT, answer};
use serde_json::{Map, json};

use crate::arguments::{Machine, TokenizerArgs, find_decoder, find_path};
use crate::{errors, output};
use bodkin::ModelFile;
use reference::Agreement;
use table::Report;

const AFTER: &str = "\
Each model answers a few fixed prompts, reads a fixed text while activations and logits are checked
for NaN and outliers, reads past its sliding window, and fills a small context. --baseline compares
logits and perplexity with an earlier run. --reference compares the most likely tokens with a server
that has OpenAI's /v1/completions with logprobs. Sampling uses fixed seeds. The exit status is 1 if
a check fails.";

/// Context size of the engine that is run to its end; longer prompts get a larger one.
const CONTEXT: usize = 256;
/// Rows of logits of a model in a baseline.
const KEPT_ROWS: usize = 32;

/// Arguments of `check`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| {
    arg.help("Most tokens of the sequence past the window").default_value("8192")
}))]
pub(crate) struct Args {
    /// Paths to GGUF files, or model names as in `list`
    #[arg(required = true)]
    models: Vec<String>,
    /// Compare with the model of the same name in this file
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Write logits and perplexities to this file
    #[arg(long, value_name = "FILE")]
    save_baseline: Option<PathBuf>,
    /// Compare with a server, such as http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    reference: Option<String>,
    /// The model's name on the server
    #[arg(long, value_name = "NAME", default_value = "default", requires = "reference")]
    reference_model: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = "Thresholds")]
    thresholds: Thresholds,
    #[command(flatten, next_help_heading = "Machine")]
    machine: Machine,
}

/// Limits of the checks.
#[derive(clap::Args, Clone, Copy, Debug)]
struct Thresholds {
    /// Mean squared error of the logits
    #[arg(long, value_name = "X", default_value_t = 0.05)]
    max_mse: f64,
    /// Mean KL divergence from the baseline
    #[arg(long, value_name = "X", default_value_t = 0.01)]
    max_kl: f64,
    /// Change of perplexity in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    max_perplexity_change: f64,
    /// Fraction of repeated 4-grams
    #[arg(long, value_name = "FRACTION", default_value_t = Rules::default().repetition)]
    max_repetition: f64,
    /// Fraction of letters outside the main script
    #[arg(long, value_name = "FRACTION", default_value_t = Rules::default().foreign_letters)]
    max_foreign_letters: f64,
    /// Mean difference of log-probabilities
    #[arg(long, value_name = "X", default_value_t = 0.2)]
    max_logprob_difference: f64,
    /// Log-probabilities that differ by less are a tie
    #[arg(long, value_name = "X", default_value_t = 0.3)]
    near_tie: f64,
    /// Maximum number of tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 48)]
    max_tokens: usize,
}

pub(crate) fn run(args: Args) -> Result<()> {
    ensure!(
        (2..=4096).contains(&args.thresholds.max_tokens),
        "--max-tokens: expected 2 to 4096 tokens, found {}",
        args.thresholds.max_tokens
    );
    let before = args.baseline.as_deref().map(baseline::open).transpose()?.unwrap_or_default();
    let backend = args.machine.backend()?;
    let (mut reports, mut records) = (Vec::new(), Vec::new());
    // An unknown name fails later, when its model is checked.
    let path = |model: &String| find_path(model).unwrap_or_else(|_| model.into());
    let paths: Vec<PathBuf> = args.models.iter().map(path).collect();
    if let Some(output) = &args.save_baseline {
        output::check(output, paths.iter().map(PathBuf::as_path))?;
    }
    let names = names(&paths);
    for (model, name) in args.models.iter().zip(names) {
        let mut report = Report { model: name, ..Report::default() };
        let done = check(&args, backend.as_ref(), model, &before, &mut report);
        match done.with_context(|| format!("cannot check {model}")) {
            Ok(record) => records.push(record),
            Err(error) => report.faults.push(errors::causes(&error)),
        }
        reports.push(report);
    }
    match args.json {
        true => table::json(&reports)?,
        false => table::print(&reports)?,
    }
    // The baseline is also written if a check failed.
    if let Some(path) = args.save_baseline.as_ref().filter(|_| !records.is_empty()) {
        baseline::save(path, &records)?;
    }
    let failed = reports.iter().filter(|report| !report.faults.is_empty()).count();
    ensure!(failed == 0, "{failed} of {} models failed", reports.len());
    Ok(())
}

/// Checks one model.
fn check(
    args: &Args,
    backend: &dyn Backend,
    model: &str,
    before: &[Record],
    report: &mut Report,
) -> Result<Record> {
    let mut opened = find_decoder(model)?;
    eprintln!("checking {}", report.model);
    let tokenizer = args.tokenizer.open(&opened.file)?;
    let record = numbers(args, backend, &mut opened, &tokenizer, report)?;
    if args.baseline.is_some() {
        let found = find(before, Path::new(&opened.name)).or(match before {
            [only] if args.models.len() == 1 => Some(only),
            _ => None,
        });
        match found {
            Some(found) => {
                if !Path::new(&opened.name).ends_with(&found.name) {
                    eprintln!("comparing with the baseline of {}", found.name);
                }
                compare(args, &record, found, report);
            }
            None => {
                let names: Vec<&str> = before.iter().map(|record| record.name.as_str()).collect();
                let names = names.join(", ");
                report.faults.push(format!("the baseline does not have this model, only {names}"));
            }
        }
    }
    words(args, backend, &mut opened, &tokenizer, report)?;
    Ok(record)
}

/// Checks without an engine: activations, sliding window, and agreement with a server.
fn numbers(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Tokenizer,
    report: &mut Report,
) -> Result<Record> {
    let tokens = tokenizer.encode(TEXT, true, false);
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
        perplexity: health.perplexity.value(),
        logits: std::mem::take(&mut health.kept),
        vocabulary: opened.plan.output_width(),
        tokens,
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
        let ids = tokenizer.encode(prompt, true, false);
        let near_tie = args.thresholds.near_tie;
        agreement.follow(model, tokenizer, ids, &theirs, near_tie)?;
    }
    Ok(agreement)
}

/// Compares with the baseline.
fn compare(args: &Args, record: &Record, before: &Record, report: &mut Report) {
    let Some(change) = record.change_from(before) else {
        let fault = "other tokens or another vocabulary than in the baseline";
        return report.faults.push(fault.to_owned());
    };
    let Thresholds { max_mse, max_kl, max_perplexity_change, .. } = args.thresholds;
    let percent = 100.0 * change.perplexity;
    for (what, value, limit) in [
        ("logits: mean squared error", change.mse, max_mse),
        ("predictions: KL divergence", change.divergence, max_kl),
        ("perplexity: change in percent", percent.abs(), max_perplexity_change),
    ] {
        // NaN exceeds every limit.
        if value.is_nan() || value > limit {
            report.faults.push(format!("{what} {value:.4}, at most {limit}"));
        }
    }
    report.change = Some(change);
}

/// Checks with an engine: answers, and the end of the context.
fn words(
    args: &Args,
    backend: &dyn Backend,
    opened: &mut ModelFile,
    tokenizer: &Arc<Tokenizer>,
    report: &mut Report,
) -> Result<()> {
    let sampling = opened.request()?.sampling;
    let template = Template::from_metadata(opened.file.metadata(), tokenizer)?;
    let prompts = PROMPTS.map(|prompt| encode(prompt, template.as_ref(), tokenizer));
    let prompts = prompts.into_iter().collect::<Result<Vec<_>>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let max_tokens = args.thresholds.max_tokens;
    let context = CONTEXT.max(longest + max_tokens + 1);
    opened.plan_for(context)?;
    let step_tokens = args.machine.step_tokens()?;
    let options = EngineOptions::single(context, step_tokens);
    let model = opened.load(backend, &options.limits(&opened.plan))?;
    let engine = Engine::open(model, Arc::clone(tokenizer), options)?;
    let Thresholds { max_repetition, max_foreign_letters, .. } = args.thresholds;
    let rules = Rules { repetition: max_repetition, foreign_letters: max_foreign_letters };
    let mut good = 0;
    for (prompt, text) in prompts.into_iter().zip(PROMPTS) {
        let answer = answer(&engine, prompt, &sampling, Some(max_tokens))?;
        let faults = coherence::faults(&answer.text, &answer.ids, &rules);
        good += usize::from(faults.is_empty());
        report.faults.extend(faults.iter().map(|fault| format!("answer to `{text}`: {fault}")));
    }
    report.good_answers = Some(good);
    let text = tokenizer.encode(TEXT, true, false);
    let prompt: Vec<u32> = text.iter().copied().cycle().take(context * 3 / 4).collect();
    report.faults.extend(past_context(&engine, &prompt, context, &sampling)?);
    report.context = Some(context);
    Ok(())
}

/// The tokens of a prompt, as a chat if the model has a template.
fn encode(prompt: &str, template: Option<&Template>, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let Some(template) = template else { return Ok(tokenizer.encode(prompt, true, true)) };
    let messages = json!([{"role": "user", "content": prompt}]);
    let text = template.render(&messages, None, true, &Map::new())?;
    let ids = tokenizer.encode(&text, false, true);
    if ids.is_empty() {
        bail!("expected a prompt from the chat template, found no tokens");
    }
    Ok(ids)
}
