//! What comes with a model beside its weights, and what it recommends for requests: sampling
//! parameters, stop strings and a system prompt. Ollama keeps these in layers; known names have
//! them too.

use std::io::Read;
use std::path::PathBuf;

use bodkin_engine::SamplerOptions;
use serde::{Deserialize, Serialize};

use super::intake::open_stored;
use crate::error::{Error, Result};

/// The kinds of layer that are used. The template serves people only: the file's own chat template
/// is rendered.
pub(super) const USED: [&str; 4] = ["params", "system", "template", "license"];

/// Larger layers are not read.
const LAYER_BYTES_MAX: u64 = 1 << 20;

/// A layer beside the model: `template`, `system`, `params`, `license` and so on.
#[derive(Clone, Debug, Serialize)]
pub struct Layer {
    /// The last word of its media type.
    pub kind: String,
    /// Its file.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
}

impl Layer {
    /// The text of the layer.
    ///
    /// # Errors
    /// If it cannot be read, is too large or not UTF-8.
    pub fn text(&self) -> Result<String> {
        let shown = self.path.display().to_string();
        let file = open_stored(&self.path)?;
        let mut text = String::new();
        match file.take(LAYER_BYTES_MAX + 1).read_to_string(&mut text) {
            Ok(bytes) if bytes as u64 <= LAYER_BYTES_MAX => Ok(text),
            Ok(_) => {
                Err(Error::mismatch(shown, format!("at most {LAYER_BYTES_MAX} bytes"), "more"))
            }
            Err(error) => Err(Error::io(shown)(error)),
        }
    }
}

/// What a model's maker or packager recommends for requests. The names of the fields are those of
/// Ollama's parameters; other parameters are about Ollama itself.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Recommendation {
    pub(crate) temperature: Option<f32>,
    /// Below 1 is all tokens.
    pub(crate) top_k: Option<i64>,
    pub(crate) top_p: Option<f32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) typical_p: Option<f32>,
    pub(crate) repeat_last_n: Option<i32>,
    pub(crate) repeat_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    #[serde(skip)]
    pub(crate) system: Option<String>,
}

impl Recommendation {
    /// Reads the layers `params` and `system`.
    pub(crate) fn read(layers: &[Layer]) -> Result<Recommendation> {
        let find = |kind: &str| layers.iter().find(|layer| layer.kind == kind);
        let mut found = Recommendation::default();
        if let Some(params) = find("params") {
            let wrong =
                |error| Error::mismatch(params.path.display(), "Ollama's parameters", error);
            found = serde_json::from_str(&params.text()?).map_err(wrong)?;
        }
        found.system = find("system").map(Layer::text).transpose()?;
        found.system = found.system.filter(|text| !text.is_empty());
        Ok(found)
    }

    /// Overrides `options` where it recommends a value.
    pub(crate) fn apply(&self, options: &mut SamplerOptions) {
        for (value, option) in [
            (self.temperature, &mut options.temperature),
            (self.top_p, &mut options.top_p),
            (self.min_p, &mut options.min_p),
            (self.typical_p, &mut options.typical_p),
            (self.repeat_penalty, &mut options.repeat_penalty),
            (self.presence_penalty, &mut options.presence_penalty),
            (self.frequency_penalty, &mut options.frequency_penalty),
        ] {
            *option = value.unwrap_or(*option);
        }
        options.top_k = self.top_k.map_or(options.top_k, |k| u32::try_from(k).unwrap_or(0));
        options.repeat_last_n = self.repeat_last_n.unwrap_or(options.repeat_last_n);
        options.seed = self.seed.or(options.seed);
    }
}
