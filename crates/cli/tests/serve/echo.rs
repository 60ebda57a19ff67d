//! `/v1/completions` with `echo` and `logprobs`, as harnesses that score texts send it.

use serde_json::{Value, json};

use crate::server::{Server, kit};

/// What llama.cpp computed for a tiny model.
fn reference(model: &str) -> Value {
    serde_json::from_slice(&std::fs::read(kit(&format!("{model}.json"))).unwrap()).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    list(value).iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The logarithm of the softmax.
fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x - sum.ln()).collect()
}

/// The values of a list of log-probabilities, the largest first.
fn sorted(top: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = top.collect();
    values.sort_by(|a, b| b.total_cmp(a));
    values
}

fn assert_close(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 2e-3, "{found} is not {wanted}");
}

/// Several prompts of token ids in one request: the log-probabilities are those of llama.cpp's
/// logits, also if the prompts are cached.
#[test]
fn log_probabilities_of_prompts_are_those_of_llama_cpp() {
    for model in ["llama", "falcon-h1"] {
        let reference = reference(model);
        let server = Server::of(&kit(&format!("{model}.gguf")), &["--ctx-size", "640"]);
        let ids = ["n1", "n7", "n48", "n130", "n600"];
        let cases = list(&reference["cases"]).iter();
        let cases: Vec<&Value> =
            cases.filter(|case| ids.contains(&case["id"].as_str().unwrap())).collect();
        assert_eq!(cases.len(), ids.len());
        let prompts: Vec<&Value> = cases.iter().map(|case| &case["tokens"]).collect();
        let mut body = json!({
            "prompt": prompts, "echo": true, "logprobs": 3, "max_tokens": 0, "temperature": 0,
            "ignore_eos": true,
        });
        let answer = server.post("/v1/completions", &body).json();
        assert_eq!(answer["usage"]["completion_tokens"], 0, "{}", answer["usage"]);
        for (choice, case) in list(&answer["choices"]).iter().zip(&cases) {
            check_prompt(choice, case);
            let count = list(&case["tokens"]).len();
            assert_eq!(list(&choice["logprobs"]["tokens"]).len(), count);
            assert_eq!(choice["finish_reason"], "length");
        }
        // What the first answer has left in the cache changes nothing.
        body["max_tokens"] = 1.into();
        let longer = server.post("/v1/completions", &body).json();
        assert_eq!(longer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        for (i, case) in cases.iter().enumerate() {
            let [choice, alone] = [&longer, &answer].map(|answer| &answer["choices"][i]);
            check_prompt(choice, case);
            let [logprobs, prompt] = [choice, alone].map(|choice| &choice["logprobs"]);
            let count = list(&case["tokens"]).len();
            assert_eq!(list(&logprobs["token_logprobs"]).len(), count + 1);
            for (name, values) in prompt.as_object().unwrap() {
                assert_eq!(list(&logprobs[name])[..count], *list(values), "{name}");
            }
            let last = numbers(list(&case["logits"]["llama_cpp"]).last().unwrap());
            let largest = sorted(log_softmax(&last).into_iter())[0];
            assert_close(logprobs["token_logprobs"][count].as_f64().unwrap(), largest);
        }
    }
}

/// Compares the prompt's part of a choice with the positions of which the reference has logits.
fn check_prompt(choice: &Value, case: &Value) {
    let logprobs = &choice["logprobs"];
    let tokens = list(&case["tokens"]);
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    let rows = list(&case["positions"]).iter().zip(list(&case["logits"]["llama_cpp"]));
    for (position, logits) in rows {
        let next = position.as_u64().unwrap() as usize + 1;
        let Some(token) = tokens.get(next) else { continue };
        let wanted = log_softmax(&numbers(logits));
        let found = logprobs["token_logprobs"][next].as_f64().unwrap();
        assert_close(found, wanted[token.as_u64().unwrap() as usize]);
        // Tokens with the same text, such as halves of characters, are one.
        let top = logprobs["top_logprobs"][next].as_object().unwrap().values();
        let top = sorted(top.map(|p| p.as_f64().unwrap()));
        assert!((1..=3).contains(&top.len()));
        assert_close(top[0], sorted(wanted.into_iter())[0]);
    }
    assert!(
        numbers(&Value::from(&list(&logprobs["token_logprobs"])[1..])).iter().all(|&p| p < 0.0)
    );
}

/// The text is the given one, and each offset is where its token stands in it: the tokenizer of
/// this model puts a token and a space before it.
#[test]
fn offsets_are_those_in_the_prompt() {
    let server = Server::of(&kit("llama-spm.gguf"), &[]);
    for prompt in ["Hello größe world", " two  spaces", "日本 <s> x"] {
        let body = json!({
            "prompt": prompt, "echo": true, "logprobs": 0, "max_tokens": 2, "temperature": 0,
            "ignore_eos": true,
        });
        let choice = &server.post("/v1/completions", &body).json()["choices"][0];
        let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        assert!(choice["text"].as_str().unwrap().starts_with(prompt), "{choice}");
        let logprobs = &choice["logprobs"];
        let (tokens, offsets) = (list(&logprobs["tokens"]), numbers(&logprobs["text_offset"]));
        assert_eq!((tokens[0].as_str(), offsets[0], offsets[1]), (Some("<s>"), 0.0, 0.0));
        for (token, &offset) in tokens.iter().zip(&offsets).skip(1) {
            let token = token.as_str().unwrap();
            let rest: String = text[offset as usize..].iter().collect();
            let is_part = token.contains('\u{FFFD}');
            let is_there = rest.starts_with(token) || rest.starts_with(token.trim_start());
            assert!(is_part || is_there, "{token:?} is not at {offset}: {choice}");
        }
        let generated = offsets[offsets.len() - 2];
        assert_eq!(generated, prompt.chars().count() as f64, "{choice}");
    }
}

/// The first event of each choice has its prompt.
#[test]
fn a_stream_begins_with_the_prompt() {
    let server = Server::start(&["--ctx-size", "256"]);
    for max_tokens in [0, 3] {
        let mut body = json!({
            "prompt": ["abc de", [5, 6]], "echo": true, "logprobs": 2, "temperature": 0, "n": 2,
            "max_tokens": max_tokens, "ignore_eos": true,
        });
        let choices = server.post("/v1/completions", &body).json()["choices"].clone();
        assert_eq!(list(&choices).len(), 4);
        body["stream"] = true.into();
        let streamed = server.post("/v1/completions", &body).body;
        let chunks = streamed.lines().filter_map(|line| line.strip_prefix("data: "));
        let chunks = chunks.filter_map(|chunk| serde_json::from_str::<Value>(chunk).ok());
        let mut found = vec![json!({ "text": "", "logprobs": {} }); 4];
        for chunk in chunks {
            let choice = &chunk["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            let all = &mut found[index];
            if all["text"] == "" {
                let prompt = ["abc de", choices[2]["text"].as_str().unwrap()][index / 2];
                assert!(prompt.starts_with(choice["text"].as_str().unwrap()), "{choice}");
                assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
            }
            let text = all["text"].as_str().unwrap().to_owned() + choice["text"].as_str().unwrap();
            all["text"] = text.into();
            let Some(lists) = choice["logprobs"].as_object() else { continue };
            for (name, values) in lists {
                let old = all["logprobs"][name].as_array().cloned().unwrap_or_default();
                all["logprobs"][name] = [&old[..], list(values)].concat().into();
            }
        }
        for (choice, found) in list(&choices).iter().zip(found) {
            assert_eq!(found["text"], choice["text"]);
            assert_eq!(found["logprobs"], choice["logprobs"]);
        }
    }
}

#[test]
fn a_prompt_alone_is_repeated_and_too_many_are_refused() {
    let server = Server::start(&["--ctx-size", "256"]);
    let body = json!({ "prompt": "abc de", "echo": true, "max_tokens": 0 });
    let answer = server.post("/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], "abc de");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(answer["usage"]["total_tokens"], answer["usage"]["prompt_tokens"]);
    let prompts = vec![vec![5; 200]; 200];
    let mut body = json!({
        "prompt": prompts, "echo": true, "logprobs": 20, "max_tokens": 0, "n": 2
    });
    let refused = server.post("/v1/completions", &body);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(refused.status, 400, "{message}");
    assert!(message.contains("80000 tokens") && message.contains("6241"), "{message}");
    body["n"] = 1.into();
    body["prompt"] = vec![vec![5; 200]; 2].into();
    assert_eq!(server.post("/v1/completions", &body).status, 200);
}
