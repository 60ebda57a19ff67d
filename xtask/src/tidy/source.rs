//! Rules about Rust source, read line by line: the code is formatted by rustfmt, so that a
//! function ends at the first closing brace in its own column. It must not need a parser.

use super::tree::Item;

const COLUMNS_MAX: usize = 100;
/// Crates that may hold `unsafe` code; all others forbid it.
const UNSAFE_CRATES: [&str; 6] = ["backend", "cpu", "cuda", "emulator", "gguf", "wgpu"];
/// Files of crates that may hold only these blocks: a function that all threads of a pool run; the
/// map of a file, the release of its pages and the handler of SIGBUS when it is truncated; the
/// permission to use cooperative matrices; queries of an adapter's memory.
const UNSAFE_BLOCKS: [(&str, usize); 4] = [
    ("crates/backend/src/pool.rs", 2),
    ("crates/gguf/src/file/map.rs", 4),
    ("crates/wgpu/src/gpu.rs", 2),
    ("crates/wgpu/src/vulkan.rs", 3),
];
/// Words for unfinished work. In two halves, so that this file does not hold them.
const UNFINISHED: [&str; 4] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("unimple", "mented!"),
    concat!("to", "do!("),
];
const FEATURE: &str = concat!("cfg(", "feature");

/// Checks one file.
pub(super) fn check(item: &Item, violations: &mut Vec<String>) {
    if !item.is_rust() {
        return;
    }
    let path = &item.path;
    let text = item.text.as_deref().unwrap_or_default();
    if !text.starts_with("//! ") {
        violations.push(format!("{path}: expected a paragraph `//!` that says what it is"));
    }
    for (number, line) in item.lines() {
        let mut violation = |what: &str| violations.push(format!("{path}:{number}: {what}"));
        if line.chars().count() > COLUMNS_MAX {
            violation("a line of more than 100 columns");
        }
        if line.ends_with([' ', '\t']) || line.contains('\t') {
            violation("a tab or trailing space");
        }
        for word in UNFINISHED.iter().filter(|word| line.contains(**word)) {
            violation(&format!("`{word}`: finish it or leave it out"));
        }
        if line.contains(FEATURE) && item.crate_name() != Some("cli") {
            violation("only the cli has features");
        }
    }
    unsafe_code(item, text, violations);
}

fn unsafe_code(item: &Item, text: &str, violations: &mut Vec<String>) {
    let Some(name) = item.crate_name() else { return };
    let is_root = ["lib.rs", "main.rs"].iter().any(|root| {
        item.path == format!("crates/{name}/src/{root}") || item.path == format!("xtask/src/{root}")
    });
    if is_root && !UNSAFE_CRATES.contains(&name) && !text.contains("#![forbid(unsafe_code)]") {
        violations.push(format!("{}: expected #![forbid(unsafe_code)]", item.path));
    }
    let blocks = item.lines().filter(|(_, line)| line.contains("unsafe {")).count();
    if !["backend", "gguf", "wgpu"].contains(&name) {
        return;
    }
    if is_root && !text.contains("#![deny(unsafe_code)]") {
        violations.push(format!("{}: expected #![deny(unsafe_code)]", item.path));
    }
    let allowed = UNSAFE_BLOCKS.iter().find(|(path, _)| *path == item.path);
    let allowed = allowed.map_or(0, |(_, blocks)| *blocks);
    if blocks > allowed {
        violations.push(format!("{}: {blocks} unsafe blocks, at most {allowed} here", item.path));
    }
}

/// Names and lengths in lines of all functions of a file.
pub(super) fn functions(item: &Item) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = item.lines().map(|(_, line)| line).collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let indent = &line[..line.len() - line.trim_start().len()];
        // A declaration ends with a semicolon before any brace closes in its column.
        let end = lines[start..].iter().position(|line| {
            line.strip_prefix(indent).is_some_and(|rest| rest == "}" || rest == "};")
                || (line.ends_with(['}', ';']) && function_name(line) == Some(name))
                || line
                    .strip_prefix(indent)
                    .is_some_and(|rest| rest.starts_with(')') && rest.ends_with(';'))
        });
        found.push((name, end.map_or(0, |end| end + 1)));
    }
    found
}

/// The name, if a function begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let mut words = line.trim_start().split(' ');
    loop {
        match words.next()? {
            "fn" => break,
            "pub" | "pub(crate)" | "pub(super)" | "const" | "async" | "unsafe" | "extern"
            | "\"C\"" => {}
            _ => return None,
        }
    }
    words.next()?.split(['(', '<']).next()
}

#[cfg(test)]
mod tests {
    use super::super::tests::violations;
    use super::*;

    #[test]
    fn every_rule_can_fail() {
        let good = "//! A module.\n\n#![forbid(unsafe_code)]\n\nfn f() {}\n";
        assert_eq!(violations("crates/eval/src/lib.rs", good).len(), 0);
        for bad in [
            good.replace("//! A module.", "// A module."),
            good.replace("#![forbid(unsafe_code)]\n", ""),
            good.replace("fn f", "\tfn f"),
            good.replace("{}\n", "{} \n"),
            good.replace("fn f", &format!("fn f{}", "f".repeat(100))),
            good.replace("fn f", &format!("// {} later.\nfn f", UNFINISHED[0])),
            good.replace("fn f", &format!("#[{FEATURE} = \"x\")]\nfn f")),
        ] {
            assert_eq!(violations("crates/eval/src/lib.rs", &bad).len(), 1, "{bad}");
        }
        let mapped = format!("//! A.\nfn f() {{\n{}}}\n", "    unsafe { a() };\n".repeat(5));
        let mapped = mapped.as_str();
        assert_eq!(violations("crates/gguf/src/file/map.rs", mapped).len(), 1);
        assert_eq!(violations("crates/cpu/src/file.rs", mapped).len(), 0);
    }

    #[test]
    fn functions_are_measured_from_brace_to_brace() {
        let text = "pub(crate) fn one() {}\n\
                    trait T {\n    fn two(&self);\n    fn three(\n        &self,\n    );\n}\n\
                    fn four<T>(\n    t: T,\n) {\n    if x {\n    }\n}\n";
        let item = Item { path: "a.rs".to_owned(), text: Some(text.to_owned()) };
        assert_eq!(functions(&item), [("one", 1), ("two", 1), ("three", 3), ("four", 6)]);
        let long = format!("//! A.\nfn f() {{\n{}}}\n", "    g();\n".repeat(69));
        assert_eq!(violations("crates/cpu/src/a.rs", &long).len(), 1);
        let fits = format!("//! A.\nfn f() {{\n{}}}\n", "    g();\n".repeat(68));
        assert_eq!(violations("crates/cpu/src/a.rs", &fits).len(), 0);
    }
}
