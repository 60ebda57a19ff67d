//! `cargo xtask kernels`: compiles the CUDA kernels with a pinned NVRTC from a package index. It
//! needs neither a GPU nor NVIDIA's toolkit. The compiled kernels are checked in, compressed, so
//! that a build of bodkin needs none of this.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

/// The compiler: drivers from 550 on accept its PTX.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.4.127";

/// The checked-in kernels: gzip files, each named after what it contains.
const BUILT: &str = "crates/cuda/kernels/built";

/// Hopper's machine code and the PTX that it was made from, uncompressed, in the workspace.
const HOPPER: &str = "target/kernels/hopper";

/// Whether to write or to compare.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only compare with the checked-in kernels
    #[arg(long)]
    check: bool,
    /// Only these files, without `.cu`; the others stay as they were built
    #[arg(conflicts_with = "check")]
    files: Vec<String>,
}

/// Compiles `crates/cuda/kernels` of the workspace at `root` to its folder `built`.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let sources = root.join("crates/cuda/kernels");
    write_headers(&sources, args.check)?;
    let built = root.join(BUILT);
    let work = root.join("target/kernels");
    let out = work.join("built");
    let hopper = root.join(HOPPER);
    for folder in [&out, &hopper] {
        if args.files.is_empty() || *folder == out {
            let _ = fs::remove_dir_all(folder);
        }
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let python = work.join("venv/bin/python");
    if !python.exists() {
        call(Command::new("python3").args(["-m", "venv"]).arg(work.join("venv")))?;
    }
    call(Command::new(&python).args(["-m", "pip", "install", "-q", WHEEL]))?;
    let script = work.join("build.py");
    fs::write(&script, include_str!("kernels/build.py"))?;
    let folders = [&sources, &out, &hopper];
    call(Command::new(&python).arg(&script).args(folders).args(&args.files))?;
    let mut compiled = BTreeMap::new();
    for entry in fs::read_dir(&out)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned() + ".gz";
        compiled.insert(name, fs::read(entry.path())?);
    }
    match (args.check, args.files.is_empty()) {
        (true, _) => compare(&compiled, &built),
        (false, true) => write(&compiled, &built).and_then(|()| remove_others(&compiled, &built)),
        (false, false) => write(&compiled, &built),
    }
}

/// Writes the headers of what the kernels share with the host, or compares them.
fn write_headers(sources: &Path, check: bool) -> Result<()> {
    for (name, text) in bodkin_cuda::kernel_headers() {
        let path = sources.join(name);
        if fs::read_to_string(&path).is_ok_and(|written| written == text) {
            continue;
        }
        ensure!(
            !check,
            "{name} is not what the host's definitions make: run `cargo xtask kernels`"
        );
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{name}: written");
    }
    Ok(())
}

/// Fails where the checked-in kernels are not the compiled ones. Their compression may differ.
fn compare(compiled: &BTreeMap<String, Vec<u8>>, built: &Path) -> Result<()> {
    const FIX: &str = "run `cargo xtask kernels`";
    for (name, bytes) in compiled {
        let stored = decompress(&built.join(name)).with_context(|| format!("{name}: {FIX}"))?;
        ensure!(stored == *bytes, "{name} differs from its compiled source: {FIX}");
    }
    for entry in fs::read_dir(built)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(compiled.contains_key(&name), "{name} has no source: {FIX}");
    }
    Ok(())
}

/// Writes the kernels that changed.
fn write(compiled: &BTreeMap<String, Vec<u8>>, built: &Path) -> Result<()> {
    fs::create_dir_all(built)?;
    for (name, bytes) in compiled {
        let path = built.join(name);
        if decompress(&path).is_ok_and(|stored| stored == *bytes) {
            continue;
        }
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes)?;
        fs::write(path, encoder.finish()?)?;
        println!("{name}: written");
    }
    Ok(())
}

/// Removes files without a source.
fn remove_others(compiled: &BTreeMap<String, Vec<u8>>, built: &Path) -> Result<()> {
    for entry in fs::read_dir(built)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !compiled.contains_key(&name) {
            fs::remove_file(entry.path())?;
            println!("{name}: removed");
        }
    }
    Ok(())
}

fn decompress(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    GzDecoder::new(fs::File::open(path)?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The folder of Hopper's kernels as PTX. They are compiled again unless those of the checked-in
/// machine code are there.
pub(crate) fn hopper(root: &Path) -> Result<PathBuf> {
    let folder = root.join(HOPPER);
    for entry in fs::read_dir(root.join(BUILT))? {
        let path = entry?.path();
        let Some(name) =
            path.file_stem().filter(|name| name.as_encoded_bytes().ends_with(b".cubin"))
        else {
            continue;
        };
        if fs::read(folder.join(name)).ok() != Some(decompress(&path)?) {
            run(root, &Args { check: true, files: Vec::new() })?;
            break;
        }
    }
    Ok(folder)
}

fn call(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "{name} failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_stored_compressed_and_compared_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let built = folder.path().join("built");
        let mut compiled = BTreeMap::new();
        for (name, byte) in [("a.ptx.gz", b'a'), ("b.cubin.gz", b'b')] {
            compiled.insert(name.to_owned(), vec![byte; 9999]);
        }
        write(&compiled, &built).unwrap();
        let stored = fs::read(built.join("a.ptx.gz")).unwrap();
        assert!(stored.len() < 100);
        compare(&compiled, &built).unwrap();
        compiled.insert("a.ptx.gz".to_owned(), vec![b'c'; 9999]);
        assert!(compare(&compiled, &built).is_err());
        compiled.remove("a.ptx.gz");
        assert!(compare(&compiled, &built).is_err());
        remove_others(&compiled, &built).unwrap();
        compare(&compiled, &built).unwrap();
        compiled.insert("d.ptx.gz".to_owned(), Vec::new());
        assert!(compare(&compiled, &built).is_err());
    }
}
