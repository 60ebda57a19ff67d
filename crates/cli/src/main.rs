//! The binary `bodkin`: one file per command in `cmd`, and the only list of backends. It parses
//! what was typed, calls the crates below, and turns every failure into one line. It must not know
//! how a model is computed.

#![forbid(unsafe_code)]

mod backends;
mod cmd;
mod interrupt;
mod load;
mod output;
mod progress;
mod skipping;
mod source;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run language models on your own machine.
#[derive(Parser)]
#[command(name = "bodkin", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a prompt, or chat
    Run(Box<cmd::run::Args>),
    /// Fetch a model and print its path
    Pull(cmd::pull::Args),
    /// List the models on this machine
    List(cmd::list::Args),
    /// Show what is in a model, what it computes, and what it takes
    Inspect(cmd::inspect::Args),
    /// Measure how fast prompts are read and tokens generated
    Bench(cmd::bench::Args),
    /// Make a model smaller by leaving weights out
    Prune(Box<cmd::prune::Args>),
    /// Store a model in fewer bits
    Quantize(cmd::quantize::Args),
    /// Turn texts into vectors
    Embed(cmd::embed::Args),
    /// Turn text into token ids
    Tokenize(cmd::tokenize::Args),
    /// Turn token ids into text
    Detokenize(cmd::detokenize::Args),
    /// Write the logits of given tokens to a file
    Logits(cmd::logits::Args),
    /// Measure how well a model predicts a text, and how far it lies from another
    Perplexity(cmd::perplexity::Args),
    /// Check models for regressions
    Check(Box<cmd::check::Args>),
    /// Collect what goes through a model's weights as it reads a text
    Imatrix(cmd::imatrix::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => cmd::run::run(*args),
        Command::Pull(args) => cmd::pull::run(args),
        Command::List(args) => cmd::list::run(args),
        Command::Inspect(args) => cmd::inspect::run(args),
        Command::Bench(args) => cmd::bench::run(args),
        Command::Prune(args) => cmd::prune::run(*args),
        Command::Quantize(args) => cmd::quantize::run(args),
        Command::Embed(args) => cmd::embed::run(args),
        Command::Tokenize(args) => cmd::tokenize::run(args),
        Command::Detokenize(args) => cmd::detokenize::run(args),
        Command::Logits(args) => cmd::logits::run(args),
        Command::Perplexity(args) => cmd::perplexity::run(args),
        Command::Check(args) => cmd::check::run(*args),
        Command::Imatrix(args) => cmd::imatrix::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if reader_has_gone(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<interrupt::Interrupted>() => interrupt::EXIT_INTERRUPTED.into(),
        Err(error) => {
            // If not even this can be written, the status has to do.
            let _ = writeln!(std::io::stderr(), "error: {}", line(&error));
            ExitCode::FAILURE
        }
    }
}

/// A failure in a line. Every failure says what was tried, but for those of plain printing.
fn line(error: &anyhow::Error) -> String {
    let text = match error.chain().len() == 1 && error.is::<std::io::Error>() {
        true => format!("cannot write to standard output: {error}"),
        false => causes(error),
    };
    // Names out of files may hold anything, which a terminal must not obey. A model that could not
    // be fetched has a line for each place that was tried.
    text.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}

/// What failed, and why: each cause that the one before it does not end with.
pub(crate) fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.ends_with(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text = text + colon + &cause;
        }
    }
    text
}

/// Whether the command failed only because nobody reads its output any more, as under `| head`.
fn reader_has_gone(error: &anyhow::Error) -> bool {
    let io = error.root_cause().downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe)
}
