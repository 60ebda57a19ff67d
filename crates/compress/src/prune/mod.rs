//! Pruning: sets weights to zero by a method, and stores the remaining ones in a sparse or a dense
//! format. It must not know the calibration text, nor how the loss in quality is measured.

mod calibrate;
mod job;
mod linear;
mod pack;
mod score;
mod structure;
mod update;

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use bodkin_gguf::{File, Format, Metadata, Tensor, Value, Writer};
use ndarray::ArrayViewMut2;

pub use calibrate::Calibration;
pub use job::{Cut, Job, Method, Rule, passes, plan, precision, with_products};
pub use structure::Structure;

use self::pack::Packed;
use self::score::Score;
use self::update::Correlations;
use crate::error::{Error, Result};
use crate::quantize::weigh;
use crate::rows;

/// The location of a pruned tensor in the temporary file.
#[derive(Clone, Copy, Debug)]
struct Pruned {
    format: Format,
    offset: u64,
    bytes: u64,
    zeros: u64,
}

/// Prunes a model's tensors one by one. They go to an unnamed temporary file first: the header of a
/// GGUF file needs their sizes, which are known only after pruning.
pub struct Pruner<'a> {
    file: &'a File,
    waiting: std::fs::File,
    pruned: HashMap<String, Pruned>,
    end: u64,
}

impl<'a> Pruner<'a> {
    /// Creates the temporary file in `folder`.
    pub fn new(file: &'a File, folder: &Path) -> Result<Pruner<'a>> {
        let waiting = tempfile::tempfile_in(folder)?;
        Ok(Pruner { file, waiting, pruned: HashMap::new(), end: 0 })
    }

    /// Prunes a tensor on `threads` threads.
    ///
    /// # Errors
    /// If the calibration lacks what the method needs, or if the disk is full.
    pub fn prune(&mut self, job: &Job, calibration: &Calibration, threads: usize) -> Result<()> {
        // A tensor that is built from others is built once, and freed after this block.
        let data = self.file.read(&job.tensor);
        let worker = Worker::new(&data, job, calibration, threads)?;
        let (mut zeros, mut stored) = (0, Vec::new());
        let (rows, cols) = (job.tensor.rows(), job.tensor.cols());
        let make = |range| worker.prune_rows(range).map_err(std::io::Error::other);
        rows::in_order(rows, cols, threads, make, |piece| {
            zeros += piece.zeros;
            stored.extend(piece.rows);
            Ok(())
        })?;
        self.store(&job.tensor, job.format, &job.format.join_rows(&stored), zeros)
    }

    /// Stores a tensor without its zeros, bit by bit, in the sparse format of its own precision
    /// that takes the fewest bytes. Returns false if none is smaller than it is.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn pack(&mut self, tensor: &Tensor, threads: usize) -> Result<bool> {
        let packed = pack::pack(&self.file.read(tensor), tensor, threads)?;
        match &packed {
            Some(Packed { format, data, zeros }) => self.store(tensor, *format, data, *zeros)?,
            None => self.file.release(tensor),
        }
        Ok(packed.is_some())
    }

    /// Writes a tensor's new data to the temporary file.
    fn store(&mut self, tensor: &Tensor, format: Format, data: &[u8], zeros: u64) -> Result<()> {
        self.waiting.write_all(data)?;
        let pruned = Pruned { format, offset: self.end, bytes: data.len() as u64, zeros };
        self.pruned.insert(tensor.name.clone(), pruned);
        self.end += pruned.bytes;
        self.file.release(tensor);
        Ok(())
    }

    /// The fraction of zeros in all pruned tensors.
    pub fn sparsity(&self) -> f64 {
        let tensors = self.pruned.keys().filter_map(|name| self.file.tensor(name));
        let elements: u64 = tensors.map(|tensor| tensor.elements()).sum();
        let zeros: u64 = self.pruned.values().map(|pruned| pruned.zeros).sum();
        zeros as f64 / elements.max(1) as f64
    }

    /// Writes the file: pruned tensors, and all others unchanged.
    pub fn write(self, metadata: &Metadata, out: &mut dyn Write) -> Result<()> {
        let waiting = &self.waiting;
        let mut writer = Writer::new(Path::new("the pruned file"), metadata)?;
        for tensor in self.file.tensors() {
            let Some(pruned) = self.pruned.get(&tensor.name) else {
                let (name, shape, file) = (&tensor.name, &tensor.shape, self.file);
                writer.tensor_with_bytes(name, tensor.format, shape, tensor.bytes, move |out| {
                    out.write_all(&file.read(tensor))?;
                    file.release(tensor);
                    Ok(())
                })?;
                continue;
            };
            let (shape, bytes) = (&tensor.shape, pruned.bytes);
            writer.tensor_with_bytes(&tensor.name, pruned.format, shape, bytes, move |out| {
                let mut waiting = waiting;
                waiting.seek(SeekFrom::Start(pruned.offset))?;
                std::io::copy(&mut waiting.take(bytes), out).map(|_| ())
            })?;
        }
        Ok(writer.write_to(out)?)
    }

    /// The metadata of a file whose tensors are stored in other formats.
    pub fn packed_metadata(&self) -> Metadata {
        let mut metadata = crate::quantize::metadata(self.file, None);
        // The format of most tensors has changed.
        metadata.remove("general.file_type");
        metadata
    }

    /// The file's metadata with a record of the pruning. `calibration` names its data.
    pub fn metadata(&self, jobs: &[Job], calibration: &str) -> Metadata {
        let mut metadata = self.packed_metadata();
        let text = |values: Vec<String>| {
            let mut distinct: Vec<String> = Vec::new();
            for value in values {
                if !distinct.contains(&value) {
                    distinct.push(value);
                }
            }
            Value::String(distinct.join(", ").into_bytes().into())
        };
        let methods = jobs.iter().map(|job| job.method.to_string()).collect();
        let structures = jobs.iter().map(|job| job.structure.to_string()).collect();
        metadata.insert("bodkin.prune.method", text(methods));
        metadata.insert("bodkin.prune.pattern", text(structures));
        metadata.insert("bodkin.prune.sparsity", Value::F32(self.sparsity() as f32));
        metadata.insert("bodkin.prune.calibration", text(vec![calibration.to_string()]));
        metadata
    }
}

/// Rows that were pruned.
struct Piece {
    /// The rows in the new format.
    rows: Vec<Vec<u8>>,
    zeros: u64,
}

/// The state that all threads share while they prune a tensor.
struct Worker<'a> {
    /// The tensor's.
    data: &'a [u8],
    job: &'a Job,
    /// Mean squares of the columns' inputs, by matrix.
    squares: Vec<Option<Vec<f32>>>,
    /// Norms of the columns' inputs, by matrix.
    norms: Vec<Vec<f32>>,
    /// Sums of the columns' magnitudes, by matrix; empty unless the method is RIA.
    column_sums: Vec<Vec<f32>>,
    correlations: Option<Correlations>,
}

impl<'a> Worker<'a> {
    fn new(
        data: &'a [u8],
        job: &'a Job,
        calibration: &Calibration,
        threads: usize,
    ) -> Result<Worker<'a>> {
        let (tensor, cols) = (&job.tensor, job.tensor.cols());
        let matrices = tensor.shape[2..].iter().product::<u64>() as usize;
        let entry = calibration.imatrix.entries.get(&tensor.name);
        let statistics = |found: String| {
            let expected = format!("statistics of its inputs, {matrices} x {cols}");
            Error::invalid(&tensor.name, expected, found)
        };
        match entry {
            None if job.method != Method::Magnitude => return Err(statistics("none".to_owned())),
            Some(entry) if entry.cols() != cols || entry.counts.len() != matrices => {
                return Err(statistics(format!("{} x {}", entry.counts.len(), entry.cols())));
            }
            _ => (),
        }
        let squares: Vec<_> = (0..matrices)
            .map(|matrix| entry.and_then(|entry| entry.mean_squares(matrix)))
            .collect();
        // An expert without tokens is pruned by magnitude.
        let norm = |squares: &Option<Vec<f32>>| match squares {
            Some(squares) => squares.iter().map(|square| square.sqrt()).collect(),
            None => vec![1.0; cols],
        };
        let norms = squares.iter().map(norm).collect();
        let correlations = match job.method {
            Method::SparseGpt => {
                let products = calibration.products(&tensor.name);
                let products = products.ok_or_else(|| statistics("none".to_owned()))?;
                let expected = "finite inputs, whose products can be inverted";
                let found = "products that cannot";
                let singular = || Error::invalid(&tensor.name, expected, found);
                Some(Correlations::new(products).ok_or_else(singular)?)
            }
            _ => None,
        };
        let column_sums = match job.method {
            Method::Ria => column_sums(data, job, matrices, threads)?,
            _ => Vec::new(),
        };
        Ok(Worker { data, job, squares, norms, column_sums, correlations })
    }

    fn prune_rows(&self, range: Range<usize>) -> Result<Piece> {
        let (tensor, cols) = (&self.job.tensor, self.job.tensor.cols());
        let zeros = self.job.structure.zeros(cols, self.job.sparsity);
        let mut values = rows::read(self.data, tensor, range.clone());
        rows::check_finite(tensor, range.start, &values)?;
        match &self.correlations {
            Some(correlations) => {
                let shape = (range.len(), cols);
                let view = ArrayViewMut2::from_shape(shape, &mut values).expect("whole rows");
                correlations.prune(view, self.job.structure, zeros);
            }
            None => {
                let (mut scores, mut order) = (vec![0.0; cols], Vec::new());
                for (row, values) in range.clone().zip(values.chunks_exact_mut(cols)) {
                    self.score(row).of(values, &mut scores);
                    self.job.structure.cut(values, &scores, zeros, &mut order);
                }
            }
        }
        let rows = range.zip(values.chunks_exact(cols));
        let rows = rows.map(|(row, values)| self.store(row, values)).collect::<Result<_>>()?;
        let zeros = values.iter().filter(|value| **value == 0.0).count() as u64;
        Ok(Piece { rows, zeros })
    }

    fn matrix(&self, row: usize) -> usize {
        row / self.job.tensor.shape[1] as usize
    }

    fn score(&self, row: usize) -> Score<'_> {
        let matrix = self.matrix(row);
        let norms = &self.norms[matrix];
        match self.job.method {
            Method::Wanda => Score::Wanda { norms },
            Method::Ria => Score::Ria { norms, column_sums: &self.column_sums[matrix] },
            Method::Magnitude | Method::SparseGpt => Score::Magnitude,
        }
    }

    /// A row as the new format has it. Zeros weigh nothing, so that scales suit what is left.
    fn store(&self, row: usize, values: &[f32]) -> Result<Vec<u8>> {
        let format = self.job.format;
        let base = format.base().unwrap_or(format);
        let mut weights = vec![0.0; values.len()];
        weigh(values, self.squares[self.matrix(row)].as_deref(), &mut weights);
        let mut dense = vec![0; base.row_bytes(values.len()).expect("a format that fits")];
        base.quantize(values, Some(&weights), &mut dense)?;
        match format.base() {
            Some(_) => Ok(format.sparsify_row(&dense)?),
            None => Ok(dense),
        }
    }
}

/// Sums of the magnitudes of each matrix's columns.
fn column_sums(data: &[u8], job: &Job, matrices: usize, threads: usize) -> Result<Vec<Vec<f32>>> {
    let (rows, cols) = (job.tensor.rows(), job.tensor.cols());
    let rows_each = rows / matrices;
    let mut sums = vec![vec![0.0; cols]; matrices];
    for (matrix, sums) in sums.iter_mut().enumerate() {
        let make = |range: Range<usize>| {
            let first = matrix * rows_each;
            let values = rows::read(data, &job.tensor, first + range.start..first + range.end);
            let mut partial = vec![0f32; cols];
            for row in values.chunks_exact(cols) {
                partial.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.abs());
            }
            Ok(partial)
        };
        rows::in_order(rows_each, cols, threads, make, |partial| {
            sums.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
            Ok(())
        })?;
    }
    Ok(sums)
}
