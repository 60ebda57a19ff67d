//! `bodkin detokenize`: token ids to text.

use std::io::{IsTerminal, Write};

use anyhow::{Result, ensure};
use serde_json::json;

use crate::arguments::{TokenizerArgs, find_path};
use crate::errors::{printable_json, printable_text};

/// Arguments of `detokenize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Token ids, separated by commas
    #[arg(value_delimiter = ',', required = true, value_name = "IDS")]
    ids: Vec<u32>,
    /// Omit special tokens
    #[arg(long)]
    no_special: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let file = bodkin_model::open(&find_path(&args.model)?)?;
    let tokenizer = args.tokenizer.open(&file)?;
    let vocabulary = tokenizer.vocab_size();
    for &id in &args.ids {
        ensure!(
            (id as usize) < vocabulary,
            "token id {id}: the vocabulary has {vocabulary} tokens"
        );
    }
    let bytes = tokenizer.decode(&args.ids, !args.no_special);
    let mut out = std::io::stdout().lock();
    if args.json {
        let json = json!({"text": String::from_utf8_lossy(&bytes)});
        writeln!(out, "{}", printable_json(&json.to_string()))?;
    } else if out.is_terminal() {
        writeln!(out, "{}", printable_text(&String::from_utf8_lossy(&bytes)))?;
    } else {
        // Raw bytes: a single token may be invalid UTF-8.
        out.write_all(&bytes)?;
        writeln!(out)?;
    }
    Ok(())
}
