//! Several requests at once on a real tiny model: each gets what it gets alone, a cancelled one
//! ends, and requests that do not fit say so without harm to the others.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Limits, Reference};
use bodkin_engine::{
    Engine, EngineOptions, Error, Event, Events, Finish, Request, SamplerOptions, Tokenizer,
};
use bodkin_gguf::File;

const OPTIONS: EngineOptions = EngineOptions { context: 96, step_tokens: 16, parallel: 3 };

/// An engine on a tiny Gemma 3, whose local layers have a window.
fn engine(change: impl FnOnce(&mut Limits)) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models/gemma3.gguf");
    let file = Arc::new(File::open(path).unwrap());
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
    let mut limits = OPTIONS.limits(&plan);
    change(&mut limits);
    let model = Reference.load(plan, &file, &limits, &|_, _| ()).unwrap();
    Engine::open(model, tokenizer, OPTIONS).unwrap()
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

/// The tokens of a request and how it ended.
fn collect(events: Events) -> (Vec<u32>, Result<Finish, Error>) {
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { reason, usage, .. } => {
                assert_eq!(usage.generated_tokens, tokens.len());
                return (tokens, Ok(reason));
            }
            Event::Error(error) => return (tokens, Err(error)),
        }
    }
    panic!("a request ends with an event");
}

#[test]
fn neighbours_change_nothing() {
    let requests = [request(7, 40, 20), request(11, 3, 30), request(13, 25, 9), request(17, 50, 5)];
    let alone: Vec<Vec<u32>> = requests
        .iter()
        .map(|r| collect(engine(|_| ()).submit(r.clone())))
        .map(|(tokens, end)| {
            assert_eq!(end.unwrap(), Finish::Length);
            tokens
        })
        .collect();
    let engine = engine(|_| ());
    // More than run at once, twice, so that the second round finds kept sequences.
    for _ in 0..2 {
        let events: Vec<Events> = requests.iter().map(|r| engine.submit(r.clone())).collect();
        let together: Vec<Vec<u32>> = events.into_iter().map(|e| collect(e).0).collect();
        assert_eq!(together, alone);
    }
}

#[test]
fn a_cancelled_request_ends_and_the_others_go_on() {
    let engine = engine(|_| ());
    let long = engine.submit(request(7, 20, 70));
    let short = engine.submit(request(11, 20, 10));
    let canceller = long.canceller();
    canceller.cancel();
    let (tokens, end) = collect(long);
    assert_eq!(end.unwrap(), Finish::Cancelled);
    assert!(tokens.len() < 70);
    let (tokens, end) = collect(short);
    assert_eq!((tokens.len(), end.unwrap()), (10, Finish::Length));
    drop(engine.submit(request(7, 20, 70)));
    let (tokens, _) = collect(engine.submit(request(11, 20, 10)));
    assert_eq!(tokens.len(), 10);
}

#[test]
fn what_does_not_fit_says_so() {
    let engine = engine(|_| ());
    let error = collect(engine.submit(request(7, 96, 1))).1.unwrap_err();
    assert_eq!(error.to_string(), "the prompt has 96 tokens, the context has room for 95");
    let error = collect(engine.submit(Request::default())).1.unwrap_err();
    assert_eq!(error.to_string(), "the prompt has no tokens");
    let wrong = Request { prompt: vec![5, 40_000], ..request(7, 1, 1) };
    let error = collect(engine.submit(wrong)).1.unwrap_err();
    assert_eq!(error.to_string(), "token id 40000: the model has 400 tokens");
    assert_eq!(collect(engine.submit(request(7, 90, 50))).0.len(), 6, "to the end of the context");
}

#[test]
fn short_pages_delay_requests_and_end_none() {
    // Room for one request of this length at a time, and a little more.
    let engine = engine(|limits| limits.pages.iter_mut().for_each(|pages| *pages = 4));
    let events: Vec<Events> = (2..6).map(|seed| engine.submit(request(seed, 40, 30))).collect();
    for events in events {
        let (tokens, end) = collect(events);
        assert_eq!((tokens.len(), end.unwrap()), (30, Finish::Length));
    }
}
