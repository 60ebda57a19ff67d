//! What the parts of a parity run share: which models run, and the outcome.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bodkin_backend::Backend;
use bodkin_cuda::Cuda;
use bodkin_wgpu::Wgpu;
use serde_json::Value;

/// Which models and backends run.
pub(super) struct Selection {
    /// Files of the real models, by name.
    pub(super) real: BTreeMap<String, PathBuf>,
    /// The start of the names of the backends that run models.
    pub(super) backend: String,
    /// The start of the names of the models that run.
    pub(super) model: String,
    /// The tokens of the longest prompt of the tiny models that runs.
    pub(super) tokens: usize,
}

impl Default for Selection {
    /// Everything but the real models.
    fn default() -> Selection {
        let (backend, model) = (String::new(), String::new());
        Selection { real: BTreeMap::new(), backend, model, tokens: usize::MAX }
    }
}

/// Numeric comparisons that have one limit.
#[derive(Debug)]
pub(super) struct Worst {
    /// The most that is allowed.
    limit: f64,
    /// The largest value found on each backend.
    found: BTreeMap<String, f64>,
}

/// The outcome for one folder of the kit.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Comparisons that were equal.
    pub(super) passed: usize,
    /// One line for each comparison that was not.
    pub(super) failures: Vec<String>,
    /// Names of what the engine does not support, each with the reason.
    pub(super) not_covered: Vec<String>,
    /// Numeric comparisons, by what is compared.
    pub(super) worst: BTreeMap<String, Worst>,
}

impl Report {
    /// Counts a comparison; `describe` is asked only if it was not equal.
    pub(super) fn check(&mut self, is_equal: bool, describe: impl FnOnce() -> String) {
        match is_equal {
            true => self.passed += 1,
            false => self.failures.push(describe()),
        }
    }

    /// Adds what another thread found.
    pub(super) fn add(&mut self, other: Report) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.not_covered.extend(other.not_covered);
        for (what, worst) in other.worst {
            for (on, value) in worst.found {
                self.worst(&what, &on, worst.limit, value);
            }
        }
    }

    /// Notes a value that is to stay below a limit, of `what` on a backend.
    pub(super) fn worst(&mut self, what: &str, on: &str, limit: f64, value: f64) {
        let new = || Worst { limit, found: BTreeMap::new() };
        let worst = self.worst.entry(what.to_owned()).or_insert_with(new);
        let found = worst.found.entry(on.to_owned()).or_default();
        *found = found.max(value);
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (on, value) in &self.found {
            write!(f, "{value:.1e} {on}, ")?;
        }
        write!(f, "at most {:.0e}", self.limit)
    }
}

/// The GPU, or those, that the name of a backend begins with; none for another backend.
pub(super) fn gpu(backend: &str) -> Result<Option<Box<dyn Backend>>> {
    // A name goes on with what the device is called.
    let name = backend.split_whitespace().next().unwrap_or("");
    let (kind, numbers) = name.split_once(':').unwrap_or((name, "0"));
    let ordinals = bodkin_cuda::ordinals(numbers).with_context(|| {
        format!("--backend: expected numbers after `{kind}:`, divided by commas, found `{numbers}`")
    });
    Ok(match kind {
        "cuda" => Some(Box::new(Cuda::open_all(&ordinals?)?)),
        "wgpu" => Some(Box::new(Wgpu::open(ordinals?[0])?)),
        _ => None,
    })
}

/// Reads a file of the kit.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_each_backend_is_kept() {
        let (mut report, mut other) = (Report::default(), Report::default());
        report.worst("F32", "a", 1e-6, 2e-9);
        other.worst("F32", "a", 1e-6, 3e-8);
        other.worst("F32", "b", 1e-6, 1e-9);
        other.worst("Q4_0", "b", 1e-3, 1e-4);
        report.add(other);
        report.worst("F32", "a", 1e-6, 1e-8);
        let lines: Vec<String> =
            report.worst.iter().map(|(what, worst)| format!("{what}: {worst}")).collect();
        let f32s = "F32: 3.0e-8 a, 1.0e-9 b, at most 1e-6";
        assert_eq!(lines, [f32s, "Q4_0: 1.0e-4 b, at most 1e-3"]);
    }
}
