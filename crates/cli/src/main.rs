//! The binary `bodkin`: one file per command in `cmd`. It parses arguments, calls the crates below,
//! and turns every failure into one line. It must not know how a model is computed, nor any backend
//! by name.

#![forbid(unsafe_code)]

mod arguments;
mod cmd;
mod errors;
mod interrupt;
mod llama_flags;
mod npy;
mod ollama_commands;
mod output;
mod progress;
mod soft_wrap;
mod store;
#[cfg(unix)]
mod suspension;
mod terminal;
mod text;
mod version;

use std::io::Write;
use std::process::ExitCode;
use std::{panic, thread};

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// The exit status for a flag that is unknown, or whose value cannot be used.
const EXIT_USAGE: u8 = 2;

/// Run language models on your own machine.
// Of a flag that is repeated the last value counts, as in llama.cpp, unless it takes several.
#[derive(Parser)]
#[command(name = "bodkin", propagate_version = true, args_override_self = true)]
struct Cli {
    /// Print each step of loading a model, and long tables
    #[arg(short, long, global = true, display_order = 998)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text from a prompt, or chat
    #[command(alias = "chat")]
    Run(Box<cmd::run::Args>),
    /// Serve models over HTTP: the OpenAI, Ollama, Anthropic and llama-server interfaces
    Serve(Box<cmd::serve::Args>),
    /// Fetch a model and print its path
    Pull(cmd::pull::Args),
    /// List the models on this machine
    #[command(alias = "ls")]
    List(cmd::list::Args),
    /// Remove a fetched model
    Rm(cmd::rm::Args),
    /// Show a summary of a model, or its metadata, tensors, plan or memory
    #[command(visible_alias = "show")]
    Inspect(cmd::inspect::Args),
    /// Show where a model's bytes go on this machine, the speed, and what would fit
    Plan(cmd::plan::Args),
    /// List the devices of this machine, with the bandwidth of their memory
    Devices(cmd::devices::Args),
    /// Measure the speed of prefill and decode
    Bench(cmd::bench::Args),
    /// Prune the weights of a model
    Prune(Box<cmd::prune::Args>),
    /// Convert safetensors to GGUF
    Convert(cmd::convert::Args),
    /// Quantize a model
    Quantize(cmd::quantize::Args),
    /// Compute embeddings of texts
    Embed(Box<cmd::embed::Args>),
    /// Search a vector store for the texts nearest to a question
    Search(Box<cmd::search::Args>),
    /// Convert text to token ids
    Tokenize(cmd::tokenize::Args),
    /// Convert token ids to text
    Detokenize(cmd::detokenize::Args),
    /// Write the logits of given tokens to a file
    Logits(cmd::logits::Args),
    /// Measure perplexity on a text, and KL divergence from another model
    Perplexity(cmd::perplexity::Args),
    /// Check models for regressions
    Check(Box<cmd::check::Args>),
    /// Collect an importance matrix: activation statistics over a text
    Imatrix(cmd::imatrix::Args),
    /// Print a script that completes commands and flags in a shell
    Completions(cmd::completions::Args),
    /// Write manual pages
    Man(cmd::man::Args),
}

/// Commands and flags.
fn command() -> clap::Command {
    Cli::command().version(version::NUMBER)
}

/// The command line, with the version that `--version` prints.
fn parse() -> Cli {
    let words = llama_flags::translate(std::env::args_os())
        .unwrap_or_else(|reason| command().error(ErrorKind::ArgumentConflict, reason).exit());
    let matches = command().version(version::of(&words)).try_get_matches_from(words);
    let matches =
        matches.unwrap_or_else(|error| errors::exit_with_usage(&ollama_commands::with_tip(error)));
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Keeps panics of templates, which become errors, from writing about themselves.
fn silence_templates() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if thread::current().name() != Some(bodkin::TEMPLATE_THREAD) {
            report(info);
        }
    }));
}

fn main() -> ExitCode {
    silence_templates();
    interrupt::install();
    bodkin_gguf::exit_on_truncation(terminal::restore_first);
    let cli = parse();
    progress::begin(cli.verbose);
    let result = match cli.command {
        Command::Run(args) => cmd::run::run(*args),
        Command::Serve(args) => cmd::serve::run(*args),
        Command::Pull(args) => cmd::pull::run(args),
        Command::List(args) => cmd::list::run(args),
        Command::Rm(args) => cmd::rm::run(args),
        Command::Inspect(args) => cmd::inspect::run(args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Devices(args) => cmd::devices::run(&args),
        Command::Bench(args) => cmd::bench::run(args),
        Command::Prune(args) => cmd::prune::run(*args),
        Command::Convert(args) => cmd::convert::run(args),
        Command::Quantize(args) => cmd::quantize::run(args),
        Command::Embed(args) => cmd::embed::run(*args),
        Command::Search(args) => cmd::search::run(*args),
        Command::Tokenize(args) => cmd::tokenize::run(args),
        Command::Detokenize(args) => cmd::detokenize::run(args),
        Command::Logits(args) => cmd::logits::run(args),
        Command::Perplexity(args) => cmd::perplexity::run(args),
        Command::Check(args) => cmd::check::run(*args),
        Command::Imatrix(args) => cmd::imatrix::run(args),
        Command::Completions(args) => cmd::completions::run(&args, command()),
        Command::Man(args) => cmd::man::run(&args, command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if errors::reader_has_gone(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<interrupt::Interrupted>() => interrupt::EXIT_INTERRUPTED.into(),
        Err(error) => {
            let line = errors::line(&error);
            // If stderr is closed, only the exit status tells.
            let _ = writeln!(std::io::stderr(), "error: {line}");
            // An error about a flag begins with its name, and has the status of the parser's.
            if line.starts_with("--") { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
        }
    }
}
