//! The families of models: how the class in `config.json` names an architecture, and how tensor
//! names, keys and layouts become those of GGUF. It must not read files.

mod decoder;
mod definition;
mod encoder;
mod keys;
mod mamba2;

use crate::config::Config;
use crate::error::Result;
pub(crate) use decoder::rope_divisors;
pub(crate) use definition::{Family, Vocabulary};

static FAMILIES: &[Family] = &[
    decoder::LLAMA,
    decoder::QWEN2,
    decoder::QWEN3,
    decoder::QWEN3_MOE,
    decoder::GEMMA3,
    encoder::BERT,
    encoder::ROBERTA,
    encoder::NOMIC_BERT,
    mamba2::MAMBA2,
];

/// The family of a configuration, which is completed.
pub(crate) fn find(config: &mut Config) -> Result<&'static Family> {
    let class = config.class()?;
    let Some(family) = FAMILIES.iter().find(|family| family.classes.contains(&class)) else {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.classes).copied().collect();
        let expected = format!("one of {}", known.join(", "));
        return Err(config.invalid("architectures", &expected, class));
    };
    (family.complete)(config)?;
    Ok(family)
}
