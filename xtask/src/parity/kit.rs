//! What the parts of a parity run share: which models run, and the outcome.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bodkin_backend::Backend;
use bodkin_cuda::Cuda;
use bodkin_wgpu::Wgpu;
use serde_json::Value;

/// Which models and backends run.
#[derive(Default)]
pub(super) struct Selection {
    /// Files of the real models, by name.
    pub(super) real: BTreeMap<String, PathBuf>,
    /// The start of the names of the backends that run models.
    pub(super) backend: String,
    /// The start of the names of the models that run.
    pub(super) model: String,
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
    /// Limits of numeric comparisons, each with the largest value found.
    pub(super) worst: Vec<(f64, f64)>,
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
        for (limit, value) in other.worst {
            self.worst(limit, value);
        }
    }

    /// Notes a value that is to stay below a limit.
    pub(super) fn worst(&mut self, limit: f64, value: f64) {
        match self.worst.iter_mut().find(|(other, _)| *other == limit) {
            Some((_, worst)) => *worst = worst.max(value),
            None => self.worst.push((limit, value)),
        }
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
