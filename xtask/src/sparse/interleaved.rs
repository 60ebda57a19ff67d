//! One model loaded dense and sparse in one process, which alternate every few tokens. The memory
//! bandwidth that other users of the machine leave changes every second, and so affects both alike.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use bodkin_backend::{
    Backend, Batch, Limits, Model, OutputRequest, PAGE_TOKENS, SamplingParams, Step,
};
use bodkin_cpu::{Cpu, Sparse};
use bodkin_engine::{Pages, Sequence};
use bodkin_gguf::File;

/// What a test does, named as llama-bench names it.
#[derive(Copy, Clone)]
pub(super) enum Test {
    /// Prefill of this number of tokens in one step.
    Prompt(usize),
    /// Decode of this number of tokens.
    Generate(usize),
}

impl Test {
    pub(super) fn parse(name: &str) -> Result<Test> {
        let (kind, count) = name.split_at_checked(2).unwrap_or((name, ""));
        let count = count.parse().ok().filter(|&count| count > 0);
        match (kind, count) {
            ("pp", Some(count)) => Ok(Test::Prompt(count)),
            ("tg", Some(count)) => Ok(Test::Generate(count)),
            _ => bail!("a test is ppN or tgN, not {name}"),
        }
    }

    fn tokens(self) -> usize {
        match self {
            Test::Prompt(count) | Test::Generate(count) => count,
        }
    }
}

/// The runs of one test, pair by pair: tokens a second, and the memory bandwidth in GB/s.
#[derive(Default)]
pub(super) struct Pairs {
    pub(super) dense: Vec<f64>,
    pub(super) sparse: Vec<f64>,
    pub(super) bandwidth: Vec<f64>,
}

/// Runs a test with zeros and without, interleaved.
pub(super) fn run(file: &Arc<File>, test: Test, threads: usize, pairs: usize) -> Result<Pairs> {
    let cpu = Cpu::new(Some(threads))?;
    let mut both = Vec::new();
    for sparse in [Sparse::Never, Sparse::Always] {
        both.push(Runner::load(&Cpu { sparse, ..cpu }, file, test)?);
    }
    let mut found = Pairs::default();
    // The first pair pages the weights in and is not counted.
    for pair in 0..=pairs {
        let mut seconds = [0.0; 2];
        both.iter_mut().for_each(Runner::restart);
        while both[0].left(test) > 0 {
            for (runner, seconds) in both.iter_mut().zip(&mut seconds) {
                *seconds += runner.turn(test)?;
            }
        }
        if pair > 0 {
            let [dense, sparse] = seconds.map(|seconds| test.tokens() as f64 / seconds);
            found.dense.push(dense);
            found.sparse.push(sparse);
            found.bandwidth.push(cpu.measure_bandwidth()? * 1e-9);
        }
    }
    Ok(found)
}

/// A model with one sequence.
struct Runner {
    model: Box<dyn Model>,
    pages: Pages,
    sequence: Sequence,
}

impl Runner {
    fn load(cpu: &Cpu, file: &Arc<File>, test: Test) -> Result<Runner> {
        let plan = bodkin_model::plan(file.metadata(), file.tensors())?;
        let step = if let Test::Prompt(count) = test { count } else { 1 };
        let pages = Pages::needed(&plan.windows(), test.tokens(), step.max(PAGE_TOKENS), 1);
        let limits = Limits { tokens: step, outputs: 1, pages, state_slots: 1 };
        let model = cpu.load(Arc::new(plan), file, &limits, &|_, _| ())?;
        let pages = Pages::of(&*model);
        let sequence = pages.unshared();
        Ok(Runner { model, pages, sequence })
    }

    fn restart(&mut self) {
        let fresh = self.pages.unshared();
        self.pages.release(std::mem::replace(&mut self.sequence, fresh));
    }

    /// Tokens that the test still wants.
    fn left(&self, test: Test) -> usize {
        test.tokens() - self.sequence.tokens.len()
    }

    /// Goes on with the test, by a page of generated tokens or by the whole prompt, and returns the
    /// seconds.
    fn turn(&mut self, test: Test) -> Result<f64> {
        let count = match test {
            Test::Prompt(count) => count,
            Test::Generate(_) => self.left(test).min(PAGE_TOKENS),
        };
        ensure!(self.pages.reserve(&mut self.sequence, count), "pages for {count} tokens");
        let vocabulary = self.model.plan().vocabulary;
        let tokens: Vec<u32> = match test {
            Test::Prompt(count) => (0..count).map(|i| (i * 7919 % vocabulary) as u32).collect(),
            Test::Generate(_) => vec![self.sequence.tokens.last().map_or(1, |&token| token)],
        };
        let is_prefill = !matches!(test, Test::Generate(_));
        let mut batch = Batch::default();
        batch.push(self.sequence.span(tokens.len(), is_prefill), &tokens);
        batch.output_last();
        let steps = if let Test::Generate(_) = test { count } else { 1 };
        let mut stored = tokens;
        let start = Instant::now();
        let greedy = SamplingParams::greedy();
        let rows = [OutputRequest::Token(&greedy)];
        let step = Step { batch: &batch, requests: &rows, steps, observer: None };
        self.model.step(step, &mut |output| {
            stored.extend(output.tokens.iter().flatten());
            ControlFlow::Continue(())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        self.pages.advance(&mut self.sequence, &stored[..count]);
        Ok(seconds)
    }
}
