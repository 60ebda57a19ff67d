//! Log-probabilities of prompts, on a tiny model with windows and one with recurrent state: they
//! are those of the logits of the whole sequence, whatever is cached and runs beside it.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;

use bodkin_backend::Limits;
use bodkin_engine::{
    Engine, Event, Events, FinishReason, Logprobs, Request, SamplerOptions, Usage,
};
use bodkin_gguf::File;

mod tiny;

const MODELS: [&str; 2] = ["gemma3.gguf", "falcon-h1.gguf"];

fn file(model: &str) -> File {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    File::open(folder.join(model)).unwrap()
}

fn engine(model: &str, change: impl FnOnce(&mut Limits)) -> Engine {
    tiny::open(file(model), change)
}

fn request(seed: u32, length: u32, max_tokens: usize) -> Request {
    Request {
        prompt: (0..length).map(|i| 5 + (i * seed) % 300).collect(),
        sampling: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..Request::default()
    }
}

fn scored(request: Request) -> Request {
    Request { prompt_logprobs: Some(3), logprobs: Some(3), ..request }
}

/// What came of a request.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    /// Of the tokens of the prompt, from the second on.
    prompt: Vec<(u32, Logprobs)>,
    generated: Vec<(u32, Option<Logprobs>)>,
    text: String,
    end: Option<FinishReason>,
    usage: Usage,
    error: Option<String>,
}

fn collect(events: Events) -> Outcome {
    let mut outcome = Outcome::default();
    for event in events {
        match event {
            Event::Prefill { .. } => (),
            Event::PromptToken { id, logprobs } => outcome.prompt.push((id, *logprobs)),
            Event::Token { id, text, logprobs } => {
                outcome.generated.push((id, logprobs.map(|logprobs| *logprobs)));
                outcome.text += &text;
            }
            Event::Done { reason, usage, .. } => {
                (outcome.end, outcome.usage) = (Some(reason), usage);
            }
            Event::Error(error) => outcome.error = Some(error.to_string()),
        }
    }
    outcome
}

fn run(engine: &Engine, request: Request) -> Outcome {
    collect(engine.submit(request).unwrap())
}

/// The log-probabilities of all tokens behind each of `tokens`, computed on their own.
fn of_sequence(model: &str, tokens: &[u32]) -> Vec<Vec<f64>> {
    let (mut model, _) = tiny::load(file(model), |_| ());
    let mut rows = Vec::new();
    let each = |_, logits: &[f32]| {
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        rows.push(logits.iter().map(|&x| f64::from(x) - sum.ln()).collect());
    };
    bodkin_engine::logits(&mut *model, tokens, 7, |_| true, each).unwrap();
    rows
}

fn assert_close(found: &Logprobs, id: u32, wanted: &[f64]) {
    let is_close = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-5;
    assert!(is_close(found.sampled, wanted[id as usize]), "{found:?}");
    assert!(found.top.iter().all(|&(id, p)| is_close(p, wanted[id as usize])), "{found:?}");
    let mut largest = wanted.to_vec();
    largest.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(found.top.len(), 3);
    let mut pairs = found.top.iter().zip(&largest);
    assert!(pairs.all(|(&(_, p), &wanted)| is_close(p, wanted)), "{found:?}");
}

#[test]
fn log_probabilities_are_those_of_the_whole_sequence() {
    for model in MODELS {
        let plain = run(&engine(model, |_| ()), request(7, 50, 4));
        let prompt = request(7, 50, 4).prompt;
        let generated: Vec<u32> = plain.generated.iter().map(|(id, _)| *id).collect();
        let wanted = of_sequence(model, &[&prompt[..], &generated].concat());
        // With one more output row than requests, a prompt takes two rows a step.
        for outputs in [3 + 16, 3, 4] {
            let engine = engine(model, |limits| limits.outputs = outputs);
            let others = [request(11, 20, 30), request(13, 60, 5)];
            let alone = others.clone().map(|other| run(&engine, other).generated);
            // The second time its prefix is cached.
            for _ in 0..2 {
                let beside = others.clone().map(|other| engine.submit(other).unwrap());
                let found = run(&engine, scored(request(7, 50, 4)));
                assert_eq!(found.end, Some(FinishReason::Length));
                assert_eq!((found.usage.prompt_tokens, found.usage.cached_tokens), (50, 0));
                assert!(found.prompt.iter().map(|(id, _)| id).eq(&prompt[1..]));
                assert!(found.generated.iter().map(|(id, _)| id).eq(&generated));
                let of_prompt = found.prompt.iter().map(|(id, found)| (*id, found));
                let of_answer = found.generated.iter();
                let of_answer = of_answer.map(|(id, found)| (*id, found.as_ref().unwrap()));
                for ((id, found), wanted) in of_prompt.chain(of_answer).zip(&wanted) {
                    assert_close(found, id, wanted);
                }
                assert_eq!(beside.map(|events| collect(events).generated), alone);
            }
        }
    }
}

/// Where pages are short, a request that was preempted returns each log-probability once.
#[test]
fn a_preempted_request_is_scored_once() {
    for model in MODELS {
        let alone = [5, 7, 11].map(|s| run(&engine(model, |_| ()), scored(request(s, 60, 20))));
        let engine = engine(model, |limits| limits.pages.iter_mut().for_each(|pages| *pages = 4));
        let events = [5, 7, 11].map(|s| engine.submit(scored(request(s, 60, 20))).unwrap());
        let found = events.map(collect);
        for (found, alone) in found.into_iter().zip(alone) {
            assert_eq!((found.prompt.len(), found.generated.len()), (59, 20));
            assert_eq!((found.prompt, found.generated), (alone.prompt, alone.generated));
        }
        assert!(engine.stats().preemptions > 0, "pages are short");
    }
}

#[test]
fn a_request_for_no_tokens_reads_its_prompt() {
    for model in MODELS {
        let engine = engine(model, |_| ());
        let found = run(&engine, scored(request(7, 40, 0)));
        assert_eq!((found.prompt.len(), found.generated.len()), (39, 0));
        assert_eq!((found.end, found.usage.generated_tokens), (Some(FinishReason::Length), 0));
        let found = run(&engine, request(11, 40, 0));
        assert_eq!((found.prompt.len(), found.generated.len()), (0, 0));
        assert_eq!(found.end, Some(FinishReason::Length));
        // What it has read is cached.
        assert_eq!(run(&engine, request(11, 70, 1)).usage.cached_tokens, 40);
        let one = run(&engine, scored(request(7, 1, 0)));
        assert_eq!((one.prompt.len(), one.generated.len()), (0, 0));
        let stats = engine.stats();
        assert_eq!((stats.running, stats.waiting, stats.generated_tokens), (0, 0, 1));
    }
}

/// Who counts tokens finds the end token behind those of the prompt; it has no text.
#[test]
fn the_end_token_is_reported_with_the_prompt() {
    let (model, tokenizer) = tiny::load(file("gemma3.gguf"), |_| ());
    let end = tokenizer.ends_of_generation()[0];
    let engine = Engine::open(model, tokenizer, tiny::OPTIONS).unwrap();
    let mut ended = Request { ignore_end: false, ..request(7, 10, 5) };
    ended.sampling.logit_bias = vec![(end, 1000.0)];
    let found = run(&engine, scored(ended.clone()));
    assert_eq!(found.generated.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [end]);
    assert_eq!((found.end, found.text.as_str()), (Some(FinishReason::End), ""));
    assert!(found.generated[0].1.is_some());
    let found = run(&engine, ended);
    assert_eq!((found.end, found.generated.len()), (Some(FinishReason::End), 0));
}

#[test]
fn nan_logits_of_a_prompt_end_the_request() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let mut bytes = std::fs::read(folder.join("gemma3.gguf")).unwrap();
    let file = File::from_bytes("nan.gguf", bytes.clone()).unwrap();
    let norm = file.tensors().iter().find(|t| t.name == "output_norm.weight").unwrap();
    bytes[norm.offset as usize..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let (model, tokenizer) = tiny::load(File::from_bytes("nan.gguf", bytes).unwrap(), |_| ());
    let engine = Engine::open(model, tokenizer, tiny::OPTIONS).unwrap();
    for request in [scored(request(7, 40, 0)), scored(request(7, 40, 5)), request(7, 40, 0)] {
        let found = run(&engine, request);
        let error = found.error.unwrap();
        assert!(error.ends_with("the head, the input of token_embd.weight"), "{error}");
        assert!(found.prompt.is_empty() && found.generated.is_empty());
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert_eq!(stats.free_pages, stats.total_pages, "nobody may reuse what was computed");
}
