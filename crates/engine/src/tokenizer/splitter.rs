//! Pre-tokenization: splits text into words before BPE merges, with a pre-tokenizer's regular
//! expressions. It must not know vocabularies.
//!
//! The expressions run on finite automata, so that their time is linear in the length of any text.
//! Automata have no look-ahead, and the published expressions have one, `\s+(?!\S)`: a run of
//! white space leaves its last character to the next word. The splitter implements that itself.

use regex_automata::Input;
use regex_automata::meta::Regex;

use super::pre_tokenizers::PreTokenizer;

/// The ends of nearly all published expressions. Both have a look-ahead.
const LOOK_AHEADS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)"];
/// The pattern that replaces them.
const WHITE_SPACE: &str = r"\s+";

/// A compiled pre-tokenizer.
pub(super) struct Splitter {
    expressions: Vec<Regex>,
    thousands: Option<fn(char) -> bool>,
    powers_of_two: bool,
}

impl Splitter {
    pub(super) fn new(pre: &PreTokenizer) -> Splitter {
        Splitter {
            expressions: pre.expressions.iter().map(|text| compile(text)).collect(),
            thousands: pre.thousands,
            powers_of_two: pre.powers_of_two,
        }
    }

    /// Writes the end of each word of `text`, in bytes, to `words`. `buffer` is scratch space.
    pub(super) fn split(&self, text: &str, words: &mut Vec<usize>, buffer: &mut Vec<usize>) {
        words.clear();
        if let Some(is_digit) = self.thousands {
            split_thousands(text, is_digit, words);
        }
        if words.last().copied().unwrap_or(0) < text.len() {
            words.push(text.len());
        }
        for expression in &self.expressions {
            std::mem::swap(words, buffer);
            words.clear();
            let mut start = 0;
            for &end in buffer.iter() {
                self.split_piece(expression, &text[start..end], start, words);
                start = end;
            }
        }
    }

    /// Splits one piece, which starts at `offset`, at the starts and ends of all matches.
    fn split_piece(&self, expression: &Regex, piece: &str, offset: usize, ends: &mut Vec<usize>) {
        let (mut at, mut last) = (0, 0);
        while at < piece.len() {
            let Some(found) = expression.find(Input::new(piece).range(at..)) else { break };
            let mut end = found.end();
            let is_white_space = found.pattern().as_usize() == 1;
            if is_white_space && end < piece.len() {
                let returned = piece[..end].chars().next_back().map_or(0, char::len_utf8);
                if end - returned > found.start() {
                    end -= returned;
                }
            }
            if found.start() > last {
                ends.push(offset + found.start());
            }
            assert!(end > found.start(), "no expression in the table matches an empty text");
            if is_white_space && self.powers_of_two {
                split_powers_of_two(&piece[found.start()..end], offset + found.start(), ends);
            } else {
                ends.push(offset + end);
            }
            (at, last) = (end, end);
        }
        if last < piece.len() {
            ends.push(offset + piece.len());
        }
    }
}

/// Compiles an expression as one pattern, or as two if it ends with a look-ahead: a match of the
/// second pattern is a run of white space, which returns its last character to the next word.
fn compile(text: &str) -> Regex {
    let head = LOOK_AHEADS.iter().find_map(|end| text.strip_suffix(end));
    let patterns = head.map_or(vec![text], |head| vec![head, WHITE_SPACE]);
    Regex::new_many(&patterns).expect("the expressions in the table are valid")
}

/// Writes the ends of the groups of three digits of every number. The first group of a number has
/// the remaining digits, and the text before it: the expressions split there.
fn split_thousands(text: &str, is_digit: fn(char) -> bool, ends: &mut Vec<usize>) {
    let mut at = 0;
    while let Some(start) = text[at..].find(is_digit) {
        let start = at + start;
        let len = text[start..].find(|c| !is_digit(c)).unwrap_or(text.len() - start);
        let number = &text[start..start + len];
        let count = number.chars().count();
        for (index, (place, digit)) in number.char_indices().enumerate() {
            if (count - index - 1).is_multiple_of(3) {
                ends.push(start + place + digit.len_utf8());
            }
        }
        at = start + len;
    }
}

/// Splits a run of white space, which starts at `offset`.
fn split_powers_of_two(run: &str, offset: usize, ends: &mut Vec<usize>) {
    let mut left = run.chars().count();
    let mut part = 0;
    for (place, space) in run.char_indices() {
        if part == 0 {
            part = (1 << left.ilog2()).min(512);
            left -= part;
        }
        part -= 1;
        if part == 0 {
            ends.push(offset + place + space.len_utf8());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pre_tokenizers::{PRE_TOKENIZERS, pre_tokenizer};
    use super::*;

    fn split<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let (mut words, mut buffer) = (Vec::new(), Vec::new());
        Splitter::new(pre_tokenizer(name).unwrap()).split(text, &mut words, &mut buffer);
        let mut start = 0;
        words.iter().map(|&end| &text[std::mem::replace(&mut start, end)..end]).collect()
    }

    #[test]
    fn every_pre_tokenizer_compiles_and_loses_nothing() {
        let text = "Don't  stop\n\n\n at 12345 x²; HelloWorld ÄÖé 你好 \t\u{a0}!!?\r\n  ";
        for name in PRE_TOKENIZERS.iter().flat_map(|pre| pre.names) {
            assert_eq!(split(name, text).concat(), text, "{name}");
            assert!(split(name, "").is_empty(), "{name}");
        }
    }

    #[test]
    fn a_run_of_white_space_leaves_one_to_the_next_word() {
        assert_eq!(split("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(split("llama-bpe", "a \n  b\n"), ["a", " \n", " ", " b", "\n"]);
        assert_eq!(split("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
    }

    #[test]
    fn digits_and_case() {
        assert_eq!(split("llama-bpe", "12345"), ["123", "45"]);
        assert_eq!(split("qwen2", "I'LL 12"), ["I", "'LL", " ", "1", "2"]);
        assert_eq!(split("gpt-2", "I'LL 12"), ["I", "'", "LL", " 12"]);
        assert_eq!(split("smollm", "x 12"), ["x", " ", "1", "2"]);
        assert_eq!(split("gpt-4o", "fooBar's"), ["foo", "Bar's"]);
        assert_eq!(split("tekken", "fooBar's"), ["foo", "Bar", "'s"]);
        assert_eq!(split("afmoe", "a1234567 12٣٤"), ["a", "1", "234", "567", " ", "1", "2٣٤"]);
        assert_eq!(split("superbpe", "by 1234 or 567"), ["by ", "1", "234", " or ", "567"]);
    }

    #[test]
    fn white_space_in_powers_of_two() {
        let lengths =
            |text: &str| split("jais-2", text).iter().map(|s| s.len()).collect::<Vec<_>>();
        assert_eq!(lengths(&" ".repeat(1031)), [512, 512, 4, 2, 1]);
        assert_eq!(lengths(&format!("{}a", " ".repeat(8))), [4, 2, 1, 2]);
        assert_eq!(lengths("  1"), [1, 1, 1]);
    }

    #[test]
    fn an_unknown_name_is_named() {
        let error = pre_tokenizer("nonsense").err().unwrap().to_string();
        assert!(error.contains("`nonsense`") && error.contains("qwen2"), "{error}");
    }
}
