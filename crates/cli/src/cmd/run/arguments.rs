//! The arguments of `run`.

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use bodkin_engine::{Constraint, Grammar};

use super::sampling::Sampling;
use crate::arguments::{Machine, TokenizerArgs, positive};
use crate::text;

const SAMPLING_HEADING: &str =
    "Sampling [default: the model file's recommendation, or llama.cpp's]";

const AFTER: &str = "\
The prompt is the text of standard input if that is no terminal, then of each --file, then PROMPT.
Without any of them, it is a chat; /help lists its commands. Ctrl-C stops an answer and keeps its
text, or ends the reading of the prompt; the exit status is then 130. llama.cpp's names of these
flags work too: --temp, --n-predict, -ngl, -sys and others.";

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    pub(super) model: String,
    /// Prompt; words are joined [default: standard input, or a chat]
    pub(super) prompt: Vec<String>,
    /// Prompt; the same as PROMPT
    #[arg(
        short = 'p',
        long = "prompt",
        value_name = "TEXT",
        hide = true,
        conflicts_with = "prompt"
    )]
    pub(super) prompt_flag: Option<String>,
    /// Read the prompt from a file, or - (may be repeated)
    #[arg(short, long, value_name = "FILE")]
    pub(super) file: Vec<PathBuf>,
    /// An image, or a projector for images, both of which are refused
    #[arg(long, alias = "mmproj", hide = true)]
    pub(super) image: Option<String>,
    /// System prompt
    #[arg(short, long, value_name = "TEXT", alias = "system-prompt")]
    pub(super) system: Option<String>,
    /// Continue the prompt without the chat template
    #[arg(long, alias = "no-conversation", conflicts_with = "system")]
    pub(super) raw: bool,
    /// Context shift: drop the oldest turns when the context is full
    #[arg(long, conflicts_with = "raw")]
    pub(super) context_shift: bool,
    /// JSON schema that answers satisfy, as text or as @FILE
    #[arg(short = 'j', long, value_name = "SCHEMA")]
    pub(super) json_schema: Option<String>,
    /// Grammar (GBNF) that answers satisfy, as text or as @FILE
    #[arg(long, value_name = "GRAMMAR", conflicts_with = "json_schema")]
    pub(super) grammar: Option<String>,
    /// Ignore end-of-generation tokens
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Print only the answer
    #[arg(short, long)]
    pub(super) quiet: bool,
    /// Print answer, token ids and timings as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Prune the model by the rules of this file before it runs
    #[arg(long, value_name = "FILE")]
    pub(super) surgery: Option<PathBuf>,
    #[command(flatten)]
    pub(super) tokenizer: TokenizerArgs,
    #[command(flatten)]
    pub(super) settings: Settings,
    #[command(flatten, next_help_heading = "Machine")]
    pub(super) machine: Machine,
}

/// The most tokens of an answer; none for no limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit(pub(super) Option<NonZeroUsize>);

/// No limit in words.
pub(super) const UNLIMITED: &str = "none";

/// Parses a [`Limit`].
fn limit(text: &str) -> std::result::Result<Limit, String> {
    match text {
        "-1" | UNLIMITED => Ok(Limit(None)),
        _ => positive(text).map(|limit| Limit(Some(limit))).map_err(|error| error + ", or -1"),
    }
}

impl Args {
    /// What answers must be.
    pub(super) fn constraint(&self) -> Result<Option<Arc<Constraint>>> {
        let (flag, grammar) = if let Some(given) = &self.json_schema {
            let text = text_or_file(given, "a JSON schema")?;
            let schema = serde_json::from_str(&text).context("--json-schema: not valid JSON")?;
            ("--json-schema", Grammar::JsonSchema(schema))
        } else if let Some(given) = &self.grammar {
            ("--grammar", Grammar::Gbnf(text_or_file(given, "a grammar")?.into_owned()))
        } else {
            return Ok(None);
        };
        let constraint = Constraint { field: flag.to_owned(), grammar };
        constraint.check()?;
        Ok(Some(Arc::new(constraint)))
    }
}

/// A text, or that of the file whose name follows an `@`.
fn text_or_file<'a>(given: &'a str, what: &str) -> Result<Cow<'a, str>> {
    match given.strip_prefix('@') {
        Some(path) => Ok(Cow::Owned(text::read(Path::new(path), what)?)),
        None => Ok(Cow::Borrowed(given)),
    }
}

impl Settings {
    /// Takes all values of a flag that may be repeated back.
    pub(super) fn clear(&mut self, name: &str) {
        match name {
            "stop" => self.stop.clear(),
            _ => self.sampling.clear_biases(),
        }
    }
}

/// The flags that `/set` changes during a chat.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct Settings {
    /// Maximum tokens of an answer; -1 for no limit [default: -1]
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        aliases = ["predict", "n-predict"],
        allow_negative_numbers = true,
        value_parser = limit,
    )]
    pub(super) max_tokens: Option<Limit>,
    /// Stop sequence (may be repeated)
    #[arg(long, short_alias = 'r', value_name = "TEXT", alias = "reverse-prompt")]
    pub(super) stop: Vec<String>,
    #[command(flatten, next_help_heading = SAMPLING_HEADING)]
    pub(super) sampling: Sampling,
}
