//! Engines on tiny models, on the reference interpreter.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::sync::Arc;

use bodkin_backend::{Backend, Limits, Model};
use bodkin_conformance::Reference;
use bodkin_engine::{Engine, EngineOptions, Tokenizer};
use bodkin_gguf::File;

pub(crate) const OPTIONS: EngineOptions = EngineOptions {
    context: 96,
    step_tokens: 16,
    parallel: 3,
    queue: 8,
    cache_tokens: None,
    more_checkpoints: 0,
};

/// Loads a model for these options, with limits that `change` has changed.
pub(crate) fn load(
    file: File,
    change: impl FnOnce(&mut Limits),
) -> (Box<dyn Model>, Arc<Tokenizer>) {
    let file = Arc::new(file);
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
    let mut limits = OPTIONS.limits(&plan);
    change(&mut limits);
    (Reference.load(plan, &file, &limits, &|_, _| ()).unwrap(), tokenizer)
}

pub(crate) fn open(file: File, change: impl FnOnce(&mut Limits)) -> Engine {
    let (model, tokenizer) = load(file, change);
    Engine::open(model, tokenizer, OPTIONS).unwrap()
}
