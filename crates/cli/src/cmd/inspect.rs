//! `bodkin inspect`: a summary of a model, its metadata and tensors, its plan, and its memory.

mod summary;
mod zeros;

use std::io::Write;

use anyhow::Result;
use bodkin_backend::{Backend, Memory, StoredFormat};
use bodkin_engine::{Tokenizer, embedding_limits};
use bodkin_gguf::{Array, File, Tensor, Value, printable};
use serde_json::json;

use crate::arguments::{Machine, find};
use crate::errors::printable_json;
use crate::progress::{is_verbose, reporter};
use crate::text;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;
use bodkin::memory::{kv_bytes, recurrent_bytes};
use bodkin::source::{self, Check};

/// Arguments of `inspect`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Print the metadata
    #[arg(long)]
    metadata: bool,
    /// Print the tensors: format, shape and size
    #[arg(long)]
    tensors: bool,
    /// Print the plan, one operation per line
    #[arg(long, conflicts_with = "json")]
    plan: bool,
    /// Print the memory of the running model
    #[arg(long)]
    memory: bool,
    /// Print shares of zeros; --verbose: of each tensor
    #[arg(long)]
    zeros: bool,
    /// Print metadata and tensors, or the memory, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: Machine,
}

pub(crate) fn run(mut args: Args) -> Result<()> {
    args.tensors |= args.zeros && is_verbose();
    let program_bytes = resident_bytes();
    let mut out = std::io::stdout().lock();
    if !args.plan && !args.memory {
        // All of this is readable for unknown architectures too.
        let found = source::find(&args.model, Check::Size, reporter())?;
        if !args.metadata && !args.tensors && !args.zeros && !args.json {
            return summary::print(&mut out, &found);
        }
        return print_file(&mut out, &File::open(&found.path)?, &args);
    }
    let mut opened = find(&args.model)?;
    if let Some(context) = args.machine.ctx_size {
        opened.plan_for(context)?;
    }
    if args.plan {
        write!(out, "{}", opened.plan)?;
    }
    if args.memory {
        print_memory(&mut out, &mut opened, &args, program_bytes)?;
    }
    Ok(())
}

fn print_file(out: &mut dyn Write, file: &File, args: &Args) -> Result<()> {
    let zeros = match args.json || args.tensors || args.zeros {
        true => zeros::count(file, args.zeros),
        false => Vec::new(),
    };
    if args.json {
        let metadata = file.metadata().iter().map(|(k, v)| (k.to_owned(), json_value(v)));
        let tensors = file.tensors().iter().zip(&zeros).map(|(t, zeros)| {
            let (format, share) = (t.format.name(), zeros.map(|zeros| zeros::share(t, zeros)));
            json!({"name": t.name, "format": format, "shape": shape(t), "bytes": t.bytes,
                   "sparsity": share})
        });
        let value = json!({
            "path": file.path().display().to_string(),
            "version": file.version(),
            "metadata": metadata.collect::<serde_json::Map<_, _>>(),
            "tensors": tensors.collect::<Vec<_>>(),
        });
        writeln!(out, "{}", printable_json(&format!("{value:#}")))?;
        return Ok(());
    }
    writeln!(
        out,
        "{}: GGUF version {}, {}, {}\n",
        file.path().display(),
        file.version(),
        text::count(file.tensors().len(), "tensor"),
        human_bytes(file.bytes())
    )?;
    for (key, value) in file.metadata().iter().filter(|_| args.metadata) {
        writeln!(out, "{} = {}", printable(key), printable(&text_value(value)))?;
    }
    if args.metadata && (args.tensors || args.zeros) {
        writeln!(out)?;
    }
    for (t, zeros) in file.tensors().iter().zip(&zeros).filter(|_| args.tensors) {
        let (format, shape, size) = (t.format.name(), shape(t), human_bytes(t.bytes));
        write!(out, "{:<40} {format:<8} {shape:?} {size}", printable(&t.name))?;
        match zeros {
            Some(zeros) => writeln!(out, ", {:.1} % zeros", 100.0 * zeros::share(t, *zeros))?,
            None => writeln!(out)?,
        }
    }
    if args.zeros {
        if args.tensors {
            writeln!(out)?;
        }
        zeros::print_summary(out, file, &zeros)?;
    }
    Ok(())
}

/// Columns last, as plans print shapes.
fn shape(tensor: &Tensor) -> Vec<u64> {
    tensor.shape.iter().rev().copied().collect()
}

/// Resident bytes of this process; 0 if the system does not report them.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    1024 * kilobytes.unwrap_or(0)
}

/// `program_bytes` are the resident bytes before the model is opened.
fn print_memory(
    out: &mut dyn Write,
    opened: &mut ModelFile,
    args: &Args,
    program_bytes: u64,
) -> Result<()> {
    let backend = args.machine.backend()?;
    let options = opened.engine_options(&args.machine.options(), backend.as_ref())?;
    let (plan, context) = (&opened.plan, options.context);
    let (formats, cost) = (backend.stored_formats(plan), plan.cost());
    let limits = match plan.is_encoder() {
        // One text of this length, in one step.
        true => embedding_limits(plan, &[vec![0; context]], options.step_tokens)?,
        false => options.limits(plan),
    };
    let memory = opened.memory(backend.as_ref(), &limits);
    let Memory { weight_bytes, state_bytes, scratch_bytes, host_expert_bytes, .. } = memory;
    let text_bytes = text_bytes(&opened.file);
    let total_bytes = weight_bytes + state_bytes + scratch_bytes + text_bytes + program_bytes;
    let (kv_per_1k, kv_windowed) = kv_sizes(opened, backend.as_ref());
    let recurrent_bytes = recurrent_bytes(plan, backend.as_ref());
    // The file's pages of packed weights are released, so only the difference is added.
    let repacking_bytes = weight_bytes.saturating_sub(cost.weight_bytes);
    if args.json {
        let value = json!({
            "backend": backend.name(),
            "context": context,
            "parameters": cost.parameters,
            "file_weight_bytes": cost.weight_bytes,
            "weight_bytes": weight_bytes,
            "repacking_bytes": repacking_bytes,
            "kv_bytes_per_1k_tokens": kv_per_1k,
            "kv_bytes_windowed": kv_windowed,
            "recurrent_bytes_per_sequence": recurrent_bytes,
            "state_bytes": state_bytes,
            "scratch_bytes": scratch_bytes,
            "host_expert_bytes": host_expert_bytes,
            "text_bytes": text_bytes,
            "program_bytes": program_bytes,
            "total_bytes": total_bytes,
            "bytes_read_per_token": cost.step_weight_bytes,
            "flops_per_token": cost.flops_per_token,
            "formats": formats.iter().map(format_json).collect::<Vec<_>>(),
        });
        return Ok(writeln!(out, "{value:#}")?);
    }
    let rows = [
        ("weights in the file", cost.weight_bytes),
        ("added by repacking", repacking_bytes),
        ("KV cache per 1k tokens", kv_per_1k),
        ("KV cache of sliding windows", kv_windowed),
        ("recurrent state per sequence", recurrent_bytes),
        ("read per token", cost.step_weight_bytes),
        ("weights in memory", weight_bytes),
        (&format!("state, context of {context} tokens"), state_bytes),
        ("scratch", scratch_bytes),
        ("tokenizer and metadata", text_bytes),
        ("program", program_bytes),
        ("total memory", total_bytes),
        ("experts in memory of the host", host_expert_bytes),
    ];
    // Only of models with cached experts the last one is more than nothing.
    let count = rows.len() - usize::from(host_expert_bytes == 0);
    for (what, bytes) in &rows[..count] {
        writeln!(out, "{what:<36} {:>12}", human_bytes(*bytes))?;
    }
    writeln!(out, "{:<36} {:>12}", "parameters", cost.parameters)?;
    writeln!(out, "{:<36} {:>12}", "operations per token", cost.flops_per_token)?;
    print_formats(out, &formats)
}

/// Bytes of the KV cache for each 1000 tokens of context, and those of sliding windows.
fn kv_sizes(opened: &ModelFile, backend: &dyn Backend) -> (u64, u64) {
    let plan = &opened.plan;
    // Beyond the largest window only layers without a window grow.
    let window = plan.windows().into_iter().flatten().max().unwrap_or(0);
    let kv = |tokens| kv_bytes(plan, backend, tokens);
    let per_1k = kv(window + 1000) - kv(window);
    (per_1k, kv(window) - window as u64 * per_1k / 1000)
}

/// How many bits a weight takes in the file and in the backend's memory, format by format.
fn print_formats(out: &mut dyn Write, formats: &[StoredFormat]) -> Result<()> {
    if !formats.is_empty() {
        let [file, stored] = ["bits in the file", "bits in memory"];
        writeln!(
            out,
            "\n{:<12} {:>7} {file:>17} {stored:>15} {:>12}",
            "format", "tensors", "bytes"
        )?;
    }
    for stored in formats {
        let (format, tensors) = (stored.format.name(), stored.tensors);
        let bits = [stored.file_bytes, stored.stored_bytes].map(|bytes| bits(bytes, stored));
        let bytes = human_bytes(stored.stored_bytes);
        writeln!(out, "{format:<12} {tensors:>7} {:>17.2} {:>15.2} {bytes:>12}", bits[0], bits[1])?;
    }
    Ok(())
}

/// Bits of an element, where all take `bytes`.
fn bits(bytes: u64, stored: &StoredFormat) -> f64 {
    8.0 * bytes as f64 / stored.elements as f64
}

fn format_json(stored: &StoredFormat) -> serde_json::Value {
    json!({
        "format": stored.format.name(),
        "tensors": stored.tensors,
        "file_bytes": stored.file_bytes,
        "stored_bytes": stored.stored_bytes,
        "file_bits": bits(stored.file_bytes, stored),
        "stored_bits": bits(stored.stored_bytes, stored),
    })
}

/// Bytes of the metadata and the tokenizer, which grow with the vocabulary.
fn text_bytes(file: &File) -> u64 {
    let metadata: u64 = file.metadata().iter().map(|(_, value)| value_bytes(value)).sum();
    // A model without a tokenizer runs on token ids.
    let tokenizer = Tokenizer::from_metadata(file.metadata()).map_or(0, |t| t.memory_bytes());
    metadata + tokenizer as u64
}

fn value_bytes(value: &Value) -> u64 {
    match value {
        Value::String(text) => string_bytes(text),
        Value::Array(array) => array_bytes(array),
        _ => 0,
    }
}

fn array_bytes(array: &Array) -> u64 {
    let width = match array {
        Array::U8(_) | Array::I8(_) | Array::Bool(_) => 1,
        Array::U16(_) | Array::I16(_) => 2,
        Array::U32(_) | Array::I32(_) | Array::F32(_) => 4,
        Array::U64(_) | Array::I64(_) | Array::F64(_) => 8,
        Array::String(texts) => return texts.iter().map(|text| string_bytes(text)).sum(),
        Array::Array(arrays) => return arrays.iter().map(array_bytes).sum(),
    };
    width * array.len() as u64
}

/// A string with its pointer in a list. Allocators round up to blocks of 16 bytes, at least two,
/// and use eight bytes themselves.
fn string_bytes(text: &[u8]) -> u64 {
    size_of::<Box<[u8]>>() as u64 + (text.len() as u64 + 8).next_multiple_of(16).max(32)
}

/// A value on one line; a long array is truncated.
fn text_value(value: &Value) -> String {
    match json_value(value) {
        serde_json::Value::Array(items) if items.len() > 8 => {
            let start = items[..4].iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            format!("[{start}, ... {} in all]", items.len())
        }
        value => value.to_string(),
    }
}

fn json_value(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(x) => json!(x),
        Value::I8(x) => json!(x),
        Value::U16(x) => json!(x),
        Value::I16(x) => json!(x),
        Value::U32(x) => json!(x),
        Value::I32(x) => json!(x),
        Value::U64(x) => json!(x),
        Value::I64(x) => json!(x),
        Value::F32(x) => json!(x),
        Value::F64(x) => json!(x),
        Value::Bool(x) => json!(x),
        Value::String(x) => json!(String::from_utf8_lossy(x)),
        Value::Array(array) => json_array(array),
    }
}

fn json_array(array: &Array) -> serde_json::Value {
    match array {
        Array::U8(x) => json!(x),
        Array::I8(x) => json!(x),
        Array::U16(x) => json!(x),
        Array::I16(x) => json!(x),
        Array::U32(x) => json!(x),
        Array::I32(x) => json!(x),
        Array::U64(x) => json!(x),
        Array::I64(x) => json!(x),
        Array::F32(x) => json!(x),
        Array::F64(x) => json!(x),
        Array::Bool(x) => json!(x),
        Array::String(x) => {
            x.iter().map(|s| json!(String::from_utf8_lossy(s))).collect::<Vec<_>>().into()
        }
        Array::Array(x) => x.iter().map(json_array).collect::<Vec<_>>().into(),
    }
}
