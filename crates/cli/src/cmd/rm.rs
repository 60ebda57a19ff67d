//! `bodkin rm NAME`: removes a fetched model from the cache.

use std::io::{Write, stdout};

use anyhow::Result;

use bodkin::memory::human_bytes;
use bodkin::source;

use crate::progress::reporter;

/// Arguments of `rm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Names of fetched models, whole, damaged or unfinished, as in `list`
    #[arg(value_name = "NAME", required = true)]
    models: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    for model in &args.models {
        let bytes = source::remove(model, reporter())?;
        writeln!(stdout(), "removed {model} ({})", human_bytes(bytes))?;
    }
    Ok(())
}
