//! Special tokens: their ids, which of them end a generation (EOG), and where they stand in a text.
//! The metadata names some by id; others are known by their text, because many files leave them
//! out. The rules are those of llama.cpp, so that the same file behaves the same.

use bodkin_gguf::Metadata;
use hashbrown::HashMap;

use super::fragments::{Cut, Fragment, Fragments};
use super::trie::Trie;
use super::vocabulary::{TokenType, Vocabulary};
use crate::error::{Error, Result};

/// Texts of tokens that end a turn; the first that exists is the one, if the metadata names none.
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Texts of tokens that end a generation besides.
const END_OF_GENERATION: &[&str] = &[
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];

/// Tokens for filling in the middle of a text (FIM), and for its place in a repository.
struct Fim {
    key: &'static str,
    is_eog: bool,
    texts: &'static [&'static str],
}

#[rustfmt::skip]
const FIM: &[Fim] = &[
    Fim {
        key: "fim_pre",
        is_eog: false,
        texts: &[
            "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
            "<|code_prefix|>", "<|prefix|>",
        ],
    },
    Fim {
        key: "fim_suf",
        is_eog: false,
        texts: &[
            "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
            "<|code_suffix|>", "<|suffix|>",
        ],
    },
    Fim {
        key: "fim_mid",
        is_eog: false,
        texts: &[
            "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
            "<|code_middle|>", "<|middle|>",
        ],
    },
    Fim {
        key: "fim_pad",
        is_eog: true,
        texts: &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    },
    Fim {
        key: "fim_rep",
        is_eog: true,
        texts: &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    },
    Fim { key: "fim_sep", is_eog: true, texts: &["<|file_sep|>"] },
];

/// Tokens between the parts of a message in the Harmony format: always shown, because they are its
/// structure.
const HARMONY: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Ids of special tokens.
#[derive(Debug, Default)]
pub(super) struct SpecialIds {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) eom: Option<u32>,
    pub(super) unknown: Option<u32>,
    pub(super) separator: Option<u32>,
    pub(super) padding: Option<u32>,
    /// All that end a generation, ascending.
    pub(super) eog_ids: Vec<u32>,
}

impl SpecialIds {
    /// Reads the ids, given the defaults of the kind of tokenizer, and corrects the types of tokens
    /// that are known by their texts.
    pub(super) fn from_metadata(
        metadata: &Metadata,
        vocabulary: &mut Vocabulary,
        defaults: SpecialIds,
    ) -> Result<SpecialIds> {
        let len = vocabulary.len();
        let read = |key: &str, default: Option<u32>| -> Result<Option<u32>> {
            let is_valid = |id: &u32| (*id as usize) < len;
            let id = metadata.u32(&format!("tokenizer.ggml.{key}_token_id"))?;
            Ok(id.filter(is_valid).or(default.filter(is_valid)))
        };
        let mut new = SpecialIds {
            bos: read("bos", defaults.bos)?,
            eos: read("eos", defaults.eos)?,
            eot: read("eot", None)?,
            eom: read("eom", None)?,
            unknown: read("unknown", defaults.unknown)?,
            // The key is spelled like that.
            separator: read("seperator", defaults.separator)?,
            padding: read("padding", defaults.padding)?,
            eog_ids: Vec::new(),
        };
        new.eot = new.eot.or_else(|| mark_control(vocabulary, END_OF_TURN));
        new.eom = new.eom.or_else(|| mark_control(vocabulary, &["<|eom_id|>"]));
        for fim in FIM {
            let id = read(fim.key, None)?.or_else(|| mark_control(vocabulary, fim.texts));
            new.eog_ids.extend(id.filter(|_| fim.is_eog));
        }
        new.find_eog_ids(vocabulary);
        Ok(new)
    }

    fn find_eog_ids(&mut self, vocabulary: &mut Vocabulary) {
        for text in END_OF_TURN.iter().chain(END_OF_GENERATION) {
            self.eog_ids.extend(mark_control(vocabulary, &[text]));
        }
        for text in HARMONY {
            if let Some(id) = vocabulary.find_named(text.as_bytes()) {
                vocabulary.set_token_type(id, TokenType::UserDefined);
            }
        }
        self.eog_ids.extend([self.eos, self.eot, self.eom].into_iter().flatten());
        self.eog_ids.sort_unstable();
        self.eog_ids.dedup();
        let eog_id = |text: &str| {
            let id = vocabulary.find_named(text.as_bytes());
            id.filter(|id| self.eog_ids.contains(id))
        };
        // Harmony and Solar Open: messages end with other tokens, `<|end|>` only a part of one.
        let call = eog_id("<|call|>").or(eog_id("<|calls|>"));
        let last = eog_id("<|return|>").or(eog_id("<|flush|>"));
        let end_of_part = call.and(last).and(eog_id("<|end|>"));
        // Gemma 4 and PLaMo: tool calls or texts end with tokens of their own, `</s>` is markup.
        let markup = eog_id("<|tool_response>").or(eog_id("<|plamo:eos|>")).and(eog_id("</s>"));
        for (id, token_type) in [(end_of_part, TokenType::UserDefined), (markup, TokenType::Normal)]
        {
            if let Some(id) = id {
                vocabulary.set_token_type(id, token_type);
                self.eog_ids.retain(|&other| other != id);
            }
        }
    }
}

/// The first token with one of the texts, made a control token if it is none.
fn mark_control(vocabulary: &mut Vocabulary, texts: &[&str]) -> Option<u32> {
    let id = texts.iter().find_map(|text| vocabulary.find_named(text.as_bytes()))?;
    vocabulary.set_token_type(id, TokenType::Control);
    Some(id)
}

/// The most steps of finding special tokens in one text, up to a second of them: bytes of the
/// text that are compared with tokens' first bytes, or searched for a token.
const MAX_WORK: usize = 1 << 26;

/// This number of searches is allowed however long the text is.
const MIN_SEARCHES: usize = 64;

/// The work for each fragment that is searched, in bytes.
const FRAGMENT_WORK: usize = 32;

/// The most places of tokens that are remembered, however short the text is.
const MIN_PLACES: usize = 1 << 22;

/// A token that stands more often than once in this number of bytes is searched for.
const BYTES_PER_PLACE: usize = 16;

/// A token that is looked for.
struct SpecialPattern {
    id: u32,
    /// The same for all tokens with one text.
    text: u32,
    /// Only looked for when special tokens are parsed.
    only_with_parse_special: bool,
    /// Takes the white space before it.
    lstrip: bool,
    /// Takes the white space after it.
    rstrip: bool,
}

/// Finds special tokens in texts.
pub(super) struct SpecialMatcher {
    /// Longest first.
    patterns: Vec<SpecialPattern>,
    /// The texts of patterns, by their numbers.
    texts: Trie,
}

impl SpecialMatcher {
    /// Takes the special tokens of a vocabulary. Which of them strip white space is not in the
    /// metadata: llama.cpp knows it by the names of models, and so do we.
    pub(super) fn new(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<SpecialMatcher> {
        let ids = (0..vocabulary.len() as u32).filter(|&id| vocabulary.token_type(id).is_special());
        // Texts of tokens that are not UTF-8 cannot stand in a text.
        let mut ids: Vec<u32> =
            ids.filter(|&id| str::from_utf8(vocabulary.text(id)).is_ok()).collect();
        ids.sort_by_key(|&id| std::cmp::Reverse(vocabulary.text(id).len()));
        let strips = Strips::from_metadata(metadata)?;
        let mut patterns: Vec<SpecialPattern> = Vec::with_capacity(ids.len());
        let mut texts: HashMap<&[u8], Seen> = HashMap::with_capacity(ids.len());
        for id in ids {
            let text = vocabulary.text(id);
            let only_with_parse_special = vocabulary.token_type(id).is_hidden();
            let number = texts.len() as u32;
            let seen = texts.entry(text).or_insert(Seen { number, always: false, parsed: false });
            // The first of several tokens with one text is found.
            if seen.always || seen.parsed && only_with_parse_special {
                continue;
            }
            seen.always |= !only_with_parse_special;
            seen.parsed = true;
            let plain: [&[u8]; 3] = [b"<unk>", b"<s>", b"<|endoftext|>"];
            patterns.push(SpecialPattern {
                id,
                text: seen.number,
                only_with_parse_special,
                lstrip: strips.lstrip == Some(text),
                rstrip: strips.rstrip && !plain.contains(&text),
            });
        }
        let texts = texts.into_iter().map(|(text, seen)| (text, seen.number)).collect();
        Ok(SpecialMatcher { patterns, texts: Trie::new(texts) })
    }

    /// Cuts a text at the special tokens in it. A longer token goes before a shorter one wherever
    /// they stand, so each takes what the longer ones left.
    ///
    /// # Errors
    /// [`Error::SpecialTokenSearch`] if that took too long, which no text of less than 500 bytes
    /// does.
    pub(super) fn partition(
        &self,
        text: &str,
        vocabulary: &Vocabulary,
        parse_special: bool,
    ) -> Result<Vec<Fragment>> {
        let mut fragments = Fragments::new(text);
        if text.is_empty() {
            return Ok(fragments.into_vec());
        }
        let mut work = Work::of_text(text);
        let found = self.find_texts(text.as_bytes(), &mut work)?;
        let patterns = self.patterns.iter().filter(|p| parse_special || !p.only_with_parse_special);
        for pattern in patterns {
            let Some(places) = found.places_of(pattern.text) else { continue };
            let token = str::from_utf8(vocabulary.text(pattern.id)).unwrap_or_default();
            let SpecialPattern { id, lstrip, rstrip, .. } = *pattern;
            let cut = Cut { id, token, lstrip, rstrip };
            match places {
                Places::At(places) => {
                    for &at in places {
                        fragments.cut_at(at as usize, &cut);
                    }
                }
                Places::Many => {
                    let count = fragments.text_count();
                    work.spend(fragments.text_bytes() + FRAGMENT_WORK * count)?;
                    fragments.cut_everywhere(&cut);
                }
            }
        }
        Ok(fragments.into_vec())
    }

    /// Where the texts of patterns stand in `text`. There are thousands of special tokens, and a
    /// search for each would take long.
    fn find_texts(&self, text: &[u8], work: &mut Work) -> Result<Found> {
        let mut found = Found { indices: vec![NOWHERE; self.patterns.len()], places: Vec::new() };
        let most_of_one = text.len() / BYTES_PER_PLACE + 64;
        let mut left = MIN_PLACES.max(text.len());
        for start in 0..text.len() {
            let mut steps = 1;
            for number in self.texts.walk(&text[start..]) {
                steps += 1;
                let Some(number) = number else { continue };
                let index = &mut found.indices[number as usize];
                if *index == NOWHERE {
                    *index = found.places.len() as u32;
                    found.places.push(Places::At(Vec::new()));
                }
                let places = &mut found.places[*index as usize];
                let Places::At(list) = places else { continue };
                if list.len() < most_of_one && left > 0 {
                    list.push(start as u32);
                    left -= 1;
                } else {
                    left += list.len();
                    *places = Places::Many;
                }
            }
            work.spend(steps)?;
        }
        Ok(found)
    }
}

/// The budget of steps of one text.
struct Work {
    left: usize,
    text_bytes: usize,
}

impl Work {
    fn of_text(text: &str) -> Work {
        Work { left: MAX_WORK.max(MIN_SEARCHES * text.len()), text_bytes: text.len() }
    }

    fn spend(&mut self, steps: usize) -> Result<()> {
        let too_many = Error::SpecialTokenSearch { bytes: self.text_bytes };
        self.left = self.left.checked_sub(steps).ok_or(too_many)?;
        Ok(())
    }
}

/// The index of a text that is not there.
const NOWHERE: u32 = u32::MAX;

/// Where the texts of patterns stand.
struct Found {
    /// The index in `places` of each text, by its number.
    indices: Vec<u32>,
    places: Vec<Places>,
}

impl Found {
    fn places_of(&self, text: u32) -> Option<&Places> {
        self.places.get(self.indices[text as usize] as usize)
    }
}

/// Where one text stands.
enum Places {
    /// In bytes, ascending.
    At(Vec<u32>),
    /// At too many places to remember. They are searched for when they are needed: a longer token
    /// may have taken them by then.
    Many,
}

/// What a vocabulary has of special tokens with one text.
struct Seen {
    number: u32,
    /// One is looked for in every text.
    always: bool,
    /// One is looked for when special tokens are parsed.
    parsed: bool,
}

/// Which special tokens take white space.
struct Strips {
    /// The text of the token that takes what is before it.
    lstrip: Option<&'static [u8]>,
    /// Whether nearly all take what is after them.
    rstrip: bool,
}

impl Strips {
    fn from_metadata(metadata: &Metadata) -> Result<Strips> {
        let read = |key| Ok::<_, Error>(metadata.str(key)?.unwrap_or_default().to_lowercase());
        let holds = |text: String, parts: &[&str]| parts.iter().any(|&part| text.contains(part));
        let none = Strips { lstrip: None, rstrip: false };
        let jina = ["jina-v2-de", "jina-v2-es", "jina-v2-code"];
        if holds(read("tokenizer.ggml.pre")?, &jina)
            || holds(read("general.architecture")?, &["nomic-bert-moe", "jina-bert-v3"])
        {
            return Ok(Strips { lstrip: Some(b"<mask>"), ..none });
        }
        let name = read("general.name")?;
        if holds(name.clone(), &["phi-3", "phi3"]) {
            return Ok(Strips { rstrip: true, ..none });
        }
        let masks = holds(name, &["modern-bert"]);
        Ok(Strips { lstrip: masks.then_some(b"[MASK]"), ..none })
    }
}

#[cfg(test)]
mod tests;
