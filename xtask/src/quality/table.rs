//! The tables and the plot of `docs/quality.md`, made from the rows of `quality`.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::results::{newest, number, replace};

/// What tells one measurement from another.
const KEYS: [&str; 8] = ["kind", "file", "cpu", "chunks", "type", "method", "amount", "format"];

/// Replaces the tables by the newest row of each model and way.
pub(super) fn rewrite(docs: &Path, results: &Path) -> Result<()> {
    let rows = newest(results, &KEYS)?;
    let tables = pruned(&rows)? + "\n" + &quantized(&rows)?;
    replace(&docs.join("quality.md"), "quality", &tables)?;
    std::fs::write(docs.join("quality.svg"), plot(&points(&rows)))?;
    Ok(())
}

fn of_kind<'a>(rows: &'a [Value], kind: &str) -> impl Iterator<Item = &'a Value> {
    let kind = kind.to_owned();
    rows.iter().filter(move |row| row["kind"] == kind.as_str())
}

/// The models of a run of `bodkin prune`: before, pruned, as precise, as large.
fn models(row: &Value) -> Result<[&Value; 4]> {
    let rows = row["rows"].as_array().context("a row of pruning has rows")?;
    let [before, pruned, precise, large] = rows.as_slice() else {
        anyhow::bail!("expected 4 rows of pruning, found {}", rows.len());
    };
    Ok([before, pruned, precise, large])
}

/// A table of ways to prune.
fn pruned(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| model | pruned | bits | perplexity (before) | KL | tok/s (before) | as precise, dense: \
         bits, perplexity, tok/s | as large, dense: type, perplexity, tok/s | better |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
    );
    for row in of_kind(rows, "prune") {
        let [before, pruned, precise, large] = models(row)?;
        let cell = |model: &Value, name: &str| number(model, name);
        let perplexity = |model| cell(model, "perplexity");
        // Speeds of a machine that did other things too say nothing.
        let speed = |model| match row["alone"] == true {
            true => format!("{:.0}", cell(model, "tokens_per_second")),
            false => "-".to_owned(),
        };
        let kind = row["dense_type_of_the_size"].as_str().unwrap_or("?");
        let better = if row["dense_is_better"] == true { kind } else { "pruned" };
        writeln!(
            out,
            "| {} | {} | {:.2} | {:.2} ({:.2}) | {:.4} | {} ({}) | {:.2}, {:.2}, {} | \
             {kind}, {:.2}, {} | {better} |",
            row["file"].as_str().unwrap_or("?"),
            way(row),
            cell(pruned, "bits_per_weight"),
            perplexity(pruned),
            perplexity(before),
            cell(pruned, "divergence"),
            speed(pruned),
            speed(before),
            cell(precise, "bits_per_weight"),
            perplexity(precise),
            speed(precise),
            perplexity(large),
            speed(large),
        )?;
    }
    Ok(out)
}

/// A way to prune in a few words.
fn way(row: &Value) -> String {
    let text = |name: &str| row[name].as_str().unwrap_or("?").to_owned();
    let amount = text("amount");
    let amount = match amount.parse::<f64>() {
        Ok(share) => format!("{:.0} %", 100.0 * share),
        Err(_) => amount,
    };
    format!("{} {amount} {}", text("method"), text("format"))
}

/// A table of types of files.
fn quantized(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| model | type | chunks | bits | perplexity | of F16 | made by llama.cpp | ratio |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in of_kind(rows, "quantize") {
        writeln!(
            out,
            "| {} | {} | {} | {:.2} | {:.3} | {:.3} | {:.3} | {:.4} |",
            row["file"].as_str().unwrap_or("?"),
            row["type"].as_str().unwrap_or("?"),
            row["chunks"],
            number(row, "bits_per_weight"),
            number(row, "perplexity"),
            number(row, "source_perplexity"),
            number(row, "peer_perplexity"),
            number(row, "ratio"),
        )?;
    }
    Ok(out)
}

/// A model in the plot.
struct Point {
    name: String,
    is_pruned: bool,
    speed: f64,
    perplexity: f64,
}

fn points(rows: &[Value]) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for row in of_kind(rows, "prune").filter(|row| row["alone"] == true) {
        let Ok([before, pruned, precise, large]) = models(row) else { continue };
        for (i, model) in [before, pruned, precise, large].into_iter().enumerate() {
            let is_pruned = i == 1;
            let what = model["what"].as_str().unwrap_or("?");
            let what = what.split_once(": ").map_or(what, |(_, name)| name).to_owned();
            let name = if is_pruned { way(row) } else { what };
            let (speed, perplexity) =
                (number(model, "tokens_per_second"), number(model, "perplexity"));
            // The same dense model stands beside several pruned ones.
            if speed > 0.0 && perplexity > 0.0 && !points.iter().any(|p| p.name == name) {
                points.push(Point { name, is_pruned, speed, perplexity });
            }
        }
    }
    points
}

/// Perplexity, on a scale of logarithms, against tokens a second.
fn plot(points: &[Point]) -> String {
    let (width, height, left, top) = (860.0, 520.0, 70.0, 30.0);
    let of = |get: fn(&Point) -> f64| points.iter().map(get).fold(f64::NAN, f64::max);
    let fastest = 1.25 * of(|p| p.speed);
    let worst = 1.15 * of(|p| p.perplexity);
    let best = 0.9 / of(|p| 1.0 / p.perplexity);
    let x = |speed: f64| left + (width - left) * speed / fastest;
    let y = |value: f64| height - (height - top) * (value / best).ln() / (worst / best).ln();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <path d=\"M{left} {top}V{height}H{width}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{left}\" y=\"18\">perplexity</text>\n\
         <text x=\"{}\" y=\"{}\">tokens a second</text>\n",
        height + 40.0,
        width - 110.0,
        height + 34.0,
    );
    let mut mark = |x: f64, y: f64, text: &str| {
        let _ = writeln!(out, "<text x=\"{x:.0}\" y=\"{y:.0}\" fill=\"gray\">{text}</text>");
    };
    for share in [0.0, 0.2, 0.4, 0.6, 0.8] {
        mark(x(share * fastest), height + 18.0, &format!("{:.0}", share * fastest));
        let value = best * (worst / best).powf(share);
        mark(left - 45.0, y(value), &format!("{value:.1}"));
    }
    for point in points {
        let colour = if point.is_pruned { "#c03020" } else { "#2050a0" };
        let (x, y) = (x(point.speed), y(point.perplexity));
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.0}\" cy=\"{y:.0}\" r=\"4\" fill=\"{colour}\"/>\
             <text x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            x + 7.0,
            y + 4.0,
            point.name,
        );
    }
    out + "</svg>\n"
}
