//! `bodkin list`: the models on this machine, or the names that bodkin knows.

use std::io::{Write, stdout};
use std::time::SystemTime;

use anyhow::Result;

use bodkin::memory::human_bytes;
use bodkin::source::{self, KnownModel, Listed};

/// Arguments of `list`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the known names instead: size, licence, source
    #[arg(long)]
    known: bool,
    /// Print a JSON array instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    if args.known {
        let rows = source::known();
        return print(args.json, &rows, &known_table(&rows));
    }
    let rows = source::list()?;
    print(args.json, &rows, &local_table(&rows))?;
    if rows.is_empty() && !args.json {
        eprintln!("no models yet; `bodkin list --known` names some that `bodkin pull` fetches");
    }
    Ok(())
}

fn local_table(rows: &[Listed]) -> Vec<[String; 5]> {
    let header = ["NAME", "SIZE", "LAST USED", "SOURCE", "PATH"].map(str::to_owned);
    let row = |row: &Listed| {
        let used = row.last_used.map_or("-".to_owned(), ago);
        let path = row.path.as_ref().map(|path| path.display().to_string());
        let size = human_bytes(row.bytes);
        [row.name.clone(), size, used, row.source.clone(), path.unwrap_or_default()]
    };
    std::iter::once(header).chain(rows.iter().map(row)).collect()
}

fn known_table(rows: &[KnownModel]) -> Vec<[String; 5]> {
    let header = ["NAME", "SIZE", "LICENCE", "SOURCE", ""].map(str::to_owned);
    let row = |row: &KnownModel| {
        let (size, licence) = (human_bytes(row.bytes), row.licence.clone());
        [row.name.clone(), size, licence, row.source.clone(), String::new()]
    };
    std::iter::once(header).chain(rows.iter().map(row)).collect()
}

/// Prints rows as JSON or as a table.
fn print<T: serde::Serialize>(as_json: bool, rows: &[T], table: &[[String; 5]]) -> Result<()> {
    let mut out = stdout().lock();
    if as_json {
        return Ok(writeln!(out, "{}", serde_json::to_string_pretty(rows)?)?);
    }
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|column| width(column).unwrap_or(0));
    for [a, b, c, d, e] in table {
        let line = format!("{a:first$}  {b:>second$}  {c:third$}  {d:fourth$}  {e}");
        writeln!(out, "{}", line.trim_end())?;
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
