//! Answers of models with random weights that must satisfy a schema, on the reference interpreter:
//! they do whatever their seed, temperature and neighbours are.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::Backend;
use bodkin_conformance::Reference;
use bodkin_engine::{
    Constraint, Engine, EngineOptions, Event, Events, FinishReason, Grammar, Reasoning, Request,
    SamplerOptions, Tokenizer,
};
use bodkin_gguf::File;
use serde_json::{Value, json};

fn engine(model: &str, cache_tokens: Option<usize>) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models").join(model);
    let file = Arc::new(File::open(path).unwrap());
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
    let options =
        EngineOptions { parallel: 4, queue: 32, cache_tokens, ..EngineOptions::single(512, 16) };
    let limits = options.limits(&plan);
    let model = Reference.load(plan, &file, &limits, &|_, _| ()).unwrap();
    Engine::open(model, tokenizer, options).unwrap()
}

fn constraint(grammar: Grammar) -> Option<Arc<Constraint>> {
    Some(Arc::new(Constraint { field: "here".to_owned(), grammar }))
}

/// Its answers end soon, whatever the model writes.
fn schema() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 6 },
            "count": { "type": "integer", "minimum": 1, "maximum": 99 },
            "kind": { "enum": ["alpha", "beta"] },
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": false,
    }))
}

fn assert_satisfied(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let name = value["name"].as_str().unwrap();
    assert!(name.chars().count() <= 6, "{text}");
    assert!((1..=99).contains(&value["count"].as_u64().unwrap()), "{text}");
    assert!(["alpha", "beta"].contains(&value["kind"].as_str().unwrap()), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
}

fn request(seed: u64, sampling: SamplerOptions) -> Request {
    Request {
        prompt: (0..20).map(|i| 10 + (i * (seed as u32 + 3)) % 300).collect(),
        sampling: SamplerOptions { seed: Some(seed), ..sampling },
        max_tokens: Some(400),
        ..Request::default()
    }
}

/// Samplers that backends run, and those that they do not.
fn samplers() -> Vec<SamplerOptions> {
    let default = SamplerOptions::default;
    vec![
        SamplerOptions { temperature: 0.0, ..default() },
        default(),
        SamplerOptions { temperature: 5.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..default() },
        SamplerOptions { mirostat: 2, temperature: 2.0, ..default() },
        SamplerOptions { repeat_penalty: 1.5, typical_p: 0.9, top_n_sigma: 2.0, ..default() },
        SamplerOptions { dry_multiplier: 1.0, xtc_probability: 0.5, ..default() },
    ]
}

/// The text of an answer, and how it ended.
fn read(events: Events) -> (String, Result<FinishReason, String>) {
    let mut all = String::new();
    for event in events {
        match event {
            Event::Token { text, logprobs, .. } => {
                // Those before the mask: the sampled token may be an improbable one.
                assert!(logprobs.is_none_or(|logprobs| logprobs.sampled.is_finite()));
                all.push_str(&text);
            }
            Event::Done { reason, text, .. } => return (all + &text, Ok(reason)),
            Event::Error(error) => return (all, Err(error.to_string())),
            Event::Prefill { .. } | Event::PromptToken { .. } => {}
        }
    }
    panic!("a request ends with an event");
}

fn run(engine: &Engine, request: Request) -> (String, Result<FinishReason, String>) {
    read(engine.submit(request).unwrap())
}

#[test]
fn answers_satisfy_their_schema_alone_and_beside_others() {
    for model in ["llama.gguf", "llama-spm.gguf", "mamba2.gguf"] {
        let requests: Vec<Request> = samplers()
            .into_iter()
            .enumerate()
            .map(|(seed, sampling)| {
                // Nothing but the grammar ends this one.
                let ignore_end = seed % 2 == 1;
                let logprobs = (seed % 3 == 0).then_some(2);
                let constraint = constraint(schema());
                Request { constraint, ignore_end, logprobs, ..request(seed as u64, sampling) }
            })
            .collect();
        let alone: Vec<String> = requests
            .iter()
            .map(|request| {
                let (text, end) = run(&engine(model, None), request.clone());
                assert_eq!(end, Ok(FinishReason::End), "{text}");
                assert_satisfied(&text);
                text
            })
            .collect();
        // Pages for about half of them, so that some are preempted and computed again.
        let engine = engine(model, (model == "llama.gguf").then_some(512));
        let free =
            |seed| Request { max_tokens: Some(60), ..request(seed, SamplerOptions::default()) };
        let others: Vec<Events> = (20..24).map(|seed| engine.submit(free(seed)).unwrap()).collect();
        let events = requests.iter().map(|request| engine.submit(request.clone()).unwrap());
        let together: Vec<String> =
            events.collect::<Vec<_>>().into_iter().map(|events| read(events).0).collect();
        assert_eq!(together, alone, "{model}");
        drop(others);
    }
}

#[test]
fn a_preempted_answer_goes_on_where_it_was() {
    let long =
        json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 40, "maxItems": 40 });
    let hot = SamplerOptions { temperature: 3.0, ..SamplerOptions::default() };
    let request = |seed| Request {
        constraint: constraint(Grammar::JsonSchema(long.clone())),
        ..request(seed, hot.clone())
    };
    let alone: Vec<String> =
        (0..4).map(|seed| run(&engine("llama.gguf", None), request(seed)).0).collect();
    let engine = engine("llama.gguf", Some(512));
    let events: Vec<Events> = (0..4).map(|seed| engine.submit(request(seed)).unwrap()).collect();
    let together: Vec<String> = events.into_iter().map(|events| read(events).0).collect();
    assert!(engine.stats().preemptions > 0);
    assert_eq!(together, alone);
    for text in alone {
        assert_eq!(serde_json::from_str::<Vec<bool>>(&text).unwrap().len(), 40, "{text}");
    }
}

#[test]
fn limits_and_stop_strings_end_an_answer_as_they_do_others() {
    let engine = engine("llama.gguf", None);
    let string = Grammar::JsonSchema(json!({ "type": "string", "minLength": 200 }));
    let request = |seed| Request {
        constraint: constraint(string.clone()),
        max_tokens: Some(30),
        ..request(seed, SamplerOptions::default())
    };
    let (text, end) = run(&engine, request(1));
    assert_eq!(end, Ok(FinishReason::Length));
    assert!(text.starts_with('"') && text.len() >= 20);
    let stop: String = text.chars().skip(4).take(2).collect();
    let (stopped, end) = run(&engine, Request { stop: vec![stop.clone()], ..request(1) });
    assert_eq!(end, Ok(FinishReason::Stop(stop.clone())));
    assert!(text.starts_with(&(stopped + &stop)), "{text}");
}

/// A constraint of which the request excludes all tokens ends it, and no other.
#[test]
fn one_answer_fails_alone() {
    let engine = engine("llama.gguf", None);
    let ends = engine.tokenizer().ends_of_generation().iter();
    let no_ends = ends.map(|&id| (id, f32::NEG_INFINITY)).collect();
    let sampling = SamplerOptions { logit_bias: no_ends, ..SamplerOptions::default() };
    let request_of =
        |grammar, sampling| Request { constraint: constraint(grammar), ..request(1, sampling) };
    // The grammar ends by itself.
    let one = Grammar::choice(&["a".to_owned()]);
    let (text, end) = run(&engine, request_of(one, sampling));
    assert_eq!((text.as_str(), end), ("a", Ok(FinishReason::End)));
    // All tokens that may come first are excluded by the request.
    let tokens = 0..engine.tokenizer().vocab_size() as u32;
    let all = tokens.map(|id| (id, f32::NEG_INFINITY)).collect();
    let sampling = SamplerOptions { logit_bias: all, ..SamplerOptions::default() };
    let other = engine.submit(request(2, SamplerOptions::default())).unwrap();
    let (text, end) = run(&engine, request_of(Grammar::json_object(), sampling));
    assert!(text.is_empty(), "{text}");
    assert!(end.unwrap_err().starts_with("here: the request's biases"));
    assert!(read(other).1.is_ok());
}

#[test]
fn wrong_constraints_are_refused_before_the_first_token() {
    let engine = engine("llama.gguf", None);
    let wrong = Grammar::JsonSchema(json!({ "type": "object", "not": {} }));
    let request = request(1, SamplerOptions::default());
    let wrong = Request { constraint: constraint(wrong), ..request.clone() };
    let error = engine.submit(wrong.clone()).err().unwrap().to_string();
    assert!(error.starts_with("here: ") && error.contains(r#"["not"]"#), "{error}");
    let sink = || Box::new(|_| true) as bodkin_engine::UpdateSink;
    assert!(engine.submit_all(vec![(request, sink()), (wrong, sink())]).is_err());
    assert_eq!((engine.stats().running, engine.stats().waiting), (0, 0));
}

/// The model opens its reasoning by chance, or the prompt has; the answer satisfies the schema.
#[test]
fn reasoning_is_free_and_the_answer_is_not() {
    let engine = engine("llama.gguf", None);
    let hot = SamplerOptions {
        temperature: 4.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        ..samplers()[1].clone()
    };
    let mut answers = 0;
    for seed in 0..6 {
        let prompt = if seed % 2 == 0 { "<think>\n" } else { "" };
        let reasoning = Reasoning::of("'</think>'", prompt);
        let constraint = constraint(schema());
        let (text, end) =
            run(&engine, Request { constraint, reasoning, ..request(seed, hot.clone()) });
        let is_reasoning = seed % 2 == 0 || text.starts_with("<think>");
        let answer = match text.split_once("</think>") {
            Some((_, answer)) if is_reasoning => answer,
            _ if is_reasoning => {
                assert!(matches!(end, Ok(FinishReason::Length | FinishReason::Context)), "{end:?}");
                continue;
            }
            _ => text.as_str(),
        };
        assert_eq!(end, Ok(FinishReason::End));
        assert_satisfied(answer.trim_start());
        answers += 1;
    }
    assert!(answers > 0);
}
