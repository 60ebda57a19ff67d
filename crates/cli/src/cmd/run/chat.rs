//! The chat: line editing, history, and commands that begin with a slash.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bodkin::Answer;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use super::session::Session;

const HELP: &str = "\
/help           this text
/system TEXT    new conversation with this system prompt (none without TEXT)
/clear          new conversation with the same system prompt
/stats          tokens and speed of the last answer
/exit           leave, like Ctrl-D
Ctrl-C stops an answer. A line that ends with \\ continues on the next.";

/// Runs the chat until the user leaves.
pub(crate) fn chat(session: &mut Session) -> Result<()> {
    let config = Config::builder().history_ignore_dups(true)?.build();
    let mut editor =
        DefaultEditor::with_config(config).context("the terminal cannot be used for a chat")?;
    let history = history_file();
    if let Some(file) = &history {
        // The first chat has no history yet.
        let _ = editor.load_history(file);
    }
    eprintln!("/help shows the commands");
    if !session.is_chat() {
        eprintln!("this model has no chat template: it continues each text as it is");
    }
    let mut last = None;
    while let Some(line) = read(&mut editor)? {
        let _ = editor.add_history_entry(&line);
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("", _) => {}
            ("/exit" | "/quit" | "/bye", _) => break,
            ("/help" | "/?", _) => eprintln!("{HELP}"),
            ("/clear", _) => session.clear(),
            ("/system", text) => {
                if let Err(error) = session.set_system(text.trim()) {
                    eprintln!("error: {error:#}");
                }
            }
            ("/stats", _) => match &last {
                Some(answer) => eprintln!("{}", session.stats(answer)),
                None => eprintln!("no answer yet"),
            },
            (command, _) if command.starts_with('/') => {
                eprintln!("unknown command {command}; /help shows the commands");
            }
            _ => last = answer(session, &line)?.or(last),
        }
    }
    if let Some(file) = history {
        // A chat does not fail because its history cannot be saved.
        let _ = file.parent().map(std::fs::create_dir_all);
        let _ = editor.save_history(&file);
    }
    Ok(())
}

/// Answers, or prints why that failed; the chat goes on. Fails if standard output is closed.
fn answer(session: &mut Session, line: &str) -> Result<Option<Answer>> {
    let mut out = std::io::stdout().lock();
    let answer = session.answer(line, |text| {
        out.write_all(text.as_bytes())?;
        out.flush()
    });
    match answer {
        Ok(answer) => {
            writeln!(out, "\n")?;
            Ok(Some(answer))
        }
        Err(error) if error.is::<std::io::Error>() => Err(error),
        Err(error) => {
            eprintln!("error: {error:#}");
            Ok(None)
        }
    }
}

/// A line, or several joined by a backslash; `None` at the end of input.
fn read(editor: &mut DefaultEditor) -> Result<Option<String>> {
    let mut text = String::new();
    loop {
        let prompt = if text.is_empty() { ">>> " } else { "... " };
        match editor.readline(prompt) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(start) => {
                    text.push_str(start);
                    text.push('\n');
                }
                None => {
                    text.push_str(&line);
                    return Ok(Some(text));
                }
            },
            // Ctrl-C at the prompt clears the line.
            Err(ReadlineError::Interrupted) => text.clear(),
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        }
    }
}

fn history_file() -> Option<PathBuf> {
    Some(dirs::data_dir()?.join("bodkin").join("history"))
}
