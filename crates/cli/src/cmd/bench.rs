//! `bodkin bench`: the speed of prefill and decode, in rows like llama-bench's, with the fraction
//! of the memory bandwidth, which is measured between the tests.

mod heat_map;
mod reference;
mod report;
mod session;
mod speeds;
mod summary;
mod timeline;
mod trace;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use bodkin_backend::{Backend, KvType, StageProfile};
use bodkin_engine::longest_text;
use bodkin_eval::Recorder;

use crate::arguments::{self, Machine, describe, find, positive};
use crate::{output, progress};
use bodkin::memory::{kv_bytes, recurrent_bytes};
use bodkin::{
    ExpertBudget, ExpertStore, MAX_BATCH_TOKENS, MAX_TOKENS, ModelFile, Options, Sparse, within,
};
use report::{Format, Row};
use session::{Session, Test, decoder_limits};
pub(super) use speeds::speeds;
use timeline::Timeline;

const AFTER: &str = "\
An encoder reads -s texts of -p tokens at once, and generates nothing. It is bound by arithmetic,
so its operations per second are compared with those of its fastest matmul.

--record-routing runs each test once more and records its tokens one after the other: -p 0 -n 512
records 512 generated tokens. docs/experts.md says what such a routing trace is for.";

/// Arguments of `bench`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Prompt lengths: 128,512 or 128-512+128 [default: 512]
    #[arg(short = 'p', long, value_name = "N")]
    n_prompt: Option<String>,
    /// Numbers of tokens to generate
    #[arg(short = 'n', long, default_value = "128", value_name = "N")]
    n_gen: String,
    /// Tokens in the KV cache before a test
    #[arg(short = 'd', long, default_value = "0", value_name = "N")]
    n_depth: String,
    /// Sequences decoded in parallel
    #[arg(short = 's', long, default_value = "1", value_name = "N")]
    n_sequences: String,
    /// CPU threads: lists and ranges [default: all cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<String>,
    /// Repetitions of each test
    #[arg(short, long, default_value = "5", value_name = "N", value_parser = positive)]
    repetitions: NonZeroUsize,
    /// Output format
    #[arg(short, long, default_value = "md", value_name = "FORMAT")]
    output: Format,
    /// Print devices, error against the CPU and rows
    #[arg(long, conflicts_with = "output")]
    report: bool,
    /// Tokens per step [default: 512, 2048 or 8192]
    #[arg(short, long, value_name = "N")]
    batch_size: Option<usize>,
    /// Print step split, stage times, expert counts and layouts
    #[arg(long)]
    profile: bool,
    /// Write a timeline of each test as a Chrome trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write which experts each token chose
    #[arg(long, value_name = "FILE")]
    record_routing: Option<PathBuf>,
    /// SVG image of expert counts to write; mmap: as in `run`
    #[arg(long, value_name = "FILE|mmap", value_parser = experts)]
    experts: Vec<Experts>,
    /// Keep weights in the file's layout: less memory, slower
    #[arg(long)]
    no_repack: bool,
    /// Use built-in launch shapes on GPUs instead of measuring them
    #[arg(long)]
    no_tune: bool,
    /// Sparse kernels: always, never or auto
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = arguments::sparse)]
    sparse: Sparse,
    /// Fraction of the inputs of down projections to skip
    #[arg(long, value_name = "FRACTION", value_parser = arguments::fraction)]
    activation_sparsity: Option<f64>,
    /// KV cache data type: auto, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = arguments::kv_type)]
    kv_type: KvType,
    /// Device: auto, cpu, cuda[:N,..] or wgpu[:N]
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: String,
    /// Layers on the GPU: the last N, the others on the CPU
    #[arg(long, value_name = "N")]
    gpu_layers: Option<usize>,
    /// Memory for experts, such as 24G or 40%
    #[arg(long, value_name = "SIZE", default_value = "auto",
          value_parser = arguments::expert_budget)]
    expert_budget: ExpertBudget,
}

/// Prompt length if none is given; encoders may have a shorter one.
const PROMPT: usize = 512;
/// Measurements of the bandwidth for a test, if it has that many repetitions.
const BANDWIDTHS: usize = 3;

impl Args {
    /// The file of an image of expert counts: of several, the last.
    fn expert_image(&self) -> Option<&PathBuf> {
        self.experts.iter().rev().find_map(|experts| match experts {
            Experts::Image(path) => Some(path),
            Experts::Store(_) => None,
        })
    }

    /// Where a GPU finds the experts that it has no room for.
    fn expert_store(&self) -> ExpertStore {
        let store = self.experts.iter().rev().find_map(|experts| match experts {
            Experts::Store(store) => Some(*store),
            Experts::Image(_) => None,
        });
        store.unwrap_or_default()
    }
}

/// What `--experts` says.
#[derive(Clone, Debug)]
enum Experts {
    Store(ExpertStore),
    /// The file of an image.
    Image(PathBuf),
}

fn experts(text: &str) -> Result<Experts, String> {
    match text.split(':').next() {
        Some("auto" | "mmap") => arguments::expert_store(text).map(Experts::Store),
        _ => Ok(Experts::Image(text.into())),
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let opened = find(&args.model)?;
    let image = args.expert_image();
    for path in [args.trace.as_ref(), args.record_routing.as_ref(), image].into_iter().flatten() {
        output::check(path, [opened.file.path()])?;
    }
    if image.is_some() {
        let has_experts = !opened.plan.routed_layers().is_empty();
        ensure!(has_experts, "--experts: expected a model with experts, found none");
    }
    let tests = match opened.plan.is_encoder() {
        true => encoder_tests(&args, &opened)?,
        false => tests(&args)?,
    };
    let threads = match &args.threads {
        Some(list) => numbers("--threads", list)?.into_iter().map(Some).collect(),
        None => vec![None],
    };
    let mut rows = Vec::new();
    let mut last = None;
    let mut recorder = recorder(&args, &opened, &tests)?;
    for threads in threads {
        let machine = Machine {
            device: args.device.clone(),
            gpu_layers: args.gpu_layers,
            expert_budget: args.expert_budget,
            experts: args.expert_store(),
            threads,
            ctx_size: None,
            batch_size: args.batch_size,
            no_repack: args.no_repack,
            no_tune: args.no_tune,
            sparse: args.sparse,
            activation_sparsity: args.activation_sparsity,
            kv_type: args.kv_type,
        };
        let backend = machine.backend()?;
        let options = machine.options();
        for &test in &tests {
            let recorder = recorder.as_mut();
            let batch = batch_size(&opened, &options, backend.as_ref(), test)?;
            rows.push(measure(&opened, backend.as_ref(), test, batch, &args, recorder)?);
        }
        last = Some(backend);
    }
    if let Some(path) = &args.trace {
        output::write(path, |out| trace::write(out, &rows))?;
    }
    if let Some(path) = args.expert_image() {
        output::write(path, |out| heat_map::write(out, &rows))?;
    }
    if let (Some(path), Some(recorder)) = (&args.record_routing, recorder) {
        let trace = recorder.finish(path)?;
        output::write(path, |out| Ok(trace.write(out)?))?;
    }
    let out = &mut std::io::stdout().lock();
    match last.filter(|_| args.report) {
        Some(backend) => summary::print(out, &opened, backend.as_ref(), &rows),
        None => report::print(out, args.output, &rows),
    }
}

/// What records the choices of the tests' tokens, if the flag says so.
fn recorder(args: &Args, opened: &ModelFile, tests: &[Test]) -> Result<Option<Recorder>> {
    if args.record_routing.is_none() {
        return Ok(None);
    }
    let one = tests.iter().all(|test| test.sequences == 1) && !opened.plan.is_encoder();
    ensure!(one, "--record-routing: expected a decoder with one sequence (-s 1)");
    Ok(Some(Recorder::new(&opened.plan, opened.file.path())?))
}

fn tests(args: &Args) -> Result<Vec<Test>> {
    let (prompts, generates) = (prompts(args, PROMPT)?, numbers("--n-gen", &args.n_gen)?);
    let sequences = sequences(args)?;
    let mut tests = Vec::new();
    for depth in numbers("--n-depth", &args.n_depth)? {
        let none = Test { depth, ..Test::new(0, 0) };
        tests.extend(prompts.iter().map(|&prompt| Test { prompt, ..none }));
        for &sequences in &sequences {
            tests.extend(generates.iter().map(|&generate| Test { generate, sequences, ..none }));
        }
    }
    tests.retain(|test| test.prompt + test.generate > 0);
    ensure!(!tests.is_empty(), "nothing to measure: -p and -n are both 0");
    Ok(tests)
}

/// The tests of an encoder: texts that are read at once.
fn encoder_tests(args: &Args, opened: &ModelFile) -> Result<Vec<Test>> {
    let longest = longest_text(&opened.plan)?;
    let mut tests = Vec::new();
    for prompt in prompts(args, PROMPT.min(longest))? {
        within("n_prompt", prompt, longest)?;
        let texts = sequences(args)?.into_iter();
        tests.extend(texts.map(|sequences| Test { sequences, ..Test::new(prompt, 0) }));
    }
    Ok(tests)
}

/// The prompt lengths of the flag, or else the default one.
fn prompts(args: &Args, default: usize) -> Result<Vec<usize>> {
    match &args.n_prompt {
        Some(list) => numbers("--n-prompt", list),
        None => Ok(vec![default]),
    }
}

/// The numbers of sequences of the flag.
fn sequences(args: &Args) -> Result<Vec<usize>> {
    let sequences = numbers("--n-sequences", &args.n_sequences)?;
    for &n in &sequences {
        within("n_sequences", n, MAX_BATCH_TOKENS)?;
    }
    Ok(sequences)
}

/// Numbers and ranges, such as `1,2-8+2,16-64*2`.
fn numbers(flag: &str, text: &str) -> Result<Vec<usize>> {
    let number = |s: &str| -> Result<usize> {
        let parsed = s.trim().parse().ok();
        let n = parsed.with_context(|| format!("{flag}: expected a whole number, found `{s}`"))?;
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

/// The nanoseconds of each run. The first run pages the weights in and is discarded.
fn samples(session: &mut Session, test: Test, repetitions: usize) -> Result<Vec<u64>> {
    let line = progress::line();
    let mut run = |what: String| {
        line.set_message(format!("{test}: {what}"));
        session.run(test)
    };
    run("warm-up".to_owned())?;
    (1..=repetitions).map(|i| run(format!("run {i} of {repetitions}"))).collect()
}

/// The most tokens of a step of a test.
fn batch_size(
    opened: &ModelFile,
    options: &Options,
    backend: &dyn Backend,
    test: Test,
) -> Result<usize> {
    Ok(match opened.plan.is_encoder() {
        true => options.encoder_step_tokens(backend)?,
        false => {
            let limits = |tokens| decoder_limits(&opened.plan, test, tokens);
            opened.step_tokens(options, backend, limits)?
        }
    })
}

fn measure(
    opened: &ModelFile,
    backend: &dyn Backend,
    test: Test,
    batch: usize,
    args: &Args,
    recorder: Option<&mut Recorder>,
) -> Result<Row> {
    let plan = &opened.plan;
    let mut session = Session::load(opened, backend, test, batch)?;
    opened.note_untrained(test.context());
    let samples_ns = samples(&mut session, test, args.repetitions.get())?;
    if let Some(recorder) = recorder {
        session.record(test, recorder)?;
    }
    let chosen = if args.expert_image().is_some() { session.experts_chosen() } else { Vec::new() };
    let (mut profile, mut experts, mut weight_layouts) = (Vec::new(), Vec::new(), Vec::new());
    let mut timeline = Timeline::default();
    if args.profile || args.trace.is_some() {
        timeline = session.trace(test)?;
    }
    let mut encoder = None;
    if args.profile || plan.is_encoder() {
        session.profiled = true;
        session.run(test)?;
        profile = StageProfile::sums(&session.model.stats().stages);
    }
    if plan.is_encoder() {
        let speeds = profile.iter().map(|stage| stage.operations as f64 / stage.seconds);
        let operations = plan.cost().flops_per_token * test.tokens() as u64;
        encoder = Some((operations, speeds.fold(0.0, f64::max)));
    }
    if args.profile {
        experts = session.experts_chosen();
        weight_layouts = session.model.stats().weight_layouts;
    } else {
        profile.clear();
    }
    let steps = session.steps(test);
    drop(session);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let cost = plan.cost();
    Ok(Row {
        model_filename: opened.name.clone(),
        model_type: describe(opened),
        model_size: cost.weight_bytes,
        model_n_params: cost.parameters,
        backend: backend.name(),
        threads: backend.threads(),
        batch,
        kv_type: args.kv_type,
        test,
        time_unix_s: time,
        bytes: bytes_read(opened, backend, test, steps),
        samples_ns,
        bandwidths: bandwidths(backend, args.repetitions.get())?,
        steps,
        encoder,
        timeline,
        profile,
        experts,
        chosen,
        weight_layouts,
    })
}

/// Tokens per second of one sequence, after a warm-up step.
pub(super) fn generation_speed(opened: &ModelFile, machine: &Machine) -> Result<f64> {
    const TOKENS: usize = 64;
    let backend = machine.backend()?;
    let mut session = Session::load(opened, backend.as_ref(), Test::new(0, TOKENS), 1)?;
    session.run(Test::new(0, 1))?;
    let ns = session.run(Test::new(0, TOKENS))?;
    Ok(TOKENS as f64 / (ns as f64 * 1e-9))
}

/// The memory bandwidth in bytes per second, measured a few times. Not between repetitions: that
/// would take a small model out of the processor's cache.
fn bandwidths(backend: &dyn Backend, repetitions: usize) -> Result<Vec<f64>> {
    let measure = |_| Ok(backend.measure_bandwidth()?);
    (0..repetitions.min(BANDWIDTHS)).map(measure).collect()
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
