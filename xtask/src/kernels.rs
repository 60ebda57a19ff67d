//! `cargo xtask kernels`: compiles the CUDA kernels with a pinned NVRTC, which a package index
//! has, and needs neither a GPU nor NVIDIA's toolkit. What it makes is kept with the sources, so
//! that nobody who builds bodkin needs any of this.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The compiler: its PTX is taken by every driver from 550 on.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.4.127";

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
    let kept = sources.join("built");
    let work = root.join("target/kernels");
    let out = work.join("built");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let python = work.join("venv/bin/python");
    if !python.exists() {
        call(Command::new("python3").args(["-m", "venv"]).arg(work.join("venv")))?;
    }
    call(Command::new(&python).args(["-m", "pip", "install", "-q", WHEEL]))?;
    let script = work.join("build.py");
    fs::write(&script, include_str!("kernels/build.py"))?;
    call(Command::new(&python).arg(&script).arg(&sources).arg(&out))?;
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

fn call(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "{name} failed");
    Ok(())
}
