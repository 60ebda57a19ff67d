//! `check` on tiny models, whose random weights say nothing sane: the table, the status, and a
//! server to compare with.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use crate::place::{Place, model, printed, stderr};

/// Short answers; what random words say is wrong whatever the rules.
const SHORT: [&str; 2] = ["-n", "4"];

/// What is said of a model, and on standard error.
fn check(place: &Place, args: &[&str]) -> (Value, String) {
    let output = place.run(&[&["check", "--json"], args, &SHORT[..]].concat());
    // Random words are no text; an unusable suite has the status of its flag.
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (value["models"][0].clone(), stderr(&output))
}

/// What is wrong apart from the words.
fn faults(report: &Value) -> Vec<&str> {
    let faults = report["faults"].as_array().unwrap().iter().map(|fault| fault.as_str().unwrap());
    faults.filter(|fault| !fault.starts_with("answer to `")).collect()
}

#[test]
fn several_models_have_one_table() {
    let place = Place::new();
    let (plain, window) = (model("llama"), model("gemma3"));
    let output = place.run(&[&["check", &plain, &window, "absent.gguf"], &SHORT[..]].concat());
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<&str> = table.lines().collect();
    assert!(rows[0].starts_with("model") && rows[0].ends_with("result"), "{table}");
    assert!(rows[1].starts_with("llama.gguf") && rows[2].starts_with("gemma3.gguf"), "{table}");
    assert!(rows[3].starts_with("absent.gguf") && rows[3].ends_with("FAILED"), "{table}");
    assert!(table.contains("absent.gguf: cannot check absent.gguf: "), "{table}");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("of 3 models failed"), "{}", stderr(&output));
}

#[test]
fn numbers_are_compared_with_a_baseline() {
    let place = Place::new();
    let model = model("llama");
    let (report, error) = check(&place, &[&model, "--save-baseline", "base.gguf"]);
    assert_eq!(faults(&report), [] as [&str; 0], "{error}");
    assert!(report["long_tokens"].as_u64().unwrap() >= 500, "{report}");
    let layers = report["health"]["layers"].as_array().unwrap();
    assert!(layers.len() > 2 && layers[0]["layer"].is_null(), "{layers:?}");
    assert!(layers.iter().all(|l| l["max"].as_f64() > l["min"].as_f64()), "{layers:?}");

    let (report, _) = check(&place, &[&model, "--baseline", "base.gguf"]);
    assert_eq!(report["baseline"]["mse"].as_f64(), Some(0.0), "{report}");
    assert_eq!(faults(&report), [] as [&str; 0]);

    // A model that is not in it, and a file that is none.
    let other = crate::place::model("llama-q4_0");
    let (report, _) = check(&place, &[&other, &model, "--baseline", "base.gguf"]);
    let report = report.to_string();
    assert!(report.contains("does not have this model, only llama.gguf"), "{report}");
    // The only one, for a model of another name.
    let (report, _) = check(&place, &[&other, "--baseline", "base.gguf"]);
    assert!(report["baseline"]["mse"].as_f64() > Some(0.0), "{report}");
    let (_, error) = check(&place, &[&model, "--baseline", &model]);
    assert!(error.contains("general.type: expected bodkin.check"), "{error}");
}

#[test]
fn answers_of_a_suite_are_checked() {
    let place = Place::new();
    let model = model("llama");
    let prompt = "What is it?";
    let run = ["run", &model, prompt, "--temperature", "0", "-n", "6", "--json"];
    let text = place.json(&run)["text"].as_str().unwrap().to_owned();
    let suite = |cases: &str| {
        std::fs::write(place.path("suite.toml"), cases).unwrap();
        check(&place, &[&model, "--suite", "suite.toml"])
    };
    let case = |rest: &str| format!("[[answer]]\nprompt = \"{prompt}\"\nmax_tokens = 6\n{rest}\n");
    let text = toml_text(&text);
    let good = [case(&format!("equals = {text}")), case("matches = '.'")].concat();
    let (report, error) = suite(&good);
    assert_eq!(report["suite"], json!([2, 2]), "{error}");
    assert_eq!(faults(&report), [] as [&str; 0]);
    let (report, _) = suite(&[good, case("contains = ['no such text']")].concat());
    assert_eq!(report["suite"], json!([2, 3]));
    let fault = faults(&report)[0];
    assert!(fault.starts_with("suite: `What is it?`: expected `no such text`"), "{fault}");

    // A file that is wrong, and one for another kind of model.
    let (_, error) = suite("[[answer]]\nprompt = 1\n");
    assert!(error.starts_with("error: --suite: suite.toml: line 2: expected a suite"), "{error}");
    let (report, _) = suite("[[similarity]]\ntexts = ['a', 'b']\nmin = 0.5\n");
    assert!(faults(&report)[0].contains("expected [[answer]] for a model that"), "{report}");
}

/// A text as TOML writes it.
fn toml_text(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

#[test]
fn encoders_are_checked_too() {
    let place = Place::new();
    let bert = model("bert");
    let check = |args: &[&str]| {
        let output = place.run(&[&["check", &bert, "--json"], args].concat());
        let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), value["models"][0].clone(), stderr(&output))
    };
    let (code, report, error) = check(&["--save-baseline", "base.gguf"]);
    assert_eq!(code, Some(0), "{report} {error}");
    assert_eq!((&report["long_tokens"], &report["answers"]), (&256.into(), &Value::Null));
    let (code, report, _) = check(&["--baseline", "base.gguf"]);
    assert_eq!(code, Some(0), "{report}");
    assert!(report["baseline"]["cosine_distance"].as_f64().unwrap().abs() < 1e-9, "{report}");

    // The similarity of two texts, as `embed` has it.
    let texts = ["the hens in the garden", "a house"];
    let lines = place.text(&["embed", &bert, texts[0], texts[1]]);
    let rows: Vec<Vec<f64>> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["embedding"].clone())
        .map(|row| row.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect())
        .collect();
    let cosine: f64 = rows[0].iter().zip(&rows[1]).map(|(a, b)| a * b).sum();
    let suite = |min: f64, max: f64| {
        let text = format!("[[similarity]]\ntexts = {texts:?}\nmin = {min:?}\nmax = {max:?}\n");
        std::fs::write(place.path("suite.toml"), text).unwrap();
        check(&["--suite", "suite.toml"])
    };
    let (code, report, _) = suite(cosine - 1e-4, (cosine + 1e-4).min(1.0));
    assert_eq!((code, &report["suite"]), (Some(0), &json!([1, 1])), "{report}");
    let (code, report, _) = suite(-1.0, cosine - 1e-3);
    assert_eq!((code, &report["suite"]), (Some(1), &json!([0, 1])), "{report}");
    let wanted = "similarity of `the hens in the garden` and `a house`: expected -1 to ";
    assert!(faults(&report)[0].starts_with(wanted), "{report}");

    // A model that gives other embeddings, and one of another kind.
    let other = place.variant("bert", |m| {
        m.insert("bert.attention.layer_norm_epsilon", bodkin_gguf::Value::F32(0.5));
    });
    let output = place.run(&["check", &other, "--baseline", "base.gguf"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("embeddings: cosine distance "), "{table}");
    let output = place.run(&["check", &model("llama"), "--baseline", "base.gguf", "-n", "2"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("other tokens or another vocabulary"), "{table}");
}

#[test]
fn a_loss_of_speed_is_a_fault() {
    let place = Place::new();
    let model = model("llama");
    let speed = ["--speed", "-t", "1"];
    let check = |args: &[&str]| check(&place, &[&[model.as_str()], &speed[..], args].concat());
    let (report, error) = check(&["--save-baseline", "base.gguf"]);
    assert_eq!(faults(&report), [] as [&str; 0], "{error}");
    for key in ["prefill_tok_s", "decode_tok_s", "prefill_over_reference", "decode_over_reference"]
    {
        assert!(report["speed"][key].as_f64().unwrap() > 0.0, "{report}");
    }
    // However noisy this machine is, it is so for the reference model, too.
    let (report, _) = check(&["--baseline", "base.gguf", "--max-slowdown", "40"]);
    assert_eq!(faults(&report), [] as [&str; 0]);
    assert!(report["speed"]["change"].as_f64().unwrap() > -0.4, "{report}");
    // Code of half the speed is found.
    for part in ["prefill", "decode"] {
        let fast = with_speed(&place, &report, part, 2.0);
        let (report, _) = check(&["--baseline", &fast]);
        assert!(faults(&report)[0].starts_with("speed: "), "{part}: {report}");
        let change = report["speed"]["change"].as_f64().unwrap();
        assert!((-0.75..-0.3).contains(&change), "{part}: {report}");
    }

    // The speed of another backend, and none.
    let two = ["--speed", "-t", "2", "--baseline", "base.gguf"];
    let (report, _) = self::check(&place, &[&[model.as_str()], &two[..]].concat());
    let wanted = "the baseline's speed is of cpu (";
    assert!(faults(&report)[0].starts_with(wanted), "{report}");
    let output = place.run(&["check", &model, "--save-baseline", "base.gguf", "-n", "2"]);
    assert_eq!(output.status.code(), Some(1));
    let (report, _) = check(&["--baseline", "base.gguf"]);
    assert!(faults(&report)[0].starts_with("the baseline has no speed; --speed"), "{report}");
}

/// A copy of `base.gguf` with `factor` times the speed that `report` has of a part.
fn with_speed(place: &Place, report: &Value, part: &str, factor: f64) -> String {
    let file = bodkin_gguf::File::open(place.path("base.gguf")).unwrap();
    let mut metadata = file.metadata().clone();
    for (key, of) in [(part.to_owned(), "tok_s"), (format!("{part}_ratio"), "over_reference")] {
        let now = report["speed"][format!("{part}_{of}")].as_f64().unwrap();
        metadata.insert(format!("check.0.speed.{key}"), bodkin_gguf::Value::F64(factor * now));
    }
    let path = place.path("fast.gguf");
    let mut writer = bodkin_gguf::Writer::new(&path, &metadata).unwrap();
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, tensor.format, &tensor.shape, file.data(tensor)).unwrap();
    }
    writer.save().unwrap();
    "fast.gguf".to_owned()
}

/// What a request to the server asks for, and what it answers.
type Answer = Box<dyn Fn(&str) -> Value + Send>;

/// A server of completions on a port of its own, that answers `requests` requests.
fn serve(requests: usize, answer: Answer) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        let mut served = 0;
        while served < requests {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            while served < requests && respond(&mut stream, &answer) {
                served += 1;
            }
        }
    });
    (url, thread)
}

/// Answers one request of a connection; false if there is none.
fn respond(stream: &mut BufReader<TcpStream>, answer: &Answer) -> bool {
    let (mut line, mut length) = (String::new(), 0);
    if stream.read_line(&mut line).unwrap_or(0) == 0 {
        return false;
    }
    assert!(line.starts_with("POST /v1/completions HTTP/1.1"), "{line}");
    while line.trim_end() != "" {
        line.clear();
        stream.read_line(&mut line).unwrap();
        let header = line.to_ascii_lowercase();
        if let Some(bytes) = header.strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    let request: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&request["temperature"], &request["logprobs"]), (&0.into(), &1.into()));
    let answer = answer(request["prompt"].as_str().unwrap()).to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ";
    write!(stream.get_mut(), "{head}{}\r\n\r\n{answer}", answer.len()).unwrap();
    true
}

/// The model's own greedy tokens, each with its bytes.
fn greedy(model: &str, prompt: &str) -> Vec<Vec<u8>> {
    let place = Place::new();
    let args = ["run", model, prompt, "--raw", "--temperature", "0", "-n", "3", "--json"];
    let answer: Value = serde_json::from_str(&printed(place.run(&args))).unwrap();
    let ids = answer["tokens"].as_array().unwrap().clone();
    let piece = |id: &Value| {
        let output = place.run(&["detokenize", model, &format!("379,{id}")]);
        let prefix = place.run(&["detokenize", model, "379"]).stdout.len() - 1;
        output.stdout[prefix..output.stdout.len() - 1].to_vec()
    };
    ids.iter().map(piece).collect()
}

/// As llama.cpp's server says it: each token with its bytes.
fn with_bytes(tokens: &[Vec<u8>]) -> Value {
    let entry = |bytes: &Vec<u8>| json!({"token": "?", "bytes": bytes, "logprob": -1.5});
    let content: Vec<Value> = tokens.iter().map(entry).collect();
    json!({"choices": [{"logprobs": {"content": content}}]})
}

#[test]
fn a_server_is_followed_token_by_token() {
    let place = Place::new();
    let model = model("llama");
    let check = |answer: Answer, most: &str| {
        let (url, server) = serve(5, answer);
        let flags = ["--reference", &url, "--max-logprob-difference", most];
        let found = check(&place, &[&[model.as_str()][..], &flags].concat());
        server.join().unwrap();
        found
    };
    let ours = model.clone();
    let same = move |prompt: &str| with_bytes(&greedy(&ours, prompt));
    let (report, error) = check(Box::new(same.clone()), "1000");
    assert_eq!(faults(&report), [] as [&str; 0], "{error}");
    let found = &report["reference"];
    assert_eq!((&found["tokens"], &found["same"]), (&15.into(), &15.into()), "{found}");

    // The same tokens with log-probabilities that are not the model's.
    let (report, _) = check(Box::new(same), "0.01");
    assert!(faults(&report)[0].contains("log-probabilities differ by"), "{report}");

    // A server that does not take its most likely token, and then goes where nobody can follow.
    let ours = model.clone();
    let penalised = move |prompt: &str| {
        let best = json!([{"bytes": greedy(&ours, prompt)[0], "logprob": -1.5}]);
        let entry = json!({"token": "no token of any model", "logprob": -4, "top_logprobs": best});
        json!({"choices": [{"logprobs": {"content": [entry]}}]})
    };
    let (report, error) = check(Box::new(penalised), "1000");
    assert_eq!(faults(&report), [] as [&str; 0], "{error}");
    assert_eq!(report["reference"]["same"], 5, "{report}");

    // Another token, in the older form.
    let other = |_: &str| {
        json!({"choices": [{"logprobs": {
        "tokens": ["some token"], "token_logprobs": [-3.0],
        "top_logprobs": [{"some token": -3.0, "no token of any model": -0.5}]}}]})
    };
    let (report, _) = check(Box::new(other), "1000");
    assert_eq!(faults(&report).len(), 5, "{report}");
    assert!(faults(&report)[0].contains("\"no token of any model\", here "), "{report}");

    // Nothing, where the model would have gone on.
    let (report, _) = check(Box::new(|_| with_bytes(&[])), "1000");
    assert_eq!(faults(&report).len(), 5, "{report}");
    assert!(faults(&report)[0].starts_with("reference: nothing after `"), "{report}");
}

#[test]
fn a_server_that_is_none_is_named() {
    let place = Place::new();
    let model = model("llama");
    // Nothing listens on this port.
    let (found, _) = check(&place, &[&model, "--reference", "http://127.0.0.1:9/v1/"]);
    assert!(found.to_string().contains("http://127.0.0.1:9/v1/completions"), "{found}");
    let (url, server) = serve(1, Box::new(|_| json!({"choices": []})));
    let (found, _) = check(&place, &[&model, "--reference", &url]);
    server.join().unwrap();
    assert!(found.to_string().contains("no logprobs in the answer"), "{found}");
}
