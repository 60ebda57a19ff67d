//! `cargo xtask golden`: rewrites the texts of the golden plans, which the tests of the model crate
//! compare. A text is named after the tiny model that it is the plan of.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use bodkin_gguf::File;

/// What to rewrite.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tiny models to add to those that have a text already.
    names: Vec<String>,
}

/// Rewrites the texts that there are in the workspace at `root`, and adds new ones.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let folder = root.join("crates/model/tests/golden");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut names = args.names.clone();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        names.push(stem.with_context(|| path.display().to_string())?.to_owned());
    }
    names.sort();
    names.dedup();
    for name in names {
        let model = root.join("tests/parity/models").join(format!("{name}.gguf"));
        let file = File::open(&model)?;
        let plan = bodkin_model::plan(file.metadata(), file.tensors())
            .with_context(|| format!("{}: no plan", model.display()))?;
        let (path, text) = (folder.join(format!("{name}.txt")), plan.to_string());
        if fs::read_to_string(&path).ok().as_deref() != Some(text.as_str()) {
            fs::write(&path, text).with_context(|| path.display().to_string())?;
            println!("{name}: written");
        }
    }
    Ok(())
}
