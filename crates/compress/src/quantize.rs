//! Quantisation: chooses the format of each tensor, then writes the file. It must not know how
//! blocks are quantised, nor the rules of a mixture.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use bodkin_gguf::{File, Format, Metadata, Tensor, Value, Writer};

use crate::error::{Error, Result};
use crate::imatrix::Imatrix;
use crate::mixture::{self, Facts, FileType};
use crate::pattern::Pattern;
use crate::rows;
use crate::source::Source;

/// The version of the block formats, as `general.quantization_version` says it.
pub const BLOCKS_VERSION: u32 = 2;

/// Metadata keys of the importance matrix that a file was quantised with: its file, its dataset,
/// and its numbers of weights and chunks.
const IMATRIX: [&str; 4] = [
    "quantize.imatrix.file",
    "quantize.imatrix.dataset",
    "quantize.imatrix.entries_count",
    "quantize.imatrix.chunks_count",
];

/// The importance of each column of the tensors that are quantised: the mean square of its input.
#[derive(Clone, Debug)]
pub struct Importance {
    /// By the tensor's name, for each of its matrices; None for an expert without tokens.
    tensors: BTreeMap<String, Vec<Option<Vec<f32>>>>,
    missing: Vec<String>,
}

impl Importance {
    /// Looks up all tensors that change their format. Fails if the statistics belong to another
    /// model: if the numbers of columns differ.
    pub fn new(imatrix: &Imatrix, choices: &[Choice]) -> Result<Importance> {
        let mut importance = Importance { tensors: BTreeMap::new(), missing: Vec::new() };
        for choice in choices.iter().filter(|choice| choice.format != choice.tensor.format) {
            let tensor = &choice.tensor;
            let Some(entry) = imatrix.entries.get(&tensor.name) else {
                importance.missing.push(tensor.name.clone());
                continue;
            };
            let matrices = entry.counts.len();
            let (rows, cols) = (tensor.rows(), tensor.cols());
            let invalid = |expected: String, found: String| {
                Error::invalid(format!("imatrix of {}", tensor.name), expected, found)
            };
            if entry.cols() != cols {
                return Err(invalid(format!("{cols} columns"), entry.cols().to_string()));
            }
            if !rows.is_multiple_of(matrices.max(1)) {
                let expected = format!("matrices that share {rows} rows");
                return Err(invalid(expected, format!("{matrices} of them")));
            }
            let means = (0..matrices).map(|matrix| entry.mean_squares(matrix)).collect();
            importance.tensors.insert(tensor.name.clone(), means);
        }
        Ok(importance)
    }

    /// Tensors without statistics.
    pub fn missing(&self) -> impl Iterator<Item = &str> {
        self.missing.iter().map(String::as_str)
    }

    /// The importance of the columns in one of a tensor's rows.
    fn columns(&self, tensor: &Tensor, row: usize) -> Option<&[f32]> {
        let matrices = self.tensors.get(&tensor.name)?;
        matrices[row * matrices.len() / tensor.rows()].as_deref()
    }
}

/// The options of a quantisation.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file type; None keeps the formats, but makes sparse tensors dense.
    pub kind: Option<FileType>,
    /// Every matrix has the main format of the file type.
    pub pure: bool,
    /// Formats by tensor name; the first pattern that matches decides.
    pub overrides: Vec<(Pattern, Format)>,
    /// Whether there is an importance matrix, which changes a few rules.
    pub has_imatrix: bool,
}

/// The chosen format of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The tensor as it is.
    pub tensor: Tensor,
    /// The new format.
    pub format: Format,
    /// The wanted format, if the rows are not a whole number of its blocks.
    pub instead_of: Option<Format>,
}

impl Choice {
    /// Whether quantised values are quantised once more, which adds the errors of both.
    pub fn is_requantized(&self) -> bool {
        let from = self.tensor.format.base().unwrap_or(self.tensor.format);
        from != self.format && is_quantized(from) && is_quantized(self.format)
    }

    /// Its size in the new format.
    pub fn bytes(&self) -> u64 {
        if self.format == self.tensor.format {
            return self.tensor.bytes;
        }
        let row = self.format.row_bytes(self.tensor.cols()).expect("a format that fits was chosen");
        row as u64 * self.tensor.rows() as u64
    }
}

/// Chooses a format for every tensor of a source, in its order. Fails if an override's pattern
/// is found in no name of a matrix, or if it names a format that cannot be written, or that a
/// tensor's rows are no whole number of blocks of.
pub fn choose(source: &dyn Source, options: &Options) -> Result<Vec<Choice>> {
    for (pattern, format) in &options.overrides {
        if !is_written(*format) {
            let item = format!("type for `{}`", pattern.as_str());
            return Err(Error::invalid(item, "a type that can be written", format.name()));
        }
        let mut matrices = source.tensors().iter().filter(|tensor| mixture::is_quantized(tensor));
        if !matrices.any(|tensor| pattern.matches(&tensor.name)) {
            let expected = "a pattern that is found in the name of a matrix";
            return Err(Error::invalid("tensor type", expected, format!("`{}`", pattern.as_str())));
        }
    }
    let facts = Facts::of(source, options.has_imatrix)?;
    source.tensors().iter().map(|tensor| choose_one(tensor, options, &facts)).collect()
}

fn choose_one(tensor: &Tensor, options: &Options, facts: &Facts) -> Result<Choice> {
    let tensor = tensor.clone();
    let cols = tensor.cols();
    let is_quantized = mixture::is_quantized(&tensor);
    let named = options.overrides.iter().find(|(pattern, _)| pattern.matches(&tensor.name));
    let named = named.filter(|_| is_quantized);
    if let Some(&(_, format)) = named {
        if format.row_bytes(cols).is_none() {
            let block = format.block_elements();
            let expected = format!("rows of whole {} blocks of {block}", format.name());
            return Err(Error::invalid(tensor.name, expected, format!("rows of {cols}")));
        }
        return Ok(Choice { tensor, format, instead_of: None });
    }
    let kind = options.kind.filter(|_| is_quantized);
    let Some(kind) = kind else {
        let format = tensor.format.base().unwrap_or(tensor.format);
        return Ok(Choice { tensor, format, instead_of: None });
    };
    let wanted = match options.pure {
        true => kind.format,
        false => mixture::format_for(kind, &tensor, facts),
    };
    match wanted.row_bytes(cols) {
        Some(_) => Ok(Choice { tensor, format: wanted, instead_of: None }),
        None => {
            let format = mixture::fallback(wanted, cols);
            Ok(Choice { tensor, format, instead_of: Some(wanted) })
        }
    }
}

/// Whether a format stores blocks of codes with a scale.
fn is_quantized(format: Format) -> bool {
    format.block_elements() > 1
}

/// Whether a format is dense and can be written.
pub(crate) fn is_written(format: Format) -> bool {
    let Some(bytes) = format.block_bytes().filter(|_| format.base().is_none()) else {
        return false;
    };
    let values = vec![0.0; format.block_elements()];
    format.quantize(&values, None, &mut vec![0; bytes]).is_ok()
}

/// The metadata of a file with converted tensors.
pub fn metadata(file: &File, kind: Option<FileType>) -> Metadata {
    let mut metadata = file.metadata().clone();
    for key in ["split.no", "split.count", "split.tensors.count"] {
        metadata.remove(key);
    }
    // The new file was not made with the importance matrix of the source.
    IMATRIX.into_iter().for_each(|key| drop(metadata.remove(key)));
    if let Some(kind) = kind {
        metadata.insert("general.quantization_version", Value::U32(BLOCKS_VERSION));
        metadata.insert("general.file_type", Value::U32(kind.id));
    }
    metadata
}

/// Records the importance matrix in a file's metadata, with the keys of `llama-quantize`. `name` is
/// the file of the matrix.
pub fn record_imatrix(metadata: &mut Metadata, imatrix: &Imatrix, name: &str) {
    let dataset = imatrix.datasets.join(", ");
    let values = [
        Value::String(name.as_bytes().into()),
        Value::String(dataset.as_bytes().into()),
        Value::I32(imatrix.entries.len() as i32),
        Value::I32(imatrix.chunks as i32),
    ];
    IMATRIX.into_iter().zip(values).for_each(|(key, value)| metadata.insert(key, value));
}

/// The tensors of a new file, and how they are made.
#[derive(Clone, Copy, Debug)]
pub struct Conversion<'a> {
    /// The format of each tensor, in the file's order.
    pub choices: &'a [Choice],
    /// The importance of the columns, for smaller errors where it is large.
    pub importance: Option<&'a Importance>,
    /// Threads that convert.
    pub threads: usize,
    /// Whether NaN and infinities are converted too.
    pub allows_nan: bool,
}

impl Conversion<'_> {
    /// Writes the file with the chosen formats. Calls `done` with the number of source bytes
    /// processed since its last call.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for a tensor with NaN or infinities, if these are not allowed; if the
    /// file cannot be written.
    pub fn write(
        &self,
        source: &dyn Source,
        metadata: &Metadata,
        done: &dyn Fn(u64),
        out: &mut dyn Write,
    ) -> Result<()> {
        // What the writer's errors cannot hold.
        let failed = Mutex::new(None);
        let failed = &failed;
        // Only error messages use the path: the output goes to the caller's stream.
        let mut writer = Writer::new(Path::new("the new file"), metadata)?;
        for choice in self.choices {
            let tensor = &choice.tensor;
            let bytes = choice.bytes();
            let (name, format, shape) = (&tensor.name, choice.format, &tensor.shape);
            writer.tensor_with_bytes(name, format, shape, bytes, move |out| {
                // A tensor that is built from others is built once, and freed after this block.
                let data = source.read(tensor)?;
                self.tensor(choice, &data, failed, done, out)?;
                source.release(tensor);
                Ok(())
            })?;
        }
        let written = writer.write_to(out);
        match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(written?),
        }
    }

    /// Writes the rows of a tensor, whose data are `data`, in their new format.
    fn tensor(
        &self,
        choice: &Choice,
        data: &[u8],
        failed: &Mutex<Option<Error>>,
        done: &dyn Fn(u64),
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let tensor = &choice.tensor;
        let (rows, cols) = (tensor.rows(), tensor.cols());
        let is_copied = choice.format == tensor.format;
        if is_copied {
            out.write_all(data)?;
            if self.allows_nan {
                done(tensor.bytes);
                return Ok(());
            }
        }
        let make = |range: Range<usize>| {
            let values = rows::read(data, tensor, range.clone());
            if !self.allows_nan {
                rows::check_finite(tensor, range.start, &values).map_err(|error| {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    io::Error::other("not finite")
                })?;
            }
            let bytes = if is_copied {
                Vec::new()
            } else if tensor.format.base() == Some(choice.format) {
                densify(data, choice, &range)
            } else {
                self.rows(choice, &range, &values)?
            };
            Ok((bytes, range.len()))
        };
        let (mut rows_made, mut reported) = (0, 0);
        rows::in_order(rows, cols, self.threads, make, |(bytes, rows)| {
            out.write_all(&bytes)?;
            rows_made += rows as u64;
            let all = tensor.bytes * rows_made / tensor.rows() as u64;
            done(all - reported);
            reported = all;
            Ok(())
        })
    }

    /// Some rows in their new format.
    fn rows(&self, choice: &Choice, range: &Range<usize>, values: &[f32]) -> io::Result<Vec<u8>> {
        let cols = choice.tensor.cols();
        let row_bytes = choice.format.row_bytes(cols).expect("a format that fits was chosen");
        let mut bytes = vec![0; range.len() * row_bytes];
        let mut weights = vec![0.0; cols];
        for ((row, values), bytes) in
            range.clone().zip(values.chunks_exact(cols)).zip(bytes.chunks_exact_mut(row_bytes))
        {
            let columns = self.importance.and_then(|all| all.columns(&choice.tensor, row));
            weigh(values, columns, &mut weights);
            let stored = choice.format.quantize(values, Some(&weights), bytes);
            stored.map_err(io::Error::other)?;
        }
        Ok(bytes)
    }
}

/// Some rows of a sparse tensor in its base format, bit by bit.
fn densify(data: &[u8], choice: &Choice, range: &Range<usize>) -> Vec<u8> {
    let tensor = &choice.tensor;
    let row_bytes = choice.format.row_bytes(tensor.cols()).expect("a format that fits was chosen");
    let mut bytes = vec![0; range.len() * row_bytes];
    for (row, dense) in range.clone().zip(bytes.chunks_exact_mut(row_bytes)) {
        tensor.format.densify_row(tensor.format.row(data, tensor.rows(), row), dense);
    }
    bytes
}

/// The weight of each value's quantisation error in a row: the importance of its column, times a
/// factor that grows with the value's magnitude, since large values matter more.
pub(crate) fn weigh(values: &[f32], columns: Option<&[f32]>, weights: &mut [f32]) {
    let mean = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
    for (i, (weight, x)) in weights.iter_mut().zip(values).enumerate() {
        let column = columns.map_or(1.0, |columns| columns[i]);
        *weight = column * (mean + x * x).sqrt();
    }
    // Without any valid weight, all errors count the same.
    if !weights.iter().any(|&weight| weight > 0.0) || !weights.iter().all(|w| w.is_finite()) {
        weights.fill(1.0);
    }
}
