//! The tensors of a model's safetensors files, in the order of their names. It must not know their
//! meaning.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use bodkin_gguf::Format;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::error::{Error, Result};
use crate::source::{Source, Stream, check_json};

/// The largest header that the format allows.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const INDEX: &str = "model.safetensors.index.json";

/// The weights of a model.
pub(crate) struct Weights {
    files: Vec<(String, RefCell<Stream>)>,
    pub(crate) tensors: Vec<Stored>,
}

/// A tensor of a safetensors file.
pub(crate) struct Stored {
    pub(crate) name: String,
    /// None for a type that is not one of floats in 16 or 32 bits.
    pub(crate) format: Option<Format>,
    /// The name of the type.
    pub(crate) dtype: String,
    /// Rows first: the order of safetensors.
    pub(crate) shape: Vec<u64>,
    /// Index of the file.
    file: usize,
    /// From the start of the file, in bytes.
    offset: u64,
    pub(crate) bytes: u64,
}

impl Weights {
    /// Reads the headers of all files.
    pub(crate) fn open(source: &Source) -> Result<Weights> {
        let (names, expected) = file_names(source)?;
        let mut weights = Weights { files: Vec::new(), tensors: Vec::new() };
        let mut seen = BTreeSet::new();
        for name in names {
            let shown = source.shown(&name);
            let missing = || Error::invalid(&shown, "a file with weights", "none");
            let mut stream = source.stream(&name)?.ok_or_else(missing)?;
            let stored = read_header(&mut stream, &shown, weights.files.len())?;
            for tensor in &stored {
                if !seen.insert(tensor.name.clone()) {
                    let item = format!("{shown}: {}", tensor.name);
                    return Err(Error::invalid(item, "one tensor of this name", "a second one"));
                }
            }
            weights.tensors.extend(stored);
            weights.files.push((shown, RefCell::new(stream)));
        }
        match expected.iter().find(|name| !seen.contains(*name)) {
            Some(name) => {
                Err(Error::invalid(source.shown(INDEX), format!("tensor {name}"), "none"))
            }
            None => Ok(weights),
        }
    }

    /// The bytes of a tensor.
    pub(crate) fn read(&self, tensor: &Stored) -> Result<Vec<u8>> {
        let (shown, stream) = &self.files[tensor.file];
        let bytes = stream.borrow_mut().read_at(tensor.offset, tensor.bytes);
        bytes.map_err(Error::io(format!("{shown}: {}", tensor.name)))
    }
}

/// The names of the files with weights, and the names of the tensors that an index lists.
fn file_names(source: &Source) -> Result<(Vec<String>, Vec<String>)> {
    if let Some(index) = source.json(INDEX)? {
        let invalid = |found: &str| {
            let expected = "weight_map: an object of tensor and file names";
            Error::invalid(source.shown(INDEX), expected, found)
        };
        let map = index.get("weight_map").and_then(|map| map.as_object());
        let mut files = BTreeSet::new();
        let mut tensors = Vec::new();
        for (tensor, file) in map.ok_or_else(|| invalid("none"))? {
            files.insert(file.as_str().ok_or_else(|| invalid("another value"))?.to_owned());
            tensors.push(tensor.clone());
        }
        return Ok((files.into_iter().collect(), tensors));
    }
    let names = source.names()?;
    let is_weights = |name: &&String| name.starts_with("model") && name.ends_with(".safetensors");
    let files: Vec<String> = names.iter().filter(is_weights).cloned().collect();
    if !files.is_empty() {
        check_shards(source, &files)?;
        return Ok((files, Vec::new()));
    }
    let is_pickle = |name: &&String| {
        [".bin", ".pt", ".pth", ".ckpt"].iter().any(|extension| name.ends_with(extension))
    };
    let found = match names.iter().find(is_pickle) {
        Some(name) => format!("{name}, a pickle, which may run code"),
        None => "none".to_owned(),
    };
    Err(Error::invalid(source.shown("model*.safetensors"), "a file with weights", found))
}

/// Fails if names such as `model-00001-of-00003.safetensors` do not count up to their last number.
fn check_shards(source: &Source, files: &[String]) -> Result<()> {
    let count = |name: &str| -> Option<usize> {
        name.strip_suffix(".safetensors")?.rsplit_once("-of-")?.1.parse().ok()
    };
    match files.iter().filter_map(|name| count(name)).max() {
        Some(count) if count != files.len() => {
            let expected = format!("{count} files with weights, as their names say");
            let item = source.shown("model*.safetensors");
            Err(Error::invalid(item, expected, files.len().to_string()))
        }
        _ => Ok(()),
    }
}

/// The tensors of a file, sorted by name.
fn read_header(stream: &mut Stream, shown: &str, file: usize) -> Result<Vec<Stored>> {
    let invalid = |expected: &str, found: String| Error::invalid(shown, expected, found);
    let length = stream.read_at(0, 8).map_err(Error::io(shown))?;
    let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
    let rest = stream.bytes() - 8;
    if length > HEADER_BYTES_MAX.min(rest) {
        let expected = format!("a header of at most {} bytes", HEADER_BYTES_MAX.min(rest));
        return Err(invalid(&expected, format!("{length}")));
    }
    let header = stream.read_at(8, length).map_err(Error::io(shown))?;
    check_json(shown, &header)?;
    // The library checks that the tensors' data have their sizes and follow one another.
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| invalid("a safetensors header", error.to_string()))?;
    let data = rest - length;
    if header.data_len() as u64 != data {
        return Err(invalid(&format!("tensors of {data} bytes"), header.data_len().to_string()));
    }
    let tensors: BTreeMap<_, _> = header.tensors().into_iter().collect();
    let stored = tensors.into_iter().map(|(name, info)| Stored {
        name,
        format: match info.dtype {
            Dtype::F32 => Some(Format::F32),
            Dtype::F16 => Some(Format::F16),
            Dtype::BF16 => Some(Format::BF16),
            _ => None,
        },
        dtype: info.dtype.to_string(),
        shape: info.shape.iter().map(|&dim| dim as u64).collect(),
        file,
        offset: 8 + length + info.data_offsets.0 as u64,
        bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
    });
    Ok(stored.collect())
}
