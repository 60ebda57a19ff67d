//! `bodkin run`: one answer, or a chat in the terminal.

mod chat;
mod sampling;
mod session;

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::load::{Machine, Opened};
use sampling::Sampling;
use session::Session;

/// Arguments of `run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A path, or any name that `pull` and `list` know
    model: String,
    /// The prompt; without it, standard input, or a chat if that is a terminal
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// What the model is told before the conversation
    #[arg(short, long, value_name = "TEXT")]
    system: Option<String>,
    /// Go on from the prompt as it stands, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// The most tokens of an answer [default: to the end of the context]
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Stop where this text begins (may be repeated)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on past the model's end tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Print nothing but the answer
    #[arg(short, long)]
    quiet: bool,
    /// Print the answer, its tokens and its timings as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    machine: Machine,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let prompt = match (&args.prompt, &args.file) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(file)) => Some(
            std::fs::read_to_string(file)
                .with_context(|| format!("cannot read the prompt from {}", file.display()))?,
        ),
        (None, None) if !std::io::stdin().is_terminal() => {
            let mut text = String::new();
            std::io::stdin()
                .lock()
                .read_to_string(&mut text)
                .context("cannot read the prompt from standard input")?;
            Some(text.strip_suffix('\n').map_or(text.clone(), str::to_owned))
        }
        (None, None) => None,
    };
    let opened = Opened::find(&args.model)?;
    let mut session = Session::open(&opened, &args)?;
    match prompt {
        Some(prompt) => {
            ensure!(!prompt.is_empty(), "the prompt is empty");
            once(&mut session, &args, &prompt)
        }
        None => {
            ensure!(!args.json, "--json needs a prompt");
            chat::chat(&mut session)
        }
    }
}

/// One answer.
fn once(session: &mut Session, args: &Args, prompt: &str) -> Result<()> {
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
        writeln!(out, "{:#}", answer.json())?;
    } else {
        writeln!(out)?;
        if !args.quiet {
            eprintln!("\n{}", session.stats(&answer));
        }
    }
    Ok(())
}
