//! A model on its way to a GGUF: everything is read and checked but the weights, which are
//! converted one tensor at a time while the file is written.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{self, Write};
use std::path::Path;

use bodkin_compress::mixture::FileType;
use bodkin_compress::quantize::{self, Choice, Conversion};
use bodkin_gguf::{Format, Metadata, Tensor, Value};
use serde_json::Value as Json;

use crate::card;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::family;
use crate::general;
use crate::modules::Modules;
use crate::safetensors::Weights;
use crate::source::Source;
use crate::tensors::Tensors;
use crate::tokenizer;

/// What a user may choose.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The file type; None for the type of the first matrix in 16 bits, or else F16.
    pub kind: Option<FileType>,
    /// The name of the pre-tokenizer, for a tokenizer that is not recognised.
    pub pre: Option<String>,
}

/// A model that can be written as a GGUF.
pub struct Model {
    weights: Weights,
    tensors: Tensors,
    metadata: Metadata,
    choices: Vec<Choice>,
    kind: FileType,
    /// The error of a read, which an I/O error cannot hold.
    failed: RefCell<Option<Error>>,
}

impl Model {
    /// Reads a folder, a wheel or a zip file, all but the weights.
    ///
    /// # Errors
    /// If a file is missing, damaged or of another kind of model.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Model> {
        let source = Source::open(path.as_ref())?;
        let weights = Weights::open(&source)?;
        let mut config = read_config(&source)?;
        let family = family::find(&mut config)?;
        let kind = match options.kind {
            Some(kind) => kind,
            None => FileType::from_name(found_type(&weights))?,
        };
        let tensors = Tensors::plan(family, &config, &weights)?;
        let mut metadata = Metadata::new();
        general::write(&source, &config, family.architecture, &tensors.all, &mut metadata)?;
        card::write(&source, &mut metadata)?;
        let modules = Modules::read(&source)?;
        family.write_keys(&config, kind.id, modules.pooling, &mut metadata)?;
        modules.write_prompts(&mut metadata);
        metadata.insert("general.quantization_version", Value::U32(quantize::BLOCKS_VERSION));
        let embeddings = tensors.all.iter().find(|tensor| tensor.name == "token_embd.weight");
        let (rows, pre) =
            (embeddings.map_or(0, |tensor| tensor.rows() as u64), options.pre.as_deref());
        tokenizer::write(&source, &config, family, rows, pre, &mut metadata)?;
        let failed = RefCell::new(None);
        let mut model = Model { weights, tensors, metadata, choices: Vec::new(), kind, failed };
        model.choices = model.choose()?;
        model.check(&path.as_ref().display().to_string())?;
        Ok(model)
    }

    /// Whether the new file has every tensor that its metadata promise, each of its shape.
    fn check(&self, item: &str) -> Result<()> {
        let tensor = |choice: &Choice| {
            let (format, bytes) = (choice.format, choice.bytes());
            Tensor { format, bytes, ..choice.tensor.clone() }
        };
        let tensors: Vec<Tensor> = self.choices.iter().map(tensor).collect();
        match bodkin_model::plan(&self.metadata, &tensors) {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(Error::Plan { item: bodkin_gguf::printable(item), reason: error.to_string() })
            }
        }
    }

    /// The file type.
    pub fn kind(&self) -> FileType {
        self.kind
    }

    /// The metadata of the new file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors as the source has them, with their formats in the new file.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// The size of the source's tensors, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.all.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Writes the file on this many threads. Calls `done` with the number of source bytes processed
    /// since its last call.
    ///
    /// # Errors
    /// If a tensor cannot be read, or holds NaN or infinities; if the file cannot be written.
    pub fn write(&self, threads: usize, done: &dyn Fn(u64), out: &mut dyn Write) -> Result<()> {
        let (choices, importance) = (self.choices.as_slice(), None);
        let conversion = Conversion { choices, importance, threads, allows_nan: false };
        let written = conversion.write(self, &self.metadata, done, out);
        match self.failed.take() {
            Some(error) => Err(error),
            None => Ok(written?),
        }
    }

    /// Chooses a format for every tensor. File types that quantise follow `quantize`; what is never
    /// quantised is in F32.
    fn choose(&self) -> Result<Vec<Choice>> {
        let options = quantize::Options {
            kind: Some(self.kind),
            pure: false,
            overrides: Vec::new(),
            has_imatrix: false,
        };
        let mut choices = quantize::choose(self, &options)?;
        for choice in choices.iter_mut().filter(|choice| is_precise(&choice.tensor)) {
            (choice.format, choice.instead_of) = (Format::F32, None);
        }
        Ok(choices)
    }
}

impl bodkin_compress::Source for Model {
    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn tensors(&self) -> &[Tensor] {
        &self.tensors.all
    }

    fn read(&self, tensor: &Tensor) -> io::Result<Cow<'_, [u8]>> {
        let bytes = self.tensors.read(tensor, &self.weights);
        bytes.map(Cow::Owned).map_err(|error| {
            let shown = error.to_string();
            self.failed.replace(Some(error));
            io::Error::other(shown)
        })
    }

    fn release(&self, _: &Tensor) {}
}

/// Whether a tensor is small or sensitive, so that llama.cpp has it in F32.
fn is_precise(tensor: &Tensor) -> bool {
    let name = &tensor.name;
    let parts = ["ffn_gate_inp.", "position_embd.", "token_types.", "ssm_conv1d."];
    tensor.shape.len() == 1
        || !name.ends_with(".weight")
        || name.ends_with("_norm.weight")
        || parts.iter().any(|part| name.contains(part))
}

/// The type of the first matrix in 16 bits.
fn found_type(weights: &Weights) -> &'static str {
    let matrices = weights.tensors.iter().filter(|tensor| tensor.shape.len() >= 2);
    let short = matrices.filter_map(|tensor| tensor.format.filter(|it| *it != Format::F32)).next();
    match short {
        Some(Format::BF16) => "BF16",
        _ => "F16",
    }
}

/// The longest `config.json`; those of real models have some kilobytes.
const CONFIG_BYTES_MAX: usize = 4_000_000;

/// Reads `config.json`, which Python may have written with numbers that JSON does not have.
fn read_config(source: &Source) -> Result<Config> {
    let name = "config.json";
    let shown = source.shown(name);
    let text = source.text(name)?;
    let text =
        text.ok_or_else(|| Error::invalid(&shown, "the model's configuration", "no file"))?;
    if text.len() > CONFIG_BYTES_MAX {
        let expected = format!("at most {CONFIG_BYTES_MAX} bytes");
        return Err(Error::invalid(&shown, expected, text.len().to_string()));
    }
    let mut value: serde_json::Result<Json> = serde_json::from_str(&text);
    if value.is_err() {
        let mut plain = String::new();
        for (index, part) in text.split('"').enumerate() {
            let quote = if index == 0 { "" } else { "\"" };
            let outside = index % 2 == 0;
            let numbers = ["-Infinity", "Infinity", "NaN"];
            let replace = |part: String, number| part.replace(number, "null");
            let part = match outside {
                true => numbers.into_iter().fold(part.to_owned(), replace),
                false => part.to_owned(),
            };
            plain.extend([quote, &part]);
        }
        value = serde_json::from_str(&plain);
    }
    let value = value.map_err(|error| Error::invalid(&shown, "JSON", error.to_string()))?;
    Config::new(shown, value)
}
