//! `bodkin run`: one answer, or a chat in the terminal.

mod arguments;
mod chat;
mod commands;
mod interruptible;
mod prefill;
mod sampling;
mod screen;
mod session;

use std::io::{IsTerminal, Write, stderr, stdin, stdout};
use std::path::Path;

use anyhow::{Result, ensure};
use bodkin::FinishReason;

use crate::arguments::find_decoder;
use crate::terminal::{NoEcho, wrapped};
use crate::{interrupt, text};
pub(crate) use arguments::Args;
use screen::Screen;
use session::Session;

/// The most bytes of a prompt: more than the longest contexts hold.
const PROMPT_BYTES: u64 = 64 << 20;

pub(crate) fn run(args: Args) -> Result<()> {
    ensure!(args.image.is_none(), text::NO_IMAGES);
    let prompt = prompt(&args)?;
    match &prompt {
        Some(prompt) => ensure!(!prompt.is_empty(), "the prompt is empty"),
        None => ensure!(!args.json, "--json needs a prompt"),
    }
    let constraint = args.constraint()?;
    let mut file = find_decoder(&args.model)?;
    if let Some(surgery) = &args.surgery {
        file = super::prune::at_load(file, surgery, &args.machine)?;
    }
    let session = Session::open(file, &args, constraint, prompt.is_none())?;
    match prompt {
        Some(prompt) => once(session, &args, &prompt),
        None => chat::chat(session),
    }
}

/// The prompt: files and standard input, then the text of the command line. `None` for a chat.
fn prompt(args: &Args) -> Result<Option<String>> {
    let mut paths = args.file.clone();
    let stdin_path = Path::new("-");
    let is_piped = !stdin().is_terminal();
    if is_piped && !paths.iter().any(|path| path == stdin_path) {
        paths.insert(0, stdin_path.to_owned());
    }
    let words = (!args.prompt.is_empty()).then(|| args.prompt.join(" "));
    let given = words.or_else(|| args.prompt_flag.clone());
    if paths.is_empty() && given.is_none() {
        return Ok(None);
    }
    let (mut parts, mut most) = (Vec::new(), PROMPT_BYTES);
    for path in paths {
        let part = text::read_trimmed_within(most, &path, "the prompt")?;
        most -= part.len() as u64;
        parts.push(part);
    }
    parts.extend(given);
    parts.retain(|part| !part.is_empty());
    Ok(Some(parts.join("\n\n")))
}

/// Generates one answer.
fn once(mut session: Session, args: &Args, prompt: &str) -> Result<()> {
    // What is typed meanwhile would appear in the answer. A pager after a pipe sets its own modes.
    let _quiet = stdout().is_terminal().then(NoEcho::before_shell);
    let mut screen = Screen::new(!args.json, !args.quiet);
    let answer = session.answer(prompt, &mut screen)?;
    screen.finish()?;
    let mut out = stdout().lock();
    if args.json {
        writeln!(out, "{:#}", session::json(&answer))?;
    } else {
        writeln!(out)?;
    }
    if !args.json && !args.quiet {
        if let Some(mark) = session.cut(&answer) {
            writeln!(stderr(), "{}", wrapped(&mark))?;
        }
        let is_read = answer.usage.generated_tokens > 0;
        if is_read && stderr().is_terminal() {
            writeln!(stderr(), "\n{}", wrapped(&session::stats(&answer)))?;
        }
    }
    if answer.finish == FinishReason::Cancelled {
        // The engine may be in a long step, for which dropping the session would wait.
        interrupt::end();
    }
    Ok(())
}
