//! The reference interpreter against itself, and a backend that gets everything wrong.

use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, Error, KvType, Limits, Memory, Model, ModelStats, Progress, Result, Sink,
    Step, Transfer,
};
use bodkin_conformance::{self as conformance, Reference};
use bodkin_gguf::File;
use bodkin_model::Plan;

/// The interpreter has no tiles and no threads that large cases would reach.
fn check(backend: &dyn Backend) -> Vec<String> {
    let mut failures = conformance::check_named(backend, |name| !conformance::is_large(name));
    failures.extend(conformance::check_steps(backend));
    failures
}

#[test]
fn the_reference_keeps_its_own_contract() {
    assert_eq!(check(&Reference), Vec::<String>::new());
}

/// Results that depend on the length of the step, no limits, nothing to observe, and no word while
/// loading.
struct Careless;

struct CarelessModel(Box<dyn Model>);

impl Backend for Careless {
    fn name(&self) -> String {
        "careless".to_owned()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        Reference.devices()
    }

    fn kv_type(&self) -> KvType {
        Reference.kv_type()
    }

    fn threads(&self) -> usize {
        Reference.threads()
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        Reference.measure_bandwidth()
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

    fn transfer(&mut self, transfer: Transfer<'_>) -> Result<usize> {
        match transfer {
            Transfer::Copy { .. } => Ok(0),
            other => self.0.transfer(other),
        }
    }

    fn stats(&self) -> ModelStats {
        self.0.stats()
    }

    fn limits(&self) -> &Limits {
        self.0.limits()
    }

    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()> {
        let tokens = if step.observer.is_some() { 0 } else { step.batch.tokens.len() };
        let factor = 1.0 + 0.002 * tokens as f32;
        let unobserved = Step { observer: None, ..step };
        let result = self.0.step(unobserved, &mut |output| {
            output.logits.iter_mut().for_each(|x| *x *= factor);
            sink(output)
        });
        match result {
            Err(Error::Limit { .. }) => Ok(()),
            result => result,
        }
    }

    fn set_profiling(&mut self, on: bool) {
        self.0.set_profiling(on);
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.0.set_tracing(on)
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        self.0.set_activation_thresholds(thresholds)
    }
}

#[test]
fn faults_are_found() {
    let failures = check(&Careless);
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
