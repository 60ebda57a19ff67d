//! The only list of backends.

use anyhow::{Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::Cpu;

/// The backend for `--device`, `--threads` and `--no-repack`.
pub(crate) fn choose(
    device: &str,
    threads: Option<usize>,
    repack: bool,
) -> Result<Box<dyn Backend>> {
    match device {
        "auto" | "cpu" => Ok(Box::new(Cpu { repack, ..Cpu::new(threads)? })),
        other => bail!("--device: expected auto or cpu, found `{other}`"),
    }
}
