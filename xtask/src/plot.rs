//! `cargo xtask plot`: images of the documents, made from the rows of measurements.

mod sparsity;
mod speed;

use std::path::Path;

use anyhow::Result;

/// What to plot.
#[derive(clap::Subcommand)]
pub(crate) enum Args {
    /// Tokens a second beside llama.cpp, and the table of the README: docs/speed.svg
    Speed,
    /// Perplexity against tokens a second, for all variants of a model: docs/sparsity.svg
    Sparsity {
        /// The file's name in the rows.
        file: String,
    },
}

/// Writes a plot.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    match args {
        Args::Speed => speed::run(root),
        Args::Sparsity { file } => sparsity::run(root, file),
    }
}
