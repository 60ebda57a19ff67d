//! `bodkin detokenize`: token ids to text.

use std::io::Write;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::arguments::{TokenizerArgs, find_path};

/// Arguments of `detokenize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A path, or any name that `pull` and `list` know
    model: String,
    /// Token ids, separated by commas
    #[arg(value_delimiter = ',', required = true, value_name = "IDS")]
    ids: Vec<u32>,
    /// Leave special tokens out
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
        writeln!(out, "{}", json!({"text": String::from_utf8_lossy(&bytes)}))?;
    } else {
        // Bytes as they are: a lone token need not be valid UTF-8.
        out.write_all(&bytes)?;
        writeln!(out)?;
    }
    Ok(())
}
