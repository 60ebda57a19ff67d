//! `bodkin tokenize`: text to token ids.

use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use crate::arguments::{TokenizerArgs, find_path};
use crate::errors::printable_json;
use crate::text;

/// Arguments of `tokenize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// The text [default: standard input]
    text: Option<String>,
    /// Add no BOS, EOS, CLS or SEP tokens
    #[arg(long)]
    no_special: bool,
    /// Do not parse special tokens in the text
    #[arg(long)]
    no_parse: bool,
    /// Print ids and pieces as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let file = bodkin_model::open(&find_path(&args.model)?)?;
    let tokenizer = args.tokenizer.open(&file)?;
    let text = match args.text {
        Some(text) => text,
        None => text::read(Path::new("-"), "the text")?,
    };
    let ids = tokenizer.try_encode(&text, !args.no_special, !args.no_parse)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    if args.json {
        let piece =
            |&id| json!({"id": id, "piece": String::from_utf8_lossy(&tokenizer.piece(id, true))});
        let json = ids.iter().map(piece).collect::<serde_json::Value>();
        writeln!(out, "{}", printable_json(&json.to_string()))?;
    } else {
        for (index, id) in ids.iter().enumerate() {
            write!(out, "{}{id}", if index == 0 { "" } else { "," })?;
        }
        writeln!(out)?;
    }
    Ok(out.flush()?)
}
