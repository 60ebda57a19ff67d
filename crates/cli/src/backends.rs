//! The only list of backends.

use anyhow::{Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::Cpu;

/// The backend for `--device`.
pub(crate) fn choose(device: &str, threads: Option<usize>) -> Result<Box<dyn Backend>> {
    match device {
        "auto" | "cpu" => Ok(Box::new(Cpu::new(threads)?)),
        other => bail!("--device: expected auto or cpu, found `{other}`"),
    }
}
