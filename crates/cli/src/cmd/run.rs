//! `bodkin run`: one answer, or a chat in the terminal.

mod arguments;
mod chat;
mod sampling;
mod session;

use std::io::{IsTerminal, Read, Write};

use anyhow::{Context, Result, ensure};
use bodkin::Finish;

use crate::arguments::find_decoder;
use crate::interrupt::Interrupted;
pub(crate) use arguments::Args;
use session::Session;

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
