//! What a family is, and how it renames tensors. It must not know any family.

use bodkin_gguf::Metadata;

use super::keys::Keys;
use crate::change::Change;
use crate::config::Config;
use crate::error::Result;

/// Pairs of the name of a module and its name in GGUF, without `.weight` and `.bias`.
pub(super) type Names = &'static [(&'static str, &'static str)];

/// One family.
pub(crate) struct Family {
    /// Values of `architectures` in `config.json`.
    pub(super) classes: &'static [&'static str],
    /// The value of `general.architecture`.
    pub(crate) architecture: &'static str,
    /// What comes before the number of a layer.
    pub(super) layers: &'static str,
    /// Modules outside of layers.
    pub(super) globals: Names,
    /// Modules of a layer.
    pub(super) blocks: Names,
    /// Fills in what a configuration may leave out.
    pub(super) complete: fn(&mut Config) -> Result<()>,
    /// Writes the architecture's keys; those before and those behind the file type.
    pub(super) keys: fn(&Config, &mut Keys<'_>) -> Result<()>,
    /// How the data of a tensor change; its name is GGUF's, its shape has rows first.
    pub(super) change: fn(&Config, &str, &[u64]) -> Result<Change>,
    pub(crate) vocabulary: Vocabulary,
}

/// Where a family has its vocabulary from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// `tokenizer.model`, or else BPE of `tokenizer.json`.
    Decoder,
    /// As `Decoder`, for BPE on characters also without `tokenizer.model`.
    Llama,
    /// As `Decoder`; the first token gets no space before it.
    Gemma,
    /// WordPiece or Unigram of `tokenizer.json`.
    Encoder,
    /// BPE for a matrix of embeddings that is padded to a multiple of this many rows.
    Padded(u32),
}

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

pub(super) fn unchanged(_: &Config, _: &str, _: &[u64]) -> Result<Change> {
    Ok(Change::None)
}
