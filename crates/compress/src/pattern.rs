//! Patterns of tensor names: regular expressions that match anywhere in a name.

use regex_automata::meta::Regex;
use regex_automata::nfa::thompson::WhichCaptures;

use crate::error::{Error, Result};

/// The largest compiled pattern: fifty times what a list of layers and tensors takes. A file with
/// the most rules, each with the largest pattern, takes a second to compile.
const MAX_BYTES: usize = 64 << 10;

/// A regular expression over names of tensors, such as `ffn_(up|gate)` or `blk\.[0-3]\.`.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    /// Parses a pattern. Fails if it is not a valid regular expression.
    pub fn new(text: &str) -> Result<Pattern> {
        // Groups captured by a hostile pattern would take memory quadratic in its length. Names are
        // short, so that the smallest engine will do.
        let config = Regex::config()
            .which_captures(WhichCaptures::Implicit)
            .nfa_size_limit(Some(MAX_BYTES))
            .hybrid(false)
            .onepass(false)
            .dfa(false);
        let regex = Regex::builder().configure(config).build(text).map_err(|error| {
            let why = error.syntax_error().map_or_else(|| error.to_string(), ToString::to_string);
            // The parser prints a diagram first; its last line is the reason.
            let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ");
            let found = format!("`{text}` ({why})");
            Error::invalid("pattern", "a regular expression", found)
        })?;
        Ok(Pattern { text: text.to_string(), regex })
    }

    /// Whether the pattern matches anywhere in a name.
    pub fn matches(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }

    /// The source of the pattern.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}
