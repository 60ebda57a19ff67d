//! A backend that computes nothing: its tokens follow from the token before and its position. What
//! is left of a request's time is that of everything around the model, so servers are measured and
//! tested with it.

use std::sync::Arc;

use bodkin_gguf::File;
use bodkin_model::Plan;

use crate::{
    Backend, Batch, DeviceInfo, DeviceKind, Error, HostSampler, KvType, Limits, Memory, Model,
    ModelStats, OutputRequest, Progress, Result, Sink, Step, StepOutput, Transfer,
};

/// Runs any plan without weights.
#[derive(Default)]
pub struct Mock {
    fault: Option<Fault>,
}

/// A call of a model that goes wrong: which one, counted from 1, and how.
#[derive(Clone, Copy)]
struct Fault {
    call: usize,
    kind: FaultKind,
}

#[derive(Clone, Copy)]
enum FaultKind {
    Error,
    Panic,
    Hang,
}

struct MockModel {
    fault: Option<Fault>,
    /// Calls so far.
    calls: usize,
    plan: Arc<Plan>,
    limits: Limits,
    host: HostSampler,
    tokens: Vec<u32>,
}

impl Mock {
    /// A backend of which each model goes wrong in one call: `error@3`, `panic@3` and `hang@3` name
    /// the third.
    pub fn failing(fault: &str) -> Option<Mock> {
        let (kind, call) = fault.split_once('@')?;
        let kind = match kind {
            "error" => FaultKind::Error,
            "panic" => FaultKind::Panic,
            "hang" => FaultKind::Hang,
            _ => return None,
        };
        Some(Mock { fault: Some(Fault { call: call.parse().ok()?, kind }) })
    }
}

impl Backend for Mock {
    fn name(&self) -> String {
        "mock".to_owned()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let (kind, name) = (DeviceKind::Cpu, self.name());
        vec![DeviceInfo { kind, name, total_bytes: None, free_bytes: None }]
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        KvType::Auto
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        Ok(f64::INFINITY)
    }

    fn available_memory(&self) -> Option<u64> {
        None
    }

    fn memory(&self, _: &Plan, _: &Limits) -> Memory {
        Memory::default()
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        _: &Arc<File>,
        limits: &Limits,
        _: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let (host, tokens) = (HostSampler::new(&plan, limits), Vec::new());
        let (fault, limits) = (self.fault, limits.clone());
        Ok(Box::new(MockModel { fault, calls: 0, plan, limits, host, tokens }))
    }
}

/// The token that follows `token` at `position`.
fn next(token: u32, position: usize, vocabulary: usize) -> u32 {
    let hash = (u64::from(token) << 32 | position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((hash >> 33) % vocabulary as u64) as u32
}

impl MockModel {
    /// Goes wrong if this call is to.
    fn fail(&mut self) -> Result<()> {
        self.calls += 1;
        match self.fault.filter(|fault| fault.call == self.calls).map(|fault| fault.kind) {
            None => Ok(()),
            Some(FaultKind::Error) => Err(Error::Config("the mock fails".to_owned())),
            Some(FaultKind::Panic) => panic!("the mock panics"),
            Some(FaultKind::Hang) => loop {
                std::thread::park();
            },
        }
    }

    /// The token that follows each output row, `step` steps after the batch.
    fn follow(&mut self, batch: &Batch, step: usize) {
        let vocabulary = self.plan.vocabulary;
        let before = std::mem::take(&mut self.tokens);
        let mut positions = batch.positions().zip(&batch.tokens).enumerate();
        for (i, &row) in batch.outputs.iter().enumerate() {
            let output = positions.find(|(at, _)| *at == row as usize);
            let (_, (position, &token)) = output.expect("an output is a row");
            let token = if step == 0 { token } else { before[i] };
            self.tokens.push(next(token, position + step, vocabulary));
        }
    }
}

impl Model for MockModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Rows that ask for logits get one that stands out.
    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()> {
        self.fail()?;
        if step.requests.iter().any(|row| matches!(row, OutputRequest::Logits)) {
            self.follow(step.batch, 0);
            let (width, tokens) = (self.plan.output_width(), self.tokens.clone());
            return self.host.run(step, sink, &mut |_, logits, _| {
                for (logits, &token) in logits.chunks_exact_mut(width).zip(&tokens) {
                    logits.fill(0.0);
                    logits[token as usize % width] = 20.0;
                }
                Ok(())
            });
        }
        self.host.check(&step)?;
        for i in 0..step.steps {
            self.follow(step.batch, i);
            let tokens: Vec<Option<u32>> = self.tokens.iter().copied().map(Some).collect();
            if sink(StepOutput { tokens: &tokens, logits: &mut [] }).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn transfer(&mut self, _: Transfer<'_>) -> Result<usize> {
        Ok(0)
    }

    fn stats(&self) -> ModelStats {
        ModelStats::default()
    }

    fn set_profiling(&mut self, _: bool) {}

    fn set_tracing(&mut self, _: bool) -> Result<()> {
        Ok(())
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        Err(Error::no_thresholds("mock", thresholds))
    }
}
