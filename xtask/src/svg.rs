//! Parts of SVG images that all plots have.

use std::fmt::Write;

use anyhow::Result;

/// The start of an image on a white ground.
pub(crate) fn start(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    )
}

/// Text at a point; `anchor` is the part of it that is there: `start`, `middle` or `end`.
pub(crate) fn label(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) -> Result<()> {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")?;
    Ok(())
}
