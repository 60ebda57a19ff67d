//! `run` with a prompt: what is answered, where it stops, and how it ends.

use std::fs;
#[cfg(unix)]
use std::{io::Read, process::Stdio};

use serde_json::Value;

use crate::place::{Place, failure, model, printed, stderr};

const GREEDY: [&str; 6] = ["--temperature", "0", "--raw", "-n", "8", "--json"];

/// `run MODEL PROMPT` with flags.
fn command<'a>(model: &'a str, prompt: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
    [&["run", model, prompt], flags].concat()
}

/// Ids and text of an answer.
fn said(answer: &Value) -> (&Value, &Value) {
    (&answer["tokens"], &answer["text"])
}

/// Some numbers of threads: more than there are cores do not run.
fn thread_counts() -> Vec<String> {
    let cores = std::thread::available_parallelism().unwrap().get();
    (1..=cores.min(3)).map(|count| count.to_string()).collect()
}

#[test]
fn greedy_answers_do_not_depend_on_threads_or_instructions() {
    let place = Place::new();
    for name in ["llama", "gemma3", "llama-q4_0"] {
        let model = model(name);
        let args = command(&model, "Hello world", &GREEDY);
        let first = place.json(&args);
        assert_eq!(first["tokens"].as_array().unwrap().len(), 8, "{name}");
        assert_eq!(first["generated_tokens"], 8);
        assert_eq!(first["reason"], "length");
        for threads in thread_counts() {
            let again = place.json(&[&args[..], &["-t", &threads]].concat());
            assert_eq!(said(&again), said(&first), "{name} on {threads} threads");
        }
        let one_by_one = place.json(&[&args[..], &["--batch-size", "1"]].concat());
        assert_eq!(said(&one_by_one), said(&first), "{name}");
        let portable = place.bodkin(&args).env("BODKIN_CPU", "portable").output().unwrap();
        let portable: Value = serde_json::from_str(&printed(portable)).unwrap();
        assert_eq!(said(&portable), said(&first), "{name}");
    }
}

#[test]
fn keys_and_values_as_bytes_do_not_depend_on_threads_or_steps() {
    let place = Place::new();
    for name in ["llama", "gemma3"] {
        let model = model(name);
        let flags = [&GREEDY[..], &["--kv-type", "q8_0"]].concat();
        let args = command(&model, "Hello world, said the hen in the garden", &flags);
        let first = place.json(&args);
        let counts = thread_counts().into_iter().map(|threads| ["-t".to_owned(), threads]);
        let one_by_one = ["--batch-size", "1"].map(str::to_owned);
        for flags in counts.chain([one_by_one]) {
            let again = place.json(&[&args[..], &[&flags[0], &flags[1]]].concat());
            assert_eq!(said(&again), said(&first), "{name} {flags:?}");
        }
    }
}

#[test]
fn the_prompt_has_the_tokens_that_tokenize_gives() {
    let place = Place::new();
    for name in ["llama", "gemma3"] {
        let model = model(name);
        let ids = place.text(&["tokenize", &model, "Hello world"]);
        let answer = place.json(&command(&model, "Hello world", &GREEDY));
        assert_eq!(answer["prompt_tokens"], ids.split(',').count(), "{name}");
    }
}

#[test]
fn a_seed_reproduces() {
    let place = Place::new();
    let model = model("llama");
    let with_seed = |seed| {
        let flags = ["--temperature", "1.5", "--raw", "-n", "24", "--json", "--seed", seed];
        place.json(&command(&model, "Hello", &flags))["tokens"].clone()
    };
    assert_eq!(with_seed("7"), with_seed("7"));
    assert_ne!(with_seed("7"), with_seed("8"));
}

#[test]
fn sampling_flags_reach_the_sampler() {
    let place = Place::new();
    let model = model("llama");
    let flags = ["--temperature", "0", "--raw", "-n", "3", "--json", "--ignore-eos"];
    let bias = [&flags[..], &["--logit-bias", "93+inf"]].concat();
    assert!(failure(&place.run(&command(&model, "a", &bias))).contains("--logit-bias"));
    let bias = [&flags[..], &["--logit-bias", "93+1000"]].concat();
    assert_eq!(said(&place.json(&command(&model, "a", &bias))).1, "xxx");
    // With the repetition forbidden, the bias helps once.
    let penalty = [&bias[..], &["--presence-penalty", "2000", "--repeat-last-n", "-1"]].concat();
    let text = place.json(&command(&model, "a", &penalty))["text"].clone();
    let text = text.as_str().unwrap();
    assert!(text.starts_with('x') && text.matches('x').count() == 1, "{text}");
}

#[test]
fn the_prompt_comes_from_anywhere() {
    let place = Place::new();
    let model = model("llama");
    let prompt = "Hello world,\n  good-bye";
    let given = place.text(&command(&model, prompt, &GREEDY[..5]));
    let args = [&["run", &model], &GREEDY[..5]].concat();
    assert_eq!(place.text_of(&args, prompt.as_bytes()), given);
    assert_eq!(place.text_of(&args, format!("{prompt}\n").as_bytes()), given);
    fs::write(place.path("prompt.txt"), prompt).unwrap();
    assert_eq!(place.text(&[&args[..], &["--file", "prompt.txt"]].concat()), given);

    assert_eq!(place.text_of(&[&args[..], &["-f", "-"]].concat(), prompt.as_bytes()), given);

    let absent = failure(&place.run(&[&args[..], &["--file", "absent.txt"]].concat()));
    assert!(absent.contains("absent.txt"), "{absent}");
    assert!(failure(&place.run(&args)).contains("the prompt is empty"));
    let both = [&args[..], &["a prompt", "--prompt", "another"]].concat();
    assert_eq!(place.run(&both).status.code(), Some(2));
}

#[test]
fn words_without_quotes_are_one_prompt() {
    let place = Place::new();
    let model = model("llama");
    let whole = place.text(&command(&model, "tell me a joke", &GREEDY[..5]));
    let words = [&["run", &model, "tell", "me", "a", "joke"], &GREEDY[..5]].concat();
    assert_eq!(place.text(&words), whole);
    let around = [&["run", &model, "tell", "me"], &GREEDY[..5], &["a", "joke"]].concat();
    assert_eq!(place.text(&around), whole);
}

#[test]
fn the_last_value_of_a_flag_counts() {
    let place = Place::new();
    let model = model("llama");
    let once = place.json(&command(&model, "Hello", &GREEDY));
    let flags = ["--temp", "0.2", "--temperature", "0.8", "-n", "3", "--raw", "--stop", "zzz"];
    let twice = [&flags[..], &GREEDY, &["--stop", "yyy"]].concat();
    assert_eq!(said(&place.json(&command(&model, "Hello", &twice))), said(&once));
}

#[test]
fn texts_from_several_places_are_one_prompt() {
    let place = Place::new();
    let model = model("llama");
    fs::write(place.path("notes.txt"), "some notes\n").unwrap();
    let run = |prompt: &[&str], input: &[u8]| {
        place.text_of(&[&["run", &model], prompt, &GREEDY[..5]].concat(), input)
    };
    let whole = |prompt: &str| run(&[prompt], b"");
    assert_eq!(run(&["Summarise."], b"a text\n"), whole("a text\n\nSummarise."));
    let file = ["-f", "notes.txt", "Summarise."];
    assert_eq!(run(&file, b""), whole("some notes\n\nSummarise."));
    assert_eq!(run(&file, b"a text"), whole("a text\n\nsome notes\n\nSummarise."));
    let order = ["-f", "notes.txt", "-f", "-", "Summarise."];
    assert_eq!(run(&order, b"a text"), whole("some notes\n\na text\n\nSummarise."));
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let place = Place::new();
    let model = model("llama");
    // Every token is an `x`.
    let flags = ["--temperature", "0", "--raw", "-n", "8", "--logit-bias", "93+1000"];
    let endless = command(&model, "a", &flags);
    assert_eq!(place.text(&endless), "xxxxxxxx\n");
    let stopped = [&endless[..], &["--stop", "y", "--stop", "xxx"]].concat();
    assert_eq!(place.text(&stopped), "\n");
    let answer = place.json(&[&stopped[..], &["--json"]].concat());
    assert_eq!((&answer["reason"], &answer["text"]), (&"stop".into(), &"".into()));
    assert_eq!(answer["generated_tokens"], 3);
    // What could have become a stop string is not lost at the end.
    assert_eq!(place.text(&[&endless[..], &["--stop", "xy"]].concat()), "xxxxxxxx\n");
}

#[test]
fn an_end_token_ends_the_answer_unless_it_is_ignored() {
    let place = Place::new();
    let model = model("llama");
    // Token 1 is the end of a text.
    let flags = ["--temperature", "0", "--raw", "-n", "4", "--json", "--logit-bias", "1+1000"];
    let ended = place.json(&command(&model, "a", &flags));
    assert_eq!((&ended["reason"], &ended["text"]), (&"end".into(), &"".into()));
    let ignored = [&flags[..], &["--ignore-eos"]].concat();
    let ignored = place.json(&command(&model, "a", &ignored));
    assert_eq!(ignored["reason"], "length");
    assert_eq!(ignored["tokens"], serde_json::json!([1, 1, 1, 1]));
}

#[test]
fn answers_satisfy_a_schema() {
    let place = Place::new();
    let model = model("llama");
    let schema = r#"{"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 3}"#;
    let file = place.path("schema.json");
    fs::write(&file, schema).unwrap();
    let at_file = format!("@{}", file.display());
    for (flag, given, more) in [
        ("--json-schema", schema, "--raw"),
        ("-j", &at_file, "--raw"),
        ("-j", schema, "--ignore-eos"),
    ] {
        let flags = [flag, given, "--json", "--temperature", "2", "--seed", "5", more];
        let answer = place.json(&command(&model, "a", &flags));
        let text = answer["text"].as_str().unwrap();
        let items: Vec<u32> = serde_json::from_str(text).unwrap();
        assert!((2..=3).contains(&items.len()) && items.iter().all(|n| [1, 22].contains(n)));
        assert_eq!(answer["reason"], "end");
    }
    // What is wrong is found before the model is.
    for (flag, given, wanted) in [
        ("-j", "{", "--json-schema: not valid JSON"),
        ("-j", "5", "--json-schema: expected a JSON schema"),
        ("-j", r#"{"not": {}}"#, r#"--json-schema: keywords that are not supported: ["not"]"#),
        ("-j", "@nowhere.json", "nowhere.json"),
        (
            "--grammar",
            "root ::= \"a\" )",
            "--grammar: line 1: expected the end of the rule, found )",
        ),
        ("--grammar", "@nowhere.gbnf", "nowhere.gbnf"),
    ] {
        let error = failure(&place.run(&command("no-such-model", "a", &[flag, given])));
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn answers_satisfy_a_grammar() {
    let (place, model) = (Place::new(), model("llama"));
    let file = place.path("list.gbnf");
    fs::write(&file, "root ::= \"[\" items \"]\"\nitems ::= [a-c] (\",\" items)?").unwrap();
    let at_file = format!("@{}", file.display());
    for given in ["root ::= \"[\" [a-c] (\",\" [a-c])* \"]\"", &at_file] {
        let flags = ["--grammar", given, "--json", "--temperature", "2", "--seed", "5", "--raw"];
        let answer = place.json(&command(&model, "a", &flags));
        let text = answer["text"].as_str().unwrap();
        let items = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap();
        assert!(items.split(',').all(|item| ["a", "b", "c"].contains(&item)), "{text}");
        assert_eq!(answer["reason"], "end");
    }
}

#[test]
fn the_chat_template_frames_the_prompt() {
    let place = Place::new();
    let model = model("llama");
    let tokens = |flags: &[&str]| {
        let flags = [&["-n", "1", "--json"], flags].concat();
        place.json(&command(&model, "Hello", &flags))["prompt_tokens"].as_u64().unwrap()
    };
    let (raw, framed) = (tokens(&["--raw"]), tokens(&[]));
    assert!(raw < framed);
    assert!(framed < tokens(&["--system", "You are terse."]));

    let bare = place.variant("llama", |m| drop(m.remove("tokenizer.chat_template")));
    let answer = place.json(&command(&bare, "Hello", &["-n", "1", "--json"]));
    assert_eq!(answer["prompt_tokens"], raw);
    let error = failure(&place.run(&command(&bare, "Hello", &["--system", "You are terse."])));
    assert!(error.contains("variant.gguf") && error.contains("no chat template"), "{error}");
    let both = command(&model, "Hello", &["--raw", "--system", "You are terse."]);
    assert_eq!(place.run(&both).status.code(), Some(2));
}

#[cfg(unix)]
#[test]
fn statistics_are_one_line_on_a_terminal() {
    use crate::terminal::Terminal;
    let place = Place::new();
    let model = model("llama");
    let flags = ["--temperature", "0", "--raw", "-n", "8", "--logit-bias", "1+1000"];
    let args = command(&model, "Hello world", &flags);
    assert_eq!(stderr(&place.run(&args)), "", "no terminal");
    let (stats, _) = Terminal::of_stderr(place.bodkin(&args)).rest();
    let stats = stats.trim();
    assert_eq!(stats.lines().count(), 1, "{stats}");
    assert!(stats.starts_with("prompt 9 tokens (0 cached), "), "{stats}");
    assert!(stats.contains("; answer 1 token, ") && stats.ends_with(" tok/s"), "{stats}");
    let quiet = [&args[..], &["-q"]].concat();
    assert_eq!(Terminal::of_stderr(place.bodkin(&quiet)).rest().0, "");
}

#[test]
fn an_answer_that_is_cut_has_a_mark() {
    let place = Place::new();
    let model = model("llama");
    let flags = ["--temperature", "0", "--raw", "--ignore-eos"];
    let marks = |more: &[&str]| {
        let output = place.run(&command(&model, "Hello world", &[&flags[..], more].concat()));
        assert!(output.status.success());
        stderr(&output)
    };
    assert_eq!(marks(&["-n", "8"]), "[answer cut: -n allows 8 tokens]\n");
    let full = "[answer cut: the context of 40 tokens is full; -c N sets a larger context]\n";
    assert_eq!(marks(&["-c", "40"]), full);
    assert_eq!(marks(&["-n", "8", "-q"]), "");
    // The longest context of the training is no limit.
    let long = "Hello world ".repeat(1500);
    let error = failure(&place.run(&command(&model, &long, &flags)));
    let wanted = "-c N sets a larger context than the 1024 tokens that the model was trained for";
    assert!(error.ends_with(&format!("; {wanted}")), "{error}");
    let output = place.run(&command(&model, &long, &[&flags[..], &["-c", "20000"]].concat()));
    assert!(output.status.success(), "{}", stderr(&output));
    let answer =
        place.json(&command(&model, "Hello", &[&flags[..], &["-c", "40", "--json"]].concat()));
    assert_eq!(answer["reason"], "context");
}

#[test]
fn numbers_that_are_too_large_warn() {
    let place = Place::new();
    let model = model("llama");
    let stderr = |flags: &[&str]| stderr(&place.run(&command(&model, "a", flags)));
    let warning = stderr(&["--raw", "-q", "-n", "1", "-t", "1000"]);
    let cores = std::thread::available_parallelism().unwrap();
    let expected = format!("1000 threads on {cores} cores: runs {cores}, which is faster\n");
    assert_eq!(warning, expected);
    let warning = stderr(&["--raw", "-q", "-n", "1", "-c", "100000"]);
    assert!(
        warning.starts_with("a context of 100000 tokens: the model was trained for "),
        "{warning}"
    );
    assert_eq!(stderr(&["--raw", "-q", "-n", "1", "-t", "1", "-c", "100"]), "");
    let both = stderr(&["--raw", "-q", "-c", "1000000000", "-t", "1024"]);
    let error = both.lines().last().unwrap();
    assert!(error.contains("are missing; a smaller --ctx-size or "), "{both}");
}

#[test]
fn names_of_flags_in_llama_cpp_work() {
    let place = Place::new();
    let model = model("llama");
    let ours = ["run", &model, "Hello", "--temperature", "0", "--max-tokens", "3", "--json"];
    let ours = place.json(&[&ours[..], &["--system", "Be terse.", "-c", "99"]].concat());
    for flags in [
        &["-m", &model, "-p", "Hello", "--temp", "0", "--predict", "3", "-sys", "Be terse."][..],
        &[
            &model,
            "--prompt",
            "Hello",
            "--temp",
            "0",
            "--n-predict",
            "3",
            "--system-prompt",
            "Be terse.",
        ],
        &[
            &model,
            "Hello",
            "--temp",
            "0",
            "-n",
            "3",
            "-sys",
            "Be terse.",
            "-b",
            "64",
            "--typical-p",
            "1",
        ],
    ] {
        let theirs = place.json(&[&["run", "--ctx-size", "99", "--json"], flags].concat());
        assert_eq!(said(&theirs), said(&ours), "{flags:?}");
        assert_eq!(theirs["prompt_tokens"], ours["prompt_tokens"], "{flags:?}");
    }
    let error = stderr(&place.run(&["run", &model, "Hello", "-ngl", "1", "--device", "cpu"]));
    assert!(error.contains("--gpu-layers"), "{error}");
    let idle = ["-fa", "on", "--no-mmap", "--mlock", "-tb", "2", "-cnv", "-n", "1"];
    let idle =
        place.run(&[&["run", &model, "Hello", "-ctk", "q8_0", "-ctv", "q8_0"], &idle[..]].concat());
    assert!(idle.status.success(), "{}", stderr(&idle));
    for flag in ["-fa", "--no-mmap", "--mlock", "-tb"] {
        assert!(stderr(&idle).contains(&format!("{flag} has no effect: ")), "{}", stderr(&idle));
    }
    let two = place.run(&["run", &model, "Hello", "-ctk", "f16", "-ctv", "q8_0"]);
    assert_eq!(two.status.code(), Some(2));
    assert!(stderr(&two).starts_with("error: -ctv: the KV cache has one type here"));
    // No layers on a GPU need none.
    for device in ["cpu", "auto"] {
        place.text(&["run", &model, "Hello", "-n", "1", "-ngl", "0", "--device", device]);
    }
    // After `--` and as a value, text is text.
    let literal = place.json(&["run", "--temp", "0", "-n", "3", "--json", "--", &model, "-sys"]);
    assert_eq!(literal["generated_tokens"], 3);
}

#[test]
fn layers_for_a_gpu_run_on_the_cpu_without_one() {
    let place = Place::new();
    let model = model("llama");
    let flags = [&GREEDY[..], &["--gpu-layers", "2"]].concat();
    let run = |device: &str| {
        let flags = [&flags[..], &["--device", device]].concat();
        // The driver shows no GPUs, if the machine has any.
        let mut command = place.bodkin(&command(&model, "Hello", &flags));
        command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    let output = run("auto");
    let text = stderr(&output);
    assert!(text.trim_end().ends_with("; all layers run on the CPU"), "{text}");
    let answer: Value = serde_json::from_str(&printed(output)).unwrap();
    let on_cpu = [&GREEDY[..], &["--device", "cpu"]].concat();
    assert_eq!(said(&answer), said(&place.json(&command(&model, "Hello", &on_cpu))));
    // A device that is named is not replaced.
    failure(&run("cuda"));
}

#[test]
fn activation_sparsity_is_reported() {
    let place = Place::new();
    for (name, wanted) in [
        ("llama", "3 of 3 down projections skip weights\n"),
        ("llama-q4_k_m", " read all weights, with no gain\n"),
    ] {
        let model = model(name);
        let mut args = command(&model, "a b", &["-n", "2"]);
        args.extend(["--activation-sparsity", "0.5"]);
        let output = place.run(&args);
        assert!(stderr(&output).contains(wanted), "{name}: {}", stderr(&output));
    }
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_ends_it_silently() {
    let place = Place::new();
    let model = model("llama");
    let flags = ["--raw", "--ignore-eos", "--ctx-size", "100000"];
    let mut command = place.bodkin(&command(&model, "Hello", &flags));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1, "no error after the warning");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_and_keeps_it() {
    let place = Place::new();
    let model = model("llama");
    let flags = ["--temperature", "0", "--raw", "--ignore-eos", "--logit-bias", "93+1000"];
    let flags = [&flags[..], &["--ctx-size", "100000"]].concat();
    let mut command = place.bodkin(&command(&model, "Hello", &flags));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 3]).unwrap();
    crate::chat::interrupt(&child);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let text = rest.strip_suffix('\n').expect("a whole last line");
    assert!(text.bytes().all(|byte| byte == b'x') && text.len() < 99_000);
}

/// What has been said stays, and one line says why there is no more.
#[test]
fn an_answer_whose_model_fails_ends_with_the_cause() {
    let place = Place::new();
    let model = model("llama");
    for (fault, cause) in [
        ("error@2", "the mock fails"),
        ("panic@2", "the engine's thread panicked: the mock panics"),
    ] {
        let device = format!("mock:{fault}");
        // The first call is the prompt with the first token.
        let flags = ["--device", &device, "-n", "9", "--raw", "--ignore-eos"];
        let output = place.run(&command(&model, "Hello", &flags));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(!output.stdout.is_empty(), "a token came");
        assert_eq!(text.lines().last(), Some(&*format!("error: {cause}")), "{text}");
    }
}
