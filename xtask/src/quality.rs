//! `cargo xtask quality`: what quantising and pruning cost a model. Each type of file is made by
//! bodkin and by llama.cpp from the same source, and read by the same engine; each way to prune is
//! one run of `bodkin prune`, whose table is stored. With `--speeds`, the same models are timed
//! instead, interleaved, on a machine that does nothing else. Appends rows to
//! `benches/results/quality.jsonl` and rewrites the tables of `docs/quality.md` from that file.

mod bench;
mod speeds;
mod table;

pub(crate) use bench::Args;
pub(crate) use table::KEYS;

use std::path::Path;

use anyhow::Result;

use self::bench::{Bench, RESULTS};
use crate::compare::{pull, release_binary};

/// Measures everything.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let binary = release_binary(root, args.binary.as_deref())?;
    let (model, folder) = (pull(root, &args.model)?, tempfile::tempdir()?);
    let bench = Bench { root, args, binary, model, folder };
    bench.cut_text()?;
    let types = args.types.iter().filter(|kind| !kind.is_empty());
    let types: Vec<&String> = types.collect();
    match args.speeds {
        Some(rounds) => speeds::measure(&bench, &types, rounds)?,
        None => {
            if !types.is_empty() {
                bench.quantize_all(&types)?;
            }
            args.prune.iter().try_for_each(|way| bench.prune(way))?;
        }
    }
    table::rewrite(&root.join("docs"), &root.join(RESULTS))
}
