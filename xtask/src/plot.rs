//! `cargo xtask plot`: perplexity against tokens a second, for every variant of a model that was
//! measured: dense, pruned, and with activations skipped. Reads the rows of `quality` and `sparse`
//! under `benches/results`, the last one of each variant, and writes `docs/sparsity.svg`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const OUT: &str = "docs/sparsity.svg";
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const MARGIN: f64 = 60.0;

/// What a variant does, with the colour of its mark.
const SERIES: [(&str, &str); 3] =
    [("dense", "#1f77b4"), ("pruned", "#d62728"), ("activations skipped", "#2ca02c")];

/// What to draw.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file's name in the rows.
    file: String,
}

/// A variant of the model.
#[derive(Debug, PartialEq)]
struct Mark {
    series: usize,
    speed: f64,
    perplexity: f64,
}

/// Draws it.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let mut marks = BTreeMap::new();
    for name in ["quality.jsonl", "sparse.jsonl"] {
        let path = root.join("benches/results").join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for line in text.lines() {
            let row: Value =
                serde_json::from_str(line).with_context(|| path.display().to_string())?;
            if row["file"] == args.file.as_str() {
                marks.extend(marks_of(&row));
            }
        }
    }
    ensure!(
        marks.len() > 1,
        "{}: expected rows of some variants, found {}",
        args.file,
        marks.len()
    );
    let path = root.join(OUT);
    std::fs::create_dir_all(path.parent().context("a file in a folder")?)?;
    std::fs::write(&path, draw(&args.file, &marks)?)?;
    println!("{OUT}: {} variants", marks.len());
    Ok(())
}

/// The variants of a row, by their names.
fn marks_of(row: &Value) -> Vec<(String, Mark)> {
    let mark = |series, speed: &Value, perplexity: &Value| {
        let (speed, perplexity) = (speed.as_f64()?, perplexity.as_f64()?);
        Some(Mark { series, speed, perplexity })
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match row["kind"].as_str() {
        Some("prune") => {
            let rows = row["rows"].as_array().map_or(&[][..], Vec::as_slice);
            let marks = rows.iter().enumerate().filter_map(|(i, variant)| {
                // The second row is the pruned model, the others are dense.
                let (series, name) = match i {
                    1 => {
                        let (method, amount) = (text(&row["method"]), text(&row["amount"]));
                        (1, format!("{method} {amount} {}", text(&row["format"])))
                    }
                    _ => (0, text(&variant["what"])),
                };
                let mark = mark(series, &variant["tokens_per_second"], &variant["perplexity"])?;
                Some((name, mark))
            });
            marks.collect()
        }
        Some("activations") if row["test"].as_str().is_some_and(|t| t.starts_with("tg")) => {
            let skipped = mark(2, &row["sparse_tok_s"], &row["perplexity"]);
            let name = format!("{:.0} % skipped", 100.0 * row["share"].as_f64().unwrap_or(0.0));
            skipped.map(|mark| (name, mark)).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// The range of some numbers, a little wider.
fn range(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(f64::MIN, f64::max));
    let more = 0.06 * (high - low).max(1e-6);
    (low - more, high + more)
}

fn draw(file: &str, marks: &BTreeMap<String, Mark>) -> Result<String> {
    let (slow, fast) = range(marks.values().map(|mark| mark.speed));
    // Pruning costs little at first and then a lot: a logarithm shows both.
    let (low, high) = range(marks.values().map(|mark| mark.perplexity.ln()));
    let x = |speed: f64| MARGIN + (speed - slow) / (fast - slow) * (WIDTH - 2.0 * MARGIN);
    let y = |log: f64| HEIGHT - MARGIN - (log - low) / (high - low) * (HEIGHT - 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let (right, bottom) = (WIDTH - MARGIN, HEIGHT - MARGIN);
    for i in 0..=5 {
        let share = f64::from(i) / 5.0;
        let (speed, log) = (slow + share * (fast - slow), low + share * (high - low));
        let (at_x, at_y) = (x(speed), y(log));
        writeln!(svg, "<path d=\"M{at_x:.1} {MARGIN}V{bottom}\" stroke=\"#ddd\"/>")?;
        writeln!(svg, "<path d=\"M{MARGIN} {at_y:.1}H{right}\" stroke=\"#ddd\"/>")?;
        label(&mut svg, (at_x, bottom + 16.0), "middle", &format!("{speed:.0}"))?;
        label(&mut svg, (MARGIN - 6.0, at_y + 4.0), "end", &format!("{:.1}", log.exp()))?;
    }
    label(&mut svg, (WIDTH / 2.0, HEIGHT - 18.0), "middle", "tokens a second")?;
    label(&mut svg, (MARGIN, MARGIN - 12.0), "start", &format!("perplexity (log), {file}"))?;
    for (i, (name, colour)) in SERIES.iter().enumerate() {
        let at = MARGIN + 18.0 * i as f64;
        writeln!(svg, "<circle cx=\"{}\" cy=\"{at}\" r=\"4\" fill=\"{colour}\"/>", right - 140.0)?;
        label(&mut svg, (right - 130.0, at + 4.0), "start", name)?;
    }
    for (name, mark) in marks {
        let (at_x, at_y) = (x(mark.speed), y(mark.perplexity.ln()));
        let colour = SERIES[mark.series].1;
        writeln!(svg, "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"4\" fill=\"{colour}\"/>")?;
        label(&mut svg, (at_x + 6.0, at_y - 5.0), "start", name)?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn label(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) -> Result<()> {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_variants_are_drawn() {
        fn variant(what: &str, speed: f64, perplexity: f64) -> Value {
            json!({ "what": what, "tokens_per_second": speed, "perplexity": perplexity })
        }
        let rows = [variant("F16", 50.0, 14.0), variant("pruned", 70.0, 21.0)];
        let pruned = json!({
            "kind": "prune", "method": "ria", "amount": "0.5", "format": "F16", "rows": rows,
        });
        let skipped = json!({
            "kind": "activations", "test": "tg128", "share": 0.4,
            "sparse_tok_s": 60.0, "perplexity": 15.0,
        });
        let mut marks: BTreeMap<_, _> = marks_of(&pruned).into_iter().collect();
        marks.extend(marks_of(&skipped));
        let names: Vec<&str> = marks.keys().map(String::as_str).collect();
        assert_eq!(names, ["40 % skipped", "F16", "ria 0.5 F16"]);
        assert_eq!(marks["ria 0.5 F16"], Mark { series: 1, speed: 70.0, perplexity: 21.0 });
        let svg = draw("a<b", &marks).unwrap();
        assert!(names.iter().all(|name| svg.contains(&format!(">{name}<"))), "{svg}");
        assert!(svg.contains("a&lt;b") && svg.ends_with("</svg>\n"));
    }
}
