//! The published pre-tokenizers by their names in `tokenizer.ggml.pre`, as llama.cpp implements
//! them. It must not know how text is split.

use crate::error::{Error, Result};

/// A pre-tokenizer, and the tokenizer settings that its name implies.
pub(super) struct PreTokenizer {
    pub(super) names: &'static [&'static str],
    /// Each expression splits the pieces of the one before it.
    pub(super) expressions: &'static [&'static str],
    /// Before that, numbers of these characters are split into groups of three, from the right.
    pub(super) thousands: Option<fn(char) -> bool>,
    /// Runs of white space are split into powers of two, the largest first, at most 512.
    pub(super) powers_of_two: bool,
    /// A word that is a token is not merged from its parts (`ignore_merges`).
    pub(super) ignore_merges: bool,
    /// Detokenizing removes spaces before punctuation.
    pub(super) clean_spaces: bool,
    /// BOS is added unless the metadata says otherwise.
    pub(super) add_bos: bool,
    /// BPE starts from characters instead of bytes, and spaces are spelled as in SentencePiece.
    pub(super) characters: Option<CharacterRules>,
}

/// Further rules of a pre-tokenizer for BPE on characters.
#[derive(Clone, Copy)]
pub(super) struct CharacterRules {
    /// A run of line breaks that is a token is not merged from single ones.
    pub(super) whole_breaks: bool,
    /// BOS is added even if the metadata says otherwise.
    pub(super) always_bos: bool,
}

const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    expressions: &[],
    thousands: None,
    powers_of_two: false,
    ignore_merges: false,
    clean_spaces: false,
    add_bos: false,
    characters: None,
};
const CLEANED: PreTokenizer = PreTokenizer { clean_spaces: true, ..PLAIN };

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

macro_rules! contractions {
    () => {
        r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    };
}

/// With groups of one to three digits, or up to the argument.
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

/// As [`cased!`] for all letters and marks, because llama.cpp takes those that are listed in
/// subclasses of letters for all of them.
macro_rules! marked {
    ($numbers:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?:",
            contractions!(),
            ")?|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const YOUTU: &[&str] = &[
    concat!("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+", "|[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+"),
    marked!(r"\p{N}"),
];

const DEEPSEEK_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const DEEPSEEK_V3: &[&str] = &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK_WORDS];

/// Scripts of Asia that AFMoE keeps apart from others.
const AFMOE: &[&str] = &[
    concat!(
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}",
        r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{EC0}-\x{EFF}\x{1780}-\x{17FF}",
        r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}",
        r"\x{1100}-\x{11FF}]+"
    ),
    DEEPSEEK_WORDS,
];

macro_rules! han {
    () => {
        concat!(
            r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}",
            r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
        )
    };
}

const KIMI: &str = concat!(
    "[",
    han!(),
    r"]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^",
    han!(),
    "]]+(?:",
    contractions!(),
    r")?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Names of images and their ends, then white space, digits and punctuation, each alone.
const CHAMELEON: &[&str] = &[
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
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

/// Without white space, which llama.cpp finds in no class but `\s`.
const DEEPSEEK_ASIAN: &str = r"[[一-龥ࠀ-一가-\x{D7FF}]&&[^\s]]+";

const DEEPSEEK_LLM: &[&str] = &[
    "[\r\n]",
    DEEPSEEK_LETTERS,
    r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
    r"\s+$",
    DEEPSEEK_ASIAN,
    r"\p{N}+",
];

const DEEPSEEK_CODER: &[&str] = &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_ASIAN, r"\p{N}"];

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

/// Whole lines, because no token holds a line break beside something else.
const LINES: &str = r"[^\n]+|[\n]+";

/// All pre-tokenizers, in the order in which errors list their names.
#[rustfmt::skip]
pub(super) static PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["default"],
        expressions: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..CLEANED
    },
    PreTokenizer {
        names: &[
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de",
            "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe",
            "exaone4", "mpt", "olmo", "jais",
        ],
        expressions: &[GPT2],
        ..CLEANED
    },
    PreTokenizer { names: &["trillion", "granite-docling"], expressions: &[GPT2], ..PLAIN },
    PreTokenizer {
        names: &[
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
            "lfm2", "jina-v5-nano",
        ],
        expressions: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..CLEANED
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        expressions: &[LLAMA3],
        ..CLEANED
    },
    PreTokenizer {
        names: &["glm4", "glm5"],
        expressions: &[LLAMA3], ignore_merges: true,
        ..CLEANED
    },
    PreTokenizer {
        names: &[
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "grok-2", "solar-open",
        ],
        expressions: &[QWEN2],
        ..PLAIN
    },
    PreTokenizer { names: &["stablelm2", "megrez"], expressions: &[QWEN2], ..CLEANED },
    PreTokenizer { names: &["qwen35"], expressions: &[QWEN35], ..PLAIN },
    PreTokenizer { names: &["laguna"], expressions: &[LINES, QWEN2], ..PLAIN },
    PreTokenizer { names: &["ufakzeka"], expressions: &[UFAKZEKA], ..PLAIN },
    PreTokenizer { names: &["smollm", "command-r"], expressions: &[r"\p{N}", GPT2], ..PLAIN },
    PreTokenizer {
        names: &["starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        expressions: &[r"\p{N}", GPT2],
        ..CLEANED
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4", "kanana2", "talkie"],
        expressions: &[GPT4O],
        ..PLAIN
    },
    PreTokenizer { names: &["minimax-m2"], expressions: &[GPT4O], ..PLAIN },
    PreTokenizer {
        names: &["granite-embed-multi-97m"],
        expressions: &[
            cased!(r"[\p{L}\p{M}]", concat!("(?:", contractions!(), ")?"), r"\p{N}{1,3}"),
        ],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        expressions: &[cased!(r"\p{L}", "", r"\p{N}")],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["deepseek-llm"], expressions: DEEPSEEK_LLM, ..PLAIN },
    PreTokenizer { names: &["deepseek-coder"], expressions: DEEPSEEK_CODER, ..PLAIN },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        expressions: DEEPSEEK_V3,
        ..PLAIN
    },
    PreTokenizer { names: &["spark2_5"], expressions: SPARK, ..PLAIN },
    PreTokenizer {
        names: &["afmoe"],
        expressions: AFMOE, thousands: Some(char::is_numeric),
        ..PLAIN
    },
    PreTokenizer {
        names: &["superbpe"],
        expressions: &[r"\p{N}+"],
        thousands: Some(|character| character.is_ascii_digit()),
        ..PLAIN
    },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        expressions: &[marked!(r"\p{N}{1,3}")],
        thousands: Some(char::is_numeric),
        ..PLAIN
    },
    PreTokenizer { names: &["youtu"], expressions: YOUTU, ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], expressions: &[KIMI], ..PLAIN },
    PreTokenizer { names: &["chameleon"], expressions: CHAMELEON, add_bos: true, ..PLAIN },
    PreTokenizer { names: &["jais-2"], expressions: &[LLAMA3], powers_of_two: true, ..CLEANED },
    PreTokenizer {
        names: &["falcon"],
        expressions: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        ..CLEANED
    },
    PreTokenizer { names: &["poro-chat"], expressions: &[BLOOM], ..PLAIN },
    PreTokenizer { names: &["bloom", "gpt3-finnish"], expressions: &[BLOOM], ..CLEANED },
    PreTokenizer { names: &["viking"], expressions: &[BLOOM, r"\p{N}"], ..PLAIN },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        expressions: &[BAILING],
        ..PLAIN
    },
    PreTokenizer { names: &["seed-coder"], expressions: &[SEED_CODER], ..PLAIN },
    PreTokenizer { names: &["exaone-moe"], expressions: &[EXAONE_MOE], ..CLEANED },
    PreTokenizer {
        names: &["minicpm5"],
        expressions: &[r"\p{N}{1,3}", llama3!(r"\p{N}+")],
        ignore_merges: true,
        ..CLEANED
    },
    PreTokenizer {
        names: &["gemma4", "granite-embed-multi-311m"],
        expressions: &[LINES],
        characters: Some(CharacterRules { whole_breaks: true, always_bos: true }),
        ..CLEANED
    },
    PreTokenizer {
        names: &["sarvam-moe"],
        expressions: &[LINES],
        characters: Some(CharacterRules { whole_breaks: false, always_bos: false }),
        ..PLAIN
    },
];

/// The pre-tokenizer with this name.
pub(super) fn pre_tokenizer(name: &str) -> Result<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied().collect();
        Error::UnknownPreTokenizer { found: name.to_owned(), known: known.join(", ") }
    })
}
