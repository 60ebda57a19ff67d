//! `bodkin convert`: safetensors and tokenizer files to a GGUF.

use std::path::PathBuf;

use anyhow::{Context, Result};
use bodkin_compress::mixture::FileType;
use bodkin_convert::{Model, Options};

use super::quantize::{fallbacks, file_type, report, type_names};
use crate::arguments::threads;
use crate::output;
use crate::progress::computing;

/// Arguments of `convert`.
#[derive(clap::Args)]
#[command(after_help = format!("TYPE is one of\n  {}", type_names()))]
pub(crate) struct Args {
    /// Folder, wheel or zip file with config.json, *.safetensors and tokenizer files
    input: PathBuf,
    /// Output file
    output: PathBuf,
    /// File type, such as Q8_0 [default: BF16 or F16, as the input]
    #[arg(long, value_parser = file_type)]
    r#type: Option<FileType>,
    /// Name of the pre-tokenizer, for one that is not recognized
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let kind = args.r#type;
    let threads = threads(args.threads)?;
    let model = Model::open(&args.input, &Options { kind, pre: args.pre })?;
    output::check(&args.output, [args.input.as_path()])?;
    output::write(&args.output, |out| {
        let progress = computing("converting", Some(model.bytes()));
        let written = model.write(threads, &|bytes| progress.add(bytes), out);
        written.with_context(|| format!("cannot write {}", args.output.display()))
    })?;
    fallbacks(model.choices());
    report(model.bytes(), model.choices(), args.json)
}
