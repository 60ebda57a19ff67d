//! The speeds of a model for a comparison with those of another day, on a machine with other load.

use std::collections::HashMap;
use std::ffi::OsString;

use anyhow::Result;
use bodkin::ModelFile;
use bodkin_backend::Backend;
use bodkin_engine::longest_text;
use bodkin_eval::check::baseline::{Rate, Speed};

use super::reference;
use super::session::{Session, Test};

/// Tokens of a prompt; an encoder may read fewer.
const PROMPT: usize = 256;
/// Generated tokens.
const GENERATED: usize = 16;

/// The same for the reference model.
const REFERENCE_PROMPT: usize = 64;
const REFERENCE_GENERATED: usize = 8;

/// Runs of a model, each between two of the reference model.
const RUNS: usize = 9;

/// How long a run takes at least, in seconds: a small model is run several times.
const RUN_SECONDS: f64 = 0.05;

/// Measures the speeds, also in relation to those of a reference model, which runs before and after
/// each run: other programs slow both down. Time without a core does not count.
pub(crate) fn speeds(opened: &ModelFile, backend: &dyn Backend) -> Result<Speed> {
    let (plan, cost) = (&opened.plan, opened.plan.cost());
    // Arithmetic takes the time of a prompt, reading weights that of decode.
    let rate = |test: Test, reference_test: Test, weights: u64| -> Result<Rate> {
        let reference = reference::model(plan.layers(), weights / plan.layers().max(1) as u64)?;
        let mut model = Timed::new(opened, backend, test, RUN_SECONDS)?;
        // The runs before and after take as long as that between them.
        let seconds = 0.5 * model.seconds;
        let mut reference = Timed::new(&reference, backend, reference_test, seconds)?;
        let (mut speeds, mut ratios) = (Vec::new(), Vec::new());
        let mut before = reference.speed()?;
        for _ in 0..RUNS {
            let (speed, after) = (model.speed()?, reference.speed()?);
            speeds.push(speed);
            ratios.push(speed / (0.5 * (before + after)));
            before = after;
        }
        Ok(Rate { tokens: median(speeds), ratio: median(ratios) })
    };
    let is_encoder = plan.is_encoder();
    let longest = if is_encoder { longest_text(plan)? } else { PROMPT };
    let (prompt, reference_prompt) = (longest.min(PROMPT), Test::new(REFERENCE_PROMPT, 0));
    let prefill = rate(Test::new(prompt, 0), reference_prompt, cost.flops_per_token / 2)?;
    let generated = [GENERATED, REFERENCE_GENERATED].map(|tokens| Test::new(0, tokens));
    let decode = || rate(generated[0], generated[1], cost.step_weight_bytes / 2);
    let decode = (!is_encoder).then(decode).transpose()?;
    Ok(Speed { backend: backend.name(), prefill, decode })
}

/// A model and what it is timed with.
struct Timed {
    session: Session,
    test: Test,
    /// Tests of a run.
    count: usize,
    /// How long they take, about.
    seconds: f64,
}

impl Timed {
    /// Loads the model and runs it a first time. Runs take at least `seconds`, about.
    fn new(opened: &ModelFile, backend: &dyn Backend, test: Test, seconds: f64) -> Result<Timed> {
        let mut session = Session::load(opened, backend, test, PROMPT)?;
        session.run(test)?;
        let one = session.run(test)? as f64 * 1e-9;
        let count = (seconds / one).ceil().clamp(1.0, 1000.0) as usize;
        Ok(Timed { session, test, count, seconds: count as f64 * one })
    }

    /// Tokens a second in one run.
    fn speed(&mut self) -> Result<f64> {
        let before = seconds_without_a_core();
        let mut seconds = 0.0;
        for _ in 0..self.count {
            seconds += self.session.run(self.test)? as f64 * 1e-9;
        }
        let waited = longest_wait(&before, &seconds_without_a_core()).min(0.5 * seconds);
        Ok((self.count * self.test.tokens()) as f64 / (seconds - waited))
    }
}

/// The median of an odd number of values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
