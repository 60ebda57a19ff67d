//! The summary of a model: what a user wants to know before running it.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;
use bodkin::source::Resolved;
use bodkin_engine::SamplerOptions;
use bodkin_gguf::{File, Metadata, printable};

use crate::progress::reporter;
use crate::{errors, text};

/// The most characters of a text of the file.
const TEXT_CHARS_MAX: usize = 200;
/// The most names in a list.
const LISTED_MAX: usize = 6;

/// Prints a line for each thing that is known of the model.
pub(super) fn print(out: &mut dyn Write, found: &Resolved) -> Result<()> {
    let file = File::open(&found.path)?;
    let metadata = file.metadata();
    let text = |key: &str| metadata.str(key).ok().flatten().map(one_line);
    let mut row = |name: &str, value: Option<String>| match value {
        Some(value) => writeln!(out, "{name:<14} {value}"),
        None => Ok(()),
    };
    row("name", text("general.name"))?;
    let (path, size) = (found.path.display().to_string(), human_bytes(found.bytes));
    row("file", Some(format!("{}, {size}", one_line(&path))))?;
    row("source", Some(found.source.clone()))?;
    row("architecture", architecture(metadata))?;
    row("formats", Some(formats(&file)))?;
    row("tokenizer", text("tokenizer.ggml.model"))?;
    let has_template = metadata.get("tokenizer.chat_template").is_some();
    row("chat template", Some(if has_template { "yes" } else { "none" }.to_owned()))?;
    match ModelFile::of(found, reporter()) {
        Ok(model) => {
            let plan = &model.plan;
            row("parameters", Some(count(plan.cost().parameters)))?;
            row("context", Some(format!("{} tokens", plan.context_length)))?;
            row("vocabulary", Some(format!("{} tokens", plan.vocabulary)))?;
            if !plan.is_encoder() {
                let request = model.request()?;
                row("sampling", Some(sampling(&request.sampling)))?;
                let stop = request.stop.iter().map(|stop| format!("`{}`", one_line(stop)));
                let stop: Vec<String> = stop.collect();
                row("stop strings", (!stop.is_empty()).then(|| stop.join(", ")))?;
                row("system prompt", model.system().map(one_line))?;
            }
            row("not read", unread(&model))?;
        }
        // Errors are short, whatever the file says.
        Err(error) => row("cannot run", Some(printable(&error.to_string())))?,
    }
    let layer = found.layers.iter().find(|layer| layer.kind == "license");
    let license = layer.and_then(|layer| layer.text().ok()).map(|text| one_line(&text));
    row("license", license.or_else(|| text("general.license")))?;
    row("more", Some("--metadata, --tensors, --plan, --memory".to_owned()))?;
    Ok(())
}

/// The tensors that the model does not read: `blk.61.* and 3 more`.
fn unread(model: &ModelFile) -> Option<String> {
    let names = model.unread();
    let shown: Vec<String> = names.iter().take(LISTED_MAX).map(|name| one_line(name)).collect();
    let more = names.len().saturating_sub(LISTED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| shown.join(", ") + &more)
}

/// `llama, 30 layers of width 576`.
fn architecture(metadata: &Metadata) -> Option<String> {
    let name = metadata.str("general.architecture").ok().flatten()?;
    let number = |key: &str| metadata.u32(&format!("{name}.{key}")).ok().flatten();
    let layers =
        number("block_count").map(|layers| format!(", {}", text::count(layers as usize, "layer")));
    let width = number("embedding_length").map(|width| format!(" of width {width}"));
    Some(one_line(name) + &layers.unwrap_or_default() + &width.unwrap_or_default())
}

/// The shares of the formats in the bytes of all tensors, the largest first.
fn formats(file: &File) -> String {
    let mut bytes = BTreeMap::<&str, u64>::new();
    for tensor in file.tensors() {
        *bytes.entry(tensor.format.name()).or_default() += tensor.bytes;
    }
    let all = bytes.values().sum::<u64>().max(1) as f64;
    let mut shares: Vec<(&str, u64)> = bytes.into_iter().collect();
    shares.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let share =
        |(name, bytes): &(&str, u64)| format!("{name} {:.1} %", 100.0 * *bytes as f64 / all);
    shares.iter().map(share).collect::<Vec<_>>().join(", ")
}

fn sampling(options: &SamplerOptions) -> String {
    let SamplerOptions { temperature, top_k, top_p, min_p, repeat_penalty, .. } = options;
    let penalty = match *repeat_penalty {
        1.0 => String::new(),
        penalty => format!(", repeat-penalty {penalty}"),
    };
    format!("temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}{penalty}")
}

/// `135 million`.
fn count(parameters: u64) -> String {
    match parameters as f64 {
        n if n >= 1e9 => format!("{:.2} billion", n / 1e9),
        n if n >= 1e6 => format!("{:.1} million", n / 1e6),
        n => n.to_string(),
    }
}

/// A text of a file, on one line and without what a terminal would obey.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = errors::printable_name(&words.join(" "));
    match line.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}
