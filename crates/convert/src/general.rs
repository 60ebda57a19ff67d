//! What metadata say of a model as a whole: its name, its size, and the sampling parameters that
//! its makers recommend. It must not know families.

use bodkin_gguf::{Metadata, Tensor, Value};

use crate::config::Config;
use crate::error::Result;
use crate::source::Source;

/// Integers and numbers of `generation_config.json`, with the last part of their keys.
const SAMPLING: [(&str, &str, bool); 6] = [
    ("top_k", "top_k", true),
    ("top_p", "top_p", false),
    ("min_p", "min_p", false),
    ("temperature", "temp", false),
    ("penalty_last_n", "penalty_last_n", true),
    ("repetition_penalty", "penalty_repeat", false),
];

/// Writes the keys that begin with `general.`, up to the model's size.
pub(crate) fn write(
    source: &Source,
    config: &Config,
    architecture: &str,
    tensors: &[Tensor],
    metadata: &mut Metadata,
) -> Result<()> {
    let string = |text: &str| Value::String(text.as_bytes().into());
    metadata.insert("general.architecture", string(architecture));
    metadata.insert("general.type", string("model"));
    let sampling = source.json("generation_config.json")?.unwrap_or_default();
    for (key, name, is_integer) in SAMPLING {
        let Some(value) = sampling.get(key).and_then(|value| value.as_f64()) else { continue };
        let value = if is_integer { Value::I32(value as i32) } else { Value::F32(value as f32) };
        metadata.insert(format!("general.sampling.{name}"), value);
    }
    // The name on the hub, unless it is a path on the machine of the one who saved it.
    let hub = config.str(&["_name_or_path"])?.unwrap_or_default();
    let hub = Some(hub).filter(|name| !name.is_empty() && name.matches('/').count() <= 1);
    let folder = source.folder_name();
    let id = hub.unwrap_or(&folder);
    let (organization, name) = match id.split_once('/') {
        Some((organization, name)) => (Some(organization), name),
        None => (None, id),
    };
    metadata.insert("general.name", string(&title(name)));
    if let Some(organization) = organization.filter(|name| !name.starts_with('.')) {
        metadata.insert("general.organization", string(&title(organization)));
    }
    metadata.insert("general.size_label", string(&size_label(tensors)));
    Ok(())
}

/// A name for people: words in lower case get a capital, unless they are versions or sizes.
pub(crate) fn title(name: &str) -> String {
    if name.contains(' ') {
        return name.to_owned();
    }
    let words = name.split('-').filter(|word| !word.is_empty());
    words.map(capitalized).collect::<Vec<_>>().join(" ")
}

fn capitalized(word: &str) -> String {
    let is_lower = word.chars().any(char::is_lowercase) && !word.chars().any(char::is_uppercase);
    let version = word.strip_prefix('v').unwrap_or(word);
    let is_version = !version.is_empty()
        && version
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    if !is_lower || is_version || word.starts_with(|first: char| first.is_ascii_digit()) {
        return word.to_owned();
    }
    let mut inside = false;
    let mut out = String::new();
    for character in word.chars() {
        match inside {
            true => out.push(character),
            false => out.extend(character.to_uppercase()),
        }
        inside = character.is_alphabetic();
    }
    out
}

/// The number of parameters, such as `135M`; of a mixture of experts `8x7.3B`, where the second
/// number counts one expert and what all experts share.
fn size_label(tensors: &[Tensor]) -> String {
    let (mut total, mut once, mut experts, mut stacks) = (0, 0, 0, 0);
    for tensor in tensors {
        total += tensor.elements();
        match tensor.shape.get(2).filter(|_| tensor.name.contains("_exps.")) {
            Some(&count) => {
                once += tensor.elements() / count;
                experts += count;
                stacks += 1;
            }
            None => once += tensor.elements(),
        }
    }
    match experts.checked_div(stacks) {
        Some(count) if count > 0 => format!("{count}x{}", rounded(once)),
        _ => rounded(total),
    }
}

/// A number with two digits at least, and the letter of its thousands.
fn rounded(count: u64) -> String {
    let count = count as f64;
    let (scaled, letter) = match count {
        _ if count > 1e12 => (count * 1e-12, 'T'),
        _ if count > 1e9 => (count * 1e-9, 'B'),
        _ if count > 1e6 => (count * 1e-6, 'M'),
        _ => (count * 1e-3, 'K'),
    };
    let whole = format!("{scaled:.0}");
    let digits = 2usize.saturating_sub(whole.trim_start_matches('0').len());
    format!("{scaled:.digits$}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_titles() {
        for (name, expected) in [
            ("all-MiniLM-L6-v2", "All MiniLM L6 v2"),
            ("qwen3moe", "Qwen3Moe"),
            ("tiny-v1.5-7b", "Tiny v1.5 7b"),
            ("A Name of its own", "A Name of its own"),
        ] {
            assert_eq!(title(name), expected);
        }
    }

    #[test]
    fn sizes_have_two_digits() {
        for (count, expected) in
            [(900, "0.9K"), (22_600_000, "23M"), (1_240_000_000, "1.2B"), (135_000_000, "135M")]
        {
            assert_eq!(rounded(count), expected);
        }
    }
}
