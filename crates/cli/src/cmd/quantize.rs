//! `bodkin quantize`: converts a model to another file type.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use bodkin_compress::Pattern;
use bodkin_compress::imatrix::Imatrix;
use bodkin_compress::mixture::{FILE_TYPES, FileType};
use bodkin_compress::quantize::{self, Choice, Conversion, Options};
use bodkin_gguf::Format;
use clap::error::ErrorKind;
use serde_json::json;

use crate::arguments::{find_path, threads};
use crate::errors::printable_name;
use crate::progress::{computing, is_verbose};
use crate::{output, text};
use bodkin::memory::human_bytes;
use bodkin::source::is_file;

/// Arguments of `quantize`.
#[derive(clap::Args)]
#[command(after_help = types())]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    input: String,
    /// Output file [default: the input's name with TYPE, beside it]
    output: Option<PathBuf>,
    /// File type, such as Q4_K_M
    #[arg(value_parser = file_type)]
    r#type: Option<FileType>,
    /// File type; the same as TYPE
    #[arg(
        long = "type",
        value_name = "TYPE",
        hide = true,
        conflicts_with = "type",
        value_parser = file_type
    )]
    type_flag: Option<FileType>,
    /// Convert sparse tensors to dense, losslessly without TYPE
    #[arg(long)]
    dense: bool,
    /// Use the main format of TYPE for every matrix
    #[arg(long)]
    pure: bool,
    /// Format of matching tensors; the first match applies
    #[arg(long, value_name = "PATTERN=FORMAT")]
    tensor_type: Vec<String>,
    /// Importance matrix written by `imatrix`
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Allow requantizing tensors that are quantized
    #[arg(long)]
    allow_requantize: bool,
    /// Allow NaN and infinities
    #[arg(long)]
    allow_nan: bool,
    /// Print the formats, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn types() -> String {
    format!("TYPE is one of\n  {}", type_names())
}

/// The names of all file types, in lines.
pub(super) fn type_names() -> String {
    let names: Vec<&str> = FILE_TYPES.iter().map(|kind| kind.name).collect();
    let lines: Vec<String> = names.chunks(12).map(|names| names.join(", ")).collect();
    lines.join(",\n  ")
}

/// Parses the name of a file type.
pub(super) fn file_type(name: &str) -> Result<FileType, String> {
    FileType::from_name(name).map_err(|_| {
        let names: Vec<&str> = FILE_TYPES.iter().map(|kind| kind.name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// The output file, if it is given, and the type, which may stand in its place.
fn output_and_type(args: &Args) -> Result<(Option<PathBuf>, Option<FileType>), String> {
    let (output, kind) = (args.output.clone(), args.r#type.or(args.type_flag));
    let expected = "expected TYPE, such as Q4_K_M, after INPUT or OUTPUT";
    let help = "`bodkin quantize --help` lists the types";
    match output {
        _ if kind.is_some() => Ok((output, kind)),
        None if args.dense => Ok((None, None)),
        None => Err(format!("{expected}; {help}")),
        Some(output) => {
            let name = printable_name(&output.to_string_lossy());
            match file_type(&name) {
                Ok(kind) => Ok((None, Some(kind))),
                Err(expected) if !is_file_name(&output) => {
                    Err(format!("{expected}, found `{name}`"))
                }
                Err(_) if args.dense => Ok((Some(output), None)),
                Err(_) => Err(format!("{expected}, found only the output `{name}`; {help}")),
            }
        }
    }
}

/// Whether this is an output file rather than a type with a wrong letter.
fn is_file_name(path: &Path) -> bool {
    let is_gguf = |extension: &OsStr| extension.eq_ignore_ascii_case("gguf");
    path.extension().is_some_and(is_gguf) || path.components().count() > 1
}

/// The output file where none is given: as the input, whose own type is replaced, beside it. The
/// output of a fetched model is in the current folder.
fn derived_output(input: &str, kind: Option<FileType>) -> PathBuf {
    let path = match is_file(input) {
        true => PathBuf::from(input),
        false => PathBuf::from(input.replace(['/', ':'], "-")),
    };
    let name = bodkin_gguf::stem(&path);
    let stem = match name.rsplit_once(['-', '.']) {
        Some((stem, old)) if kind.is_some() && FileType::from_name(old).is_ok() => stem,
        _ => &name,
    };
    path.with_file_name(format!("{stem}-{}.gguf", kind.map_or("dense", |kind| kind.name)))
}

pub(crate) fn run(args: Args) -> Result<()> {
    let (given, kind) = output_and_type(&args).unwrap_or_else(|reason| {
        clap::Error::raw(ErrorKind::InvalidValue, reason + "\n").exit();
    });
    ensure!(!args.pure || kind.is_some(), "--pure: expected TYPE, found none");
    let overrides =
        args.tensor_type.iter().map(|text| parse_override(text)).collect::<Result<_>>()?;
    let threads = threads(args.threads)?;
    let imatrix = args.imatrix.as_ref().map(Imatrix::open).transpose()?;
    let output = given.clone().unwrap_or_else(|| derived_output(&args.input, kind));
    if given.is_none() && !args.dry_run {
        // Before the input is fetched.
        let found = output.display();
        ensure!(!output.exists(), "{found} exists; name an output file to replace it");
    }
    let file = bodkin_model::open(&find_path(&args.input)?)?;
    if !args.dry_run {
        output::check(&output, [Some(file.path()), args.imatrix.as_deref()].into_iter().flatten())?;
    }
    let options = Options { kind, pure: args.pure, overrides, has_imatrix: imatrix.is_some() };
    let choices = quantize::choose(&file, &options)?;
    if !args.allow_requantize {
        check_requantized(&choices)?;
    }
    let importance = imatrix.as_ref().map(|imatrix| quantize::Importance::new(imatrix, &choices));
    let importance = importance.transpose()?;
    if !args.dry_run {
        let mut metadata = quantize::metadata(&file, kind);
        if let (Some(imatrix), Some(path)) = (&imatrix, &args.imatrix) {
            quantize::record_imatrix(&mut metadata, imatrix, &path.display().to_string());
        }
        output::write(&output, |out| {
            let progress = computing("quantizing", Some(file.bytes()));
            let conversion = Conversion {
                choices: &choices,
                importance: importance.as_ref(),
                threads,
                allows_nan: args.allow_nan,
            };
            match conversion.write(&file, &metadata, &|bytes| progress.add(bytes), out) {
                Err(error @ bodkin_compress::Error::NotFinite { .. }) => {
                    bail!("{}: {error}; --allow-nan converts it", file.path().display())
                }
                written => written.with_context(|| format!("cannot write {}", output.display())),
            }
        })?;
    }
    fallbacks(&choices);
    if let Some(importance) = &importance {
        importance.missing().for_each(|name| {
            let name = printable_name(name);
            eprintln!("{name}: expected an entry in the importance matrix, found none")
        });
    }
    if given.is_none() && !args.dry_run {
        eprintln!("wrote {}", output.display());
    }
    report(file.bytes(), &choices, args.json)
}

/// Refuses to quantise what is quantised: the errors of both formats add up.
fn check_requantized(choices: &[Choice]) -> Result<()> {
    let Some(choice) = choices.iter().find(|choice| choice.is_requantized()) else {
        return Ok(());
    };
    let (name, from, to) = (&choice.tensor.name, choice.tensor.format, choice.format);
    bail!(
        "{name}: expected F32, F16 or BF16 to make {}, found {}; --allow-requantize converts it, \
         with the errors of both formats",
        to.name(),
        from.name()
    )
}

/// `PATTERN=FORMAT`.
fn parse_override(text: &str) -> Result<(Pattern, Format)> {
    let flag = || format!("--tensor-type {text}");
    let pair = text.rsplit_once('=').context("expected PATTERN=FORMAT, found no `=`");
    let (pattern, format) = pair.with_context(flag)?;
    let known = Format::from_name(format);
    let expected = || format!("expected the name of a format such as Q8_0, found `{format}`");
    let known = known.with_context(expected).with_context(flag)?;
    Ok((Pattern::new(pattern).with_context(flag)?, known))
}

/// Prints which tensors have rows that do not fit their format, in one line for equal cases.
pub(super) fn fallbacks(choices: &[Choice]) {
    let mut alike: Vec<(&Choice, Format, usize)> = Vec::new();
    for choice in choices {
        let Some(wanted) = choice.instead_of else { continue };
        let key = (choice.tensor.cols(), wanted, choice.format);
        let of = |(first, wanted, _): &(&Choice, Format, usize)| {
            (first.tensor.cols(), *wanted, first.format) == key
        };
        match alike.iter_mut().find(|group| of(group)) {
            Some((.., count)) => *count += 1,
            None => alike.push((choice, wanted, 1)),
        }
    }
    for (first, wanted, count) in alike {
        let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        let (name, cols) = (printable_name(&first.tensor.name), first.tensor.cols());
        let (block, format) = (wanted.block_elements(), first.format.name());
        let wanted = wanted.name();
        eprintln!(
            "{name}{more}: {cols} columns do not divide into {wanted} blocks of {block}: {format}"
        );
    }
}

/// Prints what was converted from tensors of `source_bytes` bytes.
pub(super) fn report(source_bytes: u64, choices: &[Choice], as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let bytes: u64 = choices.iter().map(Choice::bytes).sum();
    let elements: u64 = choices.iter().map(|choice| choice.tensor.elements()).sum();
    let bits = bytes as f64 * 8.0 / elements as f64;
    if as_json {
        let tensors = choices.iter().map(|choice| {
            let (from, to) = (choice.tensor.format.name(), choice.format.name());
            json!({"name": choice.tensor.name, "from": from, "to": to, "bytes": choice.bytes()})
        });
        let value = json!({
            "source_bytes": source_bytes,
            "bytes": bytes,
            "bits_per_weight": bits,
            "tensors": tensors.collect::<Vec<_>>(),
        });
        return Ok(writeln!(out, "{value:#}")?);
    }
    if is_verbose() {
        for choice in choices {
            let (name, from, to) =
                (printable_name(&choice.tensor.name), choice.tensor.format, choice.format);
            let size = human_bytes(choice.bytes());
            writeln!(out, "{name:<40} {:<11} {:<11} {size}", from.name(), to.name())?;
        }
        writeln!(out)?;
    }
    print_summary(&mut out, choices)?;
    let (before, after) = (human_bytes(source_bytes), human_bytes(bytes));
    Ok(writeln!(out, "\n{before} -> {after}, {bits:.2} bits per weight")?)
}

/// Prints the conversions, each with its tensors and their size.
fn print_summary(out: &mut dyn Write, choices: &[Choice]) -> Result<()> {
    let mut kinds: Vec<(Format, Format, usize, u64)> = Vec::new();
    for choice in choices {
        let (from, to) = (choice.tensor.format, choice.format);
        match kinds.iter_mut().find(|kind| (kind.0, kind.1) == (from, to)) {
            Some((.., tensors, bytes)) => {
                *tensors += 1;
                *bytes += choice.bytes();
            }
            None => kinds.push((from, to, 1, choice.bytes())),
        }
    }
    for (from, to, tensors, bytes) in kinds {
        let (tensors, size) = (text::count(tensors, "tensor"), human_bytes(bytes));
        writeln!(out, "{:<11} -> {:<11} {tensors:>12} {size:>10}", from.name(), to.name())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_named_after_their_input() {
        let q8_0 = FileType::from_name("Q8_0").ok();
        for (input, output) in [
            ("/models/tiny.gguf", "/models/tiny-Q8_0.gguf"),
            ("./tiny-F16-00001-of-00003.gguf", "./tiny-Q8_0.gguf"),
            ("hf:me/Tiny:tiny-Q4_K_M.gguf", "hf-me-Tiny-tiny-Q8_0.gguf"),
            ("hf:me/Tiny:tiny.f16-00001-of-00002.gguf", "hf-me-Tiny-tiny-Q8_0.gguf"),
            ("hf:me/Tiny-2.5-GGUF:Q4_K_M", "hf-me-Tiny-2.5-GGUF-Q8_0.gguf"),
            ("qwen2.5:0.5b", "qwen2.5-0.5b-Q8_0.gguf"),
        ] {
            assert_eq!(derived_output(input, q8_0), Path::new(output), "{input}");
        }
        let dense = derived_output("./tiny-Q8_0.gguf", None);
        assert_eq!(dense, Path::new("./tiny-Q8_0-dense.gguf"));
    }
}
