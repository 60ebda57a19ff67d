//! `bodkin bench`: the speed of prefill and decode, in rows like llama-bench's, with the fraction
//! of the memory bandwidth, which is measured between the tests.

mod report;
mod trace;

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use bodkin_backend::{
    Backend, Batch, ExpertStats, KvType, Limits, Model, PAGE_TOKENS, RowOutput, SamplingParams,
    StageProfile, Step,
};
use bodkin_engine::{Pages, Sequence};

use crate::arguments::{self, Machine, describe, find_decoder};
use crate::output;
use bodkin::memory::{kv_bytes, recurrent_bytes};
use bodkin::{MAX_BATCH_TOKENS, MAX_TOKENS, ModelFile, Sparse, within};
use report::{Format, Row};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Prompt lengths: 128,512 or 128-512+128
    #[arg(short = 'p', long, default_value = "512", value_name = "N")]
    n_prompt: String,
    /// Numbers of tokens to generate
    #[arg(short = 'n', long, default_value = "128", value_name = "N")]
    n_gen: String,
    /// Tokens in the KV cache before a test
    #[arg(short = 'd', long, default_value = "0", value_name = "N")]
    n_depth: String,
    /// Numbers of sequences decoded in parallel
    #[arg(short = 's', long, default_value = "1", value_name = "N")]
    n_sequences: String,
    /// CPU threads: lists and ranges [default: all cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<String>,
    /// Repetitions of each test
    #[arg(short, long, default_value = "5", value_name = "N")]
    repetitions: NonZeroUsize,
    /// Output format
    #[arg(short, long, default_value = "md", value_name = "FORMAT")]
    output: Format,
    /// Batch size: tokens per prefill chunk
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    batch_size: usize,
    /// Print stage times, expert counts and sparse layouts
    #[arg(long)]
    profile: bool,
    /// Write a Chrome trace of one step of each test
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Keep weights in the file's layout: less memory, slower
    #[arg(long)]
    no_repack: bool,
    /// Sparse kernels: always, never or auto
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = arguments::sparse)]
    sparse: Sparse,
    /// Fraction of the inputs of down projections to skip
    #[arg(long, value_name = "FRACTION", value_parser = arguments::fraction)]
    activation_sparsity: Option<f64>,
    /// KV cache data type: auto, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = arguments::kv_type)]
    kv_type: KvType,
    /// Device: auto, cpu or cuda[:N,..]
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: String,
    /// Layers on the GPU: the last N, the others on the CPU
    #[arg(long, value_name = "N")]
    gpu_layers: Option<usize>,
}

/// One row to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    prompt: usize,
    generate: usize,
    depth: usize,
    /// Sequences that run in parallel; each generates `generate` tokens.
    sequences: usize,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let opened = find_decoder(&args.model)?;
    if let Some(path) = &args.trace {
        output::check(path, [opened.file.path()])?;
    }
    let tests = tests(&args)?;
    let batch_size = within("batch_size", args.batch_size, MAX_BATCH_TOKENS)?;
    let threads = match &args.threads {
        Some(list) => numbers("--threads", list)?.into_iter().map(Some).collect(),
        None => vec![None],
    };
    let mut rows = Vec::new();
    for threads in threads {
        let machine = Machine {
            device: args.device.clone(),
            gpu_layers: args.gpu_layers,
            threads,
            ctx_size: None,
            batch_size,
            no_repack: args.no_repack,
            sparse: args.sparse,
            activation_sparsity: args.activation_sparsity,
            kv_type: args.kv_type,
        };
        let backend = machine.backend()?;
        for &test in &tests {
            rows.push(measure(&opened, backend.as_ref(), test, &args)?);
        }
    }
    if let Some(path) = &args.trace {
        output::write(path, |out| trace::write(out, &rows))?;
    }
    report::print(&mut std::io::stdout().lock(), args.output, &rows)
}

fn tests(args: &Args) -> Result<Vec<Test>> {
    let (prompts, generates) =
        (numbers("--n-prompt", &args.n_prompt)?, numbers("--n-gen", &args.n_gen)?);
    let sequences = numbers("--n-sequences", &args.n_sequences)?;
    for &n in &sequences {
        within("n_sequences", n, MAX_BATCH_TOKENS)?;
    }
    let mut tests = Vec::new();
    for depth in numbers("--n-depth", &args.n_depth)? {
        let none = Test { prompt: 0, generate: 0, depth, sequences: 1 };
        tests.extend(prompts.iter().map(|&prompt| Test { prompt, ..none }));
        for &sequences in &sequences {
            tests.extend(generates.iter().map(|&generate| Test { generate, sequences, ..none }));
        }
    }
    tests.retain(|test| test.prompt + test.generate > 0);
    ensure!(!tests.is_empty(), "nothing to measure: -p and -n are both 0");
    Ok(tests)
}

/// Numbers and ranges, such as `1,2-8+2,16-64*2`.
fn numbers(flag: &str, text: &str) -> Result<Vec<usize>> {
    let number = |s: &str| -> Result<usize> {
        let n =
            s.trim().parse().with_context(|| format!("{flag}: expected a number, found `{s}`"))?;
        ensure!(n <= MAX_TOKENS, "{flag}: expected at most {}, found {n}", MAX_TOKENS);
        Ok(n)
    };
    let mut out = Vec::new();
    for part in text.split(',') {
        let Some((from, rest)) = part.split_once('-') else {
            out.push(number(part)?);
            continue;
        };
        let (to, next): (_, Box<dyn Fn(usize) -> usize>) = match rest.split_once(['+', '*']) {
            None => (rest, Box::new(|n| n + 1)),
            Some((to, step)) => {
                let step = number(step)?;
                match rest.contains('*') {
                    true if step < 2 => bail!("{flag}: the factor in `{part}` must be at least 2"),
                    false if step < 1 => bail!("{flag}: the step in `{part}` must be at least 1"),
                    true => (to, Box::new(move |n: usize| n.saturating_mul(step))),
                    false => (to, Box::new(move |n| n + step)),
                }
            }
        };
        let (mut n, to) = (number(from)?, number(to)?);
        ensure!(n > 0 || !rest.contains('*'), "{flag}: `{part}` never ends");
        ensure!(n <= to, "{flag}: `{part}` has no value");
        while n <= to {
            out.push(n);
            ensure!(out.len() <= 1000, "{flag}: more than 1000 values");
            n = next(n);
        }
    }
    Ok(out)
}

fn measure(opened: &ModelFile, backend: &dyn Backend, test: Test, args: &Args) -> Result<Row> {
    let plan = &opened.plan;
    let tokens = test.depth + test.prompt + test.generate;
    let step = args.batch_size.min((test.depth.max(test.prompt)).max(1));
    let n = test.sequences;
    let pages = Pages::needed(&plan.windows(), tokens, step.max(PAGE_TOKENS), n);
    let limits = Limits { tokens: step.max(n), outputs: n, pages, state_slots: n };
    let mut session = Session::new(opened.load(backend, &limits)?, step, n);
    let mut samples_ns = Vec::new();
    // The first run pages the weights in and is discarded.
    for i in 0..=args.repetitions.get() {
        let ns = session.run(test)?;
        if i > 0 {
            samples_ns.push(ns);
        }
    }
    let mut stages = Vec::new();
    if args.profile || args.trace.is_some() {
        session.profiled = true;
        session.run(test)?;
        stages = session.model.stats().stages;
    }
    let (mut profile, mut experts, mut weight_layouts) = (Vec::new(), Vec::new(), Vec::new());
    if args.profile {
        profile = StageProfile::sums(&stages);
        experts = session.experts_chosen();
        weight_layouts = session.model.stats().weight_layouts;
    }
    drop(session);
    let steps = if test.prompt > 0 { test.prompt.div_ceil(step) } else { test.generate };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let cost = plan.cost();
    let mut row = Row {
        model_filename: opened.name.clone(),
        model_type: describe(opened),
        model_size: cost.weight_bytes,
        model_n_params: cost.parameters,
        backend: backend.name(),
        threads: backend.threads(),
        batch: args.batch_size,
        kv_type: args.kv_type,
        prompt: test.prompt,
        generate: test.generate,
        depth: test.depth,
        sequences: test.sequences,
        time_unix_s: time,
        bytes: bytes_read(opened, backend, test, steps),
        samples_ns,
        bandwidth: 0.0,
        steps,
        stages,
        profile,
        experts,
        weight_layouts,
    };
    row.bandwidth = backend.bandwidth()?;
    Ok(row)
}

/// Tokens per second of one sequence, after a warm-up step.
pub(super) fn generation_speed(opened: &ModelFile, machine: &Machine) -> Result<f64> {
    const TOKENS: usize = 64;
    let backend = machine.backend()?;
    let pages = Pages::needed(&opened.plan.windows(), TOKENS, PAGE_TOKENS, 1);
    let limits = Limits { tokens: 1, outputs: 1, pages, state_slots: 1 };
    let mut session = Session::new(opened.load(backend.as_ref(), &limits)?, 1, 1);
    let test = |generate| Test { prompt: 0, generate, depth: 0, sequences: 1 };
    session.run(test(1))?;
    let ns = session.run(test(TOKENS))?;
    Ok(TOKENS as f64 / (ns as f64 * 1e-9))
}

/// The least bytes that a test reads: the weights in every step, and in every decode step also the
/// KV cache of the context and the recurrent state.
fn bytes_read(opened: &ModelFile, backend: &dyn Backend, test: Test, steps: usize) -> u64 {
    let context = test.depth + test.generate / 2;
    let (plan, weights) = (&opened.plan, opened.plan.cost().step_weight_bytes);
    let kept = match test.generate {
        0 => 0,
        _ => kv_bytes(plan, backend, context) + recurrent_bytes(plan, backend),
    };
    steps as u64 * (weights + test.sequences as u64 * kept)
}

/// A loaded model that runs on random tokens.
struct Session {
    model: Box<dyn Model>,
    pages: Pages,
    sequences: Vec<Sequence>,
    step: usize,
    /// State of a linear congruential generator; every run has the same tokens.
    random: u32,
    /// Whether the next run is profiled.
    profiled: bool,
    /// Expert counts and times at the start of the last run.
    experts_before: Vec<ExpertStats>,
}

impl Session {
    fn new(model: Box<dyn Model>, step: usize, sequences: usize) -> Session {
        let pages = Pages::of(&*model);
        let sequences = (0..sequences).map(|_| pages.unshared()).collect();
        let (random, profiled, experts_before) = (1, false, Vec::new());
        Session { model, pages, sequences, step, random, profiled, experts_before }
    }

    /// Runs a test and returns its duration in nanoseconds.
    fn run(&mut self, test: Test) -> Result<u64> {
        self.restart();
        for i in 0..self.sequences.len() {
            self.read(i, test.depth)?;
        }
        self.model.set_profiling(self.profiled);
        self.experts_before = self.model.stats().experts;
        let start = Instant::now();
        self.read(0, test.prompt)?;
        self.generate(test.generate)?;
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// Expert counts and times of the last run.
    fn experts_chosen(&self) -> Vec<ExpertStats> {
        let mut chosen = self.model.stats().experts;
        for (now, before) in chosen.iter_mut().zip(&self.experts_before) {
            now.counts.iter_mut().zip(&before.counts).for_each(|(now, before)| *now -= before);
            now.seconds.iter_mut().zip(&before.seconds).for_each(|(now, before)| *now -= before);
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
    fn generate(&mut self, count: usize) -> Result<()> {
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
            let rows = vec![RowOutput::Token(&greedy); self.sequences.len()];
            let mut stored = vec![next];
            let step = Step { batch: &batch, rows: &rows, steps: len, observer: None };
            self.model.step(step, &mut |output| {
                stored.push(output.tokens.to_vec());
                ControlFlow::Continue(())
            })?;
            for (i, sequence) in self.sequences.iter_mut().enumerate() {
                let tokens: Vec<u32> = stored[..len].iter().map(|step| step[i]).collect();
                self.pages.advance(sequence, &tokens);
            }
            next = stored.swap_remove(len);
            left -= len;
        }
        Ok(())
    }

    /// Prefills `count` more tokens of a sequence in chunks, with logits for the last token.
    fn read(&mut self, i: usize, count: usize) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let len = left.min(self.step);
            let tokens: Vec<u32> = (0..len).map(|_| self.token()).collect();
            let sequence = &mut self.sequences[i];
            ensure!(self.pages.reserve(sequence, len), "pages for all tokens of the test");
            let mut batch = Batch::default();
            batch.push(sequence.span(len, true), &tokens);
            batch.output_last();
            let step = Step { batch: &batch, rows: &[RowOutput::Logits], steps: 1, observer: None };
            self.model.step(step, &mut |_| ControlFlow::Break(()))?;
            self.pages.advance(&mut self.sequences[i], &batch.tokens);
            left -= len;
        }
        Ok(())
    }

    fn token(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.random >> 8) % self.model.plan().vocabulary as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        assert_eq!(numbers("-p", "1,2-8+3,16-64*2").unwrap(), [1, 2, 5, 8, 16, 32, 64]);
        assert_eq!(numbers("-p", "3-5").unwrap(), [3, 4, 5]);
        for bad in ["", "a", "0-8*2", "1-8*1", "1-4+0", "1-", "8-4", "1-2000", "2000000000"] {
            assert!(numbers("-p", bad).is_err(), "{bad}");
        }
    }
}
