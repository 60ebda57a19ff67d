//! Plans the pruning of a file: tensors, methods, sparsities and formats. It must not know how
//! pruning works.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use bodkin_gguf::{File, Format, Tensor};

use super::structure::Structure;
use crate::error::{Error, Result};
use crate::mixture;
use crate::pattern::Pattern;
use crate::quantize::is_written;

/// The most columns of a CSR matrix, whose column indices have 16 bits.
pub(super) const CSR_COLS_MAX: usize = 1 << 16;

/// The pruning method: how the weights that become zero are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// The smallest magnitudes.
    Magnitude,
    /// The smallest products of magnitude and input norm.
    Wanda,
    /// The smallest relative importance in row and column, weighted by the input norm.
    Ria,
    /// Optimal brain surgeon (OBS): the remaining weights compensate for each pruned one.
    SparseGpt,
}

/// Names of the methods.
const METHODS: [(&str, Method); 4] = [
    ("magnitude", Method::Magnitude),
    ("wanda", Method::Wanda),
    ("ria", Method::Ria),
    ("sparsegpt", Method::SparseGpt),
];

impl FromStr for Method {
    type Err = Error;

    fn from_str(text: &str) -> Result<Method> {
        let known = METHODS.iter().find(|(name, _)| *name == text).map(|(_, method)| *method);
        known.ok_or_else(|| {
            let expected = "one of magnitude, wanda, ria, sparsegpt";
            Error::invalid("method", expected, format!("`{text}`"))
        })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = METHODS.iter().find(|(_, method)| method == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// A pruning rule for the tensors that match a pattern.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Which tensors; none for all.
    pub tensors: Option<Pattern>,
    /// How they are pruned; None keeps them unchanged.
    pub cut: Option<Cut>,
}

/// How a tensor is pruned and stored.
#[derive(Clone, Debug)]
pub struct Cut {
    /// How weights are chosen.
    pub method: Method,
    /// The fraction of zeros, 0 to 1; an N:M structure determines it.
    pub sparsity: f32,
    /// Where zeros may be.
    pub structure: Structure,
    /// A dense or sparse format for the remaining weights; None for one of about the tensor's
    /// precision.
    pub format: Option<Format>,
    /// Whether zeros are stored in a dense format instead of its sparse variant.
    pub dense: bool,
}

/// A tensor that will be pruned.
#[derive(Clone, Debug)]
pub struct Job {
    /// The source tensor.
    pub tensor: Tensor,
    /// How weights are chosen. For experts this is never [`Method::SparseGpt`]: there would be
    /// too few inputs for each.
    pub method: Method,
    /// The fraction of zeros.
    pub sparsity: f32,
    /// Where zeros may be.
    pub structure: Structure,
    /// The new format.
    pub format: Format,
}

/// Whether a tensor is a matrix of a layer. Embeddings, heads, norms and routers stay.
pub(super) fn is_prunable(tensor: &Tensor) -> bool {
    tensor.name.starts_with("blk.") && mixture::is_quantized(tensor)
}

/// The tensors that rules apply to, in the file's order; of several rules the first that matches.
///
/// # Errors
/// If a rule has an invalid sparsity, matches no tensor, names a format that cannot be written or
/// has no sparse variant, or has N:M groups that do not fill a row.
pub fn plan(file: &File, rules: &[Rule]) -> Result<Vec<Job>> {
    let prunable = |tensor: &&Tensor| is_prunable(tensor);
    for (i, rule) in rules.iter().enumerate() {
        let invalid = |key: &str, expected: &str, found: String| {
            Err(Error::invalid(format!("rule {}: {key}", i + 1), expected, found))
        };
        if let Some(cut) = rule.cut.as_ref().filter(|cut| !(0.0..1.0).contains(&cut.sparsity)) {
            return invalid("sparsity", "0 <= x < 1", cut.sparsity.to_string());
        }
        let Some(pattern) = &rule.tensors else { continue };
        let can = |tensor: &&Tensor| rule.cut.is_none() || prunable(tensor);
        if !file.tensors().iter().filter(can).any(|tensor| pattern.matches(&tensor.name)) {
            let expected = "a pattern that is found in the name of such a tensor";
            return invalid("tensors", expected, format!("`{}`", pattern.as_str()));
        }
    }
    let mut jobs = Vec::new();
    for tensor in file.tensors().iter().filter(prunable) {
        let matches = |rule: &&Rule| match &rule.tensors {
            Some(pattern) => pattern.matches(&tensor.name),
            None => true,
        };
        let rule = rules.iter().find(matches);
        if let Some(cut) = rule.and_then(|rule| rule.cut.as_ref()) {
            jobs.push(job(tensor, cut)?);
        }
    }
    Ok(jobs)
}

fn job(tensor: &Tensor, cut: &Cut) -> Result<Job> {
    let (structure, cols) = (cut.structure, tensor.cols());
    let sparsity = match structure {
        Structure::Unstructured => cut.sparsity,
        Structure::Groups { of, .. } if !cols.is_multiple_of(of) => {
            let expected = format!("rows of whole groups of {of}");
            return Err(Error::invalid(&tensor.name, expected, format!("rows of {cols}")));
        }
        Structure::Groups { kept, of } => 1.0 - kept as f32 / of as f32,
    };
    let experts = tensor.shape.get(2).is_some_and(|&experts| experts > 1);
    let method = match cut.method {
        Method::SparseGpt if experts => Method::Ria,
        method => method,
    };
    let format = format(tensor, cut)?;
    Ok(Job { tensor: tensor.clone(), method, sparsity, structure, format })
}

/// Whether at most two of four weights remain.
fn is_two_four(structure: Structure) -> bool {
    matches!(structure, Structure::Groups { kept: 1..=2, of: 4 })
}

/// Refuses formats that could not be written after pruning.
fn refuse(tensor: &Tensor, cut: &Cut, wanted: Format) -> Result<()> {
    let needs_two_four = [Format::S24_F16, Format::S24_Q8_0, Format::S24_Q4_0].contains(&wanted);
    if needs_two_four && !cut.dense && !is_two_four(cut.structure) {
        let found = "a pattern that leaves more";
        return Err(Error::invalid(wanted.name(), "the pattern 2:4 or 1:4", found));
    }
    if wanted == Format::CSR_F16 && !cut.dense && tensor.cols() > CSR_COLS_MAX {
        let expected = format!("rows of at most {CSR_COLS_MAX} for {}", wanted.name());
        return Err(Error::invalid(&tensor.name, expected, format!("rows of {}", tensor.cols())));
    }
    if !is_written(wanted.base().unwrap_or(wanted)) {
        return Err(Error::invalid("format", "one that can be written", wanted.name()));
    }
    Ok(())
}

/// The format of a pruned tensor.
fn format(tensor: &Tensor, cut: &Cut) -> Result<Format> {
    let wanted = cut.format.unwrap_or_else(|| precision(tensor.format));
    refuse(tensor, cut, wanted)?;
    let siblings = match wanted {
        Format::F16 => Some([Format::S24_F16, Format::BITMAP_F16]),
        Format::Q8_0 => Some([Format::S24_Q8_0, Format::BITMAP_Q8_0]),
        Format::Q4_0 => Some([Format::S24_Q4_0, Format::BITMAP_Q4_0]),
        _ => None,
    };
    if !cut.dense && wanted.base().is_none() && siblings.is_none() {
        let expected = "F16, Q8_0, Q4_0 or a sparse format; others with --dense";
        return Err(Error::invalid("format", expected, wanted.name()));
    }
    if !tensor.cols().is_multiple_of(wanted.block_elements()) {
        return Ok(mixture::fallback(wanted.base().unwrap_or(wanted), tensor.cols()));
    }
    if cut.dense {
        return Ok(wanted.base().unwrap_or(wanted));
    }
    let Some([two_four, bitmap]) = siblings else { return Ok(wanted) };
    // At 1:4, a bitmap is smaller than the 2:4 format.
    let is_half = cut.structure == Structure::Groups { kept: 2, of: 4 };
    let format = if is_half { two_four } else { bitmap };
    // A sparse format with larger blocks than its base needs rows of whole blocks.
    let whole = tensor.cols().is_multiple_of(format.block_elements());
    Ok(if whole { format } else { wanted })
}

/// The format of about the same precision that has a sparse variant.
pub fn precision(format: Format) -> Format {
    let dense = format.base().unwrap_or(format);
    let bits = dense.block_bytes().map_or(16, |bytes| 8 * bytes / dense.block_elements());
    match bits {
        0..6 => Format::Q4_0,
        6..16 => Format::Q8_0,
        _ => Format::F16,
    }
}

/// Groups jobs into calibration passes whose Gram matrices fit into `bytes` of memory, with at
/// least one job each. Jobs without a Gram matrix are in the first pass.
pub fn passes(jobs: &[Job], bytes: u64) -> Vec<Vec<&Job>> {
    let (large, small): (Vec<&Job>, Vec<&Job>) =
        jobs.iter().partition(|job| job.method == Method::SparseGpt);
    let (mut passes, mut used) = (vec![small], 0);
    for job in large {
        let needed = (job.tensor.cols() as u64).pow(2) * 4;
        if used + needed > bytes && used > 0 {
            passes.push(Vec::new());
            used = 0;
        }
        used += needed;
        passes.last_mut().expect("there is a first").push(job);
    }
    passes
}

/// Names of the tensors that need Gram matrices.
pub fn with_products(jobs: &[&Job]) -> BTreeSet<String> {
    let large = jobs.iter().filter(|job| job.method == Method::SparseGpt);
    large.map(|job| job.tensor.name.clone()).collect()
}
