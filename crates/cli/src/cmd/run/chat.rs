//! The chat: line editing, history, and texts of several lines.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::{Behavior, Config, DefaultEditor};

use super::commands::{self, Next};
use super::session::Session;
use crate::terminal::{NoEcho, say};

/// Begins and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

/// Runs the chat until the user leaves.
pub(super) fn chat(mut session: Session) -> Result<()> {
    let mut input = Input::new()?;
    say("/help shows the commands");
    if !session.is_chat() {
        say("this model has no chat template: it continues each text as it is");
    }
    while let Some(text) = input.read()? {
        if text.trim().is_empty() {
            continue;
        }
        // What is typed meanwhile appears at the next prompt.
        let _quiet = NoEcho::in_chat();
        if commands::run(&mut session, &text)? == Next::Leave {
            break;
        }
    }
    // The engine may be in a long step of a prompt that Ctrl-C ended, which nobody waits for.
    std::mem::forget(session);
    Ok(())
}

/// What the user types.
struct Input {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Input {
    fn new() -> Result<Input> {
        let mut config = Config::builder().history_ignore_dups(true)?;
        if !std::io::stdout().is_terminal() {
            // Standard output is for answers alone: lines are edited on the terminal itself.
            config = config.behavior(Behavior::PreferTerm);
        }
        let config = config.build();
        let mut editor =
            DefaultEditor::with_config(config).context("the terminal cannot be used for a chat")?;
        let history = history_file();
        if let Some(file) = &history {
            // The first chat has no history, and one that cannot be read or saved is no failure.
            let _ = file.parent().map(std::fs::create_dir_all);
            let _ = editor.load_history(file);
        }
        Ok(Input { editor, history })
    }

    /// A text of one or more lines; `None` at the end of input.
    fn read(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        let mut interruptions = 0;
        loop {
            let prompt = if text.is_empty() { ">>> " } else { "... " };
            match self.editor.readline(prompt) {
                Ok(line) => text.push_str(&line),
                // Ctrl-C at the prompt clears the text. Who presses it again wants to leave.
                Err(ReadlineError::Interrupted) => {
                    text.clear();
                    interruptions += 1;
                    if interruptions == 2 {
                        eprintln!("Ctrl-D or /exit leaves the chat");
                    }
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
            match complete(&text) {
                Some(complete) => {
                    self.remember(&text);
                    return Ok(Some(complete));
                }
                None => text.push('\n'),
            }
        }
    }

    /// Saves a text in the history at once: the chat may end in any way.
    fn remember(&mut self, text: &str) {
        let is_new = self.editor.add_history_entry(text).unwrap_or(false);
        if let Some(file) = self.history.as_deref().filter(|_| is_new) {
            let _ = self.editor.append_history(file);
        }
    }
}

/// What the typed lines mean; `None` if another line is to follow.
fn complete(typed: &str) -> Option<String> {
    let Some(quoted) = typed.trim_start().strip_prefix(QUOTES) else {
        return match typed.strip_suffix('\\') {
            Some(_) => None,
            None => Some(typed.replace("\\\n", "\n")),
        };
    };
    let quoted = quoted.trim_end().strip_suffix(QUOTES)?;
    Some(quoted.trim_matches('\n').to_owned())
}

fn history_file() -> Option<PathBuf> {
    Some(dirs::data_dir()?.join(Path::new("bodkin/history")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_several_lines() {
        let text = |typed| complete(typed).unwrap();
        assert_eq!(text("one line"), "one line");
        assert_eq!(complete("one line\\"), None);
        assert_eq!(text("one line\\\nand another"), "one line\nand another");
        assert_eq!(complete("\"\"\""), None);
        assert_eq!(complete("\"\"\"first\nsecond\\"), None);
        assert_eq!(text("\"\"\"first\n\n\\second\n\"\"\""), "first\n\n\\second");
        assert_eq!(text("\"\"\"in one line\"\"\""), "in one line");
        assert_eq!(text("\"\"\"\"\"\""), "");
    }
}
