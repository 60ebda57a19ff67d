//! The commands of a chat, which begin with a slash.

use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::{Result, anyhow, ensure};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use console::Term;

use super::arguments::Settings;
use super::sampling::EMPTY;
use super::screen::Screen;
use super::session::{self, CONTEXT_SHIFT, Session};
use crate::terminal::{self, say};
use crate::{errors, text};

/// What happens after a command.
#[derive(PartialEq)]
pub(super) enum Next {
    Prompt,
    Leave,
}

/// A command of a chat.
struct Command {
    /// Its name and other names.
    names: &'static [&'static str],
    argument: &'static str,
    about: &'static str,
    run: fn(&mut Session, &str) -> Result<Next>,
}

const COMMANDS: [Command; 10] = [
    Command { names: &["/help", "/?"], argument: "", about: "this text", run: help },
    Command {
        names: &["/system"],
        argument: "TEXT",
        about: "new conversation with this system prompt, or with none",
        run: |session, text| session.set_system(text).map(|()| Next::Prompt),
    },
    Command {
        names: &["/clear"],
        argument: "",
        about: "new conversation with the same system prompt",
        run: |session, _| {
            session.clear();
            Ok(Next::Prompt)
        },
    },
    Command {
        names: &["/regenerate"],
        argument: "",
        about: "another answer to the last prompt",
        run: regenerate,
    },
    Command {
        names: &["/set"],
        argument: "NAME VALUE",
        about: "change a setting (\"\" clears a list); show one, or all",
        run: set,
    },
    Command {
        names: &["/show"],
        argument: "",
        about: "the model, the use of its context, and the settings",
        run: |session, _| {
            say(&errors::printable_text(&session.describe()?));
            Ok(Next::Prompt)
        },
    },
    Command {
        names: &["/save"],
        argument: "FILE",
        about: "write the conversation to a file",
        run: |session, file| {
            let messages = session.save(&named(file)?)?;
            say(&format!("saved {}", text::count(messages, "message")));
            Ok(Next::Prompt)
        },
    },
    Command {
        names: &["/load"],
        argument: "FILE",
        about: "continue the conversation of a file",
        run: |session, file| {
            let messages = session.load(&named(file)?)?;
            say(&format!("loaded {}", text::count(messages, "message")));
            Ok(Next::Prompt)
        },
    },
    Command {
        names: &["/stats"],
        argument: "",
        about: "tokens and speed of the last answer",
        run: |session, _| {
            let stats = session.last.as_ref().map(session::stats);
            say(stats.as_deref().unwrap_or("no answer yet"));
            Ok(Next::Prompt)
        },
    },
    Command {
        names: &["/exit", "/quit", "/bye"],
        argument: "",
        about: "leave, like Ctrl-D",
        run: |_, _| Ok(Next::Leave),
    },
];

const KEYS: &str = "\
Ctrl-C stops an answer. A line that ends with \\ continues on the next; \"\"\" begins and ends \
several lines. Lines that are typed during an answer are the next prompts.";

/// Help is no wider than this, and lines that continue one begin with this.
const HELP_COLUMNS: usize = 80;
const INDENT: &str = "  ";

/// `/set NAME VALUE` as the flag `--NAME=VALUE`.
#[derive(Parser)]
#[command(disable_help_flag = true)]
struct Set {
    #[command(flatten)]
    settings: Settings,
}

/// Runs a line of the user: a command, or a prompt. Fails only if standard output is closed.
pub(super) fn run(session: &mut Session, line: &str) -> Result<Next> {
    let result = if is_command(line) {
        command(session, line)
    } else {
        answer(session, line).map(|()| Next::Prompt)
    };
    match result {
        Err(error) if !errors::is_of_output(&error) => {
            say(&format!("error: {}", errors::line(&error)));
            Ok(Next::Prompt)
        }
        result => result,
    }
}

/// Whether a line is a command, and not a prompt that begins with a path or a comment.
fn is_command(line: &str) -> bool {
    let word = line.split(char::is_whitespace).next().and_then(|word| word.strip_prefix('/'));
    word.is_some_and(|word| !word.contains(['/', '*']))
}

fn command(session: &mut Session, line: &str) -> Result<Next> {
    let (name, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    match COMMANDS.iter().find(|command| command.names.contains(&name)) {
        Some(command) => (command.run)(session, argument.trim()),
        None => {
            say(&format!("unknown command {name}; see /help (after a space it is a prompt)"));
            Ok(Next::Prompt)
        }
    }
}

/// Answers a prompt. The answer ends with an empty line.
fn answer(session: &mut Session, prompt: &str) -> Result<()> {
    let mut screen = Screen::new(true, true);
    let answer = session.answer(prompt, &mut screen)?;
    screen.finish()?;
    writeln!(stdout())?;
    if let Some(mark) = session.cut(&answer) {
        say(&mark);
    }
    Ok(writeln!(stdout())?)
}

fn help(_: &mut Session, _: &str) -> Result<Next> {
    let columns = terminal::columns(&Term::stderr()).min(HELP_COLUMNS);
    for Command { names, argument, about, .. } in &COMMANDS {
        let usage = format!("{} {argument}", names.join(", "));
        let row = terminal::wrapped_at(
            &format!("{usage:<20} {about}"),
            columns.saturating_sub(INDENT.len()),
        );
        eprintln!("{}", row.replace('\n', &format!("\n{INDENT}")));
    }
    eprintln!("{}", terminal::wrapped_at(KEYS, columns));
    Ok(Next::Prompt)
}

fn regenerate(session: &mut Session, _: &str) -> Result<Next> {
    let Some(prompt) = session.take_last_prompt() else {
        say("no answer yet");
        return Ok(Next::Prompt);
    };
    if session.repeats_itself() {
        say("with the same settings, a fixed seed or temperature 0 gives the same again");
    }
    answer(session, &prompt)?;
    Ok(Next::Prompt)
}

fn set(session: &mut Session, argument: &str) -> Result<Next> {
    if argument.is_empty() {
        say(&session.setting_lines(None).join("\n"));
        return Ok(Next::Prompt);
    }
    let is_end = |c: char| c.is_whitespace() || c == '=';
    let (name, value) = argument.split_once(is_end).unwrap_or((argument, ""));
    let name = full_name(name.replace('_', "-"));
    if !argument.contains(is_end)
        && let [current] = &session.setting_lines(Some(&name))[..]
    {
        say(current);
        return Ok(Next::Prompt);
    }
    if name == CONTEXT_SHIFT {
        session.set_context_shift(value.trim())?;
        return Ok(Next::Prompt);
    }
    let mut changed = Set { settings: session.settings.clone() };
    let values = values(&name, value.trim())?.into_iter();
    let flags: Vec<String> = values.map(|value| format!("--{name}={value}")).collect();
    if flags.is_empty() {
        changed.settings.clear(&name);
        session.apply(changed.settings)?;
        return Ok(Next::Prompt);
    }
    match changed.try_update_from(["/set".to_owned()].into_iter().chain(flags)) {
        Ok(()) => session.apply(changed.settings)?,
        Err(error) if error.kind() == ErrorKind::UnknownArgument => {
            say(&format!("unknown setting {name}; /set lists the settings"));
        }
        Err(error) => {
            let text = errors::usage_text(&error);
            say(text.lines().next().unwrap_or_default());
        }
    }
    Ok(Next::Prompt)
}

/// The values that a setting gets; none for an empty list.
fn values(name: &str, value: &str) -> Result<Vec<String>> {
    let list: Vec<String> = match name {
        // As they are shown; one may be without quotes.
        "stop" if value.is_empty() || value.starts_with('"') => {
            serde_json::from_str(&format!("[{value}]")).map_err(|_| {
                anyhow!("expected \"A\", \"B\" or a text without quotes, found {value}")
            })?
        }
        "logit-bias" => value.split(',').map(|bias| bias.trim().to_owned()).collect(),
        _ => return Ok(vec![value.to_owned()]),
    };
    Ok(list.into_iter().filter(|value| !["", EMPTY].contains(&value.as_str())).collect())
}

/// The name of the setting that has this name or alias; another word as it is.
fn full_name(name: String) -> String {
    let command = Set::command();
    let mut flags = command.get_arguments();
    let is_named = |flag: &&clap::Arg| {
        let aliases = flag.get_all_aliases().into_iter().flatten();
        let shorts = flag.get_all_short_aliases().into_iter().flatten();
        aliases.chain(flag.get_long()).any(|it| it == name)
            || shorts.chain(flag.get_short()).any(|it| name.chars().eq([it]))
    };
    let found = flags.find(is_named).and_then(clap::Arg::get_long);
    found.map_or(name.clone(), str::to_owned)
}

/// The path of an argument that must be given. No shell has replaced `~/` here.
fn named(file: &str) -> Result<PathBuf> {
    ensure!(!file.is_empty(), "expected the name of a file");
    Ok(match (file.strip_prefix("~/"), dirs::home_dir()) {
        (Some(below), Some(home)) => home.join(below),
        _ => file.into(),
    })
}
