//! `bodkin embed`: embeddings of texts, one JSON object per line.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use bodkin::{Encoder, ModelFile};

use crate::arguments::{Machine, TokenizerArgs, find};
use crate::text;

const AFTER: &str = "\
Prints one line of JSON for each text, in order: {\"embedding\":[...],\"tokens\":N}. The vector has
length 1; N includes the special tokens at the start and the end. Texts share batches of up to
--batch-size tokens; texts are never truncated. Texts of --file come after those of the command
line.";

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
    let texts = texts(&args, &file)?;
    if let Some(context) = args.machine.context()? {
        for (i, tokens) in texts.iter().map(Vec::len).enumerate() {
            let text = i + 1;
            ensure!(
                tokens <= context,
                "text {text} has {tokens} tokens, --ctx-size allows {context}"
            );
        }
    }
    let mut encoder = Encoder::for_texts(file, &args.machine.options(), &texts)?;
    let mut out = std::io::stdout().lock();
    let mut written = Ok(());
    encoder.embed_tokens(&texts, |i, embedding| {
        if written.is_ok() {
            written = write_line(&mut out, &Line { embedding, tokens: texts[i].len() });
        }
    })?;
    written
}

/// The token ids of each text.
fn texts(args: &Args, file: &ModelFile) -> Result<Vec<Vec<u32>>> {
    if !args.tokens.is_empty() {
        return Ok(vec![args.tokens.clone()]);
    }
    let read = |path: &Path| text::read_trimmed(path, "the text");
    let mut texts = args.text.clone();
    for path in &args.file {
        texts.push(read(path)?);
    }
    if texts.is_empty() {
        texts.push(read(Path::new("-"))?);
        ensure!(!texts[0].is_empty(), "the text from standard input is empty");
    }
    let tokenizer = args.tokenizer.open(&file.file)?;
    texts.iter().map(|text| Ok(tokenizer.try_encode(text, true, false)?)).collect()
}

fn write_line(out: &mut dyn Write, line: &Line<'_>) -> Result<()> {
    let line = serde_json::to_string(line).context("cannot write an embedding as JSON")?;
    Ok(writeln!(out, "{line}")?)
}
