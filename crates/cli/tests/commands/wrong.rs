//! Wrong input: one line that names the thing, the right status, and nothing half-written.

use std::fs;

use bodkin_gguf::{Metadata, Value};

use crate::place::{Place, failure, model, stderr};

/// Flags of a short answer, so that what is not found wrong ends soon.
const SHORT: [&str; 3] = ["Hello", "-n", "1"];

#[test]
fn what_is_no_model_is_named() {
    let place = Place::new();
    let whole = fs::read(model("llama")).unwrap();
    fs::write(place.path("text.gguf"), "once upon a time").unwrap();
    fs::write(place.path("empty.gguf"), "").unwrap();
    fs::write(place.path("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    fs::write(place.path("header.gguf"), &whole[..100]).unwrap();
    fs::create_dir(place.path("folder")).unwrap();
    for (name, needle) in [
        ("absent.gguf", "No such file"),
        ("./absent", "No such file"),
        ("folder", "found a folder"),
        ("./folder", "found a folder"),
        ("text.gguf", "not a GGUF file"),
        ("empty.gguf", "truncated"),
        ("cut.gguf", "truncated"),
        ("header.gguf", "truncated"),
        ("absent-name", "smollm2"),
    ] {
        for command in [&["run"][..], &["inspect"], &["bench"], &["tokenize"]] {
            let flags = if command == ["run"] { &SHORT[..] } else { &[] };
            let error = failure(&place.run(&[command, &[name], flags].concat()));
            assert!(error.contains(name) && error.contains(needle), "{command:?} {name}: {error}");
        }
    }
}

#[test]
fn images_are_refused_for_want_of_a_projector() {
    let place = Place::new();
    let image = place.path("image.png").display().to_string();
    fs::write(&image, b"\x89PNG\r\n\x1a\n").unwrap();
    let qwen = model("qwen2");
    for flags in [["--image", &image], ["--mmproj", "mmproj.gguf"], ["--file", &image]] {
        let output = place.run(&[&["run", &qwen], &SHORT[..], &flags].concat());
        let error = stderr(&output);
        assert!(!output.status.success() && error.contains("need a vision projector"), "{error}");
        assert!(error.trim_end().lines().count() == 1 && !error.contains("<IMAGE>"), "{error}");
    }
    let projector = place.variant("llama", |metadata| {
        metadata.insert("general.architecture", Value::String(Box::from(&b"clip"[..])));
    });
    let error = failure(&place.run(&[&["run", &projector], &SHORT[..]].concat()));
    assert!(error.contains("this is a projector (mmproj)"), "{error}");
}

#[test]
fn an_unknown_architecture_is_named_with_the_nearest_known_one() {
    let place = Place::new();
    let path = place.variant("llama", |metadata| {
        let keys: Vec<_> = metadata.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
        for (key, value) in keys {
            metadata.insert(key.replace("llama.", "perceptron."), value);
        }
        metadata.insert("perceptron.layers_of_1957", Value::U32(1));
        metadata.insert("general.architecture", Value::String(Box::from(&b"perceptron"[..])));
    });
    let error = failure(&place.run(&[&["run", &path], &SHORT[..]].concat()));
    for text in [error, place.text(&["inspect", &path])] {
        let nearest = "unknown architecture `perceptron`; the nearest known ones are llama, \
                       ernie4_5, smollm3, mistral3 and gemma, which do not read the keys \
                       layers_of_1957";
        assert!(text.contains(nearest), "{text}");
    }
}

#[test]
fn an_architecture_without_keys_is_named_with_those_known() {
    let place = Place::new();
    let change = |metadata: &mut Metadata| {
        metadata.insert("general.architecture", Value::String(Box::from(&b"perceptron"[..])));
    };
    let path = place.variant("llama", change);
    let error = failure(&place.run(&[&["run", &path], &SHORT[..]].concat()));
    for needle in ["variant.gguf", "`perceptron`", "llama", "gemma3", "qwen2"] {
        assert!(error.contains(needle), "{error}");
    }
    // What needs no plan works.
    assert!(place.text(&["inspect", &path]).contains("perceptron"));
    assert_eq!(place.text(&["tokenize", &path, "Hello world"]), "0,45,354,81,84,275,285,81,73\n");
}

#[test]
fn a_terminal_is_not_commanded_by_a_file() {
    let place = Place::new();
    let change = |metadata: &mut Metadata| {
        metadata.insert("general.architecture", Value::String(Box::from(&b"\x1b[2Jx"[..])));
        metadata.insert("a\n\x1b[2J", Value::String("\u{9b}2J \"it's\"".as_bytes().into()));
    };
    let path = place.variant("llama", change);
    let error = failure(&place.run(&[&["run", &path], &SHORT[..]].concat()));
    assert!(error.contains("`\\u{1b}[2Jx`"), "{error}");
    let text = place.text(&["inspect", &path]) + &place.text(&["inspect", &path, "--metadata"]);
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
    assert!(text.contains("\na\\n\\u{1b}[2J = \"\\u{9b}2J \\\"it's\\\"\"\n"), "{text}");
}

#[test]
fn long_texts_of_a_file_are_cut() {
    let place = Place::new();
    for key in ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"] {
        let text = "no` such ".repeat(20_000);
        let change = |metadata: &mut Metadata| {
            metadata.insert(key, Value::String(Box::from(text.as_bytes())));
        };
        let path = place.variant("llama", change);
        let error = failure(&place.run(&[&["run", &path], &SHORT[..]].concat()));
        assert!(error.contains("variant.gguf") && error.len() < 3000, "{key}: {}", error.len());
        let text = "nonsense ".repeat(20_000);
        let change = |metadata: &mut Metadata| {
            metadata.insert(key, Value::String(Box::from(text.as_bytes())));
        };
        let path = place.variant("llama", change);
        let error = failure(&place.run(&[&["run", &path], &SHORT[..]].concat()));
        assert!(error.contains("nonsense...`"), "{key}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_named() {
    let place = Place::new();
    let status = std::process::Command::new("mkfifo").arg(place.path("pipe.gguf")).status();
    assert!(status.unwrap().success());
    std::os::unix::fs::symlink("/dev/null", place.path("nothing")).unwrap();
    for (name, found) in [
        ("/dev/null", "a character device"),
        ("nothing", "a character device"),
        ("pipe.gguf", "a named pipe (FIFO)"),
        ("./pipe.gguf", "a named pipe (FIFO)"),
    ] {
        for command in [&["run"][..], &["inspect"], &["tokenize"], &["quantize"], &["pull"]] {
            let flags: &[&str] = match command[0] {
                "run" => &SHORT,
                "quantize" => &["out.gguf", "Q8_0"],
                _ => &[],
            };
            let error = failure(&place.run(&[command, &[name], flags].concat()));
            let wanted = format!("{name}: expected a model file, found {found}");
            assert_eq!(error, wanted, "{command:?}");
        }
    }
}

#[test]
fn an_unknown_type_of_tensor_is_named() {
    let place = Place::new();
    let mut bytes = fs::read(model("llama")).unwrap();
    let name = b"output_norm.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    // The name, the number of dimensions, one dimension, the type.
    let at = at + name.len() + 4 + 8;
    assert_eq!(bytes[at..at + 4], [0; 4]);
    bytes[at..at + 4].copy_from_slice(&9999_u32.to_le_bytes());
    fs::write(place.path("odd.gguf"), bytes).unwrap();
    let error = failure(&place.run(&[&["run", "odd.gguf"], &SHORT[..]].concat()));
    for needle in ["odd.gguf", "output_norm.weight", "9999"] {
        assert!(error.contains(needle), "{error}");
    }
}

#[test]
fn a_model_without_a_tokenizer_is_named() {
    let place = Place::new();
    let path = place.variant("llama", |m| drop(m.remove("tokenizer.ggml.model")));
    for args in [&["tokenize", &path, "Hello"][..], &["run", &path, "Hello"]] {
        let error = failure(&place.run(args));
        assert!(error.contains("variant.gguf"), "{error}");
        assert!(error.contains("tokenizer.ggml.model"), "{error}");
    }
    // What needs no text works.
    place.text(&["logits", &path, "--tokens", "1,2", "-o", "out.npy"]);
}

#[test]
fn an_unknown_pre_tokenizer_is_named_with_the_way_on() {
    let place = Place::new();
    let set = |name: &'static [u8]| {
        move |m: &mut Metadata| m.insert("tokenizer.ggml.pre", Value::String(Box::from(name)))
    };
    let right = place.text(&["tokenize", &model("llama"), "Hello, (the)"]);
    let path = place.variant("llama", set(b"wonder"));
    let (tokenize, detokenize) = (["tokenize", &path, "Hello, (the)"], ["detokenize", &path, "45"]);
    let run = ["run", &path, "Hello, (the)", "--raw", "-n", "1", "-q"];
    for args in [&tokenize[..], &detokenize, &run] {
        let error = failure(&place.run(args));
        for needle in ["variant.gguf", "`wonder`", "--assume-pre NAME", "qwen2", "llama-bpe"] {
            assert!(error.contains(needle), "{error}");
        }
        let assumed = [args, &["--assume-pre", "llama-bpe"]].concat();
        assert!(!place.text(&assumed).is_empty());
        let error = failure(&place.run(&[args, &["--assume-pre", "nonsense"]].concat()));
        for needle in ["--assume-pre", "`nonsense`", "qwen2", "llama-bpe"] {
            assert!(error.contains(needle), "{error}");
        }
    }
    let assume = |name| place.text(&[&tokenize[..], &["--assume-pre", name]].concat());
    assert_eq!(assume("llama-bpe"), right);
    assert_ne!(assume("default"), right);
    // Other kinds of tokenizers have none, and mind no name.
    let path = place.variant("llama-spm", set(b"wonder"));
    let right = place.text(&["tokenize", &model("llama-spm"), "Hello"]);
    assert_eq!(place.text(&["tokenize", &path, "Hello"]), right);
}

#[test]
fn a_prompt_that_is_too_long_is_never_cut() {
    let place = Place::new();
    let model = model("llama");
    let prompt = "x ".repeat(50);
    let tokens = place.text(&["tokenize", &model, &prompt]).split(',').count().to_string();
    let error = failure(&place.run(&["run", &model, &prompt, "--raw", "--ctx-size", "32"]));
    assert!(error.contains(&tokens) && error.contains("31"), "{error}");
    let args = ["logits", &model, "--tokens", "1,2,3", "--ctx-size", "2", "-o", "out.npy"];
    let error = failure(&place.run(&args));
    assert!(error.contains("3 tokens") && error.contains("allows 2"), "{error}");
    assert_eq!(place.files(), ["home"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_prompt_without_an_end_is_refused() {
    let place = Place::new();
    let model = model("llama");
    let expected = "expected at most 67108864 bytes, found more";
    let error = failure(&place.run(&["run", &model, "-f", "/dev/zero"]));
    assert_eq!(error, format!("/dev/zero: {expected}"));
    let zeros = fs::File::open("/dev/zero").unwrap();
    let error = failure(&place.bodkin(&["run", &model]).stdin(zeros).output().unwrap());
    assert_eq!(error, format!("standard input: {expected}"));
}

#[test]
fn flags_that_make_no_sense_are_named() {
    let place = Place::new();
    let model = model("llama");
    for (flags, needles) in [
        (&["--device", "nonsense"][..], ["--device", "nonsense"]),
        (&["--device", "cpu", "--gpu-layers", "1"], ["--gpu-layers", "`cpu`"]),
        (&["--device", "cuda:0,one"], ["--device: expected device numbers", "`0,one`"]),
        (&["--device", "cuda:0,"], ["separated by commas", "`0,`"]),
        (&["-t", "0"], ["--threads: expected", "found 0"]),
        (&["-t", "100000"], ["--threads: expected", "100000"]),
        (&["--ctx-size", "1"], ["--ctx-size", "found 1"]),
        (&["--ctx-size", "18446744073709551615"], ["--ctx-size", "18446744073709551615"]),
        (&["--batch-size", "0"], ["--batch-size", "found 0"]),
        (&["--temperature", "NaN"], ["--temperature: expected", "NaN"]),
        (&["--top-p", "-0.5"], ["--top-p: expected", "-0.5"]),
        (&["--min-p", "2"], ["--min-p: expected", "2"]),
        (&["--repeat-penalty", "0"], ["--repeat-penalty: expected", "0"]),
        (&["--mirostat", "1"], ["--mirostat: expected", "1"]),
        (&["--logit-bias", "384+1"], ["--logit-bias: expected", "384"]),
        (&["--logit-bias", "one"], ["--logit-bias", "`one`"]),
    ] {
        let error = failure(&place.run(&[&["run", &model], &SHORT[..], flags].concat()));
        assert!(needles.iter().all(|needle| error.contains(needle)), "{flags:?}: {error}");
    }
    for (flag, value, expected) in [
        ("--expert-budget", "1 GB", "24G, or 40%"),
        ("--expert-budget", "101%", "0% to 100%"),
        ("--experts", "disk", "expected auto, mmap, or mmap:SIZE"),
        ("--experts", "mmap:1 GB", "32M or 24G"),
    ] {
        let output = place.run(&["run", &model, flag, value]);
        assert_eq!(output.status.code(), Some(2), "{value}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(flag) && error.contains(expected), "{error}");
    }
    let output = place.run(&[&["run", &model, "--experts", "mmap"], &SHORT[..]].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("experts mmap changes nothing: the model has no experts"), "{said}");
    let mut command = place.bodkin(&[&["run", &model], &SHORT[..]].concat());
    let error = failure(&command.env("BODKIN_CPU", "nonsense").output().unwrap());
    assert!(error.contains("BODKIN_CPU") && error.contains("portable"), "{error}");
}

#[test]
fn wrong_usage_has_status_2_and_names_the_word() {
    let place = Place::new();
    let model = model("llama");
    for (args, needle) in [
        (&["nonsense"][..], "nonsense"),
        (&["run", &model, "Hello", "--nonsense"], "--nonsense"),
        (&["run", &model, "Hello", "-n", "0"], "--max-tokens"),
        (&["run", &model, "Hello", "-n", "-2"], "-2"),
        (&["run", &model, "Hello", "--seed", "x"], "--seed"),
        (&["run", &model, "Hello", "--temperature", "warm"], "--temperature"),
        (&["run", &model, "Hello", "--kv-type", "q4_0"], "--kv-type <TYPE>': expected auto, f16"),
        (&["check", &model, "--max-kl", "nan"], "--max-kl <X>': expected a finite number x >= 0"),
        (&["check", &model, "--max-mse", "inf"], "--max-mse <X>': expected a finite number"),
        (&["check", &model, "--max-perplexity-change=-1"], "expected a finite number x >= 0"),
        (&["check", &model, "--max-repetition", "nan"], "expected 0 <= x <= 1"),
        (&["check", &model, "--near-tie", "NaN"], "--near-tie <X>': expected a finite number"),
        (&["prune", &model, "out.gguf", "--sparsity", "nan"], "expected 0 <= x < 1"),
        (&["run", &model, "Hello", "--activation-sparsity", "1"], "expected 0 <= x < 1"),
        (&["bench", &model, "--kv-type", "f32"], "--kv-type <TYPE>': expected auto, f16"),
        (&["run"], "<MODEL>"),
        (&["tokenize"], "<MODEL>"),
        (&["detokenize", &model], "<IDS>"),
        (&["detokenize", &model, "1,x"], "'x'"),
        (&["detokenize", &model, "1,-2"], "-2"),
        (&["detokenize", &model, "4294967296"], "4294967296"),
        (&["logits", &model, "-o", "out.npy"], "--tokens"),
        (&["logits", &model, "--tokens", "", "-o", "out.npy"], "--tokens"),
        (&["logits", &model, "--tokens", "1"], "--output"),
        (&["tokenize", &model, "a", "x\u{9b}2J\u{202e}"], "'x\u{fffd}2J\u{fffd}'"),
        (&["x\u{9b}2J"], "'x\u{fffd}2J'"),
        (&["plan", &model, "--memory", "24"], "expected 1K or more, such as 24G, found 24 bytes"),
    ] {
        let output = place.run(args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(output.stdout.is_empty());
        assert!(text.starts_with("error: ") && text.contains(needle), "{args:?}: {text}");
    }
    let error = failure(&place.run(&["detokenize", &model, "1,384"]));
    assert!(error.contains("token id 384") && error.contains("384 tokens"), "{error}");
    assert_eq!(place.files(), ["home"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure() {
    let place = Place::new();
    let (bert, model) = (model("bert"), model("llama"));
    for args in [
        &["run", &model, "Hello", "-n", "2", "-q"][..],
        &["run", &model, "Hello", "-n", "2", "--json"],
        &["inspect", &model],
        &["inspect", &model, "--metadata"],
        &["inspect", &model, "--json"],
        &["inspect", &model, "--plan"],
        &["inspect", &model, "--memory"],
        &["bench", &model, "-p", "1", "-n", "0", "-r", "1"],
        &["tokenize", &model, "Hello"],
        &["detokenize", &model, "45"],
        &["embed", &bert, "Hello"],
        &["list"],
        &["list", "--json"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let error = failure(&place.bodkin(args).stdout(full).output().unwrap());
        assert!(
            error.starts_with("cannot write to standard output: No space"),
            "{args:?}: {error}"
        );
        // Where not even an error can be said, the status says it.
        let full = || fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = place.bodkin(args);
        let status = command.stdout(full()).stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(1), "{args:?}");
    }
}
