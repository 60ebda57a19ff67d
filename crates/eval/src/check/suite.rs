//! A suite of one's own: prompts with expected answers, and texts with expected similarities, in a
//! TOML file. The module must not know the model.

use std::io::Read;
use std::path::Path;

use regex_automata::meta::Regex;
use regex_automata::nfa::thompson::WhichCaptures;
use serde::Deserialize;

use crate::error::{Error, Result};

/// The longest answer that a fault quotes, in characters.
const QUOTED_CHARS: usize = 80;

/// The cases of a file.
#[derive(Debug, Default)]
pub struct Suite {
    /// For models that generate text.
    pub answers: Vec<AnswerCase>,
    /// For encoders.
    pub similarities: Vec<SimilarityCase>,
}

/// A prompt, and what its greedy answer must be like.
#[derive(Debug)]
pub struct AnswerCase {
    /// The prompt.
    pub prompt: String,
    /// The system prompt; none for a model without a chat template.
    pub system: Option<String>,
    /// The most tokens of the answer.
    pub max_tokens: Option<usize>,
    equals: Option<String>,
    contains: Vec<String>,
    excludes: Vec<String>,
    matches: Option<(String, Regex)>,
}

/// Two texts, and how similar their embeddings must be.
#[derive(Debug)]
pub struct SimilarityCase {
    /// The texts.
    pub texts: [String; 2],
    min: f64,
    max: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    #[serde(default)]
    answer: Vec<AnswerText>,
    #[serde(default)]
    similarity: Vec<SimilarityText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerText {
    prompt: String,
    system: Option<String>,
    max_tokens: Option<usize>,
    equals: Option<String>,
    #[serde(default)]
    contains: Vec<String>,
    #[serde(default)]
    excludes: Vec<String>,
    matches: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SimilarityText {
    texts: [String; 2],
    min: Option<f64>,
    max: Option<f64>,
}

/// The longest file. Its syntax tree is some hundred times as large.
const BYTES_MAX: usize = 1_000_000;

impl Suite {
    /// Reads a file.
    ///
    /// # Errors
    /// One line that names the file, and the case or the line that is wrong.
    pub fn open(path: &Path) -> Result<Suite> {
        let name = path.display().to_string();
        let mut text = String::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(BYTES_MAX as u64 + 1).read_to_string(&mut text));
        read.map_err(|error| Error::suite(&name, "a readable file", error))?;
        Suite::parse(&name, &text)
    }

    /// Reads text; `name` is for messages.
    ///
    /// # Errors
    /// As [`Suite::open`].
    pub fn parse(name: &str, text: &str) -> Result<Suite> {
        if text.len() > BYTES_MAX {
            return Err(Error::suite(name, &format!("at most {BYTES_MAX} bytes"), "more"));
        }
        let read: Text = toml::from_str(text).map_err(|error| {
            let found = error.message().replace('\n', " ");
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let item = line.map_or_else(|| name.to_owned(), |line| format!("{name}: line {line}"));
            Error::suite(&item, "a suite", found)
        })?;
        let answers = read.answer.into_iter().enumerate().map(|(i, case)| {
            let item = format!("{name}: answer {}", i + 1);
            answer_case(&item, case)
        });
        let similarities = read.similarity.into_iter().enumerate().map(|(i, case)| {
            let item = format!("{name}: similarity {}", i + 1);
            similarity_case(&item, case)
        });
        let suite = Suite {
            answers: answers.collect::<Result<_>>()?,
            similarities: similarities.collect::<Result<_>>()?,
        };
        match suite.answers.is_empty() && suite.similarities.is_empty() {
            true => Err(Error::suite(name, "[[answer]] or [[similarity]]", "neither")),
            false => Ok(suite),
        }
    }
}

fn answer_case(item: &str, case: AnswerText) -> Result<AnswerCase> {
    let AnswerText { prompt, system, max_tokens, equals, contains, excludes, matches } = case;
    if max_tokens == Some(0) {
        return Err(Error::suite(item, "max_tokens of at least 1", 0));
    }
    let is_empty = contains.is_empty() && excludes.is_empty();
    if is_empty && equals.is_none() && matches.is_none() {
        let expected = "at least one of equals, contains, excludes, matches";
        return Err(Error::suite(item, expected, "none"));
    }
    // Captured groups would take memory quadratic in the length of a pattern.
    let config = Regex::config().which_captures(WhichCaptures::Implicit);
    let regex = |text: String| match Regex::builder().configure(config.clone()).build(&text) {
        Ok(regex) => Ok((text, regex)),
        Err(_) => Err(Error::suite(item, "a regular expression in matches", format!("`{text}`"))),
    };
    let matches = matches.map(regex).transpose()?;
    Ok(AnswerCase { prompt, system, max_tokens, equals, contains, excludes, matches })
}

fn similarity_case(item: &str, case: SimilarityText) -> Result<SimilarityCase> {
    let SimilarityText { texts, min, max } = case;
    if min.is_none() && max.is_none() {
        return Err(Error::suite(item, "min or max", "neither"));
    }
    let (min, max) = (min.unwrap_or(-1.0), max.unwrap_or(1.0));
    if !(-1.0..=1.0).contains(&min) || !(min..=1.0).contains(&max) {
        let found = format!("min {min} and max {max}");
        return Err(Error::suite(item, "-1 <= min <= max <= 1", found));
    }
    Ok(SimilarityCase { texts, min, max })
}

impl AnswerCase {
    /// What is wrong with an answer, one line each.
    pub fn faults(&self, answer: &str) -> Vec<String> {
        let found = format!("found `{}`", quoted(answer));
        let mut faults = Vec::new();
        if let Some(equals) = self.equals.as_ref().filter(|equals| answer.trim() != equals.trim()) {
            faults.push(format!("expected `{equals}`, {found}"));
        }
        for text in self.contains.iter().filter(|text| !answer.contains(*text)) {
            faults.push(format!("expected `{text}` in it, {found}"));
        }
        for text in self.excludes.iter().filter(|text| answer.contains(*text)) {
            faults.push(format!("expected no `{text}` in it, {found}"));
        }
        if let Some((text, _)) =
            self.matches.as_ref().filter(|(_, regex)| !regex.is_match(answer.trim()))
        {
            faults.push(format!("expected a match of `{text}`, {found}"));
        }
        faults
    }
}

impl SimilarityCase {
    /// What is wrong with the cosine similarity of the two embeddings, if anything. NaN is.
    pub fn fault(&self, similarity: f64) -> Option<String> {
        let SimilarityCase { min, max, .. } = self;
        let is_good = (*min..=*max).contains(&similarity);
        (!is_good).then(|| format!("expected {min} to {max}, found {similarity:.4}"))
    }
}

/// The start of an answer in one line.
fn quoted(answer: &str) -> String {
    let line = answer.trim().replace('\n', " ");
    match line.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_held_to_every_expectation() {
        let text = "[[answer]]\nprompt = 'Capital?'\nequals = 'Paris'\ncontains = ['Par', 'is']\n\
                    excludes = ['London']\nmatches = '(?i)^par'\n";
        let suite = Suite::parse("file", text).unwrap();
        let case = &suite.answers[0];
        assert_eq!(case.faults(" Paris\n"), [] as [&str; 0]);
        assert_eq!(
            case.faults("It is London"),
            [
                "expected `Paris`, found `It is London`",
                "expected `Par` in it, found `It is London`",
                "expected no `London` in it, found `It is London`",
                "expected a match of `(?i)^par`, found `It is London`",
            ]
        );
    }

    #[test]
    fn similarities_lie_between_limits() {
        let text = "[[similarity]]\ntexts = ['a', 'b']\nmin = 0.5\n";
        let case = &Suite::parse("file", text).unwrap().similarities[0];
        assert_eq!(case.fault(0.7), None);
        assert_eq!(case.fault(0.25).unwrap(), "expected 0.5 to 1, found 0.2500");
        assert!(case.fault(f64::NAN).is_some());
    }

    #[test]
    fn wrong_suites_say_where() {
        let answer = "[[answer]]\nprompt = 'a'\n";
        for (text, wanted) in [
            ("", "file: expected [[answer]] or [[similarity]], found neither"),
            (
                answer,
                "file: answer 1: expected at least one of equals, contains, excludes, matches",
            ),
            (
                &format!("{answer}matches = '('\n"),
                "expected a regular expression in matches, found",
            ),
            (
                &format!("{answer}equals = 'b'\nmax_tokens = 0\n"),
                "answer 1: expected max_tokens of",
            ),
            (
                &format!("{answer}equal = 'b'\n"),
                "file: line 3: expected a suite, found unknown field",
            ),
            ("[[similarity]]\ntexts = ['a', 'b']\n", "similarity 1: expected min or max"),
            ("[[similarity]]\ntexts = ['a']\nmin = 0\n", "file: line 2: expected a suite"),
            ("[[similarity]]\ntexts = ['a', 'b']\nmin = 2.0\n", "expected -1 <= min <= max <= 1"),
            ("[[similarity]]\ntexts = ['a', 'b']\nmax = nan\n", "expected -1 <= min <= max <= 1"),
        ] {
            let error = Suite::parse("file", text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
