//! `bodkin run`: one answer, or a chat in the terminal.

mod arguments;
mod chat;
mod commands;
mod interruptible;
mod prefill;
mod sampling;
mod screen;
mod session;

use std::io::{IsTerminal, Write, stderr, stdin};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin::{Finish, ModelFile};

use crate::arguments::find_decoder;
use crate::{interrupt, terminal, text};
pub(crate) use arguments::Args;
use screen::Screen;
use session::Session;

/// A prompt of these bytes is read, whatever the context.
const COUNTED_BYTES: u64 = 1 << 20;

pub(crate) fn run(args: Args) -> Result<()> {
    ensure!(args.image.is_none(), text::NO_IMAGES);
    let paths = prompt_paths(&args)?;
    let given = args.prompt.as_ref().or(args.prompt_flag.as_ref());
    let is_chat = paths.is_empty() && given.is_none();
    ensure!(!is_chat || !args.json, "--json needs a prompt");
    let mut file = find_decoder(&args.model)?;
    let prompt = match is_chat {
        true => None,
        false => Some(prompt(&paths, given, prompt_bytes(&args, &file)?)?),
    };
    if let Some(surgery) = &args.surgery {
        file = super::prune::at_load(file, surgery, &args.machine)?;
    }
    let session = Session::open(file, &args, prompt.is_none())?;
    match prompt {
        Some(prompt) => once(session, &args, &prompt),
        None => chat::chat(session),
    }
}

/// The files of the prompt, with standard input before them if that is no terminal.
fn prompt_paths(args: &Args) -> Result<Vec<PathBuf>> {
    let mut paths = args.file.clone();
    let stdin_path = Path::new("-");
    let is_piped = !stdin().is_terminal();
    if is_piped && !paths.iter().any(|path| path == stdin_path) {
        paths.insert(0, stdin_path.to_owned());
    }
    // What is missing is said before a model is fetched.
    for path in paths.iter().filter(|path| *path != stdin_path) {
        let cannot = || format!("cannot read the prompt from {}", path.display());
        path.metadata().with_context(cannot)?;
    }
    Ok(paths)
}

/// The prompt: files, then the text of the command line.
fn prompt(paths: &[PathBuf], given: Option<&String>, most: u64) -> Result<String> {
    let parts = paths.iter().map(|path| text::read_trimmed_within(most, path, "the prompt"));
    let mut parts = parts.collect::<Result<Vec<String>>>()?;
    parts.extend(given.cloned());
    parts.retain(|part| !part.is_empty());
    ensure!(!parts.is_empty(), "the prompt is empty");
    Ok(parts.join("\n\n"))
}

/// The bytes beyond which no prompt fits into the context, if each token is the longest one. The
/// tokens of a shorter prompt are counted.
fn prompt_bytes(args: &Args, file: &ModelFile) -> Result<u64> {
    let context = args.machine.context()?.unwrap_or(file.plan.context_length);
    let tokens = file.file.metadata().strings("tokenizer.ggml.tokens").ok().flatten();
    let longest = tokens.and_then(|tokens| tokens.iter().map(|token| token.len()).max());
    let bytes = longest.map_or(text::MAX_BYTES, |longest| context as u64 * longest as u64);
    Ok(bytes.clamp(COUNTED_BYTES, text::MAX_BYTES))
}

/// Generates one answer.
fn once(mut session: Session, args: &Args, prompt: &str) -> Result<()> {
    let mut screen = Screen::new(!args.json, !args.quiet);
    let answer = session.answer(prompt, &mut screen)?;
    screen.finish()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", session::json(&answer))?;
    } else {
        writeln!(out)?;
    }
    if !args.json && !args.quiet {
        if let Some(mark) = session.cut(&answer) {
            writeln!(stderr(), "{}", terminal::wrapped(&mark))?;
        }
        let is_read = answer.usage.generated_tokens > 0;
        if is_read && stderr().is_terminal() {
            writeln!(stderr(), "\n{}", session::stats(&answer))?;
        }
    }
    if answer.finish == Finish::Cancelled {
        // The engine may be in a long step, for which dropping the session would wait.
        interrupt::end();
    }
    Ok(())
}
