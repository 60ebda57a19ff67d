//! Cutting text into words before merging: the published pre-tokenizers of byte-level BPE, by the
//! names in `tokenizer.ggml.pre`. It must not know vocabularies.
//!
//! The expressions run on automata, whose time is linear in the text whatever it is. Automata know
//! no look-ahead, and the published expressions have one, `\s+(?!\S)`: a run of white space leaves
//! its last character to the word after it. That is done here, by hand.

mod known;

use regex_automata::Input;
use regex_automata::meta::Regex;

pub(super) use self::known::named;

/// The end of nearly all published expressions, and the pattern that stands for it here.
const RUNS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)"];
const RUN: &str = r"\s+";

/// A pre-tokenizer, and what its name says besides.
pub(super) struct Named {
    names: &'static [&'static str],
    /// Each cuts what those before it left.
    expressions: &'static [&'static str],
    /// Before that, numbers of these characters are cut into groups of three, from the right.
    thousands: Option<fn(char) -> bool>,
    /// Runs of white space are cut into powers of two, the largest first, at most 512.
    powers_of_two: bool,
    /// A word that is a token is not merged from its parts.
    pub(super) whole_words: bool,
    /// Detokenizing removes spaces before punctuation.
    pub(super) clean_spaces: bool,
    /// BOS is added unless the metadata says otherwise.
    pub(super) add_bos: bool,
    /// Words are made of characters and not of bytes; spaces are spelled as SentencePiece does.
    pub(super) characters: Option<Characters>,
}

/// What names of pre-tokenizers that leave characters whole say besides.
#[derive(Clone, Copy)]
pub(super) struct Characters {
    /// Line breaks that are a token together are not merged from single ones.
    pub(super) whole_breaks: bool,
    /// BOS is added even if the metadata says otherwise.
    pub(super) always_bos: bool,
}

/// A compiled pre-tokenizer.
pub(super) struct Splitter {
    expressions: Vec<Regex>,
    thousands: Option<fn(char) -> bool>,
    powers_of_two: bool,
}

impl Splitter {
    pub(super) fn new(named: &Named) -> Splitter {
        Splitter {
            expressions: named.expressions.iter().map(|text| compile(text)).collect(),
            thousands: named.thousands,
            powers_of_two: named.powers_of_two,
        }
    }

    /// Where each word of `text` ends, in bytes. `words` is cleared first.
    pub(super) fn split(&self, text: &str, words: &mut Vec<usize>, buffer: &mut Vec<usize>) {
        words.clear();
        if let Some(is_digit) = self.thousands {
            cut_thousands(text, is_digit, words);
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

    /// Cuts one piece, which starts at `offset`, at the starts and ends of all matches.
    fn split_piece(&self, expression: &Regex, piece: &str, offset: usize, ends: &mut Vec<usize>) {
        let (mut at, mut last) = (0, 0);
        while at < piece.len() {
            let Some(found) = expression.find(Input::new(piece).range(at..)) else { break };
            let mut end = found.end();
            let is_run = found.pattern().as_usize() == 1;
            if is_run && end < piece.len() {
                let given_back = piece[..end].chars().next_back().map_or(0, char::len_utf8);
                if end - given_back > found.start() {
                    end -= given_back;
                }
            }
            if found.start() > last {
                ends.push(offset + found.start());
            }
            assert!(end > found.start(), "no expression in the table matches an empty text");
            if is_run && self.powers_of_two {
                cut_powers_of_two(&piece[found.start()..end], offset + found.start(), ends);
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

/// Compiles an expression as one pattern, or two if it ends with runs of white space: then the
/// number of the pattern that matched says whether the last character must be given back.
fn compile(text: &str) -> Regex {
    let head = RUNS.iter().find_map(|run| text.strip_suffix(run));
    let patterns = head.map_or(vec![text], |head| vec![head, RUN]);
    Regex::new_many(&patterns).expect("the expressions in the table are valid")
}

/// Ends the first group of every number, which has what is left over, and those of three digits.
/// What stands before a number stays with its first group: the expressions cut there.
fn cut_thousands(text: &str, is_digit: fn(char) -> bool, ends: &mut Vec<usize>) {
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

/// Cuts a run of white space, which starts at `offset`.
fn cut_powers_of_two(run: &str, offset: usize, ends: &mut Vec<usize>) {
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
    use super::known::KNOWN;
    use super::*;

    fn split<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let (mut words, mut buffer) = (Vec::new(), Vec::new());
        Splitter::new(named(name).unwrap()).split(text, &mut words, &mut buffer);
        let mut start = 0;
        words.iter().map(|&end| &text[std::mem::replace(&mut start, end)..end]).collect()
    }

    #[test]
    fn every_pre_tokenizer_compiles_and_loses_nothing() {
        let text = "Don't  stop\n\n\n at 12345 x²; HelloWorld ÄÖé 你好 \t\u{a0}!!?\r\n  ";
        for name in KNOWN.iter().flat_map(|known| known.names) {
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
        let error = named("nonsense").err().unwrap().to_string();
        assert!(error.contains("`nonsense`") && error.contains("qwen2"), "{error}");
    }
}
