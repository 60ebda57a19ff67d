//! `cargo xtask tidy`: the rules of the project's design that a machine can check. Every rule is a
//! function from the tree's files to complaints. The limits on sizes are a ratchet: what is over
//! them stands in `tidy/ratchet.txt` with its size, and may only shrink.

mod manifests;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// A file of the tree.
struct Item {
    /// Path from the root, with `/`.
    path: String,
    /// The content, if it is text.
    text: Option<String>,
}

impl Item {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The name of the folder below `crates`, or `xtask`.
    fn crate_name(&self) -> Option<&str> {
        match self.path.split_once('/')? {
            ("crates", rest) => rest.split('/').next(),
            (name @ ("emulator" | "xtask"), _) => Some(name),
            _ => None,
        }
    }

    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let text = self.text.as_deref().unwrap_or_default();
        text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Checks the tree at `root`.
pub(crate) fn run(root: &Path) -> Result<()> {
    let items = read_tree(root)?;
    let ratchet = parse_ratchet(include_str!("tidy/ratchet.txt"))?;
    let complaints = check(&items, &ratchet);
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    ensure!(complaints.is_empty(), "tidy: {} complaints", complaints.len());
    Ok(())
}

fn check(items: &[Item], ratchet: &BTreeMap<String, usize>) -> Vec<String> {
    let mut complaints = Vec::new();
    for item in items {
        names(item, &mut complaints);
        binaries(item, &mut complaints);
        documents(item, &mut complaints);
        source::check(item, &mut complaints);
        manifests::check(item, &mut complaints);
    }
    sizes(items, ratchet, &mut complaints);
    complaints
}

/// All files that git tracks or would track.
fn read_tree(root: &Path) -> Result<Vec<Item>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let list = String::from_utf8(output.stdout).context("a path is not UTF-8")?;
    let mut items = Vec::new();
    for path in list.split_terminator('\0') {
        let full = root.join(path);
        // A file that was deleted but not yet committed as such is still listed.
        if !full.is_file() {
            continue;
        }
        let bytes = fs::read(&full).with_context(|| path.to_owned())?;
        let text = String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
        items.push(Item { path: path.to_owned(), text });
    }
    Ok(items)
}

const BANNED_NAMES: [&str; 8] =
    ["common", "helper", "helpers", "manager", "misc", "util", "utilities", "utils"];

/// Names that say nothing are refused.
fn names(item: &Item, complaints: &mut Vec<String>) {
    for part in item.path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if BANNED_NAMES.contains(&stem) {
            complaints.push(format!("{}: `{stem}` says nothing about its content", item.path));
        }
    }
}

/// Binary files have two homes: test data, and compiled kernels beside their source.
fn binaries(item: &Item, complaints: &mut Vec<String>) {
    let allowed = item.path.starts_with("tests/parity/")
        || item.path.ends_with(".cubin")
        || item.path.ends_with(".ptx");
    if item.text.is_none() && !allowed {
        complaints.push(format!("{}: a binary file outside tests/parity", item.path));
    }
}

/// Documents name no machine's folders and no package registry's address.
fn documents(item: &Item, complaints: &mut Vec<String>) {
    const REFUSED: [&str; 7] = [
        "/work/",
        "/tmp/",
        "pypi.org",
        "pythonhosted.org",
        "crates.io",
        "npmjs.org",
        "anaconda.org",
    ];
    if !item.path.ends_with(".md") {
        return;
    }
    for (number, line) in item.lines() {
        for word in REFUSED.iter().filter(|word| line.contains(**word)) {
            complaints.push(format!("{}:{number}: `{word}` in a document", item.path));
        }
    }
}

/// Lines of a file, and of a function.
const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

fn sizes(items: &[Item], ratchet: &BTreeMap<String, usize>, complaints: &mut Vec<String>) {
    let mut over = BTreeMap::new();
    for item in items.iter().filter(|item| item.is_rust()) {
        let lines = item.lines().count();
        if lines > FILE_LINES_MAX {
            over.insert(item.path.clone(), lines);
        }
        for (name, lines) in source::functions(item) {
            if lines > FUNCTION_LINES_MAX {
                over.insert(format!("{}:{name}", item.path), lines);
            }
        }
    }
    for (place, lines) in &over {
        match ratchet.get(place) {
            Some(allowed) if lines == allowed => {}
            Some(allowed) if lines < allowed => complaints
                .push(format!("{place}: shrunk to {lines} lines: write that in the ratchet")),
            Some(allowed) => complaints.push(format!("{place}: {lines} lines, allowed {allowed}")),
            None => complaints.push(format!(
                "{place}: {lines} lines, allowed {FILE_LINES_MAX} a file, {FUNCTION_LINES_MAX} a \
                 function"
            )),
        }
    }
    for place in ratchet.keys().filter(|place| !over.contains_key(*place)) {
        complaints.push(format!("{place}: within the limits now: take it out of the ratchet"));
    }
}

/// Lines of `place lines`, where a place is a file or `file:function`.
fn parse_ratchet(text: &str) -> Result<BTreeMap<String, usize>> {
    let mut ratchet = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let entry = line.rsplit_once(' ').and_then(|(place, n)| Some((place, n.parse().ok()?)));
        let Some((place, lines)) = entry else { bail!("ratchet.txt: `{line}`") };
        ratchet.insert(place.to_owned(), lines);
    }
    Ok(ratchet)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Complaints about one file with this content.
    pub(super) fn complaints(path: &str, text: &str) -> Vec<String> {
        let item = Item { path: path.to_owned(), text: Some(text.to_owned()) };
        check(&[item], &BTreeMap::new())
    }

    #[test]
    fn the_tree_is_tidy() {
        run(&crate::root()).unwrap();
    }

    #[test]
    fn names_and_documents() {
        assert_eq!(complaints("crates/cpu/src/utils.rs", "//! A.\n").len(), 1);
        assert_eq!(complaints("crates/misc/x.txt", "").len(), 1);
        assert_eq!(complaints("docs/a.md", "see /tmp/x\n").len(), 1);
        assert_eq!(complaints("docs/a.md", "see the manual\n").len(), 0);
    }

    #[test]
    fn binaries_have_their_places() {
        let complain = |path: &str| {
            check(&[Item { path: path.to_owned(), text: None }], &BTreeMap::new()).len()
        };
        assert_eq!(complain("docs/a.png"), 1);
        assert_eq!(complain("tests/parity/models/a.gguf"), 0);
        assert_eq!(complain("crates/cuda/kernels/a.cubin"), 0);
    }

    #[test]
    fn the_ratchet_only_turns_one_way() {
        let lines = |n: usize| Item {
            path: "crates/cpu/src/a.rs".to_owned(),
            text: Some(format!("//! A.\n{}", "// B.\n".repeat(n - 1))),
        };
        let ratchet = parse_ratchet("# why\ncrates/cpu/src/a.rs 600\n").unwrap();
        for (n, expected) in [(500, 1), (599, 1), (600, 0), (601, 1)] {
            assert_eq!(check(&[lines(n)], &ratchet).len(), expected, "{n}");
        }
        assert_eq!(check(&[lines(501)], &BTreeMap::new()).len(), 1);
        assert_eq!(check(&[lines(500)], &BTreeMap::new()).len(), 0);
        assert!(parse_ratchet("a b\n").is_err());
    }
}
