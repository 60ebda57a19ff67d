//! `bodkin embed`: embeddings of texts, one JSON object per line.

mod options;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use bodkin::{Encoder, Options};

use crate::arguments::{Machine, TokenizerArgs, find};
use crate::text;
use options::EmbeddingArgs;

const AFTER: &str = "\
Prints one line of JSON for each text, in order: {\"embedding\":[...],\"tokens\":N}. N includes the
special tokens at the start and the end. An encoder such as BERT and any model that generates text
embed; the latter with the mean of its last hidden states, unless its file or --pooling says
otherwise. Texts share batches of up to --batch-size tokens. Texts of --file come after those of
the command line.";

/// Arguments of `embed`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Maximum tokens per text [default: the model's]")))]
#[command(mut_arg("batch_size", |arg| arg.help("Batch size: tokens of all texts in one step")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// The texts; each gets one embedding [default: standard input]
    text: Vec<String>,
    /// Embed the text of a file, or - (may be repeated)
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Token ids of one text, without added special tokens
    #[arg(long, value_delimiter = ',', value_name = "IDS", conflicts_with_all = ["text", "file"])]
    tokens: Vec<u32>,
    #[command(flatten)]
    embedding: EmbeddingArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

/// One line of the output.
#[derive(Serialize)]
struct Line<'a> {
    embedding: &'a [f32],
    tokens: usize,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let file = find(&args.model)?;
    let options = Options {
        embedding: args.embedding.options(),
        assume_pre: args.tokenizer.assume_pre().map(str::to_owned),
        ..args.machine.options()
    };
    let given = given(&args)?;
    let encoder = Encoder::open(file, &options)?;
    let texts = match args.tokens.is_empty() {
        true => given.iter().map(|text| encoder.tokenize(text)).collect::<bodkin::Result<_>>()?,
        false => vec![args.tokens.clone()],
    };
    let context = encoder.context();
    let tokens: Vec<usize> = texts.iter().map(|text| text.len().min(context)).collect();
    let embeddings = encoder.submit(texts)?;
    if embeddings.truncated() > 0 {
        let cut = embeddings.truncated();
        eprintln!("{cut} of {} texts cut to {context} tokens", tokens.len());
    }
    let mut out = std::io::stdout().lock();
    for (embedding, tokens) in embeddings.zip(tokens) {
        write_line(&mut out, &Line { embedding: &embedding?, tokens })?;
    }
    Ok(())
}

/// The texts of the arguments, or else of standard input.
fn given(args: &Args) -> Result<Vec<String>> {
    let read = |path: &Path| text::read_trimmed(path, "the text");
    let mut texts = args.text.clone();
    for path in &args.file {
        texts.push(read(path)?);
    }
    if texts.is_empty() && args.tokens.is_empty() {
        texts.push(read(Path::new("-"))?);
        ensure!(!texts[0].is_empty(), "the text from standard input is empty");
    }
    Ok(texts)
}

fn write_line(out: &mut dyn Write, line: &Line<'_>) -> Result<()> {
    let line = serde_json::to_string(line).context("cannot write an embedding as JSON")?;
    Ok(writeln!(out, "{line}")?)
}
