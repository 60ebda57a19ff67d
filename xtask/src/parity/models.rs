//! The kit's tiny models: logits at every stored position, in prefill, token by token, in chunks
//! of five and beside another sequence; and the greedy continuation up to a near tie. Of encoders
//! the embeddings, alone and beside another sequence.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use bodkin_backend::{Backend, Batch, Limits, Model};
use bodkin_conformance::Reference;
use bodkin_cpu::{Cpu, Isa};
use bodkin_engine::Pages;
use bodkin_eval::nmse;
use bodkin_gguf::{File, Format};
use bodkin_model::Plan;
use serde_json::Value;

use super::kit::{Report, Selection};

/// The most that a file whose weights are all f32 may be off.
const NMSE_FLOAT: f64 = 1e-6;
/// The most that a file of other weights may be off.
const NMSE_QUANTIZED: f64 = 1e-3;
/// The most that the cosine of an embedding with the reference may lack of 1.
const COSINE_DISTANCE: f64 = 1e-4;
/// Greedy runs are compared up to the first step whose best two logits are closer than this.
const NEAR_TIE: f64 = 0.05;
/// Tokens in the longest step.
const STEP: usize = 1024;
/// The tokens of the longest prompt on levels that are neither the detected nor the portable one:
/// what long prompts need besides, such as windows, is the same code on all levels.
const MOST_ON_OTHER_LEVELS: usize = 130;

/// How a prompt is fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feeding {
    Whole,
    Chunks(usize),
    Beside,
}

/// Runs every model of the kit whose architecture is known on the reference interpreter and on the
/// CPU at every level, on some of which only short prompts, unless others were chosen; on a GPU
/// only if it was.
pub(crate) fn run(kit: &Path, chosen: &Selection) -> Result<Report> {
    let mut report = Report::default();
    let mut backends: Vec<(Box<dyn Backend>, usize)> = vec![(Box::new(Reference), chosen.tokens)];
    for isa in Isa::available() {
        let is_whole = [Isa::detect(), Isa::Portable].contains(&isa);
        let most = if is_whole { usize::MAX } else { MOST_ON_OTHER_LEVELS };
        let cpu = Cpu { isa, ..Cpu::new(Some(1))? };
        backends.push((Box::new(cpu), chosen.tokens.min(most)));
    }
    let wanted = &chosen.backend;
    let gpu = super::kit::gpu(wanted)?;
    // The reference and CPUs have one thread each.
    let workers = if gpu.is_some() { 1 } else { std::thread::available_parallelism()?.get() };
    match gpu {
        Some(gpu) => backends = vec![(gpu, chosen.tokens)],
        None => backends.retain(|(backend, _)| backend.name().starts_with(wanted.as_str())),
    }
    ensure!(!backends.is_empty(), "--backend: no backend's name starts with `{wanted}`");
    let names = names(kit, &chosen.model)?;
    let runs: Vec<(&dyn Backend, usize, &str)> = backends
        .iter()
        .flat_map(|(backend, most)| {
            names.iter().map(|name| (backend.as_ref(), *most, name.as_str()))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut report = Report::default();
        while let Some((backend, most, name)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            run_one(kit, name, *backend, *most, &mut report).with_context(|| (*name).to_owned())?;
        }
        Ok::<Report, anyhow::Error>(report)
    };
    let reports = std::thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        started.into_iter().map(|worker| worker.join().expect("no panic")).collect::<Vec<_>>()
    });
    for other in reports {
        report.add(other?);
    }
    report.not_covered.sort();
    report.not_covered.dedup();
    Ok(report)
}

/// The models of the kit whose names begin so.
fn names(kit: &Path, start: &str) -> Result<Vec<String>> {
    let mut names: Vec<String> = std::fs::read_dir(kit.join("models"))
        .with_context(|| format!("{}: no folder `models`", kit.display()))?
        .filter_map(|entry| {
            Some(entry.ok()?.file_name().to_str()?.strip_suffix(".gguf")?.to_owned())
        })
        .collect();
    ensure!(!names.is_empty(), "{}: no models", kit.display());
    names.retain(|name| name.starts_with(start));
    names.sort();
    Ok(names)
}

fn run_one(
    kit: &Path,
    name: &str,
    backend: &dyn Backend,
    tokens: usize,
    report: &mut Report,
) -> Result<()> {
    let gguf = kit.join("models").join(format!("{name}.gguf"));
    let mut case = super::kit::read_json(&gguf.with_extension("json"))?;
    if let Some(cases) = case["cases"].as_array_mut() {
        cases.retain(|case| case["tokens"].as_array().is_none_or(|ids| ids.len() <= tokens));
    }
    let file = Arc::new(bodkin_model::open(&gguf)?);
    match bodkin_model::plan(file.metadata(), file.tensors()) {
        Ok(plan) => {
            let check = Check { name, case: &case, file: &file, backend, tokens };
            if plan.is_encoder() { check.embeddings(report)? } else { check.all(report)? }
        }
        Err(
            error @ (bodkin_model::Error::UnknownArchitecture { .. }
            | bodkin_model::Error::Unsupported(_)),
        ) => {
            report.not_covered.push(format!("{name}: {error}"));
        }
        Err(error) => report.failures.push(format!("{name}: {error}")),
    }
    Ok(())
}

struct Check<'a> {
    name: &'a str,
    case: &'a Value,
    file: &'a Arc<File>,
    backend: &'a dyn Backend,
    /// The tokens of the longest prompt.
    tokens: usize,
}

impl Check<'_> {
    fn all(&self, report: &mut Report) -> Result<()> {
        let column = self.case["reference"].as_str().context("no `reference`")?.to_owned();
        for case in self.case["cases"].as_array().context("no `cases`")? {
            // Of some models the context that the reference was opened with decides the rotation.
            let context = case["n_ctx"].as_u64().map(|n| n as usize);
            let mut model = self.load(context)?;
            let formats = formats(model.plan());
            let limit = if formats == "F32" { NMSE_FLOAT } else { NMSE_QUANTIZED };
            let tokens = integers(&case["tokens"])?;
            let positions: Vec<usize> =
                integers(&case["positions"])?.into_iter().map(|p| p as usize).collect();
            let wanted = rows(&case["logits"][&column])?;
            let mut first: Option<Vec<Vec<f32>>> = None;
            for feeding in [Feeding::Whole, Feeding::Chunks(1), Feeding::Chunks(5), Feeding::Beside]
            {
                let found = feed(model.as_mut(), &tokens, &positions, feeding)?;
                let backend = self.backend.name();
                let label = format!("{} on {backend}: case {} {feeding:?}", self.name, case["id"]);
                let worst = compare(&label, &positions, &found, &wanted, limit, report);
                report.worst(&formats, &level(self.backend), limit, worst);
                let same = first.get_or_insert_with(|| found.clone()) == &found;
                report.check(same, || format!("{label}: not the same bits as the whole prompt"));
            }
        }
        self.greedy(self.load(None)?.as_mut(), &self.backend.name(), report)
    }

    /// The direction of every case's embedding.
    fn embeddings(&self, report: &mut Report) -> Result<()> {
        let column = self.case["reference"].as_str().context("no `reference`")?;
        let mut model = self.load(None)?;
        for case in self.case["cases"].as_array().context("no `cases`")? {
            let tokens = integers(&case["tokens"])?;
            let wanted = rows(&Value::Array(vec![case["embedding"][column].clone()]))?.remove(0);
            let alone = embed(model.as_mut(), &[&tokens])?.remove(0);
            let other: Vec<u32> = tokens.iter().rev().map(|t| t / 2).collect();
            let between = embed(model.as_mut(), &[&other[..1], &tokens, &other])?.remove(1);
            let label = format!("{} on {}: case {}", self.name, self.backend.name(), case["id"]);
            let distance = 1.0 - cosine(&alone, &wanted);
            report.worst("embeddings", &level(self.backend), COSINE_DISTANCE, distance);
            report.check(distance <= COSINE_DISTANCE, || {
                format!("{label}: 1 - cosine {distance:.2e}, at most {COSINE_DISTANCE:.0e}")
            });
            report.check(alone == between, || format!("{label}: other bits beside another"));
        }
        Ok(())
    }

    fn load(&self, context: Option<usize>) -> Result<Box<dyn Model>> {
        let (metadata, tensors) = (self.file.metadata(), self.file.tensors());
        let plan = match context {
            Some(context) => bodkin_model::plan_for(metadata, tensors, context)?,
            None => bodkin_model::plan(metadata, tensors)?,
        };
        let pages = Pages::needed(&plan.windows(), STEP, STEP, 2);
        let limits = Limits { tokens: STEP, outputs: STEP, pages, state_slots: 2 };
        Ok(self.backend.load(Arc::new(plan), self.file, &limits, &|_, _| ())?)
    }

    fn greedy(&self, model: &mut dyn Model, backend: &str, report: &mut Report) -> Result<()> {
        let greedy = &self.case["greedy"];
        let cases = self.case["cases"].as_array().context("no `cases`")?;
        let case = cases.iter().find(|c| c["id"] == greedy["case"]);
        if case.is_none() && self.tokens < usize::MAX {
            // It is longer than what is to run.
            return Ok(());
        }
        let case = case.context("no greedy case")?;
        let mut tokens = integers(&case["tokens"])?;
        let margins = rows(&Value::Array(vec![greedy["margins"].clone()]))?.remove(0);
        for (step, (wanted, margin)) in
            integers(&greedy["tokens"])?.into_iter().zip(margins).enumerate()
        {
            if f64::from(margin) < NEAR_TIE || tokens.len() > self.tokens {
                break;
            }
            let logits = feed(model, &tokens, &[tokens.len() - 1], Feeding::Whole)?.remove(0);
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            let found = best.context("no logits")? as u32;
            report.check(found == wanted, || {
                format!("{} on {backend}: greedy step {step}: {found}, not {wanted}", self.name)
            });
            tokens.push(wanted);
        }
        Ok(())
    }
}

/// The formats of a plan's weights, without those of its tables and norms if it has others.
fn formats(plan: &Plan) -> String {
    let is_exact = |format: &Format| matches!(format, Format::F32 | Format::I32);
    let weights = plan.weights.iter().map(|weight| weight.format);
    let names: BTreeSet<&str> =
        weights.filter(|format| !is_exact(format)).map(Format::name).collect();
    match names.is_empty() {
        true => "F32".to_owned(),
        false => names.into_iter().collect::<Vec<_>>().join(", "),
    }
}

/// What distinguishes a backend's results: the device, or the level of a CPU's instructions.
fn level(backend: &dyn Backend) -> String {
    let names: Vec<String> = backend.devices().into_iter().map(|device| device.name).collect();
    names.join(", ")
}

/// The pooled rows of sequences, all in one step.
fn embed(model: &mut dyn Model, sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
    let mut pages = Pages::of(model);
    let mut batch = Batch::default();
    for (state_slot, tokens) in (0..).zip(sequences) {
        let mut sequence = pages.unshared();
        ensure!(pages.reserve(&mut sequence, tokens.len()), "the pages suffice for all");
        sequence.state_slot = Some(state_slot);
        batch.push(sequence.span(tokens.len(), true), tokens);
        batch.output_last();
    }
    let width = model.plan().output_width();
    let mut rows = vec![0.0; sequences.len() * width];
    model.forward(&batch, &mut rows)?;
    Ok(rows.chunks_exact(width).map(<[f32]>::to_vec).collect())
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The logits at `positions`, with the prompt fed in some way.
fn feed(
    model: &mut dyn Model,
    tokens: &[u32],
    positions: &[usize],
    feeding: Feeding,
) -> Result<Vec<Vec<f32>>> {
    let (step, with_other) = match feeding {
        Feeding::Whole => (STEP, false),
        Feeding::Chunks(step) => (step, false),
        Feeding::Beside => (7, true),
    };
    let mut pages = Pages::of(model);
    let (mut ours, mut other) = (pages.unshared(), pages.unshared());
    let vocabulary = model.plan().vocabulary;
    let mut found = Vec::new();
    for (from, chunk) in (0..).step_by(step).zip(tokens.chunks(step)) {
        let neighbour: Vec<u32> = chunk.iter().rev().map(|t| t / 2).take(3).collect();
        let mut batch = Batch::default();
        let neighbour = if with_other { neighbour.as_slice() } else { &[] };
        for (sequence, new) in [(&mut other, neighbour), (&mut ours, chunk)] {
            if new.is_empty() {
                continue;
            }
            ensure!(pages.reserve(sequence, new.len()), "the pages suffice for both");
            batch.push(sequence.span(new.len(), true), new);
        }
        let start = batch.tokens.len() - chunk.len();
        let wanted = (0..chunk.len()).filter(|i| positions.contains(&(from + i)));
        batch.outputs = wanted.map(|i| (start + i) as u32).collect();
        let mut logits = vec![0.0; batch.outputs.len() * vocabulary];
        model.forward(&batch, &mut logits)?;
        pages.advance(&mut other, neighbour);
        pages.advance(&mut ours, chunk);
        found.extend(logits.chunks_exact(vocabulary).map(<[f32]>::to_vec));
    }
    Ok(found)
}

/// Checks rows of logits, and gives the largest NMSE of one.
fn compare(
    label: &str,
    positions: &[usize],
    found: &[Vec<f32>],
    wanted: &[Vec<f32>],
    limit: f64,
    report: &mut Report,
) -> f64 {
    report.check(found.len() == wanted.len(), || format!("{label}: {} rows", found.len()));
    let mut worst: f64 = 0.0;
    for ((found, wanted), position) in found.iter().zip(wanted).zip(positions) {
        let nmse = nmse(found, wanted);
        worst = worst.max(nmse);
        report.check(nmse <= limit, || {
            format!("{label}: position {position}: NMSE {nmse:.2e}, at most {limit:.0e}")
        });
    }
    worst
}

fn integers(value: &Value) -> Result<Vec<u32>> {
    let values = value.as_array().context("expected an array of integers")?;
    values.iter().map(|v| Ok(v.as_u64().context("expected an integer")? as u32)).collect()
}

fn rows(value: &Value) -> Result<Vec<Vec<f32>>> {
    let rows = value.as_array().context("expected an array of rows")?;
    rows.iter()
        .map(|row| {
            let row = row.as_array().context("expected a row of numbers")?;
            row.iter().map(|x| Ok(x.as_f64().context("expected a number")? as f32)).collect()
        })
        .collect()
}
