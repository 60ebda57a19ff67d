//! `cargo xtask emulate`: the CUDA backend on machines without a card, with a library in the place
//! of NVIDIA's driver that interprets the kernels. Slow, but the same calls and the same kernels.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::kernels;
use crate::synth::{self, Size};

/// What to run, and on what.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The device's kernels: Hopper's, or those of all other devices; the checks take both
    #[arg(long, value_enum, default_value_t = Chip::Hopper)]
    chip: Chip,
    /// The device's multiprocessors
    #[arg(long, default_value_t = 4)]
    processors: u32,
    /// Another seed lets warps take other turns
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The device is lost with this operation: it and all later ones fail
    #[arg(long)]
    lost_after: Option<u64>,
    /// A command with its arguments, such as `target/release/bodkin run`, or of this program, such
    /// as `conformance`; without it, checks that take minutes
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Chip {
    Hopper,
    Ampere,
}

/// Models whose bits are compared with and without rewrites of the plan.
const SYNTHETIC: [(Size, &str, &str); 10] = [
    (Size::Small, "Q4_K", "small-q4_k.gguf"),
    (Size::Small, "IQ4_XS", "small-iq4_xs.gguf"),
    (Size::Small, "S24_Q8_0", "small-s24_q8_0.gguf"),
    (Size::SmallMoe, "MXFP4", "small-moe-mxfp4.gguf"),
    (Size::SmallHybrid, "Q8_0", "small-hybrid-q8_0.gguf"),
    (Size::SmallGranite, "Q4_K", "small-granite-q4_k.gguf"),
    (Size::SmallNemotron, "Q8_0", "small-nemotron-q8_0.gguf"),
    (Size::SmallDelta, "Q4_K", "small-delta-q4_k.gguf"),
    (Size::SmallGemma4, "Q4_K", "small-gemma4-q4_k.gguf"),
    (Size::SmallLatent, "Q4_K", "small-latent-q4_k.gguf"),
];
/// The model, of those, whose persistent kernel loses a result, so that its watchdog has to end it.
const STALLED: &str = "small-q4_k.gguf";
/// The models, of those, whose bits on several devices are compared with those on one. A device
/// that is there twice cannot wait for itself in a kernel, so values are copied.
const ON_SEVERAL: [(&str, &str); 4] = [
    ("0,1", "small-q4_k.gguf"),
    ("0,0", "small-q4_k.gguf"),
    ("0,1", "small-hybrid-q8_0.gguf"),
    ("0,1", "small-latent-q4_k.gguf"),
];
/// The models, of those, that are also compared with keys and values as bytes.
const BYTES: [&str; 2] = [STALLED, "small-gemma4-q4_k.gguf"];
/// The model, of those, whose prompt has to give the same bits in chunks of any size.
const CHUNKED: &str = STALLED;
/// The model, of those, whose launch shapes are measured, where single rows run in kernels that
/// have a choice of them. The emulator's times say nothing: any choice has to give the same bits.
const TUNED: (Chip, &str) = (Chip::Ampere, STALLED);
/// Models of the parity kit whose results are compared with the reference: those that do not take
/// many minutes.
const PARITY: [(Chip, &str, &str); 6] = [
    (Chip::Hopper, "cuda:0", "qwen3moe-q4_k_m"),
    (Chip::Hopper, "cuda:0", "llama-q4_k_m"),
    (Chip::Ampere, "cuda:0", "qwen2-q8_0"),
    (Chip::Ampere, "cuda:0", "llama-q4_0"),
    (Chip::Ampere, "cuda:0", "llama-f16"),
    (Chip::Hopper, "cuda:0", "bert"),
];
/// Further ones, with a short prompt: several devices, of which three shard only some of the
/// matrices of a matmul; and with one kernel for each stage delta rules, layers with inputs of
/// their own and shared keys, and hyper-connections with compressed and selected entries.
const SHORT_PARITY: [(&str, &str); 5] = [
    ("cuda:0,1", "llama-q4_k_m"),
    ("cuda:0,1,2", "llama-f16"),
    ("cuda:0", "qwen35"),
    ("cuda:0", "gemma4-e2b"),
    ("cuda:0", "deepseek4"),
];
/// The tokens of the longest prompt of those.
const SHORT: &str = "10";
/// Parts of the names of the suite's cases for what no model above has: entries that an indexer
/// selects among more, latent attention, and the rescaled and the sparse rows of Gemma 3n.
const CASES: [&str; 4] = [
    "top_k: 1 } 1 heads",
    "F16 Attention { heads: 4, kv_heads: 1, key_dim: 48",
    "rescale 3",
    "cutoff width 3",
];

/// What a command runs on.
struct Emulator {
    /// The folder of the library.
    library: PathBuf,
    /// The folder of Hopper's kernels.
    hopper: PathBuf,
    processors: u32,
    seed: u64,
    lost_after: Option<u64>,
}

/// Runs a command, or the checks.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let Args { processors, seed, lost_after, .. } = *args;
    let (library, hopper) = (build(root)?, kernels::hopper(root)?);
    let emulator = Emulator { library, hopper, processors, seed, lost_after };
    if args.command.is_empty() {
        return emulator.check(root);
    }
    let status = emulator.command(args.chip, &args.command)?.status()?;
    ensure!(status.success(), "{} failed", args.command[0]);
    Ok(())
}

/// Builds the library for this very processor, and gives its folder.
fn build(root: &Path) -> Result<PathBuf> {
    let target = root.join("target/emulator");
    let folder = target.to_string_lossy();
    let args = ["build", "--release", "--quiet", "-p", "bodkin-emulator", "--target-dir", &folder];
    let status = Command::new("cargo")
        .args(args)
        .current_dir(root)
        .env("RUSTFLAGS", "-C target-cpu=native")
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the emulator cannot be built");
    let library = target.join("library");
    fs::create_dir_all(&library)?;
    let name = env::consts::DLL_PREFIX.to_owned() + "cuda" + env::consts::DLL_SUFFIX;
    let built = env::consts::DLL_PREFIX.to_owned() + "emulated_cuda" + env::consts::DLL_SUFFIX;
    fs::copy(target.join("release").join(built), library.join(name))?;
    Ok(library)
}

impl Emulator {
    /// A command that finds the emulated driver: of this program, or a file.
    fn command(&self, chip: Chip, words: &[String]) -> Result<Command> {
        let mut command = if Path::new(&words[0]).is_file() {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            command
        } else {
            let mut command = Command::new(env::current_exe()?);
            command.args(words);
            command
        };
        command
            .env("LD_LIBRARY_PATH", &self.library)
            .env("EMULATOR_PROCESSORS", self.processors.to_string())
            .env("EMULATOR_SEED", self.seed.to_string());
        if let Some(operation) = self.lost_after {
            command.env("EMULATOR_LOST_AFTER", operation.to_string());
        }
        if chip == Chip::Hopper {
            command.env("EMULATOR_HOPPER", &self.hopper);
        }
        if words.iter().any(|word| word == "--stalls") {
            // The persistent kernel's first result is lost.
            command.env("EMULATOR_LOST_STORE", "1");
        }
        Ok(command)
    }

    /// Runs the checks, two at a time.
    fn check(&self, root: &Path) -> Result<()> {
        let models = root.join("target/emulator/models");
        fs::create_dir_all(&models)?;
        let kit = root.join("tests/parity");
        let mut checks = Vec::new();
        for (shape, format, name) in SYNTHETIC {
            let out = models.join(name);
            let path = out.to_string_lossy().into_owned();
            let format = format.to_owned();
            synth::run(&synth::Args { shape, format, out, seed: 0, sparsity: 0.0, routing: None })?;
            // Those of several devices run with and without rewrites there, and with them on one.
            if !ON_SEVERAL.iter().any(|(_, model)| *model == name) {
                let words = ["conformance", "--brief", &path];
                checks.push((Chip::Hopper, words.map(str::to_owned).to_vec()));
            }
        }
        let chunked = models.join(CHUNKED).to_string_lossy().into_owned();
        for (chip, kv_type) in
            [(Chip::Hopper, "f16"), (Chip::Hopper, "q8_0"), (Chip::Ampere, "f16")]
        {
            let words = ["conformance", "--chunks", "--kv-type", kv_type, &chunked];
            checks.push((chip, words.map(str::to_owned).to_vec()));
        }
        let tuned = models.join(TUNED.1).to_string_lossy().into_owned();
        let shapes = root.join("target/emulator/tuning").to_string_lossy().into_owned();
        let words = ["conformance", "--brief", "--tune", &shapes, &tuned];
        checks.push((TUNED.0, words.map(str::to_owned).to_vec()));
        for model in BYTES {
            let bytes = models.join(model).to_string_lossy().into_owned();
            let words = ["conformance", "--brief", "--kv-type", "q8_0", &bytes];
            checks.push((Chip::Hopper, words.map(str::to_owned).to_vec()));
        }
        let stalled = models.join(STALLED).to_string_lossy().into_owned();
        for devices in ["0", "0,1"] {
            let words = ["conformance", "--device", devices, "--stalls", &stalled];
            checks.push((Chip::Hopper, words.map(str::to_owned).to_vec()));
            let words = ["conformance", "--device", devices, "--many-rows"];
            checks.push((Chip::Hopper, words.map(str::to_owned).to_vec()));
        }
        for (devices, model) in ON_SEVERAL {
            let path = models.join(model).to_string_lossy().into_owned();
            let words = ["conformance", "--brief", "--device", devices, &path];
            checks.push((Chip::Hopper, words.map(str::to_owned).to_vec()));
        }
        for (chip, backend, model) in PARITY {
            let kit = kit.to_string_lossy();
            let words = ["parity", "--kit", &kit, "--backend", backend, "--model", model, "models"];
            checks.push((chip, words.map(str::to_owned).to_vec()));
        }
        for (backend, model) in SHORT_PARITY {
            let kit = kit.to_string_lossy();
            let words = ["parity", "--kit", &kit, "--backend", backend, "--model", model];
            let words = words.into_iter().chain(["--tokens", SHORT, "models"]);
            checks.push((Chip::Hopper, words.map(str::to_owned).collect()));
        }
        let cases = CASES.into_iter().flat_map(|case| ["--case", case]);
        let words = std::iter::once("conformance").chain(cases);
        checks.push((Chip::Hopper, words.map(str::to_owned).collect()));
        let left = Mutex::new(checks.into_iter());
        thread::scope(|scope| {
            let workers = [(); 2].map(|()| scope.spawn(|| self.check_all(&left)));
            workers.into_iter().try_for_each(|worker| worker.join().expect("a check panicked"))
        })
    }

    /// Runs checks until there are none left, or one fails: then the others need not go on.
    fn check_all(&self, left: &Mutex<std::vec::IntoIter<(Chip, Vec<String>)>>) -> Result<()> {
        let next = || left.lock().expect("no check panics while it holds the lock").next();
        while let Some((chip, words)) = next() {
            if let Err(error) = self.check_one(chip, &words) {
                while next().is_some() {}
                return Err(error);
            }
        }
        Ok(())
    }

    fn check_one(&self, chip: Chip, words: &[String]) -> Result<()> {
        let start = std::time::Instant::now();
        let Output { status, stdout, stderr } = self.command(chip, words)?.output()?;
        let texts = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        println!("{} ({:.0} s)\n{}", words.join(" "), start.elapsed().as_secs_f64(), texts[0]);
        ensure!(status.success(), "{} failed\n{}", words.join(" "), texts[1]);
        Ok(())
    }
}
