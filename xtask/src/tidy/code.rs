//! Rust source without what is not code: comments and literals become spaces, and so do items for
//! tests. Lines keep their numbers. The source is formatted by rustfmt.

/// The code of `text`.
pub(super) fn strip(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => at + find(&bytes[at..], b"\n"),
            [b'/', b'*', ..] => at + block_comment(&bytes[at..]),
            [b'"', ..] => at + 1 + string(&bytes[at + 1..]),
            [b'r', b'"' | b'#', ..] if at == 0 || !is_word(bytes[at - 1]) => {
                at + raw_string(&bytes[at..])
            }
            [b'\'', b'\\', _, rest @ ..] => at + 3 + find(rest, b"'") + 1,
            [b'\'', ..] => at + character(&text[at..]),
            _ => at,
        };
        let end = end.min(bytes.len());
        code[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&code).into_owned()
}

pub(super) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Where `what` begins, or the end.
fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).position(|window| window == what).unwrap_or(bytes.len())
}

/// The length of a comment that may hold others.
fn block_comment(bytes: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

/// The length of a string's rest, with the closing quote.
fn string(bytes: &[u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// The length of a raw string, or 0 if it is none.
fn raw_string(bytes: &[u8]) -> usize {
    let hashes = bytes[1..].iter().take_while(|byte| **byte == b'#').count();
    if bytes.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let end = [b"\"".as_slice(), &bytes[1..1 + hashes]].concat();
    let start = hashes + 2;
    start + find(&bytes[start..], &end) + end.len()
}

/// The length of a character's literal, or 0 if a lifetime begins here.
fn character(text: &str) -> usize {
    let mut characters = text.char_indices().skip(2);
    match characters.next() {
        Some((at, '\'')) => at + 1,
        _ => 0,
    }
}

/// Replaces items behind `#[cfg(test)]` with spaces, and returns the names of modules among them
/// that have their own file.
pub(super) fn cut_tests(code: &str) -> (String, Vec<String>) {
    let mut kept = Vec::new();
    let mut modules = Vec::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            kept.push(line);
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        kept.push("");
        for line in lines.by_ref() {
            kept.push("");
            let rest = line.strip_prefix(indent).unwrap_or_default();
            if let Some(name) = rest.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
                modules.push(name.to_owned());
            }
            let is_last = rest.ends_with(';') || (rest.ends_with('}') && !rest.starts_with(' '));
            if is_last && !rest.starts_with(' ') {
                break;
            }
        }
    }
    (kept.join("\n") + "\n", modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_no_code() {
        for (text, code) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"a("b\"c", d)"#, "a(      , d)"),
            ("a(r#\"b\"c\"#, d)", "a(        , d)"),
            ("a('b', '\\'', 'é', d)", "a(   ,     ,     , d)"),
            ("fn a<'b>(c: &'b d)", "fn a<'b>(c: &'b d)"),
        ] {
            let stripped = strip(text);
            assert_eq!(stripped.trim_end(), code.trim_end(), "{text}");
        }
    }

    #[test]
    fn items_for_tests_are_cut() {
        let code = "use a;\n#[cfg(test)]\nmod tests;\nfn b() {}\n#[cfg(test)]\nmod more {\n    \
                    use c;\n}\nuse d;\n";
        let (cut, modules) = cut_tests(code);
        assert_eq!(cut, "use a;\n\n\nfn b() {}\n\n\n\n\nuse d;\n");
        assert_eq!(modules, ["tests"]);
    }
}
