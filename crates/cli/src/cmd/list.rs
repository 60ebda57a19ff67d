//! `bodkin list`: the models on this machine, or the names that bodkin knows.

use std::io::{Write, stdout};
use std::time::SystemTime;

use anyhow::Result;

use bodkin::memory::human_bytes;
use bodkin::source::{self, Listed};

/// Arguments of `list`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the known names instead, with where their models come from
    #[arg(long)]
    known: bool,
    /// Print a JSON array instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    let rows = if args.known { source::known() } else { source::list()? };
    let mut out = stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    let path = |row: &Listed| row.path.as_ref().map(|path| path.display().to_string());
    let mut table = match args.known {
        true => vec![["NAME", "SIZE", "SOURCE", "", ""].map(str::to_owned)],
        false => vec![["NAME", "SIZE", "LAST USED", "SOURCE", "PATH"].map(str::to_owned)],
    };
    table.extend(rows.iter().map(|row| {
        let (name, size, source) = (row.name.clone(), human_bytes(row.bytes), row.source.clone());
        let used = row.last_used.map_or("-".to_owned(), ago);
        match args.known {
            true => [name, size, source, String::new(), String::new()],
            false => [name, size, used, source, path(row).unwrap_or_default()],
        }
    }));
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|column| width(column).unwrap_or(0));
    for [a, b, c, d, e] in &table {
        let line = format!("{a:first$}  {b:>second$}  {c:third$}  {d:fourth$}  {e}");
        writeln!(out, "{}", line.trim_end())?;
    }
    if rows.is_empty() {
        eprintln!("no models yet; `bodkin list --known` names some that `bodkin pull` fetches");
    }
    Ok(())
}

/// How long ago a time is, in its largest unit.
fn ago(time: SystemTime) -> String {
    const UNITS: [(u64, &str); 4] = [(86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let seconds = SystemTime::now().duration_since(time).map_or(0, |past| past.as_secs()).max(1);
    let unit = UNITS.iter().find(|(unit, _)| seconds >= *unit);
    let (count, name) = unit.map_or((1, "second"), |(unit, name)| (seconds / unit, *name));
    format!("{count} {name}{} ago", if count == 1 { "" } else { "s" })
}
