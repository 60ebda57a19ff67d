//! `bodkin list`: the models on this machine, and the known names that are not fetched yet.

use std::io::{Write, stdout};

use anyhow::Result;

use bodkin::memory::human_bytes;
use bodkin::source::{self, Listed};

/// Arguments of `list`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print a JSON array instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let rows = source::list()?;
    if args.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    let name_width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max(4);
    let mut out = stdout().lock();
    writeln!(out, "{:name_width$}  {:>10}  {:14}  PATH", "NAME", "SIZE", "SOURCE")?;
    for Listed { name, bytes, source, path } in &rows {
        let path = path.as_ref().map_or("-".into(), |path| path.to_string_lossy());
        let size = human_bytes(*bytes);
        writeln!(out, "{name:name_width$}  {size:>10}  {source:14}  {path}")?;
    }
    Ok(())
}
