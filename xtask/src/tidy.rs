//! `cargo xtask tidy`: the rules of the project's design that a machine can check. Every rule is a
//! function from the tree's files to violations. What exceeds a limit today is listed in
//! `tidy/ratchet.txt` with its size, and may only shrink.

mod code;
mod cycles;
mod imports;
mod kernels;
mod manifests;
mod ratchet;
mod source;
mod tree;
mod words;

use std::path::Path;

use anyhow::{Result, ensure};

use self::ratchet::{Excess, Ratchet};
use self::tree::Item;

/// What to do beside checking.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Writes smaller sizes to the ratchet; it never grows
    #[arg(long)]
    write: bool,
    /// Only lists the imports between files of this crate that depend on each other
    #[arg(long, value_name = "CRATE")]
    cycles: Option<String>,
}

/// Checks the tree at `root`.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let items = tree::read(root)?;
    if let Some(name) = &args.cycles {
        cycles::report(&items, name).iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    let mut ratchet = Ratchet::read(root)?;
    if args.write {
        ratchet.shrink(root, &excesses(&items))?;
    }
    let violations = check(&items, &ratchet);
    for violation in &violations {
        eprintln!("{violation}");
    }
    ensure!(violations.is_empty(), "tidy: {} violations", violations.len());
    Ok(())
}

fn check(items: &[Item], ratchet: &Ratchet) -> Vec<String> {
    let mut violations = Vec::new();
    for item in items {
        names(item, &mut violations);
        binaries(item, &mut violations);
        documents(item, &mut violations);
        source::check(item, &mut violations);
        manifests::check(item, &mut violations);
    }
    ratchet.check(&excesses(items), &mut violations);
    violations
}

/// Whatever exceeds a limit that the ratchet may allow it to.
fn excesses(items: &[Item]) -> Vec<Excess> {
    let mut found = sizes(items);
    found.extend(cycles::check(items));
    found.extend(kernels::check(items));
    found.extend(words::check(items, include_str!("tidy/words.txt")));
    found
}

const BANNED_NAMES: [&str; 8] =
    ["common", "helper", "helpers", "manager", "misc", "util", "utilities", "utils"];

/// Names that say nothing are refused.
fn names(item: &Item, violations: &mut Vec<String>) {
    for part in item.path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if BANNED_NAMES.contains(&stem) {
            violations.push(format!("{}: `{stem}` says nothing about its content", item.path));
        }
    }
}

/// Binary files are test data, or compiled kernels beside their source.
fn binaries(item: &Item, violations: &mut Vec<String>) {
    let folders = ["tests/convert/", "tests/parity/", "crates/cuda/kernels/built/"];
    let allowed = folders.iter().any(|folder| item.path.starts_with(folder));
    if item.text.is_none() && !allowed {
        violations.push(format!(
            "{}: a binary file that is neither test data nor a compiled kernel",
            item.path
        ));
    }
}

/// Documents name no machine's folders and no package registry's address.
fn documents(item: &Item, violations: &mut Vec<String>) {
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
            violations.push(format!("{}:{number}: `{word}` in a document", item.path));
        }
    }
}

/// Lines of a file, and of a function.
const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

fn sizes(items: &[Item]) -> Vec<Excess> {
    let mut over = Vec::new();
    let mut measure = |place: String, size: usize, max: usize| {
        if size > max {
            over.push(Excess { place, size, detail: format!("allowed are {max} lines") });
        }
    };
    for item in items.iter().filter(|item| item.is_rust()) {
        measure(item.path.clone(), item.lines().count(), FILE_LINES_MAX);
        for (name, lines) in source::functions(item) {
            measure(format!("{}:{name}", item.path), lines, FUNCTION_LINES_MAX);
        }
    }
    over
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Violations about one file with this content.
    pub(super) fn violations(path: &str, text: &str) -> Vec<String> {
        let item = Item { path: path.to_owned(), text: Some(text.to_owned()) };
        check(&[item], &Ratchet::default())
    }

    #[test]
    fn the_tree_is_tidy() {
        run(&crate::workspace::root(), &Args { write: false, cycles: None }).unwrap();
    }

    #[test]
    fn names_and_documents() {
        assert_eq!(violations("crates/cpu/src/utils.rs", "//! A.\n").len(), 1);
        assert_eq!(violations("crates/misc/x.txt", "").len(), 1);
        assert_eq!(violations("docs/a.md", "see /tmp/x\n").len(), 1);
        assert_eq!(violations("docs/a.md", "see the manual\n").len(), 0);
    }

    #[test]
    fn binaries_have_their_places() {
        let count = |path: &str| {
            check(&[Item { path: path.to_owned(), text: None }], &Ratchet::default()).len()
        };
        assert_eq!(count("docs/a.png"), 1);
        assert_eq!(count("tests/parity/models/a.gguf"), 0);
        assert_eq!(count("crates/cuda/kernels/built/a.cubin.gz"), 0);
        assert_eq!(count("crates/cuda/kernels/a.cubin"), 1);
    }

    #[test]
    fn files_have_a_limit_of_lines() {
        let lines = |n: usize| format!("//! A.\n{}", "// B.\n".repeat(n - 1));
        assert_eq!(violations("crates/cpu/src/a.rs", &lines(501)).len(), 1);
        assert_eq!(violations("crates/cpu/src/a.rs", &lines(500)).len(), 0);
    }
}
