//! Text to tokens and back, from the metadata of a GGUF file alone, with llama.cpp's results. It
//! must not know models, requests or templates.
//!
//! The merge loop is our own and not the `tokenizers` crate's: that one has no SentencePiece BPE
//! (merging by scores), one loop serves both kinds, and it is built from a quarter of a million
//! tokens in tens of milliseconds, which is part of the time to the first token. WordPiece and
//! unigram search a trie of their own, because both must give llama.cpp's results and not those of
//! the published code. A new kind is a file beside `byte_level` and a variant of `Algorithm`.

mod alphabet;
mod byte_level;
mod character_level;
mod charsmap;
mod clean;
mod fragments;
mod markers;
mod merge;
mod merges;
mod pre_tokenizers;
mod sentence_piece;
mod special;
mod splitter;
mod trie;
mod unigram;
mod vocabulary;
mod word_piece;

#[cfg(test)]
mod tests;

use bodkin_gguf::Metadata;

use self::byte_level::ByteLevel;
use self::character_level::CharacterLevel;
use self::clean::clean_spaces;
use self::fragments::Fragment;
use self::pre_tokenizers::{PreTokenizer, pre_tokenizer};
use self::sentence_piece::{SPACE, SentencePiece};
use self::special::{SpecialIds, SpecialMatcher};
use self::unigram::Unigram;
use self::vocabulary::{Spelling, TokenType, Vocabulary};
use self::word_piece::WordPiece;
use crate::error::{Error, Result};

/// Known values of `tokenizer.ggml.model`.
const MODELS: [&str; 5] = ["gpt2", "gemma4", "llama", "bert", "t5"];

/// The longest text from a user. A space takes 3 bytes in SentencePiece's spelling, and the offsets
/// have 32 bits.
const MAX_TEXT_BYTES: usize = 512 << 20;

/// A model's tokenizer.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    algorithm: Algorithm,
    special: SpecialIds,
    /// Control tokens that belong to the text of an answer.
    markers: Vec<u32>,
    matcher: SpecialMatcher,
    add_bos: bool,
    add_eos: bool,
    /// A separator is added between two texts.
    add_separator: bool,
    /// A space is added before each text.
    add_space_prefix: bool,
    clean_spaces: bool,
}

enum Algorithm {
    ByteLevel(ByteLevel),
    CharacterLevel(CharacterLevel),
    SentencePiece(SentencePiece),
    WordPiece(WordPiece),
    Unigram(Unigram),
}

/// Defaults for missing metadata.
impl Algorithm {
    /// The ids are llama.cpp's defaults.
    fn special(&self, model: &str) -> SpecialIds {
        let none = SpecialIds::default();
        match self {
            Algorithm::CharacterLevel(_) if model == "gemma4" => none,
            Algorithm::ByteLevel(_) | Algorithm::CharacterLevel(_) => {
                SpecialIds { bos: Some(11), eos: Some(11), ..none }
            }
            Algorithm::SentencePiece(_) => {
                SpecialIds { bos: Some(1), eos: Some(2), unknown: Some(0), ..none }
            }
            Algorithm::WordPiece(_) => SpecialIds {
                bos: Some(101),
                unknown: Some(100),
                separator: Some(102),
                padding: Some(0),
                ..none
            },
            Algorithm::Unigram(_) => {
                SpecialIds { eos: Some(1), unknown: Some(2), padding: Some(0), ..none }
            }
        }
    }

    fn adds_bos(&self, pre: &PreTokenizer) -> bool {
        match self {
            Algorithm::ByteLevel(_) | Algorithm::CharacterLevel(_) => pre.add_bos,
            Algorithm::SentencePiece(_) | Algorithm::WordPiece(_) => true,
            Algorithm::Unigram(_) => false,
        }
    }

    fn cleans_spaces(&self, pre: &PreTokenizer) -> bool {
        match self {
            Algorithm::ByteLevel(_) | Algorithm::CharacterLevel(_) => pre.clean_spaces,
            Algorithm::WordPiece(_) => true,
            Algorithm::SentencePiece(_) | Algorithm::Unigram(_) => false,
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.vocabulary.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that `tokenizer.ggml.*` describe. Fails if it is of an unknown kind or
    /// the parts contradict each other.
    pub fn from_metadata(metadata: &Metadata) -> Result<Tokenizer> {
        Tokenizer::new(metadata, None)
    }

    /// As [`Tokenizer::from_metadata`], with the pre-tokenizer `pre` instead of the metadata's, for
    /// files that name an unknown or a wrong one. Only byte-level BPE has pre-tokenizers; the name
    /// is checked all the same.
    pub fn from_metadata_assuming(metadata: &Metadata, pre: &str) -> Result<Tokenizer> {
        Tokenizer::new(metadata, Some(pre_tokenizer(pre)?))
    }

    fn new(metadata: &Metadata, assumed: Option<&'static PreTokenizer>) -> Result<Tokenizer> {
        let model = metadata.need_str("tokenizer.ggml.model")?;
        if !MODELS.contains(&model) {
            let found = model.to_owned();
            return Err(Error::UnknownTokenizer { found, known: MODELS.join(", ") });
        }
        let pre = match assumed {
            Some(pre) => pre,
            None if model == "gpt2" => {
                let pre = metadata.str("tokenizer.ggml.pre")?.filter(|pre| !pre.is_empty());
                pre_tokenizer(pre.unwrap_or("default"))?
            }
            None if model == "gemma4" => pre_tokenizer("gemma4")?,
            None => pre_tokenizer("default")?,
        };
        let characters = pre.characters.filter(|_| matches!(model, "gpt2" | "gemma4"));
        let is_byte_level = model == "gpt2" && characters.is_none();
        let spelling = if is_byte_level { Spelling::ByteLevel } else { Spelling::Plain };
        let mut vocabulary = Vocabulary::from_metadata(metadata, spelling)?;
        let words = &vocabulary;
        // Before special tokens are corrected, as in llama.cpp.
        let algorithm = match model {
            "gpt2" | "gemma4" => match characters {
                None => Algorithm::ByteLevel(ByteLevel::from_metadata(metadata, words, pre)?),
                Some(rules) => {
                    let new = CharacterLevel::from_metadata(metadata, words, pre, rules)?;
                    Algorithm::CharacterLevel(new)
                }
            },
            "llama" => Algorithm::SentencePiece(SentencePiece::from_metadata(metadata, words)?),
            "bert" => Algorithm::WordPiece(WordPiece::from_metadata(metadata, words)?),
            _ => Algorithm::Unigram(Unigram::from_metadata(metadata, words)?),
        };
        let special =
            SpecialIds::from_metadata(metadata, &mut vocabulary, algorithm.special(model))?;
        let mut new = Tokenizer {
            matcher: SpecialMatcher::new(metadata, &vocabulary)?,
            markers: markers::find(&vocabulary, &special.eog_ids),
            vocabulary,
            special,
            add_bos: algorithm.adds_bos(pre),
            add_eos: matches!(algorithm, Algorithm::Unigram(_)),
            add_separator: false,
            add_space_prefix: matches!(algorithm, Algorithm::SentencePiece(_)),
            clean_spaces: algorithm.cleans_spaces(pre),
            algorithm,
        };
        new.read_flags(metadata)?;
        new.add_bos |= characters.is_some_and(|rules| rules.always_bos);
        Ok(new)
    }

    fn read_flags(&mut self, metadata: &Metadata) -> Result<()> {
        let read = |key: &str, flag: &mut bool| -> Result<()> {
            *flag = metadata.bool(&format!("tokenizer.ggml.{key}"))?.unwrap_or(*flag);
            Ok(())
        };
        read("add_bos_token", &mut self.add_bos)?;
        read("add_eos_token", &mut self.add_eos)?;
        read("add_sep_token", &mut self.add_separator)?;
        read("add_space_prefix", &mut self.add_space_prefix)
    }

    /// The tokens of `text`. With `add_special`, BOS and EOS (or what BERT has for them) are added
    /// as the model wants it; with `parse_special`, control tokens that are spelled out in the text
    /// become those tokens instead of text.
    ///
    /// # Errors
    /// [`Error::LongText`] if the text is longer than 512 MiB, [`Error::SpecialTokenSearch`] if
    /// looking for its special tokens would take seconds, as it may in a vocabulary that was made
    /// for it.
    pub fn try_encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(Error::LongText { bytes: text.len(), limit: MAX_TEXT_BYTES });
        }
        let mut out = Vec::new();
        // BERT's models always want theirs.
        let is_word_piece = matches!(self.algorithm, Algorithm::WordPiece(_));
        if add_special && (self.add_bos || is_word_piece) {
            out.extend(self.special.bos);
        }
        let mut follows_special = true;
        for fragment in self.matcher.partition(text, &self.vocabulary, parse_special)? {
            match fragment {
                Fragment::Token(id) => out.push(id),
                Fragment::Text(ref range) => {
                    self.encode_text(&text[range.clone()], follows_special, &mut out);
                }
            }
            follows_special = matches!(fragment, Fragment::Token(_));
        }
        if add_special && is_word_piece {
            out.extend(self.special.separator);
        } else if add_special && self.add_eos {
            out.extend(self.special.eos);
        }
        Ok(out)
    }

    /// As [`Tokenizer::try_encode`], for a short text.
    ///
    /// # Panics
    /// Where `try_encode` fails, which it does with no text of less than 500 bytes.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Vec<u32> {
        match self.try_encode(text, add_special, parse_special) {
            Ok(tokens) => tokens,
            Err(error) => panic!("a text of {} bytes: {error}", text.len()),
        }
    }

    /// The tokens of two texts as a cross-encoder reads them: the second has no BOS of its own, and
    /// a separator before it where the model has one besides the end of the first.
    ///
    /// # Errors
    /// As [`Tokenizer::try_encode`].
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<u32>> {
        let mut out = self.try_encode(first, true, false)?;
        // BERT's separator is the end of the first text.
        if self.add_separator && !matches!(self.algorithm, Algorithm::WordPiece(_)) {
            out.extend(self.special.separator);
        }
        let second = self.try_encode(second, true, false)?;
        let has_bos = !second.is_empty() && second.first().copied() == self.special.bos;
        out.extend(&second[usize::from(has_bos)..]);
        Ok(out)
    }

    fn encode_text(&self, text: &str, follows_special: bool, out: &mut Vec<u32>) {
        let (vocabulary, unknown) = (&self.vocabulary, self.special.unknown);
        let prefix = self.add_space_prefix;
        match &self.algorithm {
            Algorithm::ByteLevel(bpe) => bpe.encode(text, vocabulary, out),
            Algorithm::CharacterLevel(bpe) => bpe.encode(text, vocabulary, out),
            Algorithm::SentencePiece(bpe) => {
                bpe.encode(text, prefix && follows_special, vocabulary, unknown, out);
            }
            Algorithm::WordPiece(pieces) => pieces.encode(text, unknown, out),
            Algorithm::Unigram(unigram) => unigram.encode(text, prefix, unknown, out),
        }
    }

    /// The bytes of tokens; control tokens are included if `special` is set. Unknown ids are
    /// skipped.
    pub fn decode(&self, ids: &[u32], special: bool) -> Vec<u8> {
        self.decode_with(ids, false, special)
    }

    /// As [`Tokenizer::decode`]; with `remove_special`, a BOS at the start and an EOS at the end
    /// are left out where [`Tokenizer::encode`] would add them.
    pub fn decode_with(&self, mut ids: &[u32], remove_special: bool, special: bool) -> Vec<u8> {
        let mut removes_space = self.add_space_prefix;
        if remove_special && self.add_bos && ids.first().copied() == self.special.bos {
            removes_space = false;
            ids = ids.get(1..).unwrap_or_default();
        }
        if remove_special && self.add_eos && ids.last().copied() == self.special.eos {
            ids = ids.split_last().map_or(ids, |(_, rest)| rest);
        }
        let mut out = Vec::with_capacity(ids.len() * 4);
        for (index, &id) in ids.iter().enumerate() {
            self.push_piece(id, special, &mut out);
            if index == 0 && removes_space && out.first() == Some(&b' ') {
                out.remove(0);
            }
        }
        if self.clean_spaces {
            clean_spaces(&mut out);
        }
        out
    }

    /// The bytes of one token, which need not be whole characters.
    pub fn piece(&self, id: u32, special: bool) -> Vec<u8> {
        let mut out = Vec::new();
        self.push_piece(id, special, &mut out);
        out
    }

    /// Appends what [`Tokenizer::piece`] returns.
    pub fn push_piece(&self, id: u32, special: bool, out: &mut Vec<u8>) {
        let text = self.vocabulary.text(id);
        match self.vocabulary.token_type(id) {
            TokenType::Undefined | TokenType::Unused => {}
            kind if kind.is_hidden() && !special => {}
            TokenType::Unknown | TokenType::Control | TokenType::UserDefined => {
                out.extend_from_slice(text)
            }
            TokenType::Byte => out.extend(byte(text)),
            TokenType::Normal => match self.algorithm {
                Algorithm::ByteLevel(_) => out.extend_from_slice(text),
                _ => unescape(text, out),
            },
        }
    }

    /// How many tokens there are; ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Bytes of memory that it holds, near enough for planning.
    pub fn memory_bytes(&self) -> usize {
        let algorithm = match &self.algorithm {
            Algorithm::ByteLevel(byte_level) => byte_level.memory_bytes(),
            Algorithm::CharacterLevel(character_level) => character_level.memory_bytes(),
            Algorithm::SentencePiece(sentence_piece) => sentence_piece.memory_bytes(),
            Algorithm::WordPiece(word_piece) => word_piece.memory_bytes(),
            Algorithm::Unigram(unigram) => unigram.memory_bytes(),
        };
        self.vocabulary.memory_bytes() + algorithm
    }

    /// The token that starts a text.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// The token that ends a turn of a chat.
    pub fn eot(&self) -> Option<u32> {
        self.special.eot
    }

    /// The token that ends a message which goes on after a tool was called.
    pub fn eom(&self) -> Option<u32> {
        self.special.eom
    }

    /// The token for what has no token.
    pub fn unknown(&self) -> Option<u32> {
        self.special.unknown
    }

    /// The token that fills up batches.
    pub fn padding(&self) -> Option<u32> {
        self.special.padding
    }

    /// Whether a text starts with BOS.
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.special.bos.is_some()
    }

    /// Whether a text ends with EOS.
    pub fn add_eos(&self) -> bool {
        self.add_eos && self.special.eos.is_some()
    }

    /// Whether a model that generates this token is done.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.special.eog_ids.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, ascending.
    pub fn ends_of_generation(&self) -> &[u32] {
        &self.special.eog_ids
    }

    /// Whether the token stands for no text, unless special tokens are shown.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocabulary.token_type(id).is_hidden()
    }

    /// Whether the token is a control token that divides reasoning or tool calls from the rest of
    /// an answer, such as `[THINK]`: an answer's text has it, though it is a control token.
    pub fn is_marker(&self, id: u32) -> bool {
        self.markers.binary_search(&id).is_ok()
    }

    /// The token with this text, such as `<|im_end|>`; spaces are written as the vocabulary has
    /// them.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.vocabulary.find_named(text.as_bytes())
    }
}

/// The byte of a token such as `<0x0A>`.
fn byte(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

/// Appends a text of SentencePiece with its spaces as spaces.
fn unescape(mut text: &[u8], out: &mut Vec<u8>) {
    let space = SPACE.as_bytes();
    while let [first, rest @ ..] = text {
        if let Some(rest) = text.strip_prefix(space) {
            out.push(b' ');
            text = rest;
        } else {
            out.push(*first);
            text = rest;
        }
    }
}
