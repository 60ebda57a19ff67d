//! What one Rust file imports, names by path, and defines. Names inside macros' definitions and
//! calls are read like other code; what a macro makes of them is not seen.

use super::code::is_word;

/// One leaf of a `use`.
pub(super) struct Import {
    pub(super) line: usize,
    pub(super) path: Vec<String>,
    /// The name in this file; `*` for all of a module.
    pub(super) name: String,
    /// Visible outside this module: a re-export.
    pub(super) is_public: bool,
}

/// A path such as `super::plan::Plan::new` in code, not in a `use`.
pub(super) struct Mention {
    pub(super) line: usize,
    pub(super) path: Vec<String>,
}

/// A file's code, as far as its dependencies go.
pub(super) struct Source {
    pub(super) imports: Vec<Import>,
    pub(super) mentions: Vec<Mention>,
    /// Names of items at the file's top level.
    pub(super) items: Vec<String>,
    /// The code without `use` declarations.
    body: String,
}

impl Source {
    /// Reads code without comments, literals and tests.
    pub(super) fn read(code: &str) -> Self {
        let (imports, body) = imports(code);
        let items = code.lines().filter_map(item).map(str::to_owned).collect();
        Self { imports, mentions: mentions(&body), items, body }
    }

    /// The first line that names `name`, outside of `use` declarations.
    pub(super) fn line_with(&self, name: &str) -> Option<usize> {
        let names =
            |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == name);
        Some(self.body.lines().position(names)? + 1)
    }
}

/// Splits all `use` declarations from the rest of the code.
fn imports(code: &str) -> (Vec<Import>, String) {
    let mut found = Vec::new();
    let mut body = String::new();
    let mut lines = code.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let (visibility, rest) = split_visibility(line.trim_start());
        let Some(rest) = rest.strip_prefix("use ") else {
            body.push_str(line);
            body.push('\n');
            continue;
        };
        let mut tree = rest.to_owned();
        body.push('\n');
        while !tree.contains(';') {
            let Some((_, line)) = lines.next() else { break };
            tree.push_str(line);
            body.push('\n');
        }
        let tree: String =
            tree.split(" as ").map(|part| part.replace(' ', "")).collect::<Vec<_>>().join(" as ");
        let mut leaves = Vec::new();
        expand(tree.trim_end_matches(';'), &[], &mut leaves);
        found.extend(leaves.into_iter().map(|(path, name)| Import {
            line: index + 1,
            path,
            name,
            is_public: !visibility.is_empty(),
        }));
    }
    (found, body)
}

/// `pub(crate) use x` as `pub(crate)` and `use x`.
fn split_visibility(line: &str) -> (&str, &str) {
    let Some(rest) = line.strip_prefix("pub") else { return ("", line) };
    let end = if rest.starts_with('(') { rest.find(')').map_or(0, |at| at + 1) } else { 0 };
    match rest[end..].strip_prefix(' ') {
        Some(rest) => (&line[..line.len() - rest.len()], rest),
        None => ("", line),
    }
}

/// The leaves of a tree such as `a::{b, c::d as e}`, without spaces but around `as`.
fn expand(tree: &str, above: &[String], leaves: &mut Vec<(Vec<String>, String)>) {
    if let Some((prefix, rest)) = tree.split_once('{') {
        let mut path = above.to_vec();
        path.extend(prefix.split("::").filter(|part| !part.is_empty()).map(str::to_owned));
        let inner = rest.strip_suffix('}').unwrap_or(rest);
        for branch in split_branches(inner) {
            expand(branch, &path, leaves);
        }
        return;
    }
    let (path_text, alias) = tree.split_once(" as ").map_or((tree, None), |(p, a)| (p, Some(a)));
    let mut path = above.to_vec();
    path.extend(path_text.split("::").filter(|part| !part.is_empty()).map(str::to_owned));
    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    let Some(last) = path.last() else { return };
    let name = alias.unwrap_or(last).to_owned();
    leaves.push((path, name));
}

/// Splits at commas outside of braces.
fn split_branches(inner: &str) -> Vec<&str> {
    let (mut depth, mut start) = (0, 0);
    let mut branches = Vec::new();
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                branches.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    branches.push(&inner[start..]);
    branches.retain(|branch| !branch.is_empty());
    branches
}

/// All paths of two names or more.
fn mentions(body: &str) -> Vec<Mention> {
    let mut found = Vec::new();
    for (index, line) in body.lines().enumerate() {
        let bytes = line.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let is_start = at == 0 || !(is_word(bytes[at - 1]) || b":.".contains(&bytes[at - 1]));
            if !is_word(bytes[at]) || !is_start {
                at += 1;
                continue;
            }
            let mut path = Vec::new();
            loop {
                let end = at + bytes[at..].iter().take_while(|byte| is_word(**byte)).count();
                path.push(line[at..end].to_owned());
                at = end;
                let is_next = bytes.get(at + 2).is_some_and(|byte| is_word(*byte));
                if !bytes[at..].starts_with(b"::") || !is_next {
                    break;
                }
                at += 2;
            }
            if path.len() > 1 {
                found.push(Mention { line: index + 1, path });
            }
        }
    }
    found
}

/// The name of an item that a line at the top level defines.
fn item(line: &str) -> Option<&str> {
    const KINDS: [&str; 10] = [
        "const",
        "enum",
        "fn",
        "macro_rules!",
        "mod",
        "static",
        "struct",
        "trait",
        "type",
        "union",
    ];
    const MODIFIERS: [&str; 4] = ["async", "extern", "mut", "unsafe"];
    let (_, rest) = split_visibility(line);
    let mut is_item = false;
    for word in rest.split(' ') {
        if KINDS.contains(&word) {
            is_item = true;
        } else if !MODIFIERS.contains(&word) {
            let name = word.split(|c: char| !c.is_alphanumeric() && c != '_').next();
            return name.filter(|_| is_item);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_are_expanded() {
        let code =
            "use a::b;\npub(crate) use super::{\n    c::{self, D as E},\n    *,\n};\nfn f() {}\n";
        let source = Source::read(code);
        let leaves: Vec<_> = source
            .imports
            .iter()
            .map(|import| (import.line, import.path.join("::"), &*import.name, import.is_public))
            .collect();
        let expected = [
            (1, "a::b", "b", false),
            (2, "super::c", "c", true),
            (2, "super::c::D", "E", true),
            (2, "super::*", "*", true),
        ];
        assert_eq!(
            leaves,
            expected.map(|(line, path, name, public)| (line, path.to_owned(), name, public))
        );
        assert_eq!(source.items, ["f"]);
        assert_eq!(source.line_with("f"), Some(6));
        assert_eq!(source.line_with("b"), None);
    }

    #[test]
    fn paths_and_items_are_found() {
        let code = "pub const fn g() {\n    crate::a::B::<u8>::new(x.y, super::z());\n}\n\
                    static mut H: u8 = c::D;\n";
        let source = Source::read(code);
        let paths: Vec<_> =
            source.mentions.iter().map(|mention| (mention.line, mention.path.join("::"))).collect();
        let expected = [(2, "crate::a::B"), (2, "super::z"), (4, "c::D")];
        assert_eq!(paths, expected.map(|(line, path)| (line, path.to_owned())));
        assert_eq!(source.items, ["g", "H"]);
    }
}
