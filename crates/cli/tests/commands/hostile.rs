//! Files that were written to crash the binary, to fill the memory or never to end. Each must be
//! one line of error with status 1, within two seconds of processor time and 500 MB of memory,
//! which the system enforces.

mod templates;

use std::fs;
use std::process::{Command, Output};

use bodkin_gguf::{Array, File, Format, Metadata, Value, Writer};

use crate::place::{Place, failure, model, stderr};

/// Runs the binary within the limits.
fn bounded(place: &Place, args: &[&str]) -> Output {
    limited(place, "ulimit -t 2 && ulimit -d 500000", args)
}

/// Runs the binary within the limits that these commands of a shell set.
fn limited(place: &Place, limits: &str, args: &[&str]) -> Output {
    let plain = place.bodkin(args);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits} && exec \"$@\""), "sh"]).arg(plain.get_program());
    command.args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(plain.get_current_dir().unwrap()).output().unwrap()
}

/// What is wrong with the way a command ended, if it did not fail as it should.
fn fault(name: &str, output: &Output) -> Option<String> {
    let text = stderr(output);
    let mut errors = text.lines().filter(|line| line.starts_with("error: "));
    let is_last =
        text.ends_with('\n') && text.lines().last().is_some_and(|l| l.starts_with("error: "));
    let is_one = errors.next().is_some() && errors.next().is_none();
    let is_good = output.status.code() == Some(1)
        && is_last
        && is_one
        && text.len() < 4000
        && !text.contains("panicked at");
    let shown: String = text.chars().take(300).collect();
    (!is_good).then(|| format!("{name}: {}: {shown}", output.status))
}

#[track_caller]
fn assert_none(faults: impl IntoIterator<Item = String>) {
    let faults: Vec<String> = faults.into_iter().collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn text(text: impl AsRef<[u8]>) -> Value {
    Value::String(text.as_ref().into())
}

type Change = Box<dyn Fn(&mut Metadata)>;

fn set(key: &'static str, value: Value) -> Change {
    Box::new(move |m| m.insert(key, value.clone()))
}

fn strings(count: usize, text: &str) -> Value {
    Value::Array(Array::String(vec![text.as_bytes().into(); count]))
}

/// Texts that are hashed to the same number by multiplication with constants (rustc-hash 2).
fn equal_hashes() -> Value {
    let first = 0x243f_6a88_85a3_08d3_u64.to_le_bytes();
    let texts = (0..100_000_u64).map(|number| [first, number.to_le_bytes()].concat().into());
    Value::Array(Array::String(texts.collect()))
}

/// Changes of a model's metadata, with names.
fn metadata() -> Vec<(&'static str, Change)> {
    vec![
        ("a million equal tokens", set("tokenizer.ggml.tokens", strings(1_000_000, "a"))),
        ("no token", set("tokenizer.ggml.tokens", strings(0, ""))),
        ("four million texts", set("texts", strings(4_000_000, ""))),
        ("a long token", set("tokenizer.ggml.tokens", strings(1, &"a".repeat(1025)))),
        ("long tokens", set("tokenizer.ggml.tokens", strings(30_000, &"a".repeat(1000)))),
        ("two million merges", set("tokenizer.ggml.merges", strings(2_000_000, "a b"))),
        ("tokens with one hash", set("tokenizer.ggml.tokens", equal_hashes())),
        (
            "tokens that are numbers",
            set("tokenizer.ggml.tokens", Value::Array(Array::U8(vec![1; 384]))),
        ),
        ("a text for tokens", set("tokenizer.ggml.tokens", text("a"))),
        ("few types", set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1; 3])))),
        ("an unknown tokenizer", set("tokenizer.ggml.model", text("x".repeat(1 << 20)))),
        ("a template that is a number", set("tokenizer.chat_template", Value::U32(1))),
        ("a template that is no UTF-8", set("tokenizer.chat_template", text(b"{{ \xff\xfe }}"))),
        ("no layer", set("llama.block_count", Value::U32(0))),
        ("too few layers", set("llama.block_count", Value::U32(1))),
        ("too many layers", set("llama.block_count", Value::U32(u32::MAX))),
        ("no head", set("llama.attention.head_count", Value::U32(0))),
        ("many heads", set("llama.attention.head_count", Value::U32(u32::MAX))),
        ("odd key heads", set("llama.attention.head_count_kv", Value::U32(3))),
        ("no width", set("llama.embedding_length", Value::U32(0))),
        ("a huge width", set("llama.embedding_length", Value::U32(u32::MAX))),
        ("a huge hidden width", set("llama.feed_forward_length", Value::U64(u64::MAX))),
        ("no context", set("llama.context_length", Value::U32(0))),
        ("a NaN epsilon", set("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN))),
        ("a NaN base", set("llama.rope.freq_base", Value::F32(f32::NAN))),
        ("a rotation of more than a head", set("llama.rope.dimension_count", Value::U32(1 << 30))),
        ("a list as architecture", set("general.architecture", strings(9, "llama"))),
        ("parts", set("split.count", Value::U16(u16::MAX))),
    ]
}

#[test]
fn metadata_end_with_one_line() {
    let place = Place::new();
    let faults = metadata().into_iter().filter_map(|(name, change)| {
        let path = place.variant("llama", change);
        let output = bounded(&place, &["run", &path, "Hello", "-n", "1", "-t", "1", "-q"]);
        fault(name, &output)
    });
    assert_none(faults);
}

#[test]
fn metadata_that_name_no_token_are_ignored() {
    let place = Place::new();
    for (name, change) in [
        ("one token", set("tokenizer.ggml.tokens", strings(1, "a"))),
        ("types", set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![-7; 384])))),
        ("merges of nothing", set("tokenizer.ggml.merges", strings(9, "zz yy"))),
        ("merges without a space", set("tokenizer.ggml.merges", strings(9, "zzyy"))),
        ("the end", set("tokenizer.ggml.eos_token_id", Value::U32(u32::MAX))),
        ("the start", set("tokenizer.ggml.bos_token_id", Value::U32(u32::MAX))),
    ] {
        let path = place.variant("llama", change);
        let output = bounded(&place, &["run", &path, "Hello", "-n", "1", "-t", "1", "-q"]);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
    }
}

#[test]
fn surgery_files_end_with_one_line() {
    let place = Place::new();
    let input = model("llama");
    let rule = "[[rule]]\nmethod = 'magnitude'\nsparsity = 0.5\n";
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("bytes", vec![0xff; 100]),
        ("zeros", vec![0; 1 << 20]),
        ("nested lists", format!("x = {}", "[".repeat(100_000)).into()),
        ("nested tables", format!("x = {}", "{a = ".repeat(100_000)).into()),
        ("many numbers", format!("a = [{}]", "0,".repeat(3_000_000)).into()),
        ("a dotted key", format!("{}a = 1", "a.".repeat(100_000)).into()),
        ("a dotted table", format!("[{}a]", "a.".repeat(100_000)).into()),
        ("many tables", (0..50_000).map(|i| format!("[a{i}]\n")).collect::<String>().into()),
        ("wrong rules", rule.replace("0.5", "2").repeat(1000).into()),
        ("an open text", format!("{rule}tensors = '{}", "x".repeat(1 << 20)).into()),
        ("an open table", b"[[rule".to_vec()),
        ("nested groups", format!("{rule}tensors = '{}'", "(".repeat(100_000)).into()),
        (
            "repeated repeats",
            format!("{rule}tensors = '((((a{{99}}){{99}}){{99}}){{99}}){{99}}'").into(),
        ),
        ("a huge class", format!("{rule}tensors = '{}'", r"\pL{999}".repeat(1000)).into()),
        ("alternatives", format!("{rule}tensors = '{}zzz'", "(a|b)*zzz|".repeat(50_000)).into()),
        ("large classes", format!("{rule}tensors = '\\w{{2}}zzz'\n").repeat(1000).into()),
        ("many rules", format!("{rule}tensors = 'q'\n").repeat(1001).into()),
        ("NaN", b"[[rule]]\nmethod = 'magnitude'\nsparsity = nan\n".to_vec()),
        ("infinity", b"[[rule]]\nmethod = 'magnitude'\nsparsity = inf\n".to_vec()),
        ("a huge number", b"[[rule]]\nsparsity = 99999999999999999999999\n".to_vec()),
        ("a huge pattern", b"[[rule]]\nmethod = 'magnitude'\npattern = '1:99999999999'\n".to_vec()),
        ("a device", b"imatrix = '/dev/zero'\n[[rule]]\nmethod = 'ria'\nsparsity = 0.5\n".to_vec()),
        ("an unknown method", format!("[[rule]]\nmethod = '{}'\n", "x".repeat(1 << 20)).into()),
        ("a date", format!("{rule}format = 1979-05-27\n").into()),
        ("a key twice", format!("{rule}{rule}sparsity = 0.5\n").into()),
    ];
    let faults = files.into_iter().filter_map(|(name, bytes)| {
        fs::write(place.path("s.toml"), bytes).unwrap();
        fault(name, &bounded(&place, &["prune", &input, "out.gguf", "--surgery", "s.toml"]))
    });
    assert_none(faults);
    assert_eq!(place.files(), ["home", "s.toml"]);
}

#[test]
fn a_long_pattern_of_a_suite_takes_little_memory() {
    let place = Place::new();
    let case = format!("prompt = 'x'\nmax_tokens = 1\nmatches = '{}a'", "(a|b)*|".repeat(50_000));
    fs::write(place.path("suite.toml"), format!("[[answer]]\n{case}\n")).unwrap();
    let output = bounded(&place, &["check", &model("llama"), "--suite", "suite.toml", "-t", "1"]);
    assert!(output.status.code().is_some(), "{}: {}", output.status, stderr(&output));
    fs::write(place.path("suite.toml"), format!("a = [{}]", "0,".repeat(3_000_000))).unwrap();
    let output = bounded(&place, &["check", &model("llama"), "--suite", "suite.toml", "-t", "1"]);
    let error = stderr(&output);
    assert!(error.contains("suite.toml: expected at most 1000000 bytes"), "{error}");
}

#[test]
fn texts_to_embed_end_with_one_line() {
    let place = Place::new();
    let numbers = "0,".repeat(10_000_000);
    for (file, text) in [
        ("a.jsonl", format!("{{\"text\":\"x\",\"a\":[{numbers}0]}}\n")),
        ("a.csv", format!("text{}\n", ",".repeat(40_000_000))),
        ("b.csv", format!("text{}\n", ",x".repeat(200_000))),
        ("c.csv", format!("text\n\"{}", "\n".repeat(20_000_000))),
        ("b.jsonl", format!("{{\"text\":\"x\",\"a\":[{}0]}}\n", "[0],".repeat(1_200_000))),
    ] {
        fs::write(place.path(file), text).unwrap();
        let output = bounded(&place, &["embed", &model("bert"), "-f", file, "-t", "1"]);
        assert_none(fault(file, &output));
    }
}

/// All rows together would take 300 MB.
#[test]
fn rows_of_many_columns_take_the_memory_of_a_few() {
    let place = Place::new();
    let names: String = (0..9000).map(|i| format!(",c{i}")).collect();
    let row = format!("a hen{}\n", ",x".repeat(9000));
    fs::write(place.path("wide.csv"), format!("text{names}\n{}", row.repeat(250))).unwrap();
    let embed = ["embed", &model("bert"), "-f", "wide.csv", "-t", "1", "-o", "out.npy"];
    let output = limited(&place, "ulimit -d 150000", &embed);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn json_to_convert_ends_with_one_line() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    let write_header = |header: &str| {
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        fs::write(place.path("folder/model.safetensors"), file).unwrap();
    };
    write_header("{}");
    let convert = || bounded(&place, &["convert", "folder", "out.gguf"]);
    fs::write(place.path("folder/config.json"), "\"".repeat(40_000_000)).unwrap();
    let output = convert();
    assert_none(fault("config.json", &output));
    assert!(stderr(&output).contains("expected at most 4000000 bytes"), "{}", stderr(&output));
    fs::write(place.path("folder/config.json"), "{\"architectures\":[\"LlamaForCausalLM\"]}")
        .unwrap();
    write_header(&format!("{{\"a\":[{}0]}}", "0,".repeat(7_000_000)));
    let output = convert();
    assert_none(fault("model.safetensors", &output));
    assert!(
        stderr(&output).contains("expected values of at most 288 MB in memory"),
        "{}",
        stderr(&output)
    );
}

/// Writes a copy of an importance matrix with those tensors, and data, that `keep` keeps.
fn write_imatrix(place: &Place, keep: impl Fn(&str, &mut Vec<u8>) -> bool) {
    let file = File::open(place.path("good.gguf")).unwrap();
    let mut writer = Writer::new(place.path("bad.gguf"), file.metadata()).unwrap();
    for tensor in file.tensors() {
        let mut data = file.data(tensor).to_vec();
        if !keep(&tensor.name, &mut data) {
            continue;
        }
        let is_whole = data.len() as u64 == tensor.bytes;
        let shape = if is_whole { tensor.shape.clone() } else { vec![data.len() as u64 / 4] };
        let write = move |out: &mut dyn std::io::Write| out.write_all(&data);
        writer.tensor_with(&tensor.name, Format::F32, &shape, write).unwrap();
    }
    writer.save().unwrap();
}

fn fill(data: &mut [u8], value: f32) {
    data.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&value.to_le_bytes()));
}

#[test]
fn importance_matrices_end_with_one_line() {
    let place = Place::new();
    let input = model("llama");
    fs::write(place.path("text"), "The hens in the garden were older. ".repeat(40)).unwrap();
    place.text(&["imatrix", &input, "-f", "text", "-c", "32", "-o", "good.gguf"]);
    let faults_of = |name: &str| {
        let quantize = ["quantize", &input, "out.gguf", "Q4_K", "--imatrix", "bad.gguf"];
        let flags = ["--imatrix", "bad.gguf", "--method", "wanda"];
        let prune = [&["prune", &input, "out.gguf"][..], &flags].concat();
        [&quantize[..], &prune]
            .into_iter()
            .filter_map(|args| fault(&format!("{} {name}", args[0]), &bounded(&place, args)))
            .collect::<Vec<_>>()
    };
    let mut faults = Vec::new();
    for (name, value) in [("NaN", f32::NAN), ("infinity", f32::INFINITY), ("negative sums", -1.0)] {
        write_imatrix(&place, |tensor, data| {
            if tensor.ends_with(".in_sum2") {
                fill(data, value);
            }
            true
        });
        faults.extend(faults_of(name));
    }
    for (name, value) in [("NaN rows", f32::NAN), ("negative rows", -1.0)] {
        write_imatrix(&place, |tensor, data| {
            if tensor.ends_with(".counts") {
                fill(data, value);
            }
            true
        });
        faults.extend(faults_of(name));
    }
    write_imatrix(&place, |tensor, _| !tensor.ends_with(".counts"));
    faults.extend(faults_of("no counts"));
    write_imatrix(&place, |tensor, _| tensor.ends_with(".counts"));
    faults.extend(faults_of("no sums"));
    write_imatrix(&place, |_, _| false);
    faults.extend(faults_of("no tensors"));
    write_imatrix(&place, |_, data| {
        data.truncate(4);
        true
    });
    faults.extend(faults_of("narrow tensors"));
    let good = fs::read(place.path("good.gguf")).unwrap();
    for (name, len) in [("no header", 3), ("half a header", 200), ("half", good.len() / 2)] {
        fs::write(place.path("bad.gguf"), &good[..len]).unwrap();
        faults.extend(faults_of(name));
    }
    fs::copy(&input, place.path("bad.gguf")).unwrap();
    faults.extend(faults_of("a model"));
    fs::write(place.path("bad.gguf"), "\x01\0\0\0".repeat(10_000)).unwrap();
    faults.extend(faults_of("the old format"));
    assert_none(faults);
}

#[test]
fn log_probabilities_end_with_one_line() {
    let place = Place::new();
    let input = model("llama");
    fs::write(place.path("text"), "The hens in the garden were older. ".repeat(40)).unwrap();
    let base = ["--kl-divergence-base", "base.kld"];
    let args = ["perplexity", &input, "-f", "text", "-c", "32", "--chunks", "3"];
    place.text(&[&args[..], &base].concat());
    let good = fs::read(place.path("base.kld")).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let (rows, max) = (20 + 4 * 32 * 3, u32::MAX.to_le_bytes());
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("text", b"once upon a time".to_vec()),
        ("another magic number", with(0, b"_logitz_")),
        ("windows of nothing", with(8, &[0; 4])),
        ("windows of one token", with(8, &1_u32.to_le_bytes())),
        ("huge windows", with(8, &max)),
        ("large windows", with(8, &0x7fff_ffff_u32.to_le_bytes())),
        ("no vocabulary", with(12, &[0; 4])),
        ("another vocabulary", with(12, &385_u32.to_le_bytes())),
        ("a huge vocabulary", with(12, &max)),
        ("no window", with(16, &[0; 4])),
        ("negative windows", with(16, &max)),
        ("many windows", with(16, &0x7fff_ffff_u32.to_le_bytes())),
        ("another token", with(20, &max)),
        ("negative tokens", with(24, &(-1_i32).to_le_bytes())),
        ("a header", good[..20].to_vec()),
        ("half of the tokens", good[..20 + 60].to_vec()),
        ("no rows", good[..rows].to_vec()),
        ("half of the rows", good[..rows + (good.len() - rows) / 2].to_vec()),
        ("all but a byte", good[..good.len() - 1].to_vec()),
        ("a NaN scale", with(rows, &f32::NAN.to_le_bytes())),
        ("an infinite scale", with(rows, &f32::INFINITY.to_le_bytes())),
        ("a NaN minimum", with(rows + 4, &f32::NAN.to_le_bytes())),
    ];
    let faults = files.into_iter().filter_map(|(name, bytes)| {
        fs::write(place.path("base.kld"), bytes).unwrap();
        let args = ["perplexity", &input, "--kl-divergence", "-t", "1"];
        fault(name, &bounded(&place, &[&args[..], &base].concat()))
    });
    assert_none(faults);
    // A file without data, of the size of its 2^28 tokens.
    let header = [&b"_logits_"[..], &[1, 0, 0, 0], &[1, 0, 0, 0], &[0, 0, 0, 16]].concat();
    fs::write(place.path("base.kld"), header).unwrap();
    let file = fs::OpenOptions::new().write(true).open(place.path("base.kld")).unwrap();
    file.set_len(20 + (1 << 30)).unwrap();
    let args = ["perplexity", &input, "--kl-divergence", "-t", "1"];
    assert_none(fault("many tokens", &bounded(&place, &[&args[..], &base].concat())));
}

#[test]
fn texts_of_a_gibibyte_end_with_one_line() {
    let place = Place::new();
    fs::File::create(place.path("text")).unwrap().set_len(1 << 30).unwrap();
    let (llama, bert) = (model("llama"), model("bert"));
    let whole = "text: expected at most 268435456 bytes, found 1073741824";
    let prompt = "text: expected at most 67108864 bytes, found 1073741824";
    let line = "text:1: expected at most 16000000 bytes, found more";
    for (args, wanted) in [
        (&["run", &llama, "-n", "1"][..], prompt),
        (&["embed", &bert], line),
        (&["embed", &bert, "--whole"], whole),
        (&["perplexity", &llama], whole),
        (&["imatrix", &llama, "-o", "out.gguf"], whole),
    ] {
        let output = bounded(&place, &[args, &["-f", "text"]].concat());
        assert_none(fault(args[0], &output));
        let found = stderr(&output);
        assert!(found.ends_with(&format!("error: {wanted}\n")), "{found}");
    }
    // The size of a pipe is not known before half of it is read.
    let text = fs::File::open(place.path("text")).unwrap();
    let output = place.bodkin(&["tokenize", &llama]).stdin(text).output().unwrap();
    let wanted = "standard input: expected at most 268435456 bytes, found more";
    assert_eq!(failure(&output), wanted);
}
