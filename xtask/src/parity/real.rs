//! The kit's real models: log-probabilities against those of exact arithmetic on the same weights,
//! no further from them than llama.cpp's; the same first token and the same greedy text, up to
//! near ties.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use bodkin_backend::{Backend, Limits, Model};
use bodkin_cpu::{Cpu, Isa};
use bodkin_engine::{Pages, Tokenizer};
use bodkin_eval::{LogSoftmax, Perplexity, Row, Windows, score};
use bodkin_gguf::File;
use serde_json::Value;

use super::kit::{Report, Selection};

/// The mean distance may be this multiple of llama.cpp's.
const RATIO: f64 = 1.1;
/// Logits closer than this may come out in either order: integer activations move them as much.
const NEAR_TIE: f64 = 0.3;
/// What may lie between the portable level, which rounds twice where others round once, and
/// another: as much as the kit allows quantised files. An activation whose rounding falls the other
/// way costs a step of its int8 code, and later layers make more of it.
const LEVELS_NMSE: f64 = 1e-3;
/// The perplexity may be so far from one of the references', relatively.
const PERPLEXITY: f64 = 0.005;
/// Tokens of the longest prompt with its continuation, and of a window of the perplexity's text.
const CONTEXT: usize = 512;

/// Runs every model of the kit's folder `real` that there is, on the CPU, or on a GPU if it was
/// chosen.
pub(crate) fn run(kit: &Path, chosen: &Selection) -> Result<Report> {
    let mut report = Report::default();
    let gpu = super::kit::gpu(&chosen.backend)?;
    let is_gpu = gpu.is_some();
    let backend = match gpu {
        Some(gpu) => gpu,
        None => Box::new(Cpu::new(None)?),
    };
    if !is_gpu && !backend.name().starts_with(&chosen.backend) {
        report.not_covered.push(format!(
            "`{}`: {} runs real models",
            chosen.backend,
            backend.name()
        ));
        return Ok(report);
    }
    for entry in std::fs::read_dir(kit.join("real"))? {
        let path = entry?.path();
        // Beside the cases lies the text of the perplexities.
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let case: Value =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let name = case["name"].as_str().or(path.file_stem().and_then(|s| s.to_str()));
        let name = name.context("no name")?;
        if !name.starts_with(&chosen.model) {
            continue;
        }
        let Some(model) = chosen.real.get(name) else {
            report.not_covered.push(format!("{name}: no model file"));
            continue;
        };
        let real = Real { name, case: &case, path: model, backend: backend.as_ref() };
        real.check(&mut report).with_context(|| name.to_owned())?;
        if !is_gpu {
            real.levels_agree(&mut report).with_context(|| name.to_owned())?;
        }
        real.perplexity(kit, &mut report).with_context(|| name.to_owned())?;
    }
    Ok(report)
}

/// A real model and its references.
struct Real<'a> {
    name: &'a str,
    case: &'a Value,
    path: &'a Path,
    backend: &'a dyn Backend,
}

impl Real<'_> {
    /// The file, and the limits of what its prompts need.
    fn open(&self) -> Result<(Arc<File>, Limits)> {
        let file = Arc::new(bodkin_model::open(self.path)?);
        let plan = bodkin_model::plan(file.metadata(), file.tensors())?;
        let pages = Pages::needed(&plan.windows(), CONTEXT, CONTEXT, 1);
        Ok((file, Limits { tokens: CONTEXT, outputs: 1, pages, state_slots: 1 }))
    }

    /// All prompts.
    fn check(&self, report: &mut Report) -> Result<()> {
        let (file, limits) = self.open()?;
        let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors())?);
        let mut model = self.backend.load(plan, &file, &limits, &|_, _| ())?;
        let (name, mut ours, mut theirs) = (self.label(), 0.0, 0.0);
        for prompt in self.case["prompts"].as_array().context("no `prompts`")? {
            let label = format!("{name}, prompt {}", prompt["id"]);
            let exact = &prompt["dequantized_f32"];
            let tokens = ids(&prompt["tokens"])?;
            let logits = last_logits(model.as_mut(), &tokens)?;
            let (a, b) = distances(&logits, exact, &prompt["llama_cpp"])?;
            (ours, theirs) = (ours + a, theirs + b);
            let top = numbers(&exact["top20_logits"])?;
            let best = ids(&exact["top20_ids"])?[0];
            let is_tie = top[0] - top[1] <= NEAR_TIE;
            report.check(is_tie || argmax(&logits) == best, || {
                format!("{label}: first token {}, not {best}", argmax(&logits))
            });
            greedy(model.as_mut(), &label, tokens, &prompt["greedy_dequantized_f32"], report)?;
        }
        println!("{name}: distance from exact arithmetic {:.2} times llama.cpp's", ours / theirs);
        report.check(ours <= RATIO * theirs, || {
            format!("{name}: mean distance {ours:.4}, llama.cpp's {theirs:.4}")
        });
        Ok(())
    }

    /// The perplexity of the windows that the references have and that the text at hand fills.
    fn perplexity(&self, kit: &Path, report: &mut Report) -> Result<()> {
        let name = self.label();
        let texts = [kit.join("../data/wikitext2-test.txt"), kit.join("real/wikitext2-start.txt")];
        let text = texts.iter().find(|path| path.is_file()).context("the kit has no text")?;
        let text = std::fs::read_to_string(text)?;
        let file = Arc::new(bodkin_model::open(self.path)?);
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let first = tokenizer.bos().filter(|_| tokenizer.add_bos());
        let mut windows = Windows::of_text(tokenizer.encode(&text, true, false), CONTEXT, first)?;
        let exact = numbers(&self.case["perplexity_dequantized_f32"]["running"])?;
        let llama_cpp = numbers(&self.case["perplexity"]["running"])?;
        windows.truncate(exact.len());
        let plan = Arc::new(bodkin_model::plan_for(file.metadata(), file.tensors(), CONTEXT)?);
        let limits = bodkin_eval::limits(&plan, CONTEXT, CONTEXT);
        let mut model = self.backend.load(plan, &file, &limits, &|_, _| ())?;
        let mut found = Perplexity::default();
        let threads = std::thread::available_parallelism()?.get();
        for window in 0..windows.count() {
            let of = |row: Row<'_>| {
                LogSoftmax::of(row.logits).log_probability(row.logits[row.next as usize])
            };
            score(model.as_mut(), &windows, window, threads, of, |log| found.add(log))?;
        }
        let last = windows.count() - 1;
        let relative = |wanted: f64| (found.value() / wanted - 1.0).abs();
        let (from_exact, from_peer) = (relative(exact[last]), relative(llama_cpp[last]));
        println!(
            "{name}: perplexity {:.4} of {} windows, {:.2} % from exact arithmetic, {:.2} % from \
             llama.cpp",
            found.value(),
            last + 1,
            100.0 * from_exact,
            100.0 * from_peer
        );
        report.check(from_exact.min(from_peer) <= PERPLEXITY, || {
            format!("{name}: perplexity {:.4}, not {:.4}", found.value(), exact[last])
        });
        Ok(())
    }

    /// Every level of the CPU's instructions against the portable one, which takes minutes for all
    /// prompts: on the first.
    fn levels_agree(&self, report: &mut Report) -> Result<()> {
        let (file, limits) = self.open()?;
        let tokens = ids(&self.case["prompts"][0]["tokens"])?;
        let mut portable = Vec::new();
        for isa in Isa::available() {
            let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors())?);
            let cpu = Cpu { isa, ..Cpu::new(None)? };
            let mut model = cpu.load(plan, &file, &limits, &|_, _| ())?;
            let logits = last_logits(model.as_mut(), &tokens)?;
            if portable.is_empty() {
                portable.clone_from(&logits);
            }
            let square = |x: f32| f64::from(x) * f64::from(x);
            let error: f64 = logits.iter().zip(&portable).map(|(a, b)| square(a - b)).sum();
            let nmse = error / portable.iter().map(|&x| square(x)).sum::<f64>();
            report.worst(self.name, isa.name(), LEVELS_NMSE, nmse);
            report.check(nmse <= LEVELS_NMSE, || {
                format!("{}: {isa} off by NMSE {nmse:.1e}", self.name)
            });
        }
        Ok(())
    }

    fn label(&self) -> String {
        format!("{} on {}", self.name, self.backend.name())
    }
}

/// The mean distances of our and of llama.cpp's log-probabilities from the exact ones, over the
/// exact ones' top 20, as far as llama.cpp's top 20 has them too.
fn distances(logits: &[f32], exact: &Value, llama_cpp: &Value) -> Result<(f64, f64)> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let normal = f64::from(max) + sum.ln();
    let theirs: BTreeMap<u32, f64> = ids(&llama_cpp["top20_ids"])?
        .into_iter()
        .zip(numbers(&llama_cpp["top20_logprobs"])?)
        .collect();
    let exact = ids(&exact["top20_ids"])?.into_iter().zip(numbers(&exact["top20_logprobs"])?);
    let common: Vec<(f64, f64)> = exact
        .filter_map(|(id, logprob)| {
            let theirs = theirs.get(&id)?;
            let ours = f64::from(logits[id as usize]) - normal;
            Some(((ours - logprob).abs(), (theirs - logprob).abs()))
        })
        .collect();
    let n = common.len() as f64;
    Ok((common.iter().map(|c| c.0).sum::<f64>() / n, common.iter().map(|c| c.1).sum::<f64>() / n))
}

/// Follows the reference's greedy text token by token, up to its first near tie.
fn greedy(
    model: &mut dyn Model,
    label: &str,
    mut tokens: Vec<u32>,
    reference: &Value,
    report: &mut Report,
) -> Result<()> {
    let wanted = ids(&reference["tokens"])?.into_iter().zip(numbers(&reference["margins"])?);
    let wanted: Vec<(u32, f64)> = wanted.take_while(|(_, margin)| *margin > NEAR_TIE).collect();
    let prompt = tokens.len();
    tokens.extend(wanted.iter().map(|(id, _)| id));
    let mut found = Vec::new();
    bodkin_engine::logits(
        model,
        &tokens,
        CONTEXT,
        |i| i + 1 >= prompt,
        |_, logits| {
            found.push(argmax(logits));
        },
    )?;
    for (step, (found, (wanted, margin))) in found.into_iter().zip(wanted).enumerate() {
        report.check(found == wanted, || {
            format!("{label}: greedy step {step}: {found}, not {wanted} (margin {margin:.2})")
        });
    }
    Ok(())
}

fn last_logits(model: &mut dyn Model, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut last = Vec::new();
    bodkin_engine::logits(
        model,
        tokens,
        CONTEXT,
        |i| i + 1 == tokens.len(),
        |_, logits| {
            last = logits.to_vec();
        },
    )?;
    Ok(last)
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32
}

fn ids(value: &Value) -> Result<Vec<u32>> {
    let values = value.as_array().context("expected an array of ids")?;
    values.iter().map(|v| Ok(v.as_u64().context("expected an id")? as u32)).collect()
}

fn numbers(value: &Value) -> Result<Vec<f64>> {
    let values = value.as_array().context("expected an array of numbers")?;
    values.iter().map(|v| v.as_f64().context("expected a number")).collect()
}
