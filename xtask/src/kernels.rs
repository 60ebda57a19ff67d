//! `cargo xtask kernels`: compiles the CUDA kernels with a pinned NVRTC, which a package index
//! has, and needs neither a GPU nor NVIDIA's toolkit. Its output is checked in, so that a build of
//! bodkin needs none of this.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The compiler: its PTX is taken by every driver from 550 on.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.4.127";

/// Where the machine code for Hopper lies beside the PTX that it was made from, in the workspace.
const HOPPER: &str = "target/kernels/hopper";

/// What to do with what is made.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only compare with what is there
    #[arg(long)]
    check: bool,
}

/// Compiles `crates/cuda/kernels` of the workspace at `root` to its folder `built`.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let sources = root.join("crates/cuda/kernels");
    write_headers(&sources, args.check)?;
    let kept = sources.join("built");
    let work = root.join("target/kernels");
    let out = work.join("built");
    for folder in [&out, &root.join(HOPPER)] {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let python = work.join("venv/bin/python");
    if !python.exists() {
        call(Command::new("python3").args(["-m", "venv"]).arg(work.join("venv")))?;
    }
    call(Command::new(&python).args(["-m", "pip", "install", "-q", WHEEL]))?;
    let script = work.join("build.py");
    fs::write(&script, include_str!("kernels/build.py"))?;
    call(Command::new(&python).arg(&script).args([&sources, &out, &root.join(HOPPER)]))?;
    let mut names = Vec::new();
    for entry in fs::read_dir(&out)? {
        names.push(entry?.file_name());
    }
    names.sort();
    let kept_count = fs::read_dir(&kept).map_or(0, Iterator::count);
    for name in &names {
        let made = fs::read(out.join(name))?;
        if fs::read(kept.join(name)).ok().as_ref() == Some(&made) {
            continue;
        }
        let name = name.to_string_lossy();
        if args.check {
            bail!("{name} is not what the sources make: run `cargo xtask kernels`");
        }
        fs::create_dir_all(&kept)?;
        fs::write(kept.join(&*name), made)?;
        println!("{name}: written");
    }
    ensure!(!args.check || kept_count == names.len(), "files in `built` that no source makes");
    Ok(())
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

/// The folder of the kernels for Hopper as PTX, made if it does not belong to the kept ones.
pub(crate) fn hopper(root: &Path) -> Result<PathBuf> {
    let folder = root.join(HOPPER);
    let kept = fs::read_dir(root.join("crates/cuda/kernels/built"))?;
    let mut codes = kept
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "cubin"));
    let is_same = |path: PathBuf| {
        let made = path.file_name().map(|name| fs::read(folder.join(name)));
        made.is_some_and(|made| made.ok() == fs::read(&path).ok())
    };
    if !codes.all(is_same) {
        run(root, &Args { check: true })?;
    }
    Ok(folder)
}

fn call(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "{name} failed");
    Ok(())
}
