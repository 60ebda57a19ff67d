//! `cargo xtask golden`: rewrites the texts of the golden plans, which the tests of the model crate
//! compare. A text is named after the tiny model that it is the plan of.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin_gguf::File;

/// What to rewrite.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A model whose header goes to tests/parity/headers first, and whose text is added
    #[arg(long)]
    header: Option<PathBuf>,
    /// Tiny models to add to those that have a text already.
    names: Vec<String>,
}

/// Rewrites the texts that there are in the workspace at `root`, and adds new ones.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let folder = root.join("crates/model/tests/golden");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut names = args.names.clone();
    if let Some(path) = &args.header {
        names.push(write_header(path, &root.join("tests/parity/headers"))?);
    }
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        names.push(stem.with_context(|| path.display().to_string())?.to_owned());
    }
    names.sort();
    names.dedup();
    for name in names {
        let file = open(&root.join("tests/parity"), &format!("{name}.gguf"))?;
        let plan = bodkin_model::plan(file.metadata(), file.tensors())
            .with_context(|| format!("{name}: no plan"))?;
        let (path, text) = (folder.join(format!("{name}.txt")), plan.to_string());
        if fs::read_to_string(&path).ok().as_deref() != Some(text.as_str()) {
            fs::write(&path, text).with_context(|| path.display().to_string())?;
            println!("{name}: written");
        }
    }
    Ok(())
}

/// Writes the bytes of a file before its first tensor's data, and gives the model's name.
fn write_header(path: &Path, folder: &Path) -> Result<String> {
    let file = File::open(path)?;
    bodkin_model::plan(file.metadata(), file.tensors())?;
    // Tensors that others are made of have no place of their own.
    let stored = file.tensors().iter().filter(|tensor| !file.is_derived(tensor));
    let len = stored.map(|tensor| tensor.offset).min();
    let len = len.with_context(|| format!("{}: no tensors", path.display()))?;
    let name = path.file_stem().and_then(|stem| stem.to_str());
    let name = name.with_context(|| path.display().to_string())?.to_owned();
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(len).read_to_end(&mut bytes)?;
    let to = folder.join(format!("{name}.gguf"));
    fs::write(&to, bytes).with_context(|| to.display().to_string())?;
    println!("{name}.gguf: a header of {len} bytes");
    Ok(name)
}

/// A tiny model. Some are only a header: no plan reads a weight, so zeros replace them.
fn open(folder: &Path, name: &str) -> Result<File> {
    let Ok(mut bytes) = fs::read(folder.join("headers").join(name)) else {
        let path = folder.join("models").join(name);
        ensure!(
            path.is_file(),
            "{name}: neither in `headers` nor in `models` of {}",
            folder.display()
        );
        return Ok(File::open(path)?);
    };
    bytes.resize(bytes.len() + 4_000_000, 0);
    Ok(File::from_bytes(name, bytes)?)
}
