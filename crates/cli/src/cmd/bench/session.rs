//! A loaded model that runs tests on random tokens.

use std::fmt;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Error, Result, ensure};
use bodkin::ModelFile;
use bodkin_backend::{
    Backend, Batch, ExpertStats, Limits, Model, Observer, OutputRequest, PAGE_TOKENS,
    SamplingParams, Step, are_samplable,
};
use bodkin_engine::{Pages, Sequence, embed, embedding_limits};
use bodkin_eval::Recorder;
use bodkin_model::Plan;

use super::timeline::Timeline;

/// One row to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Test {
    pub(super) prompt: usize,
    pub(super) generate: usize,
    pub(super) depth: usize,
    /// Sequences that run in parallel; each generates `generate` tokens, or is an encoder's text.
    pub(super) sequences: usize,
}

impl Test {
    /// A prompt alone, or generation alone.
    pub(super) fn new(prompt: usize, generate: usize) -> Test {
        Test { prompt, generate, depth: 0, sequences: 1 }
    }

    /// Tokens that are read or generated.
    pub(super) fn tokens(&self) -> usize {
        (self.prompt + self.generate) * self.sequences
    }

    /// Tokens of a sequence at the end.
    pub(super) fn context(&self) -> usize {
        self.depth + self.prompt + self.generate
    }

    /// Tokens of the largest prefill chunk.
    fn chunk(&self, batch_size: usize) -> usize {
        batch_size.min(self.depth.max(self.prompt).max(1))
    }
}

/// What a decoder is loaded for, to run a test with batches of `batch_size` tokens.
pub(super) fn decoder_limits(plan: &Plan, test: Test, batch_size: usize) -> Limits {
    let (step, n) = (test.chunk(batch_size), test.sequences);
    let pages = Pages::needed(&plan.windows(), test.context(), step.max(PAGE_TOKENS), n);
    Limits { tokens: step.max(n), outputs: n, pages, state_slots: n }
}

/// As in llama-bench: `pp512`, `tg128 @ d4096`; several sequences are `tg128 x8`.
impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prompt {
            0 => write!(f, "tg{}", self.generate)?,
            n => write!(f, "pp{n}")?,
        }
        if self.sequences > 1 {
            write!(f, " x{}", self.sequences)?;
        }
        if self.depth > 0 {
            write!(f, " @ d{}", self.depth)?;
        }
        Ok(())
    }
}

/// A loaded model that runs on random tokens.
pub(super) struct Session {
    pub(super) model: Box<dyn Model>,
    pages: Pages,
    sequences: Vec<Sequence>,
    step: usize,
    /// State of a linear congruential generator; every run has the same tokens.
    random: u32,
    /// Whether the next run is profiled, and whether its timeline is recorded.
    pub(super) profiled: bool,
    traced: bool,
    /// When the last run began.
    start: Instant,
    /// Expert counts and times at the start of the last run.
    experts_before: Vec<ExpertStats>,
}

impl Session {
    /// Loads a model for a test, with prefill chunks of `batch_size` tokens.
    pub(super) fn load(
        opened: &ModelFile,
        backend: &dyn Backend,
        test: Test,
        batch_size: usize,
    ) -> Result<Session> {
        let plan = &opened.plan;
        let limits = match plan.is_encoder() {
            true => {
                embedding_limits(plan, &vec![vec![0; test.prompt]; test.sequences], batch_size)?
            }
            false => decoder_limits(plan, test, batch_size),
        };
        let model = opened.load(backend, &limits)?;
        let pages = Pages::of(&*model);
        let sequences = (0..test.sequences).map(|_| pages.unshared()).collect();
        Ok(Session {
            model,
            pages,
            sequences,
            step: test.chunk(batch_size),
            random: 1,
            profiled: false,
            traced: false,
            start: Instant::now(),
            experts_before: Vec::new(),
        })
    }

    /// Steps of one run of a test.
    pub(super) fn steps(&self, test: Test) -> usize {
        match test.prompt {
            0 => test.generate,
            prompt if self.model.plan().is_encoder() => {
                // A text runs in one step, which several may share.
                let shared = (self.model.limits().tokens / prompt).max(1);
                test.sequences.div_ceil(shared)
            }
            prompt => prompt.div_ceil(self.step),
        }
    }

    /// Runs a test and returns its duration in nanoseconds.
    pub(super) fn run(&mut self, test: Test) -> Result<u64> {
        self.restart();
        let is_encoder = self.model.plan().is_encoder();
        let count = if is_encoder { test.sequences } else { 0 };
        let texts: Vec<Vec<u32>> = (0..count).map(|_| self.tokens(test.prompt)).collect();
        for i in 0..self.sequences.len() {
            self.read(i, test.depth, None)?;
        }
        self.model.set_profiling(self.profiled);
        self.experts_before = self.model.stats().experts;
        if self.traced {
            self.model.set_tracing(true)?;
        }
        self.start = Instant::now();
        if is_encoder {
            embed(self.model.as_mut(), &texts, |_, _| ())?;
        } else {
            self.read(0, test.prompt, None)?;
            self.generate(test.generate, None)?;
        }
        Ok(self.start.elapsed().as_nanos() as u64)
    }

    /// Runs a test once more and records the experts that its tokens choose.
    pub(super) fn record(&mut self, test: Test, recorder: &mut Recorder) -> Result<()> {
        self.restart();
        self.read(0, test.depth, None)?;
        self.experts_before = self.model.stats().experts;
        self.read(0, test.prompt, Some(recorder))?;
        self.generate(test.generate, Some(recorder))
    }

    /// Runs a test and returns its timeline.
    pub(super) fn trace(&mut self, test: Test) -> Result<Timeline> {
        self.traced = true;
        let result = self.run(test);
        self.traced = false;
        let seconds = result? as f64 * 1e-9;
        let intervals = self.model.stats().timeline;
        self.model.set_tracing(false)?;
        Ok(Timeline::new(&intervals, self.start, seconds))
    }

    /// Expert counts and times of the last run.
    pub(super) fn experts_chosen(&self) -> Vec<ExpertStats> {
        let mut chosen = self.model.stats().experts;
        for (now, before) in chosen.iter_mut().zip(&self.experts_before) {
            now.counts.iter_mut().zip(&before.counts).for_each(|(now, before)| *now -= before);
            now.seconds.iter_mut().zip(&before.seconds).for_each(|(now, before)| *now -= before);
            if let Some((now, before)) = now.cache.as_mut().zip(before.cache) {
                now.hits -= before.hits;
                now.misses -= before.misses;
                now.fills -= before.fills;
                now.reads -= before.reads;
                now.predicted -= before.predicted;
            }
        }
        chosen
    }

    fn restart(&mut self) {
        for sequence in &mut self.sequences {
            let fresh = self.pages.unshared();
            self.pages.release(std::mem::replace(sequence, fresh));
        }
    }

    /// Generates `count` tokens of each sequence greedily in multi-step decodes of one page, as the
    /// engine does. No logits leave the device.
    fn generate(&mut self, count: usize, mut observer: Option<&mut Recorder>) -> Result<()> {
        let mut next: Vec<u32> = (0..self.sequences.len()).map(|_| self.token()).collect();
        let mut left = count;
        while left > 0 {
            let len = left.min(PAGE_TOKENS);
            let mut batch = Batch::default();
            for (sequence, &token) in self.sequences.iter_mut().zip(&next) {
                ensure!(self.pages.reserve(sequence, len), "pages for all tokens of the test");
                batch.push(sequence.span(1, false), &[token]);
                batch.output_last();
            }
            let greedy = SamplingParams::greedy();
            let rows = vec![OutputRequest::Token(&greedy); self.sequences.len()];
            let mut stored = vec![next];
            let mut failed = None;
            let observer = observer.as_deref_mut().map(|observer| observer as &mut dyn Observer);
            let step = Step { batch: &batch, requests: &rows, steps: len, observer };
            self.model.step(step, &mut |output| {
                failed = failed.or(output.tokens.iter().position(Option::is_none));
                stored.extend(output.tokens.iter().copied().collect::<Option<Vec<u32>>>());
                ControlFlow::Continue(())
            })?;
            if let Some(i) = failed {
                return Err(self.non_finite(i, stored.iter().map(|tokens| tokens[i])));
            }
            for (i, sequence) in self.sequences.iter_mut().enumerate() {
                let tokens: Vec<u32> = stored[..len].iter().map(|step| step[i]).collect();
                self.pages.advance(sequence, &tokens);
            }
            next = stored.swap_remove(len);
            left -= len;
        }
        Ok(())
    }

    /// The error of a sequence that has no next token after `new` ones.
    fn non_finite(&mut self, i: usize, new: impl Iterator<Item = u32>) -> Error {
        let mut tokens = self.sequences[i].tokens.clone();
        tokens.extend(new);
        self.restart();
        bodkin_engine::non_finite_error(self.model.as_mut(), &mut self.pages, &tokens).into()
    }

    /// Prefills `count` more tokens of a sequence in chunks, with logits for the last token.
    fn read(&mut self, i: usize, count: usize, mut observer: Option<&mut Recorder>) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let len = left.min(self.step);
            let tokens = self.tokens(len);
            let sequence = &mut self.sequences[i];
            ensure!(self.pages.reserve(sequence, len), "pages for all tokens of the test");
            let mut batch = Batch::default();
            batch.push(sequence.span(len, true), &tokens);
            batch.output_last();
            let observer = observer.as_deref_mut().map(|observer| observer as &mut dyn Observer);
            let step =
                Step { batch: &batch, requests: &[OutputRequest::Logits], steps: 1, observer };
            let mut is_finite = true;
            self.model.step(step, &mut |output| {
                is_finite = are_samplable(output.logits);
                ControlFlow::Break(())
            })?;
            if !is_finite {
                return Err(self.non_finite(i, batch.tokens.into_iter()));
            }
            self.pages.advance(&mut self.sequences[i], &batch.tokens);
            left -= len;
        }
        Ok(())
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.token()).collect()
    }

    fn token(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.random >> 8) % self.model.plan().vocabulary as u32
    }
}
