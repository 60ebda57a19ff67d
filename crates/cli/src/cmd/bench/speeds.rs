//! The speeds of a model for a comparison with those of another day, on a machine with other load.

use anyhow::Result;
use bodkin::ModelFile;
use bodkin_backend::Backend;
use bodkin_engine::longest_text;
use bodkin_eval::check::baseline::Speed;

use super::session::{Session, Test};

/// Tokens of a prompt; an encoder may read fewer.
const PROMPT: usize = 256;
/// Generated tokens.
const GENERATED: usize = 32;

/// Runs, and measurements of the bandwidth between them.
const RUNS: usize = 5;

/// Measures the speeds and the memory bandwidth, interleaved. The fastest of each counts: other
/// programs make both slower, but not in the same moment.
pub(crate) fn speeds(opened: &ModelFile, backend: &dyn Backend) -> Result<Speed> {
    let mut bandwidth = 0.0_f64;
    let mut fastest = |test: Test| -> Result<f64> {
        let mut session = Session::load(opened, backend, test, PROMPT)?;
        session.run(test)?;
        let mut fastest = 0.0_f64;
        for _ in 0..RUNS {
            let waited = seconds_without_a_core();
            let seconds = session.run(test)? as f64 * 1e-9;
            // Threads wait for each other, so each one's time without a core is everyone's.
            let waited = (seconds_without_a_core() - waited).min(0.9 * seconds);
            fastest = fastest.max(test.tokens() as f64 / (seconds - waited));
            bandwidth = bandwidth.max(backend.bandwidth()? / 1e9);
        }
        Ok(fastest)
    };
    let is_encoder = opened.plan.is_encoder();
    let longest = if is_encoder { longest_text(&opened.plan)? } else { PROMPT };
    let prefill = fastest(Test::new(longest.min(PROMPT), 0))?;
    let decode = (!is_encoder).then(|| fastest(Test::new(0, GENERATED))).transpose()?;
    Ok(Speed { backend: backend.name(), prefill, decode, bandwidth })
}

/// The seconds for which threads of this process could have run, but other programs had the cores;
/// 0 where the system does not say.
fn seconds_without_a_core() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let ns = |thread: std::fs::DirEntry| -> Option<u64> {
        let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        times.split_whitespace().nth(1)?.parse().ok()
    };
    threads.flatten().filter_map(ns).sum::<u64>() as f64 * 1e-9
}
