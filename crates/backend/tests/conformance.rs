//! The reference interpreter against itself, and a backend that gets everything wrong.

use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, Error, Limits, Memory, Model, Observer, Progress, Reference, Result,
    StageProfile, conformance,
};
use bodkin_gguf::File;
use bodkin_model::Plan;

#[test]
fn the_reference_keeps_its_own_contract() {
    assert_eq!(conformance::check(&Reference), Vec::<String>::new());
}

/// Results that depend on the length of the step, no limits, nothing to observe, and no word while
/// loading.
struct Careless;

struct CarelessModel(Box<dyn Model>);

impl Backend for Careless {
    fn name(&self) -> String {
        "careless".to_owned()
    }

    fn threads(&self) -> usize {
        Reference.threads()
    }

    fn bandwidth(&self) -> Result<f64> {
        Reference.bandwidth()
    }

    fn available_memory(&self) -> Option<u64> {
        Reference.available_memory()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        Reference.memory(plan, limits)
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        _: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let model = Reference.load(plan, file, limits, &|_, _| ())?;
        Ok(Box::new(CarelessModel(model)))
    }
}

impl Model for CarelessModel {
    fn plan(&self) -> &Plan {
        self.0.plan()
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result<()> {
        self.0.copy_state(from, to)
    }

    fn expert_counts(&self) -> Vec<Vec<u64>> {
        self.0.expert_counts()
    }

    fn limits(&self) -> &Limits {
        self.0.limits()
    }

    fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        match self.0.forward(batch, logits) {
            Err(Error::Limit { .. }) => return Ok(()),
            result => result?,
        }
        let factor = 1.0 + 0.002 * batch.tokens.len() as f32;
        logits.iter_mut().for_each(|x| *x *= factor);
        Ok(())
    }

    fn observe(&mut self, batch: &Batch, logits: &mut [f32], _: &mut dyn Observer) -> Result<()> {
        self.0.forward(batch, logits)
    }

    fn set_profiling(&mut self, on: bool) {
        self.0.set_profiling(on);
    }

    fn profile(&self) -> Vec<StageProfile> {
        self.0.profile()
    }
}

#[test]
fn faults_are_found() {
    let failures = conformance::check(&Careless);
    for part in [
        "NMSE",
        "Chunks(1) differs in bits",
        "Beside differs in bits",
        "other matmuls are observed",
        "observed differs in bits",
        "too many tokens is accepted",
        "a page that does not exist is accepted",
        "a position that the table has not is accepted",
        "a state slot that does not exist is accepted",
        "a copy goes on otherwise",
        "progress",
    ] {
        assert!(failures.iter().any(|line| line.contains(part)), "nothing says `{part}`");
    }
    let are_named = |word| failures.iter().any(|line| line.starts_with(word));
    let some =
        ["linear Q6_K", "rope", "norm", "glu", "slice", "decoder", "route", "expert", "pool"];
    assert!(some.into_iter().all(are_named));
}
