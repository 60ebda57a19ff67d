//! Baselines: a GGUF file with earlier results, for comparison with a later run. It has each
//! model's input tokens, some rows of logits, and its perplexity.

use std::path::{Path, PathBuf};

use bodkin_gguf::{Array, Error as FileError, File, Format, Metadata, Value, Writer};

use crate::error::{Error, Result};
use crate::score::LogSoftmax;

const TYPE: &str = "bodkin.check";
/// The most models of a baseline.
const MODELS_MAX: u32 = 10_000;

/// The results of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The end of the model's path, which [`find`] looks for.
    pub name: String,
    /// The input tokens.
    pub tokens: Vec<u32>,
    /// Of those tokens.
    pub perplexity: f64,
    /// `[positions, vocabulary]`.
    pub logits: Vec<f32>,
    /// Elements of a row.
    pub vocabulary: usize,
}

/// The difference of two records of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// The mean square difference of the logits.
    pub mse: f64,
    /// The mean divergence of the predictions from the earlier ones.
    pub divergence: f64,
    /// The relative change of the perplexity.
    pub perplexity: f64,
}

impl Record {
    /// Compares with an earlier record. None if the tokens or the vocabulary differ.
    pub fn change_from(&self, before: &Record) -> Option<Change> {
        let is_same = self.tokens == before.tokens
            && self.vocabulary == before.vocabulary
            && self.logits.len() == before.logits.len();
        if !is_same {
            return None;
        }
        let n = self.logits.len() as f64;
        let pairs = self.logits.iter().zip(&before.logits);
        let square: f64 = pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
        let rows = self.logits.chunks_exact(self.vocabulary);
        let rows = rows.zip(before.logits.chunks_exact(self.vocabulary));
        let count = rows.len() as f64;
        let divergence: f64 = rows.map(|(row, before)| divergence(row, before)).sum();
        Some(Change {
            mse: square / n,
            divergence: divergence / count,
            perplexity: self.perplexity / before.perplexity - 1.0,
        })
    }
}

/// The record of the model at `path`: the one with the longest name that the path ends with.
pub fn find<'a>(records: &'a [Record], path: &Path) -> Option<&'a Record> {
    let named = records.iter().filter(|record| path.ends_with(&record.name));
    named.max_by_key(|record| Path::new(&record.name).components().count())
}

/// Names for models at these paths: the shortest end of each path that is unique.
pub fn names(paths: &[PathBuf]) -> Vec<String> {
    let name = |path: &PathBuf| {
        let ends = path.ancestors().filter_map(|folder| path.strip_prefix(folder).ok()).skip(1);
        let is_own = |end: &&Path| paths.iter().filter(|other| other.ends_with(end)).count() == 1;
        ends.into_iter().find(is_own).unwrap_or(path).display().to_string()
    };
    paths.iter().map(name).collect()
}

/// The Kullback-Leibler divergence of a prediction from an earlier one.
fn divergence(row: &[f32], before: &[f32]) -> f64 {
    let (now, then) = (LogSoftmax::of(row), LogSoftmax::of(before));
    let terms = row.iter().zip(before).map(|(&logit, &before)| {
        let log_then = then.log_probability(before);
        log_then.exp() * (log_then - now.log_probability(logit))
    });
    terms.sum()
}

/// Writes a baseline of several models.
///
/// # Errors
/// One line if the file cannot be written.
pub fn save(path: &Path, records: &[Record]) -> Result<()> {
    let mut metadata = Metadata::new();
    metadata.insert("general.type", Value::String(TYPE.as_bytes().into()));
    metadata.insert("check.count", Value::U32(records.len() as u32));
    for (i, record) in records.iter().enumerate() {
        let key = |name: &str| format!("check.{i}.{name}");
        metadata.insert(key("name"), Value::String(record.name.as_bytes().into()));
        metadata.insert(key("perplexity"), Value::F64(record.perplexity));
        metadata.insert(key("tokens"), Value::Array(Array::U32(record.tokens.clone())));
    }
    let bytes = |record: &Record| record.logits.iter().flat_map(|x| x.to_le_bytes()).collect();
    let data: Vec<Vec<u8>> = records.iter().map(bytes).collect();
    let mut writer = Writer::new(path, &metadata)?;
    for (i, (record, data)) in records.iter().zip(&data).enumerate() {
        let cols = record.vocabulary as u64;
        let shape = [cols, record.logits.len() as u64 / cols];
        writer.tensor(&format!("check.{i}.logits"), Format::F32, &shape, data)?;
    }
    Ok(writer.save()?)
}

/// Reads a baseline.
///
/// # Errors
/// One line if the file is no baseline, or is inconsistent.
pub fn open(path: &Path) -> Result<Vec<Record>> {
    let file = File::open(path)?;
    let metadata = file.metadata();
    let invalid = |item: String, expected: &str, found: String| {
        let (file, expected) = (path.to_owned(), expected.to_owned());
        Error::File(FileError::Invalid { file, item, expected, found })
    };
    let kind = metadata.str("general.type")?.unwrap_or("no such key");
    if kind != TYPE {
        return Err(invalid("general.type".to_owned(), TYPE, kind.to_owned()));
    }
    let count = metadata.need_u32("check.count")?;
    if count > MODELS_MAX {
        return Err(invalid("check.count".to_owned(), "fewer models", count.to_string()));
    }
    let record = |i: u32| -> Result<Record> {
        let key = |name: &str| format!("check.{i}.{name}");
        let tensor = file.tensor(&key("logits")).filter(|t| t.format == Format::F32);
        let Some(tensor) = tensor else {
            return Err(invalid(key("logits"), "a tensor of F32", "none".to_owned()));
        };
        let mut logits = vec![0.0; tensor.elements() as usize];
        tensor.format.dequantize(file.data(tensor), &mut logits);
        let Some(tokens) = metadata.u32s(&key("tokens"))? else {
            return Err(invalid(key("tokens"), "the tokens that were read", "none".to_owned()));
        };
        Ok(Record {
            name: metadata.need_str(&key("name"))?.to_owned(),
            tokens,
            perplexity: f64::from(metadata.need_f32(&key("perplexity"))?),
            logits,
            vocabulary: tensor.cols(),
        })
    };
    (0..count).map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_one_name_are_told_apart() {
        let paths = ["/a/model.gguf", "/b/model.gguf", "/b/other.gguf"].map(PathBuf::from);
        let names = names(&paths);
        assert_eq!(names, ["a/model.gguf", "b/model.gguf", "other.gguf"]);
        let record = |name: &str| Record {
            name: name.to_owned(),
            tokens: Vec::new(),
            perplexity: 1.0,
            logits: Vec::new(),
            vocabulary: 1,
        };
        let mut records: Vec<Record> = names.iter().map(|name| record(name)).collect();
        for (path, name) in paths.iter().zip(&names) {
            assert_eq!(find(&records, path).map(|record| &record.name), Some(name));
        }
        assert_eq!(find(&records, Path::new("/c/model.gguf")), None);
        // One that says less is of any folder, but yields to one that says more.
        records.push(record("model.gguf"));
        let found = |path: &str| find(&records, Path::new(path)).map(|r| r.name.as_str());
        assert_eq!(found("/c/model.gguf"), Some("model.gguf"));
        assert_eq!(found("/a/model.gguf"), Some("a/model.gguf"));
    }
}
