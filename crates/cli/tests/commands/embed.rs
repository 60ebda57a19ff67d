//! `embed`: vectors against the reference, that company changes nothing, and what it refuses.

use serde_json::Value;

use crate::place::{Place, failure, model, printed, reference, stderr};

/// The lines of a run, each an object.
fn lines(place: &Place, args: &[&str]) -> Vec<Value> {
    let text = place.text(&[&["embed", &model("bert")], args].concat());
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn list(ids: &Value) -> String {
    let ids = ids.as_array().unwrap().iter().map(ToString::to_string);
    ids.collect::<Vec<_>>().join(",")
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn embeddings_are_those_of_the_reference() {
    let place = Place::new();
    let reference = reference("bert");
    let column = reference["reference"].as_str().unwrap();
    let cases = reference["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let found = lines(&place, &["--tokens", &list(&case["tokens"])]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0]["tokens"], case["tokens"].as_array().unwrap().len());
        let (found, wanted) = (floats(&found[0]["embedding"]), floats(&case["embedding"][column]));
        assert!((dot(&found, &found) - 1.0).abs() < 1e-6, "length 1");
        let cosine = dot(&found, &wanted) / dot(&wanted, &wanted).sqrt();
        assert!(cosine >= 0.999_999, "{}: {cosine}", case["id"]);
    }
}

#[test]
fn a_text_has_its_special_tokens_and_minds_no_company() {
    let place = Place::new();
    let reference = reference("bert");
    // An argument holds no zero byte, and a text some character.
    let is_argument = |case: &&Value| {
        case["text"].as_str().is_some_and(|text| !text.is_empty() && !text.contains('\0'))
    };
    let cases: Vec<&Value> =
        reference["tokenize"].as_array().unwrap().iter().filter(is_argument).collect();
    let texts: Vec<&str> = cases.iter().map(|case| case["text"].as_str().unwrap()).collect();
    let args = |flags: &[&'static str]| [flags, &["--"], &texts].concat();
    let together = lines(&place, &args(&[]));
    assert_eq!(together.len(), cases.len());
    for (found, case) in together.iter().zip(&cases).take(8) {
        let alone = lines(&place, &["--tokens", &list(&case["ids_add_special"])]);
        assert_eq!(&alone, std::slice::from_ref(found), "{}", case["text"]);
    }
    // Few tokens a step, so that some texts are longer; and one thread.
    for flags in [&["--batch-size", "9"][..], &["-t", "1"]] {
        assert_eq!(lines(&place, &args(flags)), together);
    }
}

#[test]
fn texts_come_from_files_and_standard_input() {
    let place = Place::new();
    let texts = ["hello there", "the hens\nin the garden", "good-bye"];
    let given = lines(&place, &texts);
    let bert = model("bert");
    std::fs::write(place.path("hens.txt"), format!("{}\n", texts[1])).unwrap();
    let read = |args: &[&str], input: &str| -> Vec<Value> {
        let text = place.text_of(&[&["embed", &bert], args].concat(), input.as_bytes());
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    assert_eq!(read(&["--whole", texts[0], "-f", "hens.txt", "-f", "-"], "good-bye\n"), given);
    assert_eq!(read(&["--whole"], texts[1]), given[1..2]);
    // Without the flag each line is a text.
    assert_eq!(read(&[], "hello there\ngood-bye\n"), [given[0].clone(), given[2].clone()]);
    let named = stderr(&place.run(&["embed", &bert, "hens.txt"]));
    assert!(named.contains("`hens.txt` is embedded as a text; -f reads a file"), "{named}");
    let error = failure(&place.run(&["embed", &bert, "-f", "absent.txt"]));
    assert!(error.starts_with("cannot read the text from absent.txt"), "{error}");
    std::fs::write(place.path("bytes"), b"\xff\xfe").unwrap();
    let error = failure(&place.run(&["embed", &bert, "-f", "bytes"]));
    assert!(error.contains("bytes:1: stream did not contain valid UTF-8"), "{error}");
    assert_eq!(place.run(&["embed", &bert, "--tokens", "2", "-f", "x"]).status.code(), Some(2));
}

#[test]
fn a_text_that_is_too_long_is_cut_only_if_asked() {
    let place = Place::new();
    let bert = model("bert");
    let long = "hello ".repeat(200);
    let tokens = place.text(&["tokenize", &bert, &long]).split(',').count();
    assert!(tokens > 256);
    let error = failure(&place.run(&["embed", &bert, "hello", &long]));
    let needle = format!("text 2 has {tokens} tokens, the model takes 256; --truncate cuts");
    assert!(error.contains("bert.gguf") && error.contains(&needle), "{error}");
    // It is the first error, whichever thread finds one, also before a line that cannot be read.
    let texts = [&"hello\n".repeat(99), &long, "\n", &"hello\n".repeat(99), &long].concat();
    let bytes = [texts.as_bytes(), b"\n\xff\n"].concat();
    std::fs::write(place.path("lines.txt"), bytes).unwrap();
    let error = failure(&place.run(&["embed", &bert, "-f", "lines.txt"]));
    assert!(error.contains(&format!("text 100 has {tokens} tokens")), "{error}");
    let error = failure(&place.run(&["embed", &bert, "--tokens", "2,5,3", "--ctx-size", "2"]));
    assert!(error.contains("has 3 tokens, the model takes 2"), "{error}");
    let error = failure(&place.run(&["embed", &bert, "--tokens", "2,384"]));
    assert!(error.contains("token id 384") && error.contains("384 tokens"), "{error}");
    // The token that ends a text stays.
    let hello = place.text(&["tokenize", &bert, "hello"]);
    let ids: Vec<&str> = hello.trim().split(',').collect();
    assert!(ids.len() > 4, "{hello}");
    let cut = [&ids[..3], &ids[ids.len() - 1..]].concat().join(",");
    let args = ["embed", &bert, "hello", "a", "--ctx-size", "4", "--truncate"];
    let output = place.run(&args);
    assert_eq!(stderr(&output), "1 of 2 texts cut to 4 tokens\n");
    let first = printed(output);
    assert_eq!(lines(&place, &["--tokens", &cut]), [first_line(&first)]);
}

fn first_line(text: &str) -> Value {
    serde_json::from_str(text.lines().next().unwrap()).unwrap()
}

#[test]
fn vectors_are_cut_scaled_and_prefixed_as_asked() {
    let place = Place::new();
    let vector = |args: &[&str]| floats(&lines(&place, args)[0]["embedding"]);
    let (whole, raw) = (vector(&["hello"]), vector(&["hello", "--no-normalize"]));
    let length = dot(&raw, &raw).sqrt();
    assert!((length - 1.0).abs() > 0.1, "{length}");
    assert!((dot(&whole, &raw) / length - 1.0).abs() < 1e-6, "one direction");
    let short = vector(&["hello", "--dimensions", "8"]);
    assert!(short.len() == 8 && (dot(&short, &short) - 1.0).abs() < 1e-6);
    assert!((dot(&short, &whole[..8]) / dot(&whole[..8], &whole[..8]).sqrt() - 1.0).abs() < 1e-6);
    assert_eq!(vector(&["hello", "--dimensions", "8", "--no-normalize"]), raw[..8]);
    assert_eq!(vector(&["hello", "--prefix", "query: "]), vector(&["query: hello"]));
    // The name of a task, and that of a prompt of the file.
    let task = vector(&["hello", "--prefix", "search_query"]);
    assert_eq!(task, vector(&["search_query: hello"]));
    let prompted = place.variant("bert", |metadata| {
        let strings = |text: &str| bodkin_gguf::Array::String(vec![text.as_bytes().into()]);
        metadata.insert("bodkin.prompt.names", bodkin_gguf::Value::Array(strings("q")));
        metadata.insert("bodkin.prompt.texts", bodkin_gguf::Value::Array(strings("query: ")));
    });
    let line = first_line(&place.text(&["embed", &prompted, "hello", "--prefix", "q"]));
    assert_eq!(floats(&line["embedding"]), vector(&["query: hello"]));
    assert_ne!(vector(&["hello", "--pooling", "cls"]), whole);
    let bert = model("bert");
    let error = failure(&place.run(&["embed", &bert, "a", "--dimensions", "65"]));
    assert_eq!(error, "--dimensions: expected 1 to 64, found 65");
    assert_eq!(place.run(&["embed", &bert, "a", "--pooling", "all"]).status.code(), Some(2));
    let error = failure(&place.run(&["embed", &bert, "a", "--pooling", "rank"]));
    assert!(error.contains("cls.output.weight"), "{error}");
}

/// The vectors that Hugging Face's transformers give, see tests/parity/decoder_embeddings.py.
#[test]
fn decoders_embed_as_transformers_do() {
    let place = Place::new();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity");
    let text = std::fs::read_to_string(path.join("embeddings/qwen3.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    let last = place.variant("qwen3", |metadata| {
        metadata.insert("qwen3.pooling_type", bodkin_gguf::Value::U32(3));
    });
    let qwen3 = model("qwen3");
    for case in recorded["cases"].as_array().unwrap() {
        let tokens = list(&case["tokens"]);
        for (file, pooling) in [(&last, "last"), (&qwen3, "mean")] {
            let line = first_line(&place.text(&["embed", file, "--tokens", &tokens]));
            let found = floats(&line["embedding"]);
            let cosine = dot(&found, &floats(&case[pooling]));
            assert!(cosine >= 0.999_99, "{} {pooling}: {cosine}", case["id"]);
        }
    }
    // It generates as well.
    assert!(!place.text(&["run", &last, "a", "-n", "2", "--raw"]).is_empty());
}

#[test]
fn each_kind_of_model_names_the_other_command() {
    let place = Place::new();
    let bert = model("bert");
    for args in [&["run", &bert, "hello"][..], &["logits", &bert, "--tokens", "2", "-o", "out.npy"]]
    {
        let error = failure(&place.run(args));
        assert!(error.contains("bert.gguf") && error.contains("`bodkin embed`"), "{error}");
    }
    assert_eq!(place.files(), ["home"]);
    assert!(failure(&place.run(&["embed", &bert])).contains("expected a text, found none"));
    assert_eq!(place.run(&["embed", &bert, "x", "--tokens", "1"]).status.code(), Some(2));
}

#[test]
fn rows_bring_their_columns() {
    let place = Place::new();
    let (bert, given) = (model("bert"), lines(&place, &["one hen", "two, hens"]));
    std::fs::write(place.path("a.jsonl"), "{\"n\":1,\"t\":\"one hen\"}\n{\"t\":\"two, hens\"}\n")
        .unwrap();
    std::fs::write(place.path("a.csv"), "n,t\n1,one hen\n,\"two, hens\"\n").unwrap();
    for (file, n) in [("a.jsonl", Value::from(1)), ("a.csv", Value::from("1"))] {
        let text = place.text(&["embed", &bert, "-f", file, "--column", "t"]);
        let found: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(found.len(), 2);
        assert_eq!((&found[0]["n"], &found[0]["text"]), (&n, &"one hen".into()));
        assert!(found.iter().zip(&given).all(|(a, b)| a["embedding"] == b["embedding"]));
        let error = failure(&place.run(&["embed", &bert, "-f", file]));
        assert!(error.contains("expected a column `text` (--column names another)"), "{error}");
    }
    for (line, wanted) in [
        ("{\"text\":3}", "a.jsonl:1: `text`: expected a string, found 3"),
        ("[]", "a.jsonl:1: expected a JSON object, found []"),
        ("{\"text\":\"\"}", "a.jsonl:1: the text is empty"),
        ("{\"text\":\"x\",\"a\":1,\"a\":2}", "a.jsonl:1: two columns `a`"),
        ("{\"text\":\"x\",\"text\":\"y\"}", "a.jsonl:1: two columns `text`"),
        ("{\"text\":\"x\"", "a.jsonl:1: expected a JSON object: EOF"),
        ("{\"text\":\"x\",\"tokens\":1}", "row 1: the column `tokens` is made here"),
    ] {
        std::fs::write(place.path("a.jsonl"), line).unwrap();
        let error = failure(&place.run(&["embed", &bert, "-f", "a.jsonl"]));
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn numpy_says_which_columns_it_leaves_out() {
    let place = Place::new();
    let bert = model("bert");
    let npy = |file: &str| {
        let output = place.run(&["embed", &bert, "-f", file, "-o", "out.npy"]);
        let told = stderr(&output);
        printed(output);
        told
    };
    std::fs::write(place.path("a.csv"), "id,text,n\n7,a,1\n8,b,2\n").unwrap();
    let told = npy("a.csv");
    assert_eq!(told, "--output npy has vectors alone: the text and `id`, `n` are left out\n");
    let many: String = (0..7).map(|i| format!(",\"c{i}\":{i}")).collect();
    let rows = format!("{{\"text\":\"a\"}}\n{{\"text\":\"b\"{many}}}\n");
    std::fs::write(place.path("a.jsonl"), rows).unwrap();
    let told = npy("a.jsonl");
    assert!(told.contains("`c0`, `c1`, `c2`, `c3`, `c4` and 2 other columns"), "{told}");
    std::fs::write(place.path("a.txt"), "a\nb\n").unwrap();
    assert_eq!(npy("a.txt"), "");
}

#[test]
fn marks_and_blank_lines_are_no_text() {
    let place = Place::new();
    let (bert, given) = (model("bert"), lines(&place, &["one hen", "two hens"]));
    for (file, text) in [
        ("a.txt", "\u{feff}one hen\ntwo hens\n"),
        ("a.jsonl", "\u{feff}{\"text\":\"one hen\"}\n\n{\"text\":\"two hens\"}\r\n \r\n"),
        ("a.csv", "\u{feff}text\none hen\n\ntwo hens\n"),
    ] {
        std::fs::write(place.path(file), text).unwrap();
        let found = place.text(&["embed", &bert, "-f", file]);
        let found: Vec<Value> = found.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(found.len(), 2, "{file}");
        assert!(found.iter().zip(&given).all(|(a, b)| a["embedding"] == b["embedding"]), "{file}");
    }
    let error = failure(&place.run(&["embed", &bert, "hello", ""]));
    assert!(error.contains("text 2 of the command line is empty"), "{error}");
    std::fs::write(place.path("a.csv"), "text,n,n\na,1,2\n").unwrap();
    let error = failure(&place.run(&["embed", &bert, "-f", "a.csv"]));
    assert!(error.contains("a.csv: two columns `n`"), "{error}");
    std::fs::write(place.path("a.csv"), "id,text\n7,a\n8,b\n").unwrap();
    let line = first_line(&place.text(&["embed", &bert, "-f", "a.csv"]));
    assert_eq!(line["id"], 7);
}

#[test]
#[cfg(unix)]
fn a_full_disk_claims_no_row_that_is_not_there() {
    let place = Place::new();
    let texts: String = (0..3000).map(|i| format!("{i} hens\n")).collect();
    std::fs::write(place.path("texts.txt"), texts).unwrap();
    for (out, row_bytes) in [("x.jsonl", 700), ("x.npy", 256)] {
        // Files may have 400 000 bytes or so.
        let output = place.limited(390, &["embed", &model("bert"), "-f", "texts.txt", "-o", out]);
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("File too large"), "{told}");
        if let Some((_, rows)) = told.split_once(".partial has ") {
            let claimed: u64 = rows.split_once(" row").unwrap().0.parse().unwrap();
            let bytes = std::fs::metadata(place.path(&format!("{out}.partial"))).unwrap().len();
            assert!(claimed * row_bytes <= bytes, "{claimed} rows in {bytes} bytes: {told}");
        }
    }
}

#[test]
fn interrupted_output_goes_on() {
    let place = Place::new();
    let bert = model("bert");
    let texts: String = (0..2500).map(|i| format!("{i} hens\n")).collect();
    std::fs::write(place.path("texts.txt"), texts).unwrap();
    for kind in ["json", "npy"] {
        let embed = ["embed", &bert, "-f", "texts.txt", "--output", kind, "-o"];
        place.text(&[&embed[..], &["whole"]].concat());
        let whole = std::fs::read(place.path("whole")).unwrap();
        let mut torn = whole[..whole.len() / 2 + 3].to_vec();
        if kind == "npy" {
            // The number of rows is written at the end.
            let header = String::from_utf8(whole[10..127].to_vec()).unwrap();
            let header = format!("{:<117}", header.trim_end().replace("(2500,", "(0,"));
            torn[10..127].copy_from_slice(header.as_bytes());
        }
        std::fs::write(place.path("out.partial"), torn).unwrap();
        let resumed = [&embed[..], &["out", "--resume"]].concat();
        place.text(&resumed);
        assert!(std::fs::read(place.path("out")).unwrap() == whole, "{kind}: the same bytes");
        let error = failure(&place.run(&resumed));
        assert!(error.contains("nothing to resume: out.partial does not exist"), "{error}");
    }
    std::fs::write(place.path("texts.txt"), "a\n").unwrap();
    std::fs::write(place.path("x.partial"), "x\n").unwrap();
    let resume = ["embed", &bert, "-f", "texts.txt", "--resume", "-o", "x"];
    let error = failure(&place.run(&resume));
    assert!(error.contains("expected a JSON object with an embedding of"), "{error}");
    let wrong = ["--output", "npy", "--resume", "-o", "x"];
    let error = failure(&place.run(&[&["embed", &bert, "-f", "texts.txt"], &wrong[..]].concat()));
    assert!(error.contains("expected vectors of 64, as the model gives"), "{error}");
    // Another model or other options gave the last row.
    let line = place.text(&["embed", &bert, "a", "--pooling", "cls"]);
    std::fs::write(place.path("x.partial"), &line).unwrap();
    let output = place.run(&resume);
    let told = stderr(&output);
    assert!(told.contains("--resume: expected in row 1 the vector that"), "{told}");
    let line = place.text(&["embed", &bert, "a"]);
    std::fs::write(place.path("x.partial"), line.repeat(3)).unwrap();
    let error = failure(&place.run(&resume));
    assert!(error.contains("of these 1 texts, found 3"), "{error}");
    std::fs::write(place.path("texts.txt"), b"a\n\xff\n").unwrap();
    let out = place.run(&["embed", &bert, "-f", "texts.txt", "-o", "short"]);
    let told = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(told.contains("texts.txt:2: stream did not contain valid UTF-8"), "{told}");
    assert!(!place.path("short").exists(), "an incomplete file has another name");
}

#[test]
fn empty_lines_are_skipped() {
    let place = Place::new();
    let bert = model("bert");
    std::fs::write(place.path("texts.txt"), "\none hen\n\n \t\r\ntwo hens\n\n").unwrap();
    let whole = place.text(&["embed", &bert, "one hen", "two hens"]);
    let output = place.run(&["embed", &bert, "-f", "texts.txt"]);
    assert_eq!(stderr(&output), "skipped 4 empty lines\n");
    assert_eq!(printed(output), whole);
    assert_eq!(place.text_of(&["embed", &bert], b"one hen\n\ntwo hens\n"), whole);
    // They are no rows of an interrupted run, either.
    let first = whole.lines().next().unwrap();
    std::fs::write(place.path("out.partial"), format!("{first}\n")).unwrap();
    place.text(&["embed", &bert, "-f", "texts.txt", "-o", "out", "--resume"]);
    assert_eq!(std::fs::read_to_string(place.path("out")).unwrap(), whole);
    std::fs::write(place.path("texts.txt"), "\n\n").unwrap();
    let error = failure(&place.run(&["embed", &bert, "-f", "texts.txt"]));
    assert!(error.contains("expected a text, found none"), "{error}");
}
