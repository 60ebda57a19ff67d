//! The speeds of a model for a comparison with those of another day, on a machine with other load.

use std::collections::HashMap;
use std::ffi::OsString;

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
/// programs make both slower, but not in the same moment. Time without a core does not count.
pub(crate) fn speeds(opened: &ModelFile, backend: &dyn Backend) -> Result<Speed> {
    let mut bandwidth = 0.0_f64;
    let mut fastest = |test: Test| -> Result<f64> {
        let mut session = Session::load(opened, backend, test, PROMPT)?;
        session.run(test)?;
        let mut fastest = 0.0_f64;
        for _ in 0..RUNS {
            let before = seconds_without_a_core();
            let seconds = session.run(test)? as f64 * 1e-9;
            let waited = longest_wait(&before, &seconds_without_a_core()).min(0.5 * seconds);
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

/// The seconds for which each thread of this process could have run, but others had the cores; of
/// no thread where the system does not say.
fn seconds_without_a_core() -> HashMap<OsString, f64> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return HashMap::new() };
    let seconds = |thread: std::fs::DirEntry| -> Option<(OsString, f64)> {
        let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let ns: u64 = times.split_whitespace().nth(1)?.parse().ok()?;
        Some((thread.file_name(), ns as f64 * 1e-9))
    };
    threads.flatten().filter_map(seconds).collect()
}

/// The longest time that a thread waited between two readings. The others wait for it.
fn longest_wait(before: &HashMap<OsString, f64>, after: &HashMap<OsString, f64>) -> f64 {
    let waits = after.iter().map(|(thread, end)| end - before.get(thread).unwrap_or(&0.0));
    waits.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_counts() {
        let times = |times: &[(&str, f64)]| -> HashMap<OsString, f64> {
            times.iter().map(|&(thread, seconds)| (thread.into(), seconds)).collect()
        };
        let before = times(&[("1", 1.0), ("2", 5.0), ("3", 9.0)]);
        let after = times(&[("1", 1.5), ("2", 5.25), ("4", 0.125)]);
        assert_eq!(longest_wait(&before, &after), 0.5);
        assert_eq!(longest_wait(&before, &times(&[])), 0.0);
    }
}
