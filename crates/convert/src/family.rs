//! The families of models: how the class in `config.json` names an architecture, and how tensor
//! names, keys and layouts become those of GGUF. It must not read files.

mod decoder;
mod encoder;
mod keys;
mod mamba2;

use bodkin_gguf::Metadata;

use crate::config::Config;
use crate::error::Result;
use crate::tensors::Change;
pub(crate) use decoder::rope_divisors;
use keys::Keys;

/// Pairs of the name of a module and its name in GGUF, without `.weight` and `.bias`.
type Names = &'static [(&'static str, &'static str)];

/// One family.
pub(crate) struct Family {
    /// Values of `architectures` in `config.json`.
    classes: &'static [&'static str],
    /// The value of `general.architecture`.
    pub(crate) architecture: &'static str,
    /// What comes before the number of a layer.
    layers: &'static str,
    /// Modules outside of layers.
    globals: Names,
    /// Modules of a layer.
    blocks: Names,
    /// Fills in what a configuration may leave out.
    complete: fn(&mut Config) -> Result<()>,
    /// Writes the architecture's keys; those before and those behind the file type.
    keys: fn(&Config, &mut Keys<'_>) -> Result<()>,
    /// How the data of a tensor change; its name is GGUF's, its shape has rows first.
    change: fn(&Config, &str, &[u64]) -> Result<Change>,
    pub(crate) vocabulary: Vocabulary,
}

/// Where a family has its vocabulary from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// `tokenizer.model`, or else BPE of `tokenizer.json`.
    Decoder,
    /// As `Decoder`, for BPE on characters also without `tokenizer.model`.
    Llama,
    /// `tokenizer.model`, whose first token gets no space before it.
    Gemma,
    /// WordPiece or Unigram of `tokenizer.json`.
    Encoder,
    /// BPE for a matrix of embeddings that is padded to a multiple of this many rows.
    Padded(u32),
}

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

/// Names of tensors that are no weights, or that no architecture here uses.
const SKIPPED: [&str; 12] = [
    "rotary_emb.inv_freq",
    ".attention.masked_bias",
    ".attention.bias",
    "embeddings.position_ids",
    "pooler.dense.",
    "cls.predictions.",
    "cls.seq_relationship.",
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "lm_head.decoder.",
];

impl Family {
    /// The family of a configuration, which is completed.
    pub(crate) fn of(config: &mut Config) -> Result<&'static Family> {
        let class = config.class()?;
        let Some(family) = FAMILIES.iter().find(|family| family.classes.contains(&class)) else {
            let known: Vec<&str> =
                FAMILIES.iter().flat_map(|family| family.classes).copied().collect();
            let expected = format!("one of {}", known.join(", "));
            return Err(config.invalid("architectures", &expected, class));
        };
        (family.complete)(config)?;
        Ok(family)
    }

    /// Writes the keys of the architecture and the file type.
    pub(crate) fn write_keys(
        &self,
        config: &Config,
        file_type: u32,
        pooling: Option<u32>,
        metadata: &mut Metadata,
    ) -> Result<()> {
        let mut keys = Keys { architecture: self.architecture, file_type, pooling, metadata };
        (self.keys)(config, &mut keys)
    }

    /// The name in GGUF of a tensor; None for one that is left out, an error's text for one that is
    /// unknown.
    pub(crate) fn rename(&self, name: &str) -> Result<Option<String>, String> {
        if SKIPPED.iter().any(|part| name.contains(part)) {
            return Ok(None);
        }
        let mut name = name.replace("language_model.", "");
        for prefix in ["model.", "bert.", "roberta."] {
            name = name.strip_prefix(prefix).unwrap_or(&name).to_owned();
        }
        for (old, new) in [(".gamma", ".weight"), (".beta", ".bias"), (".dt_bias", ".dt_proj.bias")]
        {
            if let Some(stem) = name.strip_suffix(old) {
                name = format!("{stem}{new}");
            }
        }
        let (stem, suffix) = match name.rsplit_once('.') {
            Some((stem, "weight")) => (stem, ".weight"),
            Some((stem, "bias")) => (stem, ".bias"),
            _ => (name.as_str(), ""),
        };
        let find = |names: Names, stem: &str| {
            names.iter().find(|(from, _)| *from == stem).map(|(_, to)| *to)
        };
        let renamed = match stem.strip_prefix(self.layers).and_then(|rest| rest.split_once('.')) {
            Some((layer, stem)) if layer.parse::<u32>().is_ok() => {
                find(self.blocks, stem).map(|to| format!("blk.{layer}.{to}{suffix}"))
            }
            _ => find(self.globals, stem).map(|to| format!("{to}{suffix}")),
        };
        let known = || format!("a tensor of {}", self.architecture);
        renamed.map(Some).ok_or_else(known)
    }

    /// How the data of a tensor change.
    pub(crate) fn change(&self, config: &Config, name: &str, shape: &[u64]) -> Result<Change> {
        (self.change)(config, name, shape)
    }
}

fn unchanged(_: &Config, _: &str, _: &[u64]) -> Result<Change> {
    Ok(Change::None)
}
