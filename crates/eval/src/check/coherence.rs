//! Rules for generated text that detect broken models, not weak ones: empty text, repetition, mixed
//! scripts, invalid UTF-8. The prompts are English, so that one script is expected. The module must
//! not know the model.

use std::collections::{HashMap, HashSet};
use std::fmt;

use unicode_script::{Script, UnicodeScript};

/// Repetition is not measured in texts of fewer tokens.
const FEWEST_TOKENS: usize = 24;
/// The length of the n-grams whose repetition is counted.
const GRAM: usize = 4;

/// Thresholds for faults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The largest allowed fraction of repeated 4-grams of tokens.
    pub repetition: f64,
    /// The largest allowed fraction of letters outside the most common script.
    pub foreign_letters: f64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { repetition: 0.6, foreign_letters: 0.15 }
    }
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The text is empty or white space.
    Empty,
    /// A control character, or the replacement character of invalid UTF-8.
    Control(char),
    /// This fraction of the 4-grams is repeated.
    Repetition(f64),
    /// This fraction of the letters is outside the most common script.
    MixedScripts(f64),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Empty => f.write_str("an empty text"),
            Fault::Control('\u{fffd}') => f.write_str("invalid UTF-8 (U+FFFD)"),
            Fault::Control(c) => write!(f, "control character U+{:04X}", u32::from(*c)),
            Fault::Repetition(share) => write!(f, "{:.0} % repetition", 100.0 * share),
            Fault::MixedScripts(share) => {
                write!(f, "mixed scripts, {:.0} % of the letters", 100.0 * share)
            }
        }
    }
}

/// All faults of a text and its tokens.
pub fn faults(text: &str, ids: &[u32], rules: &Rules) -> Vec<Fault> {
    let mut faults = Vec::new();
    if text.chars().all(char::is_whitespace) {
        faults.push(Fault::Empty);
    }
    // A text that was cut short may end within a character.
    let whole = text.trim_end_matches('\u{fffd}');
    let is_bad = |c: &char| (c.is_control() && !"\n\r\t".contains(*c)) || *c == '\u{fffd}';
    faults.extend(whole.chars().find(is_bad).map(Fault::Control));
    let repetition = repetition(ids);
    if repetition > rules.repetition {
        faults.push(Fault::Repetition(repetition));
    }
    let foreign = foreign_letters(text);
    if foreign > rules.foreign_letters {
        faults.push(Fault::MixedScripts(foreign));
    }
    faults
}

/// The fraction of repeated n-grams of `GRAM` tokens.
pub fn repetition(ids: &[u32]) -> f64 {
    if ids.len() < FEWEST_TOKENS {
        return 0.0;
    }
    let distinct: HashSet<&[u32]> = ids.windows(GRAM).collect();
    1.0 - distinct.len() as f64 / (ids.len() - GRAM + 1) as f64
}

/// The fraction of letters outside the most common script. The scripts of Japanese count as one.
pub fn foreign_letters(text: &str) -> f64 {
    let mut letters: HashMap<Script, usize> = HashMap::new();
    for c in text.chars().filter(|c| c.is_alphabetic()) {
        match c.script() {
            Script::Common | Script::Inherited | Script::Unknown => (),
            Script::Hiragana | Script::Katakana => *letters.entry(Script::Han).or_default() += 1,
            script => *letters.entry(script).or_default() += 1,
        }
    }
    let all: usize = letters.values().sum();
    let most = letters.values().copied().max().unwrap_or(0);
    if all == 0 { 0.0 } else { (all - most) as f64 / all as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, ids: &[u32]) -> Vec<String> {
        faults(text, ids, &Rules::default()).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn sane_texts_pass() {
        let ids: Vec<u32> = (0..60).collect();
        for text in [
            "Paris, of course.\n\n1. Yes\t2. No",
            "def largest(numbers):\r\n    return max(numbers)",
            "Die Grüße: 12 °C, π ≈ 3.14, naïve café",
            "東京は日本の首都です。カタカナもある。",
            "Москва",
            "cut short \u{fffd}",
        ] {
            assert_eq!(found(text, &ids), [] as [&str; 0], "{text}");
        }
        // A list repeats its numbers, a poem a line.
        let list: Vec<u32> = (0..60).map(|i| if i % 6 < 3 { i % 6 } else { i }).collect();
        assert_eq!(found("a list", &list), [] as [&str; 0]);
    }

    #[test]
    fn broken_texts_do_not() {
        assert_eq!(found(" \n", &[1]), ["an empty text"]);
        assert_eq!(found("a\u{7}b", &[1]), ["control character U+0007"]);
        assert_eq!(found("a\u{fffd}b", &[1]), ["invalid UTF-8 (U+FFFD)"]);
        let circle: Vec<u32> = (0..64).map(|i| i % 9).collect();
        assert_eq!(found("and on and on", &circle), ["85 % repetition"]);
        assert_eq!(found("the кошка 猫 und עברית", &[1]), ["mixed scripts, 65 % of the letters"]);
    }
}
