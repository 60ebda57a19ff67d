//! `cargo xtask conformance`: the acceptance suite on a device that tests cannot count on.

use anyhow::{Result, ensure};
use bodkin_backend::conformance;
use bodkin_cuda::{Cuda, Kept};

/// What to check.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The number of the NVIDIA device.
    #[arg(long, default_value_t = 0)]
    device: usize,
}

/// Runs the suite, also with keys and values in half precision where the weights are in f32, and
/// compares the bits with and without rewrites of the plan.
pub(crate) fn run(args: &Args) -> Result<()> {
    let cuda = Cuda::open(args.device)?;
    let mut failures = conformance::check(&cuda);
    let fused = conformance::logits(&cuda)?;
    let plain = conformance::logits(&cuda.fusing(false))?;
    failures.extend(conformance::check(&Cuda::open(args.device)?.keeping(Kept::F16)));
    for ((name, fused), (_, plain)) in fused.iter().zip(&plain) {
        if !fused.iter().map(|x| x.to_bits()).eq(plain.iter().map(|x| x.to_bits())) {
            failures.push(format!("{name}: other bits without rewrites"));
        }
    }
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    ensure!(failures.is_empty(), "{} failures", failures.len());
    println!("conformance: {} cases, none failed", fused.len());
    Ok(())
}
