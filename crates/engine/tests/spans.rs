//! What the engine tells a backend of tokens: whether they are of a prompt, also where pages were
//! given up and a sequence is stored again.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;
use std::sync::{Arc, Mutex};

use bodkin_backend::{Backend, Limits, Model, ModelStats, Result, Sink, Span, Step, Transfer};
use bodkin_conformance::Reference;
use bodkin_engine::{Engine, EngineOptions, Event, Request, SamplerOptions, Tokenizer};
use bodkin_gguf::File;
use bodkin_model::Plan;

const OPTIONS: EngineOptions = EngineOptions {
    context: 160,
    step_tokens: 16,
    parallel: 2,
    queue: 8,
    cache_tokens: None,
    more_checkpoints: 0,
};
const PROMPT: usize = 40;

/// A model that remembers the spans of its steps.
struct Watched {
    model: Box<dyn Model>,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Model for Watched {
    fn plan(&self) -> &Plan {
        self.model.plan()
    }

    fn limits(&self) -> &Limits {
        self.model.limits()
    }

    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()> {
        self.spans.lock().unwrap().extend(step.batch.spans.iter().cloned());
        self.model.step(step, sink)
    }

    fn transfer(&mut self, transfer: Transfer<'_>) -> Result<usize> {
        self.model.transfer(transfer)
    }

    fn stats(&self) -> ModelStats {
        self.model.stats()
    }

    fn set_profiling(&mut self, on: bool) {
        self.model.set_profiling(on);
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.model.set_tracing(on)
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        self.model.set_activation_thresholds(thresholds)
    }
}

#[test]
fn tokens_stay_of_a_prompt_or_generated_where_they_are_stored_again() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models/gemma3.gguf");
    let file = Arc::new(File::open(path).unwrap());
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
    let mut limits = OPTIONS.limits(&plan);
    // Two prompts fit; what is generated for both does not.
    limits.pages.iter_mut().for_each(|pages| *pages = 6);
    let model = Reference.load(plan, &file, &limits, &|_, _| ()).unwrap();
    let spans = Arc::new(Mutex::new(Vec::new()));
    let watched = Watched { model, spans: Arc::clone(&spans) };
    let engine = Engine::open(Box::new(watched), tokenizer, OPTIONS).unwrap();
    let request = |seed: u32| Request {
        prompt: (0..PROMPT as u32).map(|i| 5 + (i * seed) % 300).collect(),
        sampling: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        max_tokens: Some(100),
        ignore_end: true,
        ..Request::default()
    };
    let both = [2, 3].map(|seed| engine.submit(request(seed)).unwrap());
    for events in both {
        assert!(events.into_iter().all(|event| !matches!(event, Event::Error(_))));
    }
    let spans = spans.lock().unwrap();
    assert!(engine.stats().preemptions > 0, "a request was preempted and computed again");
    for span in &*spans {
        let is_prefill = span.position < PROMPT;
        assert_eq!(span.is_prefill, is_prefill, "at position {}", span.position);
        assert!(!is_prefill || span.position + span.len <= PROMPT, "a span is of one or the other");
    }
    assert!(spans.iter().any(|span| !span.is_prefill && span.len > 1), "generated tokens again");
}
