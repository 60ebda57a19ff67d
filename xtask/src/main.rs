//! Everything a developer runs: one command per file, listed here. Building and using
//! bodkin does not need it.

#![forbid(unsafe_code)]

mod arm;
mod ci;
mod compare;
mod conformance;
mod dist;
mod emulate;
mod expert_cache;
mod expert_trace;
mod golden;
mod gpu;
mod kernels;
mod parity;
mod peer;
mod plot;
mod quality;
mod random;
mod results;
mod serving;
mod soak;
mod sparse;
mod svg;
mod synth;
mod tidy;
mod workspace;

use clap::Parser;

use workspace::root;

/// Checks and data that need more than `cargo test`.
#[derive(Parser)]
#[command(name = "xtask")]
enum Command {
    /// Runs the tests of the CPU backend on emulated 64-bit Arm processors.
    Arm,
    /// Runs all checks, in the order in which failures are cheapest to find.
    Ci(ci::Args),
    /// Measures interleaved with llama.cpp, and rewrites docs/performance.md and the README.
    Compare(compare::Args),
    /// Runs the acceptance suite of backends on an NVIDIA device.
    Conformance(conformance::Args),
    /// Builds and packs the binary: a tarball, and a Python wheel.
    Dist(dist::Args),
    /// Runs the CUDA backend without a card, on an emulated driver.
    Emulate(emulate::Args),
    /// Compares which experts to keep on a device, on a routing trace.
    ExpertCache(expert_cache::Args),
    /// Makes a routing trace with the locality of trained models.
    ExpertTrace(expert_trace::Args),
    /// Rewrites the golden texts of plans.
    Golden(golden::Args),
    /// Measures on an NVIDIA device, and rewrites docs/performance.md and the README.
    Gpu(gpu::Args),
    /// Counts the instructions of the kernels of 64-bit Arm, beside llama.cpp's.
    Instructions(arm::instructions::Args),
    /// Compiles the CUDA kernels.
    Kernels(kernels::Args),
    /// Compares with the reference results of a parity kit.
    Parity(parity::Args),
    /// Makes the documents' plots from the measured rows.
    #[command(subcommand)]
    Plot(plot::Args),
    /// Measures what quantising and pruning cost.
    Quality(quality::Args),
    /// Measures many streams against `bodkin serve`, interleaved with llama-server.
    Serving(serving::Args),
    /// Runs `bodkin serve` under mixed traffic and faults, and checks that nothing is left of them.
    Soak(soak::Args),
    /// Measures sparse weights, interleaved with the same weights made dense.
    Sparse(sparse::Args),
    /// Makes a model file of some size with random weights.
    Synth(synth::Args),
    /// Checks the rules of the design that a machine can check.
    Tidy(tidy::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Arm => arm::run(&root()),
        Command::Ci(args) => ci::run(&root(), &args),
        Command::Compare(args) => compare::run(&root(), &args).and_then(|()| plot_speed()),
        Command::Conformance(args) => conformance::run(&args),
        Command::Dist(args) => dist::run(&root(), &args),
        Command::Emulate(args) => emulate::run(&root(), &args),
        Command::ExpertCache(args) => expert_cache::run(&root(), &args),
        Command::ExpertTrace(args) => expert_trace::run(&args),
        Command::Golden(args) => golden::run(&root(), &args),
        Command::Gpu(args) => gpu::run(&root(), &args).and_then(|()| plot_speed()),
        Command::Instructions(args) => arm::instructions::run(&root(), &args),
        Command::Kernels(args) => kernels::run(&root(), &args),
        Command::Parity(args) => parity::main(&args),
        Command::Plot(args) => plot::run(&root(), &args),
        Command::Quality(args) => quality::run(&root(), &args),
        Command::Serving(args) => serving::run(&root(), &args),
        Command::Soak(args) => soak::run(&root(), &args),
        Command::Sparse(args) => sparse::run(&root(), &args),
        Command::Synth(args) => synth::run(&args),
        Command::Tidy(args) => tidy::run(&root(), &args),
    }
}

/// Makes the README's plot and table, from the newest rows of both.
fn plot_speed() -> anyhow::Result<()> {
    plot::run(&root(), &plot::Args::Speed)
}
