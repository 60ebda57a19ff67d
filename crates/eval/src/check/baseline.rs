//! Baselines: a GGUF file with earlier results, for comparison with a later run. It has each
//! model's input tokens, some rows of logits and its perplexity, or the embeddings of an encoder,
//! and its speed if that was measured.

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
    /// Of those tokens; none for an encoder.
    pub perplexity: Option<f64>,
    /// Logits, `[positions, vocabulary]`, or the embeddings of an encoder, `[texts, width]`.
    pub rows: Vec<f32>,
    /// Elements of a row.
    pub width: usize,
    /// The speed, if it was measured.
    pub speed: Option<Speed>,
}

/// The speed of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// The backend, as it describes itself.
    pub backend: String,
    /// Of a prompt, or of an encoder's text.
    pub prefill: Rate,
    /// Of generated tokens; none for an encoder.
    pub decode: Option<Rate>,
}

/// Medians of several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Tokens a second.
    pub tokens: f64,
    /// The same over the tokens a second of a reference model, which ran before and after.
    pub ratio: f64,
}

impl Rate {
    /// The relative change of the ratio from that of an earlier rate. Tokens a second are not
    /// compared: other programs halve them or double them from one minute to the next.
    fn change_from(self, before: Rate) -> f64 {
        self.ratio / before.ratio - 1.0
    }
}

impl Speed {
    /// The relative change of the part of the speed that has become worst, from an earlier one.
    /// None if the backends differ, or one of the speeds is missing.
    pub fn change_from(&self, before: &Speed) -> Option<f64> {
        let is_same = self.backend == before.backend;
        let prefill = self.prefill.change_from(before.prefill);
        match (self.decode, before.decode) {
            (Some(now), Some(before)) if is_same => Some(prefill.min(now.change_from(before))),
            (None, None) if is_same => Some(prefill),
            _ => None,
        }
    }
}

/// The difference of two records of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// The mean square difference of the logits or embeddings.
    pub mse: f64,
    /// The mean divergence of the predictions from the earlier ones; none for an encoder.
    pub divergence: Option<f64>,
    /// The relative change of the perplexity; none for an encoder.
    pub perplexity: Option<f64>,
    /// The mean of one minus the cosine similarity of embeddings; none for other models.
    pub cosine_distance: Option<f64>,
}

impl Record {
    /// Compares with an earlier record. None if the tokens or the shapes differ.
    pub fn change_from(&self, before: &Record) -> Option<Change> {
        let is_same = self.tokens == before.tokens
            && self.width == before.width
            && self.rows.len() == before.rows.len()
            && self.perplexity.is_some() == before.perplexity.is_some();
        if !is_same {
            return None;
        }
        let n = self.rows.len() as f64;
        let pairs = self.rows.iter().zip(&before.rows);
        let square: f64 = pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
        let mean = |of: fn(&[f32], &[f32]) -> f64| {
            let rows = self.rows.chunks_exact(self.width);
            let rows = rows.zip(before.rows.chunks_exact(self.width));
            rows.map(|(row, before)| of(row, before)).sum::<f64>() / (n / self.width as f64)
        };
        let perplexity = self.perplexity.zip(before.perplexity);
        Some(Change {
            mse: square / n,
            divergence: perplexity.map(|_| mean(divergence)),
            perplexity: perplexity.map(|(now, before)| now / before - 1.0),
            cosine_distance: perplexity.is_none().then(|| mean(|a, b| 1.0 - cosine(a, b))),
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

/// The cosine of the angle between two embeddings.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
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
        if let Some(perplexity) = record.perplexity {
            metadata.insert(key("perplexity"), Value::F64(perplexity));
        }
        if let Some(Speed { backend, prefill, decode }) = &record.speed {
            metadata.insert(key("speed.backend"), Value::String(backend.as_bytes().into()));
            for (name, rate) in [("prefill", Some(prefill)), ("decode", decode.as_ref())] {
                let Some(Rate { tokens, ratio }) = rate else { continue };
                metadata.insert(key(&format!("speed.{name}")), Value::F64(*tokens));
                metadata.insert(key(&format!("speed.{name}_ratio")), Value::F64(*ratio));
            }
        }
        metadata.insert(key("tokens"), Value::Array(Array::U32(record.tokens.clone())));
    }
    let bytes = |record: &Record| record.rows.iter().flat_map(|x| x.to_le_bytes()).collect();
    let data: Vec<Vec<u8>> = records.iter().map(bytes).collect();
    let mut writer = Writer::new(path, &metadata)?;
    for (i, (record, data)) in records.iter().zip(&data).enumerate() {
        let cols = record.width as u64;
        let shape = [cols, record.rows.len() as u64 / cols];
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
        let mut rows = vec![0.0; tensor.elements() as usize];
        tensor.format.dequantize(file.data(tensor), &mut rows);
        let Some(tokens) = metadata.u32s(&key("tokens"))? else {
            return Err(invalid(key("tokens"), "the tokens that were read", "none".to_owned()));
        };
        let number =
            |name: &str| -> Result<Option<f64>> { Ok(metadata.f32(&key(name))?.map(f64::from)) };
        let rate = |name: &str| -> Result<Option<Rate>> {
            let tokens = number(&format!("speed.{name}"))?;
            let ratio = number(&format!("speed.{name}_ratio"))?;
            Ok(tokens.zip(ratio).map(|(tokens, ratio)| Rate { tokens, ratio }))
        };
        let speed = match (metadata.str(&key("speed.backend"))?, rate("prefill")?) {
            (Some(backend), Some(prefill)) => {
                Some(Speed { backend: backend.to_owned(), prefill, decode: rate("decode")? })
            }
            _ => None,
        };
        Ok(Record {
            name: metadata.need_str(&key("name"))?.to_owned(),
            tokens,
            perplexity: number("perplexity")?,
            rows,
            width: tensor.cols(),
            speed,
        })
    };
    (0..count).map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_is_lower_if_the_machine_does_not_explain_it() {
        // With the speed of the reference model.
        let rate = |tokens, reference| Rate { tokens, ratio: tokens / reference };
        let speed = |prefill, decode, reference| Speed {
            backend: "cpu".to_owned(),
            prefill: rate(prefill, reference),
            decode: Some(rate(decode, reference)),
        };
        let before = speed(100.0, 10.0, 40.0);
        let change = |now: Speed| now.change_from(&before).unwrap();
        // A slower machine, and a faster one.
        assert_eq!(change(speed(50.0, 5.0, 20.0)), 0.0);
        assert_eq!(change(speed(200.0, 20.0, 80.0)), 0.0);
        assert_eq!(change(speed(100.0, 10.0, 80.0)), -0.5);
        assert_eq!(change(speed(100.0, 5.0, 40.0)), -0.5);
        assert_eq!(change(speed(50.0, 10.0, 40.0)), -0.5);
        assert_eq!(change(speed(100.0, 5.0, 30.0)), 0.5 / 0.75 - 1.0);
        assert_eq!(change(speed(50.0, 10.0, 32.0)), 0.5 / 0.8 - 1.0);
        let encoder = Speed { decode: None, ..before.clone() };
        assert_eq!(encoder.change_from(&before), None);
    }

    #[test]
    fn models_of_one_name_are_told_apart() {
        let paths = ["/a/model.gguf", "/b/model.gguf", "/b/other.gguf"].map(PathBuf::from);
        let names = names(&paths);
        assert_eq!(names, ["a/model.gguf", "b/model.gguf", "other.gguf"]);
        let record = |name: &str| Record {
            name: name.to_owned(),
            tokens: Vec::new(),
            perplexity: None,
            rows: Vec::new(),
            width: 1,
            speed: None,
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
