//! The model card: what the front matter of `README.md` says of licence, origin, data sets, tags
//! and languages. It is YAML, of which keys with a string or a list of strings are read here; all
//! else is left out, as a card that is damaged is. It must not know families.

use std::collections::BTreeMap;

use bodkin_gguf::{Array, Metadata, Value};

use crate::error::Result;
use crate::general::title;
use crate::repository;
use crate::source::Source;

/// The front matter must end within this many bytes; those of real cards have some kilobytes.
const FRONT_BYTES_MAX: u64 = 256 << 10;
/// The most strings of a list.
const ITEMS_MAX: usize = 10_000;

/// Keys of the front matter with their strings; none for what is empty or no string.
type Card = BTreeMap<String, Entry>;

#[derive(Debug, PartialEq, Eq)]
enum Entry {
    /// Null, or what this module does not read.
    Other,
    String(String),
    List(Vec<String>),
}

impl Entry {
    fn strings(&self) -> &[String] {
        match self {
            Entry::Other => &[],
            Entry::String(string) => std::slice::from_ref(string),
            Entry::List(strings) => strings,
        }
    }
}

/// Writes what the card of a model says, in the order of llama.cpp's converter.
pub(crate) fn write(source: &Source, metadata: &mut Metadata) -> Result<()> {
    let Some(front) = front_matter(source) else { return Ok(()) };
    let card = parse(&front);
    let string = |text: &str| Value::String(text.as_bytes().into());
    for (key, name) in
        [("license", "license"), ("license_name", "license.name"), ("license_link", "license.link")]
    {
        let strings = card.get(key).map_or(&[][..], Entry::strings);
        if !strings.is_empty() {
            metadata.insert(format!("general.{name}"), string(&strings.join(",")));
        }
    }
    for (keys, name) in [
        (["base_model", "base_models", "base_model_sources"], "base_model"),
        (["datasets", "dataset", "dataset_sources"], "dataset"),
    ] {
        let Some(entry) = keys.iter().find_map(|key| card.get(*key)) else { continue };
        let count = entry.strings().len();
        metadata.insert(format!("general.{name}.count"), Value::U32(count as u32));
        for (index, id) in entry.strings().iter().enumerate() {
            write_repository(&format!("general.{name}.{index}"), id, metadata);
        }
    }
    for (name, keys) in
        [("tags", ["tags", "pipeline_tag"]), ("languages", ["languages", "language"])]
    {
        let strings = keys.iter().filter_map(|key| card.get(*key)).flat_map(Entry::strings);
        let strings: Vec<_> = strings.map(|text| text.as_bytes().into()).collect();
        if !strings.is_empty() {
            metadata.insert(format!("general.{name}"), Value::Array(Array::String(strings)));
        }
    }
    Ok(())
}

/// Writes what the name or the address of a model or of a data set tells.
fn write_repository(prefix: &str, id: &str, metadata: &mut Metadata) {
    let mut write = |key: &str, text: &str| {
        metadata.insert(format!("{prefix}.{key}"), Value::String(text.as_bytes().into()));
    };
    let found = repository::parse(id);
    if let Some(name) = found.name {
        write("name", &title(name));
    }
    if let Some(version) = &found.version {
        write("version", version);
    }
    if let Some(organization) = found.organization {
        write("organization", &title(organization));
    }
    if let Some(url) = &found.url {
        write("repo_url", url);
    }
}

/// The lines between `---` and `---` at the start of `README.md`, if there are any and they can be
/// read: a model can be converted without its card.
fn front_matter(source: &Source) -> Option<String> {
    let mut file = source.stream("README.md").ok()??;
    let bytes = file.bytes().min(FRONT_BYTES_MAX);
    let start = file.read_at(0, bytes).ok()?;
    between_dashes(&start).and_then(|front| String::from_utf8(front.to_vec()).ok())
}

/// What follows a first line `---`, up to the next one.
fn between_dashes(text: &[u8]) -> Option<&[u8]> {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n');
    let is_dashes = |line: &[u8]| matches!(line, b"---" | b"---\n" | b"---\r\n");
    let first = lines.next().filter(|line| is_dashes(line))?.len();
    let mut end = first;
    for line in lines {
        if is_dashes(line) {
            return text.get(first..end);
        }
        end += line.len();
    }
    None
}

/// The keys of a front matter. The last of several with one name counts.
fn parse(front: &str) -> Card {
    let mut card = Card::new();
    // The key that the lines of a list belong to.
    let mut open: Option<String> = None;
    for line in front.lines().map(str::trim_end) {
        let text = line.trim_start();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let item = text.strip_prefix("- ").or(Some("").filter(|_| text == "-"));
        if let Some(item) = item {
            let Some(entry) = open.as_ref().and_then(|key| card.get_mut(key)) else { continue };
            if let Entry::Other = entry {
                *entry = Entry::List(Vec::new());
            }
            if let (Entry::List(items), Some(item)) = (entry, scalar(item))
                && items.len() < ITEMS_MAX
            {
                items.push(item);
            }
            continue;
        }
        if text.len() < line.len() {
            // It goes on with the value before, or is inside of an object: the key is not read.
            if let Some(key) = open.take() {
                card.insert(key, Entry::Other);
            }
            continue;
        }
        open = None;
        let Some((key, value)) = key_and_value(text) else { continue };
        open = Some(key.to_owned());
        card.insert(key.to_owned(), entry(value));
    }
    card
}

fn key_and_value(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let key = key.trim_end().trim_matches(['"', '\'']);
    (value.is_empty() || value.starts_with([' ', '\t'])).then_some((key, value.trim_start()))
}

/// The value behind a key.
fn entry(value: &str) -> Entry {
    match value.strip_prefix('[') {
        Some(items) => flow_list(items).map_or(Entry::Other, Entry::List),
        None => scalar(value).map_or(Entry::Other, Entry::String),
    }
}

/// The strings of `a, "b"]`. None if the list does not end here.
fn flow_list(text: &str) -> Option<Vec<String>> {
    let (mut items, mut rest) = (Vec::new(), text.trim_start());
    while !rest.starts_with(']') {
        let end = match rest.chars().next()? {
            quote @ ('"' | '\'') => 2 + rest[1..].find(quote)?,
            _ => rest.find([',', ']'])?,
        };
        let (item, behind) = rest.split_at(end);
        items.extend(scalar(item.trim_end()).filter(|_| items.len() < ITEMS_MAX));
        let behind = behind.trim_start();
        rest = behind.strip_prefix(',').unwrap_or(behind).trim_start();
        if rest == behind && !rest.starts_with(']') {
            return None;
        }
    }
    let behind = rest.strip_prefix(']')?.trim_start();
    (behind.is_empty() || behind.starts_with('#')).then_some(items)
}

/// A string, plain or in quotes. None for null and for whatever else YAML has.
fn scalar(text: &str) -> Option<String> {
    let text = text.trim_start();
    match text.chars().next()? {
        quote @ ('"' | '\'') => {
            let (inside, behind) = text[1..].split_once(quote)?;
            let behind = behind.trim_start();
            // Escapes, and quotes that are doubled, are not read.
            let is_plain = !(quote == '"' && inside.contains('\\'));
            let is_whole = behind.is_empty() || behind.starts_with('#');
            (is_plain && is_whole).then(|| inside.to_owned())
        }
        '|' | '>' | '&' | '*' | '!' | '{' | '}' | '[' | ']' | '%' | '@' | '`' | '?' | '#' => None,
        _ => {
            let text = text.split_once(" #").map_or(text, |(before, _)| before).trim_end();
            let is_null = matches!(text, "~" | "null" | "Null" | "NULL" | "");
            let is_object = text.contains(": ") || text.ends_with(':') || text.starts_with("- ");
            (!is_null && !is_object).then(|| text.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(front: &str, key: &str) -> Vec<String> {
        parse(front).get(key).map_or(&[][..], Entry::strings).to_vec()
    }

    #[test]
    fn strings_and_lists_are_read() {
        for (front, expected) in [
            ("k: apache-2.0", &["apache-2.0"][..]),
            ("k: a b # note", &["a b"]),
            ("k: 'a: b'", &["a: b"]),
            ("k: \"#x\" # note", &["#x"]),
            ("k: https://example.org/a", &["https://example.org/a"]),
            ("k:\n- a\n- 'b'\nl: x", &["a", "b"]),
            ("k:\n  - a\n\n  # note\n  - no\n", &["a", "no"]),
            ("k: [a, \"b, c\", 'd' ]", &["a", "b, c", "d"]),
            ("k: []", &[]),
            ("k: a\nk: b", &["b"]),
            ("k: a\r\nl: b", &["a"]),
        ] {
            assert_eq!(strings(front, "k"), expected, "{front:?}");
        }
    }

    #[test]
    fn what_is_no_string_is_left_out() {
        for front in [
            "k:",
            "k: ~",
            "k: null",
            "k: {a: b}",
            "k: |\n  a\n  b",
            "k: >-\n  a",
            "k: &x a",
            "k: *x",
            "k: !t a",
            "k: a\n  b",
            "k:\n  a: b\n  c: d",
            "k: [a",
            "k: ['a]",
            "k: [a] b, c",
            "k: 'a",
            "k: \"a\\u0041\"",
            "k:a",
            " k: a",
            "- k: a",
            "k: [a 'b",
            "k: ['a' 'b']",
            "k: 'it''s'",
        ] {
            let found = strings(front, "k");
            assert!(found.is_empty(), "{front:?}: {found:?}");
        }
        assert_eq!(strings("k:\n- a: b\n- c\n- [d]", "k"), ["c"]);
        let many = format!("k:\n{}", "- a\n".repeat(20_000));
        assert_eq!(strings(&many, "k").len(), ITEMS_MAX);
    }

    #[test]
    fn the_front_matter_is_between_dashes() {
        let between = |text: &str| between_dashes(text.as_bytes()).map(<[u8]>::to_vec);
        assert_eq!(between("---\na: b\n---\n# T\n").unwrap(), b"a: b\n");
        assert_eq!(between("---\r\na: b\r\n---").unwrap(), b"a: b\r\n");
        assert_eq!(between("---\n---\n").unwrap(), b"");
        for text in ["", "# T\n---\na: b\n---\n", "---\na: b\n", "--- \na: b\n---\n"] {
            assert_eq!(between(text), None, "{text:?}");
        }
    }
}
