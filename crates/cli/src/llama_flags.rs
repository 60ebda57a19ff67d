//! Flags as llama.cpp's tools spell them, which are not this command line's: those of one dash and
//! several letters, and those that mean something else here or nothing.

use std::ffi::{OsStr, OsString};
use std::iter::Peekable;

use crate::terminal::say;

/// What a flag means here.
enum Meaning {
    /// A flag of this name.
    Is(&'static str),
    /// Nothing: what follows has no flag, or this is the default.
    Nothing,
    /// A model, whose name this precedes.
    Model(&'static str),
    /// The type of the KV cache, which is one for keys and values.
    KvType,
    /// It has no effect, for this reason.
    Idle(Value, &'static str),
}

/// The value of a flag without effect.
enum Value {
    None,
    One,
    /// One of [`SWITCH`], or none.
    Switch,
}

const SWITCH: [&str; 10] =
    ["on", "off", "auto", "1", "0", "-1", "true", "false", "enabled", "disabled"];
const ONE_COUNT: &str = "--threads is the number for prompts, too";
const NO_COLOURS: &str = "answers have no colours";
const ONE_TURN: &str = "with a prompt there is one answer, without one a chat";
const CHAT: &str = "without a prompt this is a chat";
const ONE_ATTENTION: &str = "attention has one implementation on each device";

const FLAGS: &[(&str, Meaning)] = &[
    ("-m", Meaning::Nothing),
    ("--model", Meaning::Nothing),
    ("-hf", Meaning::Model("hf:")),
    ("-hfr", Meaning::Model("hf:")),
    ("--hf-repo", Meaning::Model("hf:")),
    ("-ngl", Meaning::Is("--gpu-layers")),
    ("-ub", Meaning::Is("--batch-size")),
    ("-dev", Meaning::Is("--device")),
    ("-sys", Meaning::Is("--system")),
    ("-cnv", Meaning::Nothing),
    ("--conversation", Meaning::Nothing),
    ("-st", Meaning::Idle(Value::None, ONE_TURN)),
    ("--single-turn", Meaning::Idle(Value::None, ONE_TURN)),
    ("--jinja", Meaning::Nothing),
    ("--no-warmup", Meaning::Nothing),
    ("--no-display-prompt", Meaning::Nothing),
    ("--no-context-shift", Meaning::Nothing),
    ("--log-disable", Meaning::Nothing),
    ("--simple-io", Meaning::Nothing),
    ("--no-perf", Meaning::Idle(Value::None, "--quiet prints the answer alone")),
    ("-no-cnv", Meaning::Is("--raw")),
    ("-ctk", Meaning::KvType),
    ("--cache-type-k", Meaning::KvType),
    ("-ctv", Meaning::KvType),
    ("--cache-type-v", Meaning::KvType),
    ("-tb", Meaning::Idle(Value::One, ONE_COUNT)),
    ("--threads-batch", Meaning::Idle(Value::One, ONE_COUNT)),
    ("-fa", Meaning::Idle(Value::Switch, ONE_ATTENTION)),
    ("--flash-attn", Meaning::Idle(Value::Switch, ONE_ATTENTION)),
    (
        "--no-mmap",
        Meaning::Idle(
            Value::None,
            "weights are in memory unless --no-repack leaves them in the file",
        ),
    ),
    ("--mlock", Meaning::Idle(Value::None, "memory is not locked")),
    ("--color", Meaning::Idle(Value::Switch, NO_COLOURS)),
    ("-co", Meaning::Idle(Value::Switch, NO_COLOURS)),
    ("-i", Meaning::Idle(Value::None, CHAT)),
    ("--interactive", Meaning::Idle(Value::None, CHAT)),
];

/// The command line with these flags by their names here, and notes about those without effect.
/// Fails with the reason if keys and values are to have two types.
pub(crate) fn translate(words: impl Iterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut words = words.peekable();
    let (mut out, mut kv_type) = (Vec::new(), None);
    while let Some(word) = words.next() {
        if word == "--" {
            out.push(word);
            out.extend(words);
            break;
        }
        let (name, mut value) = split(&word);
        let Some((flag, meaning)) = FLAGS.iter().find(|(flag, _)| name == *flag) else {
            out.push(word);
            continue;
        };
        match meaning {
            Meaning::Is(name) => out.push(name.into()),
            Meaning::Nothing => out.extend(value),
            Meaning::Model(prefix) => {
                let name = value.or_else(|| words.next());
                out.extend(name.map(|name| [OsStr::new(prefix), &name].into_iter().collect()));
            }
            Meaning::KvType => {
                value = value.or_else(|| words.next());
                match &kv_type {
                    None => {
                        out.extend([Some("--kv-type".into()), value.clone()].into_iter().flatten())
                    }
                    Some(first) if *first == value => (),
                    Some(_) => {
                        return Err(format!(
                            "{flag}: the KV cache has one type here, which --kv-type sets"
                        ));
                    }
                }
                kv_type = Some(value);
            }
            Meaning::Idle(takes, reason) => {
                if value.is_none() {
                    skip(takes, &mut words);
                }
                say(&format!("{flag} has no effect: {reason}"));
            }
        }
    }
    Ok(out)
}

/// A long flag and the value after its equals sign.
fn split(word: &OsStr) -> (&OsStr, Option<OsString>) {
    match word.to_str().and_then(|text| text.split_once('=')) {
        Some((name, value)) if name.starts_with("--") => (OsStr::new(name), Some(value.into())),
        _ => (word, None),
    }
}

/// Skips the value of a flag, if it takes one and it is there.
fn skip(takes: &Value, words: &mut Peekable<impl Iterator<Item = OsString>>) {
    let is_value = |word: &OsString| match takes {
        Value::None => false,
        Value::One => true,
        Value::Switch => SWITCH.iter().any(|switch| word == switch),
    };
    words.next_if(is_value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> String {
        let words = translate(line.split(' ').map(OsString::from)).unwrap();
        words.join(OsStr::new(" ")).into_string().unwrap()
    }

    #[test]
    fn flags_have_their_names_here() {
        for (given, expected) in [
            ("run -m x.gguf -ngl 3 -p Hi", "run x.gguf --gpu-layers 3 -p Hi"),
            ("run --model=x.gguf -no-cnv", "run x.gguf --raw"),
            ("run -hf me/Tiny:Q8_0 -cnv", "run hf:me/Tiny:Q8_0"),
            ("run --hf-repo=me/Tiny", "run hf:me/Tiny"),
            ("run x -ctk q8_0 -ctv q8_0", "run x --kv-type q8_0"),
            ("run x --cache-type-v=f16", "run x --kv-type f16"),
            ("run x -fa on Hello", "run x Hello"),
            ("run x -fa 1 Hello", "run x Hello"),
            ("run x -fa Hello", "run x Hello"),
            ("run x --flash-attn=off -tb 4 --no-mmap --mlock Hello", "run x Hello"),
            ("run x -- -fa", "run x -- -fa"),
            ("run x -st --jinja --color auto -i Hello", "run x Hello"),
            ("run x --no-warmup --no-display-prompt --no-perf -co Hello", "run x Hello"),
            ("run x --single-turn --simple-io --log-disable --no-context-shift", "run x"),
            ("run x -ctk", "run x --kv-type"),
        ] {
            assert_eq!(translated(given), expected, "{given}");
        }
    }

    #[test]
    fn keys_and_values_have_one_type() {
        let words = ["run", "x", "-ctk", "f16", "-ctv", "q8_0"];
        let error = translate(words.into_iter().map(OsString::from)).unwrap_err();
        assert_eq!(error, "-ctv: the KV cache has one type here, which --kv-type sets");
    }
}
