//! What a file of an unknown architecture has in common with the known ones, so that a user can
//! report what is missing.

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
/// Names in a list, at most.
const LISTED: usize = 6;
/// Characters of a name from the file, at most.
const NAME_CHARS: usize = 48;

/// What an architecture reads of the file.
struct Attempt {
    name: &'static str,
    /// Tensors without the number of their block.
    tensors: BTreeSet<String>,
    /// Keys without prefix.
    keys: BTreeSet<String>,
    /// Why there is no plan.
    problem: Option<String>,
}

/// The known architecture that reads the most tensors of a file, and what it does not read.
pub(crate) fn describe(
    metadata: &Metadata,
    tensors: &[Tensor],
    known: &[(&'static str, Build)],
) -> Result<String> {
    // A file that lacks what all architectures need has no nearest one.
    let attempts = known.iter().filter_map(|&known| attempt(metadata, tensors, known).ok());
    let attempts: Vec<Attempt> = attempts.collect();
    let found = metadata.architecture()?;
    let rank = |a: &Attempt| {
        let same = a.name.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
        // Names of one family begin alike.
        let family = if same >= 3 { same } else { 0 };
        (a.tensors.len(), a.problem.is_none(), a.keys.len(), family, a.name == "llama")
    };
    let Some(nearest) =
        attempts.iter().rev().max_by_key(|a| rank(a)).filter(|a| a.tensors.len() > 1)
    else {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        return Ok(format!("known: {}", names.join(", ")));
    };
    let prefix = format!("{found}.");
    let keys = metadata.iter().filter_map(|(key, _)| key.strip_prefix(&prefix));
    let is_unread = |key: &&str| !nearest.keys.contains(*key) && !IMPLIED.contains(key);
    let keys = keys.filter(is_unread).map(str::to_owned).collect();
    let roles = tensors.iter().map(|tensor| role(&tensor.name));
    let roles = roles.filter(|role| !nearest.tensors.contains(role)).collect();
    let unread = [list("tensors", &roles), list("keys", &keys)];
    let unread: Vec<String> = unread.into_iter().flatten().collect();
    let mut text = format!("the nearest known one is {}, which ", nearest.name);
    text += &match unread.is_empty() {
        true => "reads all its tensors and keys".to_owned(),
        false => format!("does not read {}", unread.join(" and ")),
    };
    if let Some(problem) = &nearest.problem {
        text += &format!(", and for which {problem}");
    }
    Ok(text)
}

fn attempt(
    metadata: &Metadata,
    tensors: &[Tensor],
    (name, build): (&'static str, Build),
) -> Result<Attempt> {
    let keys = HyperParameters::new(metadata)?.read_as(name);
    let mut builder = Builder::new(&keys, tensors)?;
    let problem = build(&keys, &mut builder).err().map(|error| error.to_string());
    let tensors = builder.weights().map(role).collect();
    Ok(Attempt { name, tensors, keys: keys.read(), problem })
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
