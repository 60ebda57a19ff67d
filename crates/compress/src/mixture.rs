//! Chooses the format of each tensor. A file type such as `Q4_K_M` is a mixture: most matrices have
//! one format, and the most sensitive ones a more precise one. The rules are llama.cpp's, so that a
//! name means the same in both. It must not know how blocks are quantised.

use bodkin_gguf::{Format, Tensor};

use crate::error::{Error, Result};
use crate::source::Source;

/// A file type that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileType {
    /// Its name, such as `Q4_K_M`.
    pub name: &'static str,
    /// Its id in `general.file_type`.
    pub id: u32,
    /// The format of a matrix without a rule of its own.
    pub format: Format,
    mix: Mix,
}

/// The rules of a file type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    /// Every matrix in the one format.
    None,
    /// Only the output matrix is larger.
    Output,
    /// The 4-bit and 5-bit legacy formats: with an offset where that is known to help.
    Legacy,
    Q2K,
    Q2KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KM,
    Iq4,
    ExpertsOnly,
}

/// All file types that can be written.
pub const FILE_TYPES: &[FileType] = &[
    file_type("F32", 0, Format::F32, Mix::None),
    file_type("F16", 1, Format::F16, Mix::None),
    file_type("BF16", 32, Format::BF16, Mix::None),
    file_type("Q8_0", 7, Format::Q8_0, Mix::Output),
    file_type("Q4_0", 2, Format::Q4_0, Mix::Legacy),
    file_type("Q4_1", 3, Format::Q4_1, Mix::Output),
    file_type("Q5_0", 8, Format::Q5_0, Mix::Legacy),
    file_type("Q5_1", 9, Format::Q5_1, Mix::Output),
    file_type("Q2_K", 10, Format::Q2_K, Mix::Q2K),
    file_type("Q2_K_S", 21, Format::Q2_K, Mix::Q2KS),
    file_type("Q3_K_S", 11, Format::Q3_K, Mix::Output),
    file_type("Q3_K_M", 12, Format::Q3_K, Mix::Q3KM),
    file_type("Q3_K_L", 13, Format::Q3_K, Mix::Q3KL),
    file_type("Q4_K_S", 14, Format::Q4_K, Mix::Q4KS),
    file_type("Q4_K_M", 15, Format::Q4_K, Mix::Q4KM),
    file_type("Q5_K_S", 16, Format::Q5_K, Mix::Output),
    file_type("Q5_K_M", 17, Format::Q5_K, Mix::Q5KM),
    file_type("Q6_K", 18, Format::Q6_K, Mix::Output),
    file_type("IQ4_NL", 25, Format::IQ4_NL, Mix::Iq4),
    file_type("IQ4_XS", 30, Format::IQ4_XS, Mix::Iq4),
    file_type("MXFP4", 38, Format::MXFP4, Mix::Output),
    file_type("MXFP4_MOE", 38, Format::MXFP4, Mix::ExpertsOnly),
];

const fn file_type(name: &'static str, id: u32, format: Format, mix: Mix) -> FileType {
    FileType { name, id, format, mix }
}

impl FileType {
    /// The file type of a name; case does not matter. `Q3_K`, `Q4_K` and `Q5_K` mean their
    /// mixtures of medium size.
    pub fn from_name(name: &str) -> Result<FileType> {
        let full = match name.to_ascii_uppercase().as_str() {
            short @ ("Q3_K" | "Q4_K" | "Q5_K") => format!("{short}_M"),
            full => full.to_string(),
        };
        FILE_TYPES.iter().copied().find(|known| known.name == full).ok_or_else(|| {
            let known: Vec<&str> = FILE_TYPES.iter().map(|known| known.name).collect();
            Error::invalid("TYPE", format!("one of {}", known.join(", ")), format!("`{name}`"))
        })
    }
}

/// The properties of a model that the rules need.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    falcon: bool,
    layers: usize,
    experts: usize,
    /// Query heads per KV head.
    sharing: usize,
    /// The output matrix is tied to the embeddings.
    tied: bool,
    /// Names of the value projections, in order of their layers.
    values: Vec<String>,
    /// Names of the down projections, in order of their layers.
    downs: Vec<String>,
    has_imatrix: bool,
}

impl Facts {
    /// Reads what the metadata and the tensors say.
    pub(crate) fn of(source: &dyn Source, has_imatrix: bool) -> Result<Facts> {
        let metadata = source.metadata();
        let architecture = metadata.architecture()?;
        let first = |key: &str| -> Result<usize> {
            let values = metadata.u32s(&format!("{architecture}.{key}"))?;
            Ok(values.and_then(|values| values.first().copied()).unwrap_or(0) as usize)
        };
        let heads = first("attention.head_count")?;
        let kv_heads = match first("attention.head_count_kv")? {
            0 => heads,
            some => some,
        };
        let named = |wanted: &dyn Fn(Role) -> bool| -> Vec<String> {
            let names = source.tensors().iter().map(|tensor| tensor.name.clone());
            let mut names: Vec<String> = names.filter(|name| wanted(Role::of(name))).collect();
            names.sort_by_key(|name| layer_of(name));
            names
        };
        Ok(Facts {
            falcon: architecture == "falcon",
            layers: first("block_count")?,
            experts: first("expert_count")?,
            sharing: heads.checked_div(kv_heads).unwrap_or(0),
            tied: source.tensors().iter().all(|tensor| tensor.name != "output.weight"),
            values: named(&Role::has_values),
            downs: named(&|role| role == Role::Down),
            has_imatrix,
        })
    }

    /// The index of the matrix among those of all layers.
    fn layer(&self, name: &str, among: &[String]) -> usize {
        if self.experts > 1 {
            // Layers may have several, for shared experts and others.
            return layer_of(name).unwrap_or(0);
        }
        among.iter().position(|other| other == name).unwrap_or(0)
    }
}

/// The number in `blk.3.attn_q.weight`.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The role of a matrix in the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Embedding,
    Output,
    /// The fused QKV projection.
    FusedQkv,
    /// The up-projection of keys and values in multi-head latent attention.
    Latent,
    Value,
    Key,
    AttentionOutput,
    Down,
    Other,
}

impl Role {
    fn of(name: &str) -> Role {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => Role::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Role::Embedding,
            _ if has("attn_qkv.weight") => Role::FusedQkv,
            _ if has("attn_kv_b.weight") => Role::Latent,
            _ if has("attn_v.weight") => Role::Value,
            _ if has("attn_k.weight") => Role::Key,
            _ if has("attn_output.weight") => Role::AttentionOutput,
            _ if has("ffn_down") => Role::Down,
            _ => Role::Other,
        }
    }

    fn has_values(self) -> bool {
        matches!(self, Role::Value | Role::FusedQkv | Role::Latent)
    }
}

/// Name parts of small matrices that are not quantised: routers, convolutions, position embeddings,
/// mixing weights of recurrent layers.
const NOT_QUANTIZED: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp",
    "ffn_gate_tid2eid",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv.conv",
    "indexer.k_proj",
    "indexer.q_proj",
    "time_mix_",
    "attn_rel_b",
    ".rel_pos",
    ".patch_embd",
];

/// Whether a tensor is a matrix that may be quantised: tables of integers may not.
pub(crate) fn is_quantized(tensor: &Tensor) -> bool {
    if matches!(tensor.format, Format::I8 | Format::I16 | Format::I32 | Format::I64) {
        return false;
    }
    let matrix = tensor.shape.iter().skip(1).any(|&rows| rows > 1);
    let excluded = NOT_QUANTIZED.iter().any(|part| tensor.name.contains(part));
    matrix && tensor.name.ends_with("weight") && !excluded
}

/// The format that a file type gives to a matrix.
pub(crate) fn format_for(kind: FileType, tensor: &Tensor, facts: &Facts) -> Format {
    if kind.mix == Mix::None {
        return kind.format;
    }
    let role = Role::of(&tensor.name);
    if role == Role::Output || (facts.tied && role == Role::Embedding) {
        return output_format(kind, tensor, facts);
    }
    if kind.mix == Mix::ExpertsOnly {
        let stacked = tensor.shape.get(2).is_some_and(|&experts| experts > 1);
        return if stacked { kind.format } else { Format::Q8_0 };
    }
    let larger = match role {
        role if role.has_values() => value_format(kind.mix, tensor, role, facts),
        Role::Key if facts.experts == 8 => Some(Format::Q8_0),
        Role::Down => down_format(kind, tensor, facts),
        Role::AttentionOutput => attention_output_format(kind, facts),
        _ => None,
    };
    larger.unwrap_or(kind.format)
}

/// The output matrix is the most sensitive to quantisation.
fn output_format(kind: FileType, tensor: &Tensor, facts: &Facts) -> Format {
    let whole = tensor.cols().is_multiple_of(kind.format.block_elements());
    match kind.format {
        Format::Q8_0 => Format::Q8_0,
        _ if facts.falcon || !whole || kind.mix == Mix::ExpertsOnly => Format::Q8_0,
        _ => Format::Q6_K,
    }
}

/// Whether a layer gets more bits: those at both ends, and every third between them.
fn use_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

fn value_format(mix: Mix, tensor: &Tensor, role: Role, facts: &Facts) -> Option<Format> {
    if facts.experts == 8 {
        // These are small beside eight experts.
        return Some(Format::Q8_0);
    }
    let rank = facts.values.iter().position(|name| *name == tensor.name).unwrap_or(0);
    let shared = facts.sharing >= 4;
    let format = match mix {
        Mix::Q2K if shared => Some(Format::Q4_K),
        Mix::Q2K => Some(Format::Q3_K),
        Mix::Q2KS if shared => Some(Format::Q4_K),
        Mix::Q3KM if rank < 2 => Some(Format::Q5_K),
        Mix::Q3KM => Some(Format::Q4_K),
        Mix::Q3KL => Some(Format::Q5_K),
        Mix::Iq4 if shared => Some(Format::Q5_K),
        Mix::Q4KM | Mix::Q5KM if use_more_bits(rank, facts.values.len()) => Some(Format::Q6_K),
        Mix::Q4KS if rank < 4 => Some(Format::Q5_K),
        _ => None,
    };
    // With 80 layers, many heads share these matrices: they are small and matter more.
    let small = facts.layers == 80 && facts.sharing == 8 && role == Role::Value;
    match format {
        Some(Format::Q3_K | Format::Q4_K) if small => Some(Format::Q5_K),
        None if small && matches!(mix, Mix::Q4KM | Mix::Q4KS) => Some(Format::Q5_K),
        other => other,
    }
}

fn down_format(kind: FileType, tensor: &Tensor, facts: &Facts) -> Option<Format> {
    let layers = facts.layers;
    let layer = facts.layer(&tensor.name, &facts.downs);
    let (eighth, sixteenth) = (layer < layers / 8, layer < layers / 16);
    match kind.mix {
        Mix::Q2K => Some(Format::Q3_K),
        Mix::Q2KS if eighth => Some(Format::Q4_K),
        Mix::Q3KM if sixteenth => Some(Format::Q5_K),
        Mix::Q3KM if !facts.falcon || use_more_bits(layer, layers) => Some(Format::Q4_K),
        Mix::Q3KL if facts.falcon => Some(Format::Q4_K),
        Mix::Q3KL => Some(Format::Q5_K),
        Mix::Q4KM if facts.falcon && sixteenth => Some(Format::Q6_K),
        Mix::Q4KM if facts.falcon && use_more_bits(layer, layers) => Some(Format::Q5_K),
        Mix::Q4KM if facts.falcon => None,
        Mix::Q4KM | Mix::Q5KM if use_more_bits(layer, layers) => Some(Format::Q6_K),
        Mix::Q4KS if !facts.falcon && eighth => Some(Format::Q5_K),
        Mix::Iq4 if eighth && !facts.has_imatrix => Some(Format::Q5_K),
        Mix::Legacy if eighth && facts.has_imatrix && kind.format == Format::Q4_0 => {
            Some(Format::Q4_1)
        }
        Mix::Legacy if eighth && facts.has_imatrix => Some(Format::Q5_1),
        _ => None,
    }
}

fn attention_output_format(kind: FileType, facts: &Facts) -> Option<Format> {
    if facts.falcon {
        return (kind.mix == Mix::Q3KL).then_some(Format::Q4_K);
    }
    if facts.experts == 8 {
        let small = ["Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"];
        return small.contains(&kind.name).then_some(Format::Q5_K);
    }
    match kind.mix {
        Mix::Q2K => Some(Format::Q3_K),
        Mix::Q3KM => Some(Format::Q4_K),
        Mix::Q3KL => Some(Format::Q5_K),
        _ => None,
    }
}

/// The fallback for rows that are not a whole number of blocks: a format of similar precision in
/// blocks of 32, or F16.
pub(crate) fn fallback(format: Format, cols: usize) -> Format {
    let smaller = match format {
        Format::IQ4_XS => Format::IQ4_NL,
        Format::Q2_K | Format::Q3_K => Format::Q4_0,
        Format::Q4_K => Format::Q5_0,
        Format::Q5_K => Format::Q5_1,
        Format::Q6_K => Format::Q8_0,
        _ => Format::F16,
    };
    if cols.is_multiple_of(smaller.block_elements()) { smaller } else { Format::F16 }
}
