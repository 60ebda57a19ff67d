//! Cutting text into words before merging: the published pre-tokenizers of byte-level BPE, by the
//! names in `tokenizer.ggml.pre`. It must not know vocabularies.
//!
//! The expressions run on automata, whose time is linear in the text whatever it is. Automata know
//! no look-ahead, and the published expressions have one, `\s+(?!\S)`: a run of white space leaves
//! its last character to the word after it. That is done here, by hand.

use regex_automata::Input;
use regex_automata::meta::Regex;

use crate::error::{Error, Result};

/// The end of nearly all published expressions, and the pattern that stands for it here.
const RUNS: [&str; 2] = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)"];
const RUN: &str = r"\s+";

/// A pre-tokenizer, and what its name says besides.
pub(super) struct Named {
    names: &'static [&'static str],
    /// Each cuts what those before it left.
    expressions: &'static [&'static str],
    /// A word that is a token is not merged from its parts.
    pub(super) whole_words: bool,
    /// Detokenizing removes spaces before punctuation.
    pub(super) clean_spaces: bool,
    /// BOS is added unless the metadata says otherwise.
    pub(super) add_bos: bool,
}

const PLAIN: Named =
    Named { names: &[], expressions: &[], whole_words: false, clean_spaces: false, add_bos: false };
const CLEANED: Named = Named { clean_spaces: true, ..PLAIN };

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

macro_rules! contractions {
    () => {
        r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    };
}

/// With groups of one to three digits, as many as the argument allows.
macro_rules! llama3 {
    ($numbers:literal) => {
        concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const LLAMA3: &str = llama3!(r"\p{N}{1,3}");
const QWEN2: &str = llama3!(r"\p{N}");

/// Words end where lower case is followed by upper case. Letters without case count as both; what
/// has case outside ASCII does too, which is how llama.cpp reads the published `\p{Lu}`, `\p{Ll}`.
macro_rules! cased {
    ($letters:literal, $suffix:expr, $numbers:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[",
            $letters,
            r"&&[^a-z]]*[",
            $letters,
            r"&&[^A-Z]]+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?[",
            $letters,
            r"&&[^a-z]]+[",
            $letters,
            r"&&[^A-Z]]*",
            $suffix,
            "|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const GPT4O: &str = cased!(r"\p{L}", concat!("(?:", contractions!(), ")?"), r"\p{N}{1,3}");

const DEEPSEEK_V3: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

const SPARK: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
    ),
    r"\p{N}",
];

/// The letters that have case, as DeepSeek LLM lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}",
    r"\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}",
    r"\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}",
    r"\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}",
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    "]+"
);

const DEEPSEEK_LLM: &[&str] = &[
    "[\r\n]",
    DEEPSEEK_LETTERS,
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\u{d7ff}]+",
    r"\p{N}+",
];

const DEEPSEEK_CODER: &[&str] =
    &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", r"\p{N}"];

const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const QWEN35: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const BAILING: &str = concat!(
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
);

const SEED_CODER: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const EXAONE_MOE: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);

const UFAKZEKA: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// What is known, in the order in which errors list it.
#[rustfmt::skip]
static KNOWN: &[Named] = &[
    Named {
        names: &["default"],
        expressions: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..CLEANED
    },
    Named {
        names: &[
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de",
            "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe",
            "exaone4", "mpt", "olmo", "jais",
        ],
        expressions: &[GPT2],
        ..CLEANED
    },
    Named { names: &["trillion", "granite-docling"], expressions: &[GPT2], ..PLAIN },
    Named {
        names: &[
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
            "lfm2", "jina-v5-nano",
        ],
        expressions: &[LLAMA3],
        whole_words: true,
        add_bos: true,
        ..CLEANED
    },
    Named { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], expressions: &[LLAMA3], ..CLEANED },
    Named { names: &["glm4", "glm5"], expressions: &[LLAMA3], whole_words: true, ..CLEANED },
    Named {
        names: &[
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "grok-2", "solar-open",
        ],
        expressions: &[QWEN2],
        ..PLAIN
    },
    Named { names: &["stablelm2", "megrez"], expressions: &[QWEN2], ..CLEANED },
    Named { names: &["qwen35"], expressions: &[QWEN35], ..PLAIN },
    Named { names: &["laguna"], expressions: &[r"[^\n]+|[\n]+", QWEN2], ..PLAIN },
    Named { names: &["ufakzeka"], expressions: &[UFAKZEKA], ..PLAIN },
    Named { names: &["smollm", "command-r"], expressions: &[r"\p{N}", GPT2], ..PLAIN },
    Named {
        names: &["starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        expressions: &[r"\p{N}", GPT2],
        ..CLEANED
    },
    Named { names: &["gpt-4o", "llama4", "kanana2", "talkie"], expressions: &[GPT4O], ..PLAIN },
    Named { names: &["minimax-m2"], expressions: &[GPT4O], ..PLAIN },
    Named {
        names: &["granite-embed-multi-97m"],
        expressions: &[
            cased!(r"[\p{L}\p{M}]", concat!("(?:", contractions!(), ")?"), r"\p{N}{1,3}"),
        ],
        whole_words: true,
        ..PLAIN
    },
    Named {
        names: &["tekken"],
        expressions: &[cased!(r"\p{L}", "", r"\p{N}")],
        whole_words: true,
        add_bos: true,
        ..PLAIN
    },
    Named { names: &["deepseek-llm"], expressions: DEEPSEEK_LLM, ..PLAIN },
    Named { names: &["deepseek-coder"], expressions: DEEPSEEK_CODER, ..PLAIN },
    Named {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        expressions: DEEPSEEK_V3,
        ..PLAIN
    },
    Named { names: &["spark2_5"], expressions: SPARK, ..PLAIN },
    Named {
        names: &["falcon"],
        expressions: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        ..CLEANED
    },
    Named { names: &["poro-chat"], expressions: &[BLOOM], ..PLAIN },
    Named { names: &["bloom", "gpt3-finnish"], expressions: &[BLOOM], ..CLEANED },
    Named { names: &["viking"], expressions: &[BLOOM, r"\p{N}"], ..PLAIN },
    Named {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        expressions: &[BAILING],
        ..PLAIN
    },
    Named { names: &["seed-coder"], expressions: &[SEED_CODER], ..PLAIN },
    Named { names: &["exaone-moe"], expressions: &[EXAONE_MOE], ..CLEANED },
    Named {
        names: &["minicpm5"],
        expressions: &[r"\p{N}{1,3}", llama3!(r"\p{N}+")],
        whole_words: true,
        ..CLEANED
    },
];

/// Looks a pre-tokenizer up by its name.
pub(super) fn named(name: &str) -> Result<&'static Named> {
    KNOWN.iter().find(|known| known.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = KNOWN.iter().flat_map(|known| known.names).copied().collect();
        Error::UnknownPreTokenizer { found: name.to_owned(), known: known.join(", ") }
    })
}

/// A compiled pre-tokenizer.
pub(super) struct Splitter {
    expressions: Vec<Regex>,
}

impl Splitter {
    pub(super) fn new(named: &Named) -> Splitter {
        Splitter { expressions: named.expressions.iter().map(|text| compile(text)).collect() }
    }

    /// Where each word of `text` ends, in bytes. `words` is cleared first.
    pub(super) fn split(&self, text: &str, words: &mut Vec<usize>, buffer: &mut Vec<usize>) {
        words.clear();
        if !text.is_empty() {
            words.push(text.len());
        }
        for expression in &self.expressions {
            std::mem::swap(words, buffer);
            words.clear();
            let mut start = 0;
            for &end in buffer.iter() {
                split_piece(expression, &text[start..end], start, words);
                start = end;
            }
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

/// Cuts one piece, which starts at `offset`, at the starts and ends of all matches.
fn split_piece(expression: &Regex, piece: &str, offset: usize, ends: &mut Vec<usize>) {
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
        ends.push(offset + end);
        (at, last) = (end, end);
    }
    if last < piece.len() {
        ends.push(offset + piece.len());
    }
}

#[cfg(test)]
mod tests {
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
    }

    #[test]
    fn an_unknown_name_is_named() {
        let error = named("nonsense").err().unwrap().to_string();
        assert!(error.contains("`nonsense`") && error.contains("qwen2"), "{error}");
    }
}
