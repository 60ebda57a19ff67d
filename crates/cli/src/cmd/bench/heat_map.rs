//! `bench --experts`: an image of how often the experts of each layer were chosen.

use std::io::Write;

use anyhow::Result;

use super::report::Row;

/// Width of the squares of a layer, and height of one.
const WIDTH: f64 = 768.0;
const HEIGHT: f64 = 12.0;
/// Above each test, and left of the squares.
const TOP: f64 = 36.0;
const LEFT: f64 = 44.0;

/// Writes a map for each test: a line for each layer, a square for each expert. A square is white
/// if no token chose the expert, and darkest if it is the test's most chosen one.
pub(crate) fn write(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let height: f64 = rows.iter().map(|row| TOP + HEIGHT * row.chosen.len() as f64).sum();
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"10\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
        LEFT + WIDTH + 10.0,
        height + 10.0,
    )?;
    let mut y = 0.0;
    for row in rows {
        let most = row.chosen.iter().flat_map(|layer| &layer.counts).max().copied().unwrap_or(0);
        let (test, at) = (row.test(), y + TOP - 8.0);
        writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"{at:.1}\">{test}: choices of each expert by layer, {most} at \
             most</text>"
        )?;
        y += TOP;
        for layer in &row.chosen {
            let (number, at) = (layer.layer, y + HEIGHT - 2.5);
            let right = LEFT - 6.0;
            writeln!(out, "<text x=\"{right}\" y=\"{at:.1}\" text-anchor=\"end\">{number}</text>")?;
            let width = WIDTH / layer.counts.len() as f64;
            for (expert, &count) in layer.counts.iter().enumerate().filter(|(_, count)| **count > 0)
            {
                let (x, opacity) = (LEFT + width * expert as f64, count as f64 / most as f64);
                writeln!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{HEIGHT}\" \
                     fill=\"#08306b\" fill-opacity=\"{opacity:.3}\"><title>layer {number}, expert \
                     {expert}: {count}</title></rect>"
                )?;
            }
            y += HEIGHT;
        }
    }
    writeln!(out, "</svg>")?;
    Ok(())
}
