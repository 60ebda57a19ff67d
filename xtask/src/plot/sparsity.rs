//! Perplexity against tokens a second, for every variant of a model that was
//! measured: dense, pruned, and with activations skipped. Reads the rows of `quality` (with speeds
//! of its `--speeds`) and `sparse`, the newest of each variant, and writes `docs/sparsity.svg`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::quality::KEYS as QUALITY_KEYS;
use crate::results::{newest, number, text};
use crate::sparse::KEYS as SPARSE_KEYS;
use crate::svg::{self, label};

const OUT: &str = "docs/sparsity.svg";
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const MARGIN: f64 = 60.0;

/// What a variant does, with the colour of its mark.
const SERIES: [(&str, &str); 3] =
    [("dense", "#1f77b4"), ("pruned", "#d62728"), ("activations skipped", "#2ca02c")];

/// A variant of the model.
#[derive(Debug, PartialEq)]
struct Mark {
    series: usize,
    speed: f64,
    perplexity: f64,
}

/// Writes the plot of a file's variants.
pub(super) fn run(root: &Path, file: &str) -> Result<()> {
    let mut rows = Vec::new();
    for (name, keys) in [("quality.jsonl", &QUALITY_KEYS[..]), ("sparse.jsonl", &SPARSE_KEYS)] {
        rows.extend(newest(&root.join("benches/results").join(name), keys)?);
    }
    rows.retain(|row| row["file"] == file);
    let marks = marks(&rows);
    ensure!(marks.len() > 1, "{}: expected rows of some variants, found {}", file, marks.len());
    let path = root.join(OUT);
    std::fs::write(&path, draw(file, &marks)?)?;
    println!("{OUT}: {} variants", marks.len());
    Ok(())
}

/// The variants of a model whose perplexity and speed are known, by their names.
fn marks(rows: &[Value]) -> BTreeMap<String, Mark> {
    let speed = |variant: &str| {
        let is_it = |row: &&Value| row["kind"] == "speed" && row["variant"] == variant;
        rows.iter().find(is_it).and_then(|row| row["tokens_per_second"].as_f64())
    };
    let mut marks = BTreeMap::new();
    let mut mark = |name: String, series: usize, speed: Option<f64>, perplexity: &Value| {
        if let (Some(speed), Some(perplexity)) = (speed, perplexity.as_f64()) {
            marks.insert(name, Mark { series, speed, perplexity });
        }
    };
    for row in rows {
        match text(row, "kind") {
            "quantize" => {
                let kind = text(row, "type");
                mark(kind.to_owned(), 0, speed(kind), &row["perplexity"]);
            }
            "prune" => {
                let (amount, format) = (text(row, "amount"), text(row, "format"));
                let name = format!("{} {amount} {format}", text(row, "method"));
                let pruned = &row["rows"][1]["perplexity"];
                mark(name, 1, speed(&format!("{amount}:{format}")), pruned);
                mark("as shipped".to_owned(), 0, speed("before"), &row["rows"][0]["perplexity"]);
            }
            "activations" if text(row, "test").starts_with("tg") => {
                let name = format!("{:.0} % skipped", 100.0 * number(row, "share"));
                mark(name, 2, row["sparse_tok_s"].as_f64(), &row["perplexity"]);
            }
            _ => (),
        }
    }
    marks
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
    let mut svg = svg::start(WIDTH, HEIGHT);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_variants_are_drawn() {
        let rows = [
            json!({ "kind": "quantize", "type": "Q8_0", "perplexity": 14.0 }),
            json!({ "kind": "quantize", "type": "Q2_K", "perplexity": 30.0 }),
            json!({
                "kind": "prune", "method": "ria", "amount": "0.5", "format": "F16",
                "rows": [{ "perplexity": 13.0 }, { "perplexity": 21.0 }],
            }),
            json!({ "kind": "speed", "variant": "Q8_0", "tokens_per_second": 50.0 }),
            json!({ "kind": "speed", "variant": "0.5:F16", "tokens_per_second": 70.0 }),
            json!({
                "kind": "activations", "test": "tg128", "share": 0.4,
                "sparse_tok_s": 60.0, "perplexity": 15.0,
            }),
        ];
        let marks = marks(&rows);
        let names: Vec<&str> = marks.keys().map(String::as_str).collect();
        assert_eq!(names, ["40 % skipped", "Q8_0", "ria 0.5 F16"]);
        assert_eq!(marks["ria 0.5 F16"], Mark { series: 1, speed: 70.0, perplexity: 21.0 });
        let svg = draw("a<b", &marks).unwrap();
        assert!(names.iter().all(|name| svg.contains(&format!(">{name}<"))), "{svg}");
        assert!(svg.contains("a&lt;b") && svg.ends_with("</svg>\n"));
    }
}
