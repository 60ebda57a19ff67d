//! Flags as llama.cpp's tools spell them, which are not this command line's: those of one dash and
//! several letters, and those that mean something else here or nothing.

use std::ffi::{OsStr, OsString};
use std::iter::Peekable;

use crate::terminal::say;

/// What a flag means here.
enum Meaning {
    /// A flag of this name.
    Is(&'static str),
    /// Nothing: this is the default.
    Nothing,
    /// A model, whose name this precedes.
    Model(&'static str),
    /// The type of keys (0) or values (1) in the KV cache, which is one here.
    KvType(usize),
    /// It has no effect, for this reason.
    Idle(Value, &'static str),
    /// The seed if its value is a number, or else this command line's own `-s`.
    Seed,
    /// Layers on a GPU, of which llama.cpp also takes `all`, `-1` and `auto`.
    GpuLayers,
    /// It cannot be had; what to do instead.
    Refused(&'static str),
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
const DEVICES: &str = "--device cuda:0,1 chooses the GPUs, which share the work";
const EXPERTS: &str = "--expert-budget says how many bytes of the experts a GPU holds";
const SAMPLERS: &str = "samplers have a fixed order";
const SCHEDULING: &str = "the system schedules the threads";
const ALL_LAYERS: &str = "100000";
const ONE_ATTENTION: &str = "attention has one implementation on each device";

const FLAGS: &[(&str, Meaning)] = &[
    ("-m", Meaning::Model("")),
    ("--model", Meaning::Model("")),
    ("-hf", Meaning::Model("hf:")),
    ("-hfr", Meaning::Model("hf:")),
    ("--hf-repo", Meaning::Model("hf:")),
    ("-ngl", Meaning::GpuLayers),
    ("--gpu-layers", Meaning::GpuLayers),
    ("--n-gpu-layers", Meaning::GpuLayers),
    ("-s", Meaning::Seed),
    ("-np", Meaning::Is("--parallel")),
    ("-sm", Meaning::Idle(Value::One, DEVICES)),
    ("--split-mode", Meaning::Idle(Value::One, DEVICES)),
    ("-mg", Meaning::Idle(Value::One, DEVICES)),
    ("--main-gpu", Meaning::Idle(Value::One, DEVICES)),
    ("-ts", Meaning::Idle(Value::One, DEVICES)),
    ("--tensor-split", Meaning::Idle(Value::One, DEVICES)),
    ("-cmoe", Meaning::Refused(EXPERTS)),
    ("--cpu-moe", Meaning::Refused(EXPERTS)),
    ("-ncmoe", Meaning::Refused(EXPERTS)),
    ("--n-cpu-moe", Meaning::Refused(EXPERTS)),
    ("-ot", Meaning::Refused(EXPERTS)),
    ("--override-tensor", Meaning::Refused(EXPERTS)),
    ("-mu", Meaning::Refused("a model is a path, a known name, or hf:owner/repo:FILE.gguf")),
    (
        "--model-url",
        Meaning::Refused("a model is a path, a known name, or hf:owner/repo:FILE.gguf"),
    ),
    ("-md", Meaning::Refused("there are no draft models yet")),
    ("--model-draft", Meaning::Refused("there are no draft models yet")),
    ("--samplers", Meaning::Idle(Value::One, SAMPLERS)),
    ("--sampling-seq", Meaning::Idle(Value::One, SAMPLERS)),
    ("--numa", Meaning::Idle(Value::One, SCHEDULING)),
    ("--prio", Meaning::Idle(Value::One, SCHEDULING)),
    ("--poll", Meaning::Idle(Value::One, SCHEDULING)),
    ("-fit", Meaning::Idle(Value::Switch, "sizes that fit are the default")),
    ("--fit", Meaning::Idle(Value::Switch, "sizes that fit are the default")),
    ("-nkvo", Meaning::Idle(Value::None, "the KV cache is where its layer is computed")),
    ("--no-kv-offload", Meaning::Idle(Value::None, "the KV cache is where its layer is computed")),
    ("-lv", Meaning::Idle(Value::One, "--verbose prints more")),
    ("--mmap", Meaning::Nothing),
    ("--perf", Meaning::Nothing),
    ("--no-escape", Meaning::Nothing),
    ("-e", Meaning::Idle(Value::None, "escapes such as \\n in a prompt are not replaced")),
    ("--escape", Meaning::Idle(Value::None, "escapes such as \\n in a prompt are not replaced")),
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
    ("-ctk", Meaning::KvType(0)),
    ("--cache-type-k", Meaning::KvType(0)),
    ("-ctv", Meaning::KvType(1)),
    ("--cache-type-v", Meaning::KvType(1)),
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

/// Words of the command line, of which a repeated flag replaces those that it put there before.
#[derive(Default)]
struct Line(Vec<Vec<OsString>>);

impl Line {
    fn push(&mut self, word: impl Into<OsString>) {
        self.0.push(vec![word.into()]);
    }

    /// Puts words at the place of a flag, which the first call chooses.
    fn put(&mut self, place: &mut Option<usize>, words: impl IntoIterator<Item = OsString>) {
        let place = *place.get_or_insert_with(|| {
            self.0.push(Vec::new());
            self.0.len() - 1
        });
        self.0[place] = words.into_iter().collect();
    }

    fn words(self) -> Vec<OsString> {
        self.0.into_iter().flatten().collect()
    }
}

/// The command line with these flags by their names here, and notes about those without effect. Of
/// a repeated flag the last value counts. Fails with the reason if keys and values are to have two
/// types, or for a flag that is not supported.
pub(crate) fn translate(words: impl Iterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut words = words.peekable();
    let mut line = Line::default();
    let (mut model, mut layers, mut kv_type) = (None, None, None);
    let mut kv_types = [None, None];
    let mut two_types = None;
    while let Some(word) = words.next() {
        if word == "--" {
            line.push(word);
            words.by_ref().for_each(|word| line.push(word));
            break;
        }
        let (name, value) = split(&word);
        let Some((flag, meaning)) = FLAGS.iter().find(|(flag, _)| name == *flag) else {
            line.push(word);
            continue;
        };
        match meaning {
            Meaning::Is(name) => line.push(*name),
            Meaning::Nothing => value.into_iter().for_each(|value| line.push(value)),
            Meaning::Model(prefix) => {
                let name = value.or_else(|| words.next());
                let with_prefix =
                    |name: OsString| [OsStr::new(prefix), &name].into_iter().collect();
                line.put(&mut model, name.map(with_prefix));
            }
            Meaning::KvType(of) => {
                let value = value.or_else(|| words.next());
                kv_types[*of] = Some(value.clone());
                let is_other = kv_types.iter().flatten().any(|kind| *kind != value);
                two_types = is_other.then_some(flag);
                let words = [Some("--kv-type".into()), value];
                line.put(&mut kv_type, words.into_iter().flatten());
            }
            Meaning::Seed => {
                let is_number =
                    |word: &OsString| word.to_str().is_some_and(|word| word.parse::<u64>().is_ok());
                // `bench` has a flag of this name, too.
                let is_run = line.0.iter().flatten().take(2).any(|word| word == "run");
                let is_seed = is_run && words.peek().is_some_and(is_number);
                line.push(if is_seed { "--seed" } else { "-s" });
                words.next().into_iter().for_each(|value| line.push(value));
            }
            Meaning::GpuLayers => {
                let value = value.or_else(|| words.next());
                line.put(&mut layers, gpu_layers(value));
            }
            Meaning::Refused(instead) => return Err(format!("{flag} is not supported: {instead}")),
            Meaning::Idle(takes, reason) => {
                if value.is_none() {
                    skip(takes, &mut words);
                }
                say(&format!("{flag} has no effect: {reason}"));
            }
        }
    }
    match two_types {
        Some(flag) => Err(format!("{flag}: the KV cache has one type here, which --kv-type sets")),
        None => Ok(line.words()),
    }
}

/// The words for layers on a GPU; none for the default.
fn gpu_layers(value: Option<OsString>) -> Vec<OsString> {
    let layers = match value.as_ref().and_then(|value| value.to_str()) {
        Some("auto") => return Vec::new(),
        Some("all" | "-1") => Some(ALL_LAYERS.into()),
        _ => value,
    };
    [Some("--gpu-layers".into()), layers].into_iter().flatten().collect()
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
            ("run x -s 42 Hi", "run x --seed 42 Hi"),
            ("run x -s Briefly Hi", "run x -s Briefly Hi"),
            ("bench x -s 4", "bench x -s 4"),
            ("run x -ngl all -sm layer -mg 0 -ts 1,1", "run x --gpu-layers 100000"),
            ("run x --gpu-layers=auto --n-gpu-layers 2", "run x --gpu-layers 2"),
            ("run -m a -m b Hello", "run b Hello"),
            ("run -hf me/Tiny --model=b Hello", "run b Hello"),
            ("run x -ngl 10 -ngl 20", "run x --gpu-layers 20"),
            ("run x -ngl 10 -ngl auto", "run x"),
            ("run x -ctk q8_0 -ctk f16", "run x --kv-type f16"),
            ("run x -ctk q8_0 -ctv f16 -ctk f16", "run x --kv-type f16"),
            ("run x -ctk f16 -- -ctv q8_0", "run x --kv-type f16 -- -ctv q8_0"),
            ("run x --samplers top_k --numa distribute -fit on -e", "run x"),
        ] {
            assert_eq!(translated(given), expected, "{given}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_its_name() {
        let words = ["run", "x", "-ncmoe", "2"];
        let error = translate(words.into_iter().map(OsString::from)).unwrap_err();
        assert!(error.starts_with("-ncmoe is not supported: --expert-budget"), "{error}");
    }

    #[test]
    fn keys_and_values_have_one_type() {
        let words = ["run", "x", "-ctk", "f16", "-ctv", "q8_0"];
        let error = translate(words.into_iter().map(OsString::from)).unwrap_err();
        assert_eq!(error, "-ctv: the KV cache has one type here, which --kv-type sets");
    }
}
