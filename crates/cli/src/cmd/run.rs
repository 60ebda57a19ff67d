//! `bodkin run`: one answer, or a chat in the terminal.

mod chat;
mod sampling;
mod session;

use std::io::{IsTerminal, Read, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use bodkin::Finish;

use crate::arguments::{Machine, TokenizerArgs, find_decoder};
use crate::interrupt::Interrupted;
use sampling::Sampling;
use session::Session;

const SAMPLING_HEADING: &str =
    "Sampling [default: the model file's recommendation, or llama.cpp's]";

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = "Ctrl-C stops an answer and keeps its text; the exit status is then 130.")]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Prompt [default: standard input, or a chat on a terminal]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// System prompt
    #[arg(short, long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Maximum tokens of an answer [default: the rest of the context]
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<NonZeroUsize>,
    /// Stop text (may be repeated)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Ignore end-of-generation tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Print only the answer
    #[arg(short, long)]
    quiet: bool,
    /// Print answer, token ids and timings as JSON
    #[arg(long)]
    json: bool,
    /// Prune the model by the rules of this file before it runs
    #[arg(long, value_name = "FILE")]
    surgery: Option<PathBuf>,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = SAMPLING_HEADING)]
    sampling: Sampling,
    #[command(flatten, next_help_heading = "Machine")]
    machine: Machine,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let prompt = prompt(&args)?;
    match &prompt {
        Some(prompt) => ensure!(!prompt.is_empty(), "the prompt is empty"),
        None => ensure!(!args.json, "--json needs a prompt"),
    }
    let mut file = find_decoder(&args.model)?;
    if let Some(surgery) = &args.surgery {
        file = super::prune::at_load(file, surgery, &args.machine)?;
    }
    let mut session = Session::open(file, &args)?;
    match prompt {
        Some(prompt) => once(session, &args, &prompt),
        None => chat::chat(&mut session),
    }
}

/// The prompt from the command line, a file or standard input; `None` for a chat.
fn prompt(args: &Args) -> Result<Option<String>> {
    if let Some(text) = &args.prompt {
        return Ok(Some(text.clone()));
    }
    if let Some(file) = &args.file {
        let text = std::fs::read_to_string(file);
        let failed = || format!("cannot read the prompt from {}", file.display());
        return Ok(Some(text.with_context(failed)?));
    }
    let mut stdin = std::io::stdin().lock();
    if stdin.is_terminal() {
        return Ok(None);
    }
    let mut text = String::new();
    stdin.read_to_string(&mut text).context("cannot read the prompt from standard input")?;
    // `echo` and here-documents add a newline that is not part of the prompt.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(Some(text))
}

/// Generates one answer.
fn once(mut session: Session, args: &Args, prompt: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let show = !args.json;
    let answer = session.answer(prompt, |text| {
        if show {
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    })?;
    if args.json {
        writeln!(out, "{:#}", session::json(&answer))?;
    } else {
        writeln!(out)?;
        if !args.quiet {
            writeln!(std::io::stderr(), "\n{}", session.into_stats(&answer))?;
        }
    }
    if answer.finish == Finish::Cancelled { Err(Interrupted.into()) } else { Ok(()) }
}
