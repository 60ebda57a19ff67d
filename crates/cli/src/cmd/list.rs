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
    let cells = rows.iter().map(|row| {
        let Listed { name, bytes, source, path, last_used } = row;
        let path = path.as_ref().map_or("".into(), |path| path.to_string_lossy());
        let used = last_used.map_or("-".to_owned(), ago);
        [name.clone(), human_bytes(*bytes), used, source.clone(), path.into_owned()]
    });
    let head = ["NAME", "SIZE", "LAST USED", "SOURCE", "PATH"].map(str::to_owned);
    let cells: Vec<[String; 5]> = std::iter::once(head).chain(cells).collect();
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max();
    let [name, size, used, source] = [0, 1, 2, 3].map(|column| width(column).unwrap_or(0));
    for [a, b, c, d, e] in &cells {
        let line = format!("{a:name$}  {b:>size$}  {c:used$}  {d:source$}  {e}");
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
