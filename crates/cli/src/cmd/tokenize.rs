//! `bodkin tokenize`: text to token ids.

use std::io::{Read, Write};

use anyhow::{Context, Result};
use serde_json::json;

use crate::arguments::{TokenizerArgs, find_path};

/// Arguments of `tokenize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A path, or any name that `pull` and `list` know
    model: String,
    /// The text; without it, standard input
    text: Option<String>,
    /// Do not add the tokens that the model wants at the start and end
    #[arg(long)]
    no_special: bool,
    /// Take special tokens in the text as text
    #[arg(long)]
    no_parse: bool,
    /// Print JSON: ids and pieces
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
        None => std::io::read_to_string(std::io::stdin().lock().by_ref())
            .context("cannot read the text from standard input")?,
    };
    let ids = tokenizer.encode(&text, !args.no_special, !args.no_parse);
    let mut out = std::io::stdout().lock();
    if args.json {
        let piece =
            |&id| json!({"id": id, "piece": String::from_utf8_lossy(&tokenizer.piece(id, true))});
        writeln!(out, "{}", ids.iter().map(piece).collect::<serde_json::Value>())?;
    } else {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        writeln!(out, "{}", ids.join(","))?;
    }
    Ok(())
}
