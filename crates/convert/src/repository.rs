//! What the name of a repository of a model or of a data set tells: who made it, what it is called,
//! and which version it is. The rules are those of llama.cpp's converter. It must not know files.

/// Where names are looked up.
const HUB: &str = "https://huggingface.co/";

/// The parts of a name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Repository<'a> {
    pub(crate) name: Option<&'a str>,
    pub(crate) organization: Option<&'a str>,
    pub(crate) version: Option<String>,
    pub(crate) url: Option<String>,
}

/// Reads a name such as `openai/whisper-v2`, or an address.
pub(crate) fn parse(id: &str) -> Repository<'_> {
    if ["http://", "https://", "ssh://"].iter().any(|scheme| id.starts_with(scheme)) {
        let path = id.strip_prefix(HUB).or_else(|| id.strip_prefix("http://huggingface.co/"));
        let path = path.filter(|path| {
            let mut parts = path.split('/');
            parts.by_ref().take(2).filter(|part| !part.is_empty()).count() == 2
                && parts.next().is_none()
        });
        let known = path.map(parts).unwrap_or_default();
        return Repository { url: Some(id.to_owned()), ..known };
    }
    let known = parts(id);
    let url = known.organization.zip(known.name);
    let url = url.map(|(organization, name)| format!("{HUB}{organization}/{name}"));
    Repository { url, ..known }
}

fn parts(id: &str) -> Repository<'_> {
    if id.contains(' ') {
        // A sentence, not a name of the hub.
        return Repository { name: Some(id), ..Repository::default() };
    }
    let (organization, name) = match id.split_once('/') {
        Some((organization, name)) => (Some(organization), name),
        None => (None, id),
    };
    let organization = organization.filter(|name| !name.starts_with('.'));
    Repository { name: Some(name), organization, version: version(name), url: None }
}

/// What a part of a name is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Version,
    /// A size in letters, such as `small`.
    SizeWord,
    /// A size in digits, such as `8x7B`.
    Size,
    /// A type of weights, or what the model was tuned for.
    Typed,
    /// A word of the name.
    Word,
}

/// The parts of a name that are a version, unless they belong to the name itself: those before
/// another word of it.
fn version(name: &str) -> Option<String> {
    let parts: Vec<&str> = name.split('-').filter(|part| !part.is_empty()).collect();
    let mut kinds: Vec<Kind> = parts.iter().enumerate().map(|(i, part)| kind(i, part)).collect();
    if kinds.contains(&Kind::Size) {
        for kind in kinds.iter_mut().filter(|kind| **kind == Kind::SizeWord) {
            *kind = Kind::Word;
        }
    }
    let starts_in_name = |(part, kind): &(&&str, &Kind)| match kind {
        Kind::Word => part.starts_with(char::is_alphabetic),
        kind => **kind == Kind::Version,
    };
    let mut in_name = parts.iter().zip(&kinds).take_while(starts_in_name).count();
    if in_name == parts.len() {
        let trailing = kinds.iter().rev().take_while(|kind| **kind == Kind::Version).count();
        in_name -= trailing;
    }
    let versions = parts.iter().zip(&kinds).skip(in_name);
    let versions: Vec<&str> =
        versions.filter(|(_, kind)| **kind == Kind::Version).map(|(part, _)| *part).collect();
    Some(versions.join("-")).filter(|versions| !versions.is_empty())
}

fn kind(index: usize, part: &str) -> Kind {
    let part = part.to_ascii_lowercase();
    let is_later = index > 0;
    match part.as_str() {
        part if is_version(part) => Kind::Version,
        part if is_weight_type(part) => Kind::Typed,
        "small" | "mini" | "medium" | "large" | "xl" | "xxl" if is_later => Kind::SizeWord,
        part if is_later && is_size(part) => Kind::Size,
        "chat" | "instruct" | "vision" | "lora" if is_later => Kind::Typed,
        _ => Kind::Word,
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// `2`, `v1.5`, `iter3`.
fn is_version(part: &str) -> bool {
    let number = part.strip_prefix("iter").or(part.strip_prefix('v')).unwrap_or(part);
    number.split('.').all(is_digits)
}

/// `q4_k_m`, `iq2_xs`, `bf16`, `f32`.
fn is_weight_type(part: &str) -> bool {
    if matches!(part, "f16" | "f32" | "bf16" | "bf32" | "fp16" | "fp32" | "bfp16" | "bfp32") {
        return true;
    }
    let Some(rest) = part.strip_prefix("iq").or(part.strip_prefix('q')) else { return false };
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let mut groups = rest.split('_');
    groups.next().is_some_and(|digit| digit.len() == 1 && is_digits(digit))
        && rest
            .chars()
            .skip(1)
            .collect::<Vec<_>>()
            .chunks(2)
            .all(|pair| matches!(pair, ['_', letter] if is_word(*letter)))
}

/// `7b`, `8x7b`, `1.5b`, `a3b`, `7b1`.
fn is_size(part: &str) -> bool {
    let number = match part.split_once('x') {
        Some((experts, size)) if is_digits(experts) => size,
        _ => part.strip_prefix('a').unwrap_or(part),
    };
    let Some((number, behind)) = number.split_once(['k', 'm', 'b', 't']) else { return false };
    let mut parts = number.split(['.', '_']);
    parts.by_ref().take(2).all(is_digits)
        && parts.next().is_none()
        && (behind.is_empty() || behind.len() == 1 && is_digits(behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_name_on_the_hub_alone() {
        let found = parse("https://huggingface.co/openai/whisper-v2");
        assert_eq!((found.name, found.organization), (Some("whisper-v2"), Some("openai")));
        assert_eq!(found.version.as_deref(), Some("v2"));
        for id in ["https://huggingface.co/a", "https://huggingface.co/a/b/c", "ssh://a/b"] {
            let url = Some(id.to_owned());
            assert_eq!(parse(id), Repository { url, ..Repository::default() });
        }
        assert_eq!(parse("a set of mine").name, Some("a set of mine"));
        assert_eq!(parse("./b").url, None);
        assert_eq!(parse("a/b").url.unwrap(), "https://huggingface.co/a/b");
    }

    /// What llama.cpp's converter finds in such names.
    #[test]
    fn versions_are_those_of_the_converter() {
        for (name, expected) in [
            ("all-MiniLM-L6-v2", "v2"),
            ("ms_marco", ""),
            ("wiki-2020", "2020"),
            ("wikipedia-20220301.en", ""),
            ("Llama-3.1-8B-Instruct", ""),
            ("Mixtral-8x7B-v0.1", "v0.1"),
            ("Qwen3-30B-A3B", ""),
            ("gpt-2", "2"),
            ("v1", "v1"),
            ("v1-v2", "v1-v2"),
            ("a-v1-b-v2", "v2"),
            ("small-v3", "v3"),
            ("x-small-v3", "v3"),
            ("x-small-7b-v3", "v3"),
            ("x-small-v3-7b", ""),
            ("bloom-7b1-v2", "v2"),
            ("model-q4_K_M-v1", "v1"),
            ("model-iq2_x_y-v1", "v1"),
            ("model-bf16-v1", "v1"),
            ("model-fp16-2", "2"),
            ("a-1.2.3", "1.2.3"),
            ("a-1.2.x", ""),
            ("iter3-a", ""),
            ("a-iter3", "iter3"),
            ("1a-v1", "v1"),
            ("a-1a-v1", "v1"),
            ("a--v2-", "v2"),
            ("2-7B", ""),
            ("7B-v1", "v1"),
            ("a-chat-v1.5", "v1.5"),
            ("a-1_5B-v2", "v2"),
            ("a-1.5.2B-v2", "v2"),
            ("a-b-2-c", ""),
            ("-v1", "v1"),
            ("a-q8_0-v1", "v1"),
            ("a-q8_00-v1", "v1"),
            ("a-q10-v1", "v1"),
            ("a-3xl-v1", "v1"),
            ("a-xxl-v2", "v2"),
            ("a-xxl-7b-3", "3"),
            ("c4", ""),
            ("the-stack-v2-dedup", ""),
            ("oasst1", ""),
            ("OpenHermes-2.5", "2.5"),
            ("a-A3B-v1", "v1"),
            ("a-2x-v1", "v1"),
            ("a-xl-v1", "v1"),
        ] {
            assert_eq!(version(name).unwrap_or_default(), expected, "{name}");
        }
    }
}
