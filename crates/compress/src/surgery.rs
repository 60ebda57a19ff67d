//! Surgery files: pruning rules in TOML.
//!
//! ```toml
//! # Statistics of activations, as `imatrix` writes them; beside the file if the path is relative.
//! imatrix = "model.imatrix.gguf"
//!
//! [[rule]]                     # The first rule whose pattern is found in a tensor's name counts.
//! tensors = 'attn_(k|v)'       # A regular expression.
//! keep = true                  # These stay as they are.
//!
//! [[rule]]                     # No pattern: all others.
//! method = "ria"               # magnitude, wanda, ria or sparsegpt.
//! sparsity = 0.5               # Left out where the pattern says it.
//! pattern = "unstructured"     # Or N:M.
//! format = "Q8_0"              # What the rest is stored in.
//! dense = false                # Whether zeros are stored too.
//! ```
//!
//! It must not know how pruning works.

use std::io::Read;
use std::path::{Path, PathBuf};

use bodkin_gguf::Format;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::prune::{Cut, Rule, Structure};

/// A surgery file, read.
#[derive(Clone, Debug)]
pub struct Surgery {
    /// Statistics of activations.
    pub imatrix: Option<PathBuf>,
    /// Pruning rules; the first match decides.
    pub rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    imatrix: Option<PathBuf>,
    rule: Vec<RuleText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    tensors: Option<String>,
    #[serde(default)]
    keep: bool,
    method: Option<String>,
    sparsity: Option<f32>,
    pattern: Option<String>,
    format: Option<String>,
    #[serde(default)]
    dense: bool,
}

/// The most rules of a file, whose patterns take up to a millisecond each to compile.
const MAX_RULES: usize = 1000;
/// The longest file. Its syntax tree is some hundred times as large.
const MAX_BYTES: usize = 1_000_000;

impl Surgery {
    /// Reads a file.
    ///
    /// # Errors
    /// One line with the file's name, and the invalid rule and key.
    pub fn open(path: &Path) -> Result<Surgery> {
        let name = path.display().to_string();
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES as u64 + 1).read_to_string(&mut text))
            .map_err(|error| {
                std::io::Error::new(error.kind(), format!("cannot read {name}: {error}"))
            })?;
        let mut surgery = Surgery::parse(&name, &text)?;
        if let (Some(imatrix), Some(folder)) = (&mut surgery.imatrix, path.parent()) {
            *imatrix = folder.join(&*imatrix);
        }
        Ok(surgery)
    }

    /// Reads text; `name` is for messages.
    ///
    /// # Errors
    /// As [`Surgery::open`].
    pub fn parse(name: &str, text: &str) -> Result<Surgery> {
        if text.len() > MAX_BYTES {
            return Err(Error::invalid(name, format!("at most {MAX_BYTES} bytes"), "more"));
        }
        let read: Text = toml::from_str(text).map_err(|error| {
            let found = error.message().replace('\n', " ");
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let item = line.map_or_else(|| name.to_owned(), |line| format!("{name}: line {line}"));
            Error::invalid(item, "a surgery file", found)
        })?;
        let count = read.rule.len();
        if count > MAX_RULES {
            let expected = format!("at most {MAX_RULES} rules");
            return Err(Error::invalid(name, expected, count.to_string()));
        }
        let rules = read.rule.into_iter().enumerate().map(|(number, rule)| {
            let item = format!("{name}: rule {}", number + 1);
            read_rule(rule).map_err(|error| match error {
                Error::Invalid { item: key, expected, found } => {
                    Error::invalid(format!("{item}: {key}"), expected, found)
                }
                other => other,
            })
        });
        Ok(Surgery { imatrix: read.imatrix, rules: rules.collect::<Result<_>>()? })
    }
}

fn read_rule(rule: RuleText) -> Result<Rule> {
    let tensors = rule.tensors.as_deref().map(Pattern::new).transpose();
    let tensors = tensors.map_err(|error| match error {
        Error::Invalid { expected, found, .. } => Error::invalid("tensors", expected, found),
        other => other,
    })?;
    if rule.keep {
        if rule.method.is_some() || rule.sparsity.is_some() || rule.pattern.is_some() {
            return Err(Error::invalid("keep", "no other key but tensors", "method or sparsity"));
        }
        return Ok(Rule { tensors, cut: None });
    }
    let method = rule.method.ok_or_else(|| Error::invalid("method", "a method", "none"))?;
    let structure: Structure = rule.pattern.as_deref().unwrap_or("unstructured").parse()?;
    let format = rule.format.as_deref().map(parse_format).transpose()?;
    let sparsity = sparsity(structure, rule.sparsity)?;
    let method = method.parse()?;
    Ok(Rule { tensors, cut: Some(Cut { method, sparsity, structure, format, dense: rule.dense }) })
}

/// A format by its name.
///
/// # Errors
/// If there is none of this name.
pub fn parse_format(name: &str) -> Result<Format> {
    let unknown = || Error::invalid("format", "the name of a format", format!("`{name}`"));
    Format::from_name(name).ok_or_else(unknown)
}

/// The sparsity: the given one, or that of an N:M structure.
///
/// # Errors
/// If neither determines it, or both do and differ.
pub fn sparsity(structure: Structure, asked: Option<f32>) -> Result<f32> {
    let own = match structure {
        Structure::Unstructured => None,
        Structure::Groups { kept, of } => Some(1.0 - kept as f32 / of as f32),
    };
    match (own, asked) {
        (None, None) => Err(Error::invalid("sparsity", "0 <= x < 1", "none")),
        (Some(own), Some(asked)) if (own - asked).abs() > 1e-3 => {
            let expected = format!("{own}, as the pattern {structure} has it");
            Err(Error::invalid("sparsity", expected, asked.to_string()))
        }
        (own, asked) => Ok(own.or(asked).unwrap_or(0.0)),
    }
}
