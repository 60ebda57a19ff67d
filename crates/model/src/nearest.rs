//! What a file of an unknown architecture has in common with the known ones, so that a user can
//! report what is missing.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use bodkin_gguf::{Metadata, Tensor};

use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;

/// Writes a plan with a builder.
pub(crate) type Build = fn(&HyperParameters<'_>, &mut Builder<'_>) -> Result<Value>;

/// Keys that no architecture needs, as the tensors say the same.
const IMPLIED: [&str; 6] = [
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "vocab_size",
];
/// Keys of files of any architecture begin so.
const COMMON: [&str; 5] = ["bodkin.", "general.", "quantize.", "split.", "tokenizer."];
/// Architectures that are the same decoder with other settings, which a file does not tell, and
/// what their own files have of the parts that the decoder takes if they are there.
const USUAL: [(&str, &[&str]); 25] = [
    ("apertus", &[Q_NORM]),
    ("bailingmoe2", &[FUSED, Q_NORM, EXPERTS, SHARED, EXPERT_BIAS]),
    ("dots1", &[Q_NORM, EXPERTS, SHARED, EXPERT_BIAS]),
    ("ernie4_5", &[]),
    ("ernie4_5-moe", &[EXPERTS, SHARED, EXPERT_BIAS]),
    ("exaone-moe", &[Q_NORM, EXPERTS, SHARED, EXPERT_BIAS]),
    ("gemma", &[]),
    ("hunyuan-dense", &[Q_NORM]),
    ("hunyuan-moe", &[Q_NORM, EXPERTS, SHARED]),
    ("hy_v3", &[Q_NORM, EXPERTS, SHARED, EXPERT_BIAS]),
    ("llama", &[]),
    ("llama4", &[EXPERTS, SHARED]),
    ("mellum", &[Q_NORM, EXPERTS]),
    ("minimax-m2", &[Q_NORM, EXPERTS, EXPERT_BIAS]),
    ("mistral3", &[]),
    ("olmoe", &[Q_NORM, EXPERTS]),
    ("phi3", &[FUSED]),
    ("qwen2", &[Q_BIAS]),
    ("qwen2moe", &[Q_BIAS, EXPERTS, SHARED, SHARED_GATE]),
    ("qwen2vl", &[Q_BIAS, SECTIONS]),
    ("qwen3", &[Q_NORM]),
    ("qwen3moe", &[Q_NORM, EXPERTS]),
    ("qwen3vl", &[Q_NORM, SECTIONS]),
    ("qwen3vlmoe", &[Q_NORM, EXPERTS, SECTIONS]),
    ("smollm3", &[]),
];

const EXPERT_BIAS: &str = "blk.*.exp_probs_b.bias";
const EXPERTS: &str = "blk.*.ffn_gate_inp.weight";
const FUSED: &str = "blk.*.attn_qkv.weight";
const Q_BIAS: &str = "blk.*.attn_q.bias";
const Q_NORM: &str = "blk.*.attn_q_norm.weight";
const SECTIONS: &str = "rope.dimension_sections";
const SHARED: &str = "blk.*.ffn_up_shexp.weight";
const SHARED_GATE: &str = "blk.*.ffn_gate_inp_shexp.weight";
/// The parts by which files of these architectures differ.
const FEATURES: [&str; 8] =
    [EXPERT_BIAS, EXPERTS, FUSED, Q_BIAS, Q_NORM, SECTIONS, SHARED, SHARED_GATE];

/// Names in a list, at most.
const LISTED: usize = 6;
/// Architectures that are named, at most.
const NEAREST: usize = 5;
/// Characters of a name from the file, at most.
const NAME_CHARS: usize = 48;

/// What an architecture makes of the file.
struct Attempt {
    name: &'static str,
    /// How many tensors it reads, those of all blocks counted once.
    tensors: usize,
    /// The tensors that it does not read, without the number of their block.
    unread_tensors: BTreeSet<String>,
    /// The keys that it does not read, without the architecture's prefix.
    unread_keys: BTreeSet<String>,
    /// How many tensors and keys it asks for that the file has not.
    absent: usize,
    /// Why there is no plan.
    problem: Option<String>,
}

impl Attempt {
    /// What an architecture must not be worse in than another to be named beside it.
    fn gaps(&self) -> (usize, bool, usize) {
        (self.unread_tensors.len(), self.problem.is_some(), self.unread_keys.len())
    }

    /// What orders those that read the same: how far a file is from their own ones, then what
    /// they ask for in vain.
    fn order(&self, found: &str, features: &[&str]) -> (usize, usize, Reverse<usize>, bool) {
        let usual = USUAL.iter().find(|(name, _)| *name == self.name);
        let is_unlike = |feature: &&&str| {
            usual.is_none_or(|(_, usual)| usual.contains(feature) != features.contains(feature))
        };
        let unlike = FEATURES.iter().filter(is_unlike).count();
        let same = self.name.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
        // Names of one family begin alike.
        let family = if same >= 3 { same } else { 0 };
        (unlike, self.absent, Reverse(family), self.name != "llama")
    }

    /// What it does not read: `reads all its tensors and keys`.
    fn reads(&self, is_one: bool) -> String {
        let unread = [list("tensors", &self.unread_tensors), list("keys", &self.unread_keys)];
        let unread: Vec<String> = unread.into_iter().flatten().collect();
        let mut text = match (unread.is_empty(), is_one) {
            (true, true) => "reads all its tensors and keys".to_owned(),
            (true, false) => "read all its tensors and keys".to_owned(),
            (false, true) => format!("does not read {}", unread.join(" and ")),
            (false, false) => format!("do not read {}", unread.join(" and ")),
        };
        if let Some(problem) = &self.problem {
            text += &format!(", and for which {problem}");
        }
        text
    }
}

/// The known architectures that leave the least of a file unread, and what they do not read.
pub(crate) fn describe(
    metadata: &Metadata,
    tensors: &[Tensor],
    known: &[(&'static str, Build)],
) -> Result<String> {
    let found = metadata.architecture()?;
    // A file that lacks what all architectures need has no nearest one.
    let attempts = known.iter().filter_map(|&known| attempt(metadata, tensors, known).ok());
    let mut attempts: Vec<Attempt> = attempts.filter(|attempt| attempt.tensors > 1).collect();
    let Some(gaps) = attempts.iter().map(Attempt::gaps).min() else {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        return Ok(format!("known: {}", names.join(", ")));
    };
    attempts.retain(|attempt| attempt.gaps() == gaps);
    let features = features(metadata, tensors, found);
    attempts.sort_by_key(|attempt| attempt.order(found, &features));
    // Only those of which the same is true.
    let unread = attempts[0].reads(false);
    attempts.retain(|attempt| attempt.reads(false) == unread);
    attempts.truncate(NEAREST);
    let names: Vec<&str> = attempts.iter().map(|attempt| attempt.name).collect();
    let (last, others) = names.split_last().expect("the first is like itself");
    Ok(match others {
        [] => format!("the nearest known one is {last}, which {}", attempts[0].reads(true)),
        _ => format!("the nearest known ones are {} and {last}, which {unread}", others.join(", ")),
    })
}

/// What the file has of those that tell architectures apart.
fn features(metadata: &Metadata, tensors: &[Tensor], found: &str) -> Vec<&'static str> {
    let roles: BTreeSet<String> = tensors.iter().map(|tensor| role(&tensor.name)).collect();
    let is_there = |feature: &&str| {
        roles.contains(*feature) || metadata.get(&format!("{found}.{feature}")).is_some()
    };
    FEATURES.into_iter().filter(is_there).collect()
}

fn attempt(
    metadata: &Metadata,
    tensors: &[Tensor],
    (name, build): (&'static str, Build),
) -> Result<Attempt> {
    let keys = HyperParameters::new(metadata)?.read_as(name);
    let mut builder = Builder::new(&keys, tensors)?;
    let problem = build(&keys, &mut builder).err().map(|error| error.to_string());
    let read: BTreeSet<String> = builder.weights().map(role).collect();
    let roles = tensors.iter().map(|tensor| role(&tensor.name));
    let unread_tensors = roles.filter(|role| !read.contains(role)).collect();
    let prefix = format!("{}.", metadata.architecture()?);
    let read_keys = keys.read();
    let of_model = |key: &str| !COMMON.iter().any(|common| key.starts_with(common));
    let of_file = metadata.iter().filter(|(key, _)| of_model(key));
    let of_file = of_file.map(|(key, _)| key.strip_prefix(&prefix).unwrap_or(key));
    let is_unread = |key: &&str| !read_keys.contains(*key) && !IMPLIED.contains(key);
    let unread_keys = of_file.filter(is_unread).map(str::to_owned).collect();
    let absent = builder.absent() + keys.absent();
    Ok(Attempt { name, tensors: read.len(), unread_tensors, unread_keys, absent, problem })
}

/// A tensor's name without the number of its block: `blk.*.attn_q.weight`.
fn role(name: &str) -> String {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    block.map_or_else(|| name.to_owned(), |(_, role)| format!("blk.*.{role}"))
}

/// `the tensors a, b and 3 more`, of names that may be anything.
fn list(what: &str, names: &BTreeSet<String>) -> Option<String> {
    let shown = names.iter().take(LISTED);
    let shown: Vec<String> = shown
        .map(|name| name.chars().take(NAME_CHARS).flat_map(char::escape_debug).collect())
        .collect();
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| format!("the {what} {}{more}", shown.join(", ")))
}
