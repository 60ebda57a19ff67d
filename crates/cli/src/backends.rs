//! The only list of backends.

use anyhow::{Context, Result, bail};
use bodkin_backend::Backend;
use bodkin_cpu::Cpu;
use bodkin_cuda::Cuda;

/// The backend for `--device`, `--threads` and `--no-repack`. `auto` takes the first GPU if there
/// is one that works, and says on stderr why it does not take one that is there.
pub(crate) fn choose(
    device: &str,
    threads: Option<usize>,
    repack: bool,
) -> Result<Box<dyn Backend>> {
    let cpu = || -> Result<Box<dyn Backend>> { Ok(Box::new(Cpu { repack, ..Cpu::new(threads)? })) };
    match device.split_once(':').unwrap_or((device, "")) {
        ("cpu", "") => cpu(),
        // Who sets threads or the use of the file's pages means the processor.
        ("auto", "") if threads.is_some() || !repack || !Cuda::is_installed() => cpu(),
        ("auto", "") => match Cuda::open(0) {
            Ok(cuda) => Ok(Box::new(cuda)),
            Err(error) => {
                eprintln!("{error}; computing on the processor");
                cpu()
            }
        },
        ("cuda", "") => Ok(Box::new(Cuda::open(0)?)),
        ("cuda", number) => {
            let number = number.parse().with_context(|| {
                format!("--device: expected a number after `cuda:`, found `{number}`")
            })?;
            Ok(Box::new(Cuda::open(number)?))
        }
        _ => bail!("--device: expected auto, cpu or cuda[:N], found `{device}`"),
    }
}
