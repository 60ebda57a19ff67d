//! What the owner of a machine can send: what it is, whether its GPU computes what the CPU does,
//! and how fast it is.

use std::env::consts::{ARCH, OS};
use std::io::Write;

use anyhow::Result;
use bodkin::memory::human_bytes;
use bodkin::{Device, DeviceKind, ModelFile, Options, Reporter};
use bodkin_backend::{Backend, Model};
use bodkin_engine::{embed, embedding_limits, longest_text, steps};
use bodkin_eval::{limits, nmse};

use super::report::{self, Format, Row};
use crate::arguments::describe;
use crate::version;

/// Tokens whose results are compared: most in one step, the others alone.
const TOKENS: usize = 64;
const TOKENS_ALONE: usize = 8;

/// Prints the summary in Markdown.
pub(super) fn print(
    out: &mut dyn Write,
    opened: &ModelFile,
    backend: &dyn Backend,
    rows: &[Row],
) -> Result<()> {
    writeln!(out, "- bodkin {}{} on {OS} {ARCH}", version::NUMBER, version::commit())?;
    for Device { option, name } in bodkin::devices() {
        writeln!(out, "- {option}: {name}")?;
    }
    let (name, size) = (&opened.name, human_bytes(opened.plan.cost().weight_bytes));
    writeln!(out, "- model: {name}: {}, {size}", describe(opened))?;
    let is_on_gpu = backend.devices().iter().any(|device| device.kind != DeviceKind::Cpu);
    if is_on_gpu {
        let error = error_beside_cpu(opened, backend)?;
        writeln!(out, "- results beside those of the CPU: NMSE {error:.1e}")?;
    }
    writeln!(out)?;
    report::print(out, Format::Md, rows)
}

/// The normalised mean squared error of a backend's results, where the CPU's are taken as right.
fn error_beside_cpu(opened: &ModelFile, backend: &dyn Backend) -> Result<f64> {
    let options = Options { device: "cpu".to_owned(), ..Options::default() };
    let cpu = bodkin::backend(&options, &Reporter::default())?;
    Ok(nmse(&results(opened, backend)?, &results(opened, cpu.as_ref())?))
}

/// The logits of a text, or its embedding.
fn results(opened: &ModelFile, backend: &dyn Backend) -> Result<Vec<f32>> {
    let plan = &opened.plan;
    let mut results = Vec::new();
    if plan.is_encoder() {
        let texts = [tokens(opened, TOKENS.min(longest_text(plan)?))];
        let mut model = opened.load(backend, &embedding_limits(plan, &texts, TOKENS)?)?;
        embed(model.as_mut(), &texts, |_, embedding| results.extend_from_slice(embedding))?;
        return Ok(results);
    }
    for (count, step) in [(TOKENS, TOKENS), (TOKENS_ALONE, 1)] {
        let mut model = opened.load(backend, &limits(plan, count, step))?;
        let model: &mut dyn Model = model.as_mut();
        let tokens = tokens(opened, count);
        steps(model, &tokens, step, |_| true, None, |_, rows| results.extend_from_slice(rows))?;
    }
    Ok(results)
}

/// Tokens spread over the vocabulary.
fn tokens(opened: &ModelFile, count: usize) -> Vec<u32> {
    let vocabulary = opened.plan.vocabulary;
    (1..=count).map(|i| (i * 7919 % vocabulary) as u32).collect()
}
