//! `cargo xtask arm`: builds the CPU backend for 64-bit Arm and runs its tests on emulated
//! processors, with and without the int8 dot product.

pub(crate) mod instructions;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const QEMU: &str = "qemu-aarch64-static";
/// Where Debian's cross toolchain has the C library.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// The processors of qemu, and the tests that run on them. `max` has everything; of the first
/// 64-bit Arm processors, which have NEON alone, the short tests are enough.
const RUNS: [(&str, &str); 2] = [
    ("max", "--lib --test linear --test sparse --test linear_parity --test tiny_models"),
    ("cortex-a72", "--lib --test linear_parity --test tiny_models"),
];

/// Runs the tests of the workspace at `root`.
pub(crate) fn run(root: &Path) -> Result<()> {
    check_installed(root)?;
    for (processor, tests) in RUNS {
        println!("arm: {processor}: {tests}");
        let runner = format!("{QEMU} -L {LIBRARIES} -cpu {processor}");
        let status = cargo(root)
            .args(["test", "--release", "--quiet", "--target", TARGET, "-p", "bodkin-cpu"])
            .args(tests.split(' '))
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
            .status()
            .context("cannot run cargo")?;
        ensure!(status.success(), "the tests failed on {processor}");
    }
    Ok(())
}

/// Fails if a tool is missing that builds for Arm, or emulates it.
fn check_installed(root: &Path) -> Result<()> {
    let print = ["--print", "target-libdir", "--target", TARGET];
    let rustc = Command::new("rustc").args(print).current_dir(root).output();
    let folder = rustc.context("cannot run rustc")?.stdout;
    let has_target = Path::new(String::from_utf8_lossy(&folder).trim()).is_dir();
    ensure!(
        has_target && is_installed(LINKER) && is_installed(QEMU),
        "Arm's kernels need: rustup target add {TARGET}; apt-get install gcc-aarch64-linux-gnu \
         libc6-dev-arm64-cross qemu-user-static"
    );
    Ok(())
}

/// Cargo in the workspace at `root`, with the linker for Arm.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root).env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    command
}

fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
