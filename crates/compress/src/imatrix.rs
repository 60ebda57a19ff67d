//! The importance matrix: for each column of each weight, the sum of squared activations over a
//! calibration text. It is collected by observing a model and stored in the GGUF layout of
//! llama.cpp's `llama-imatrix`: a weight `NAME` has the tensors `NAME.in_sum2`, `[cols, matrices]`,
//! and `NAME.counts`, `[1, matrices]`, both F32. It must not know the text, nor how quantisation
//! and pruning use it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bodkin_backend::{Matmul, Observer};
use bodkin_gguf::{Array, Error, File, Format, Metadata, Result, Tensor, Value, Writer};
use bodkin_model::{Op, Plan, WeightId};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const DATASETS: &str = "imatrix.datasets";
const CHUNK_COUNT: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";
/// The largest valid row count; a larger one means a damaged file.
const ROWS_MAX: f32 = 1e15;

/// Statistics of the inputs of one weight. A weight of experts has a matrix for each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Entry {
    /// `[matrices, cols]`: the sum of each input column's squares.
    pub square_sums: Vec<f64>,
    /// `[matrices]`: the number of input rows.
    pub counts: Vec<u64>,
}

impl Entry {
    /// Columns of the weight.
    pub fn cols(&self) -> usize {
        self.square_sums.len() / self.counts.len().max(1)
    }

    /// The mean square of each input column of a matrix; None if it had no input, like an expert
    /// that no token was routed to.
    pub fn mean_squares(&self, matrix: usize) -> Option<Vec<f32>> {
        let (count, cols) = (*self.counts.get(matrix)?, self.cols());
        let sums = &self.square_sums[matrix * cols..][..cols];
        let count = (count > 0).then_some(count as f64)?;
        Some(sums.iter().map(|sum| (sum / count) as f32).collect())
    }
}

/// Statistics of the inputs of many weights, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    /// By the weight's name, such as `blk.0.attn_q.weight`.
    pub entries: BTreeMap<String, Entry>,
    /// The texts that were read.
    pub datasets: Vec<String>,
    /// Chunks of text that were read.
    pub chunks: u32,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
}

impl Observer for Imatrix {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let (name, cols) = (&matmul.weight.name, matmul.weight.cols);
        let zeros = || {
            let (counts, square_sums) = (vec![0; matmul.experts], vec![0.0; matmul.experts * cols]);
            Entry { square_sums, counts }
        };
        let entry = self.entries.entry(name.clone()).or_insert_with(zeros);
        assert_eq!(entry.square_sums.len(), matmul.experts * cols, "the same shape as before");
        for row in matmul.rows {
            entry.counts[row.expert] += 1;
            let sums = &mut entry.square_sums[row.expert * cols..][..cols];
            sums.iter_mut().zip(row.values).for_each(|(sum, &x)| *sum += f64::from(x).powi(2));
        }
    }
}

impl Imatrix {
    /// Reads a file that [`Imatrix::save`] or `llama-imatrix` wrote.
    ///
    /// # Errors
    /// One line if it is no such file, or if its tensors contradict each other.
    pub fn open(path: impl AsRef<Path>) -> Result<Imatrix> {
        Imatrix::from_file(&File::open(path)?)
    }

    /// As [`Imatrix::open`], for a file that is open.
    ///
    /// # Errors
    /// As [`Imatrix::open`].
    pub fn from_file(file: &File) -> Result<Imatrix> {
        let metadata = file.metadata();
        let invalid = |item: &str, expected: &str, found: String| Error::Invalid {
            file: file.path().to_owned(),
            item: item.to_owned(),
            expected: expected.to_owned(),
            found,
        };
        let kind = metadata.str("general.type")?.unwrap_or("no such key");
        if kind != "imatrix" {
            return Err(invalid("general.type", "imatrix", kind.to_owned()));
        }
        let names = metadata.strings(DATASETS)?.unwrap_or_default();
        let datasets = names.iter().map(|name| String::from_utf8_lossy(name).into_owned());
        let mut imatrix = Imatrix {
            datasets: datasets.collect(),
            chunks: metadata.u32(CHUNK_COUNT)?.unwrap_or(0),
            chunk_tokens: metadata.u32(CHUNK_SIZE)?.unwrap_or(0),
            ..Imatrix::default()
        };
        for sums in file.tensors() {
            let Some(name) = sums.name.strip_suffix(SUMS) else { continue };
            let counts = format!("{name}{COUNTS}");
            let Some(counts) = file.tensor(&counts) else {
                return Err(invalid(&sums.name, "counts beside the sums", "none".to_owned()));
            };
            imatrix.entries.insert(name.to_owned(), entry(file, sums, counts)?);
        }
        if imatrix.entries.is_empty() {
            let found = format!("{} other tensors", file.tensors().len());
            return Err(invalid("tensors", "sums of squares", found));
        }
        Ok(imatrix)
    }

    /// Makes every entry fit its weight in the plan: a single count for all matrices, which
    /// `llama-imatrix` writes for dense weights, is copied to each. `file` is for messages.
    ///
    /// # Errors
    /// One line about the first entry without a weight in the plan, or with another shape.
    pub fn fit(mut self, plan: &Plan, file: &Path) -> Result<Imatrix> {
        for (name, entry) in &mut self.entries {
            let invalid = |expected: String, found: String| Error::Invalid {
                file: file.to_owned(),
                item: format!("`{name}`"),
                expected,
                found,
            };
            let Some(id) = plan.weights.iter().position(|weight| weight.name == *name) else {
                let found = "none of this name".to_owned();
                return Err(invalid("a weight of the model".to_owned(), found));
            };
            let (cols, matrices) = (plan.weights[id].cols, matrices(plan, WeightId(id)));
            let (sums, counts) = (entry.square_sums.len(), entry.counts.len());
            if sums != cols * matrices || (counts != 1 && counts != matrices) {
                let found = format!("{sums} sums and {counts} counts");
                return Err(invalid(format!("{matrices} x {cols} sums"), found));
            }
            entry.counts.resize(matrices, entry.counts[0]);
        }
        Ok(self)
    }

    /// Writes the file that [`Imatrix::open`] and `llama-quantize` read.
    ///
    /// # Errors
    /// One line if a sum is not finite, naming the weight, or if the file cannot be written.
    pub fn save(&self, path: impl Into<PathBuf>) -> Result<()> {
        let path = path.into();
        let datasets = self.datasets.iter().map(|name| name.as_bytes().into()).collect();
        let mut metadata = Metadata::new();
        metadata.insert("general.type", Value::String((*b"imatrix").into()));
        metadata.insert(DATASETS, Value::Array(Array::String(datasets)));
        metadata.insert(CHUNK_COUNT, Value::U32(self.chunks));
        metadata.insert(CHUNK_SIZE, Value::U32(self.chunk_tokens));
        let data = self.entries.iter().map(|(name, entry)| {
            let sums: Vec<f32> = entry.square_sums.iter().map(|&sum| sum as f32).collect();
            check_sums(&path, name, &sums)?;
            let counts: Vec<f32> = entry.counts.iter().map(|&count| count as f32).collect();
            Ok((name, entry.cols() as u64, bytes(&sums), bytes(&counts)))
        });
        let data = data.collect::<Result<Vec<_>>>()?;
        let mut writer = Writer::new(path, &metadata)?;
        for (name, cols, sums, counts) in &data {
            let matrices = counts.len() as u64 / 4;
            // As GGML does, without dimensions of one at the end.
            let dims = if matrices == 1 { 1 } else { 2 };
            let name = |suffix| format!("{name}{suffix}");
            writer.tensor(&name(SUMS), Format::F32, &[*cols, matrices][..dims], sums)?;
            writer.tensor(&name(COUNTS), Format::F32, &[1, matrices][..dims], counts)?;
        }
        writer.save()
    }
}

/// How many matrices a weight of a plan is made of.
fn matrices(plan: &Plan, id: WeightId) -> usize {
    let experts = plan.ops.iter().find_map(|op| match op {
        Op::ExpertLinear { weight, experts, .. } if *weight == id => Some(*experts),
        _ => None,
    });
    experts.unwrap_or(1)
}

/// The statistics of one weight from its two tensors.
fn entry(file: &File, sums: &Tensor, counts: &Tensor) -> Result<Entry> {
    let invalid = |tensor: &Tensor, expected: &str, found: String| Error::Invalid {
        file: file.path().to_owned(),
        item: format!("tensor `{}`", tensor.name),
        expected: expected.to_owned(),
        found,
    };
    for tensor in [sums, counts] {
        if tensor.format != Format::F32 {
            return Err(invalid(tensor, "F32", tensor.format.name().to_owned()));
        }
    }
    if !sums.elements().is_multiple_of(counts.elements()) {
        let found = format!("{} sums for {} counts", sums.elements(), counts.elements());
        return Err(invalid(sums, "the same number of columns for each count", found));
    }
    let values = floats(file, sums);
    check_sums(file.path(), &sums.name, &values)?;
    let counts = floats(file, counts).into_iter().map(|count| match count {
        0.0..=ROWS_MAX => Ok(count.round() as u64),
        _ => Err(invalid(counts, "a number of rows", count.to_string())),
    });
    let square_sums = values.into_iter().map(f64::from).collect();
    Ok(Entry { square_sums, counts: counts.collect::<Result<_>>()? })
}

fn check_sums(file: &Path, name: &str, sums: &[f32]) -> Result<()> {
    match sums.iter().find(|sum| !(sum.is_finite() && **sum >= 0.0)) {
        None => Ok(()),
        Some(bad) => Err(Error::Invalid {
            file: file.to_owned(),
            item: format!("sums of squares of `{name}`"),
            expected: "finite numbers".to_owned(),
            found: bad.to_string(),
        }),
    }
}

fn floats(file: &File, tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.format.dequantize(file.data(tensor), &mut values);
    values
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
