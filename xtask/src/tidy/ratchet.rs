//! The ratchet: places that exceed a limit today, each with its size. A size may only shrink, and
//! a new place is a violation.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

const FILE: &str = "xtask/src/tidy/ratchet.txt";

/// A place that exceeds a limit.
pub(super) struct Excess {
    /// A file, `file:function`, or a rule and a crate.
    pub(super) place: String,
    /// In the unit of the rule: lines, files, occurrences.
    pub(super) size: usize,
    /// The limit, and where exactly it is exceeded.
    pub(super) detail: String,
}

/// The largest size that each place may have.
#[derive(Default)]
pub(super) struct Ratchet {
    allowed: BTreeMap<String, usize>,
    /// The comments above the entries.
    header: String,
}

impl Ratchet {
    /// Reads the file in the tree at `root`.
    pub(super) fn read(root: &Path) -> Result<Self> {
        Self::parse(&fs::read_to_string(root.join(FILE)).context(FILE)?)
    }

    /// Lines of `place size`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut ratchet = Self::default();
        for line in text.lines() {
            if line.starts_with('#') {
                writeln!(ratchet.header, "{line}")?;
                continue;
            }
            let entry = line.rsplit_once(' ').and_then(|(place, n)| Some((place, n.parse().ok()?)));
            let Some((place, size)) = entry else { bail!("{FILE}: expected a size: `{line}`") };
            ratchet.allowed.insert(place.to_owned(), size);
        }
        Ok(ratchet)
    }

    /// Compares what exceeds a limit with what is allowed to.
    pub(super) fn check(&self, found: &[Excess], violations: &mut Vec<String>) {
        const SHRUNK: &str = "run `cargo xtask tidy --write`";
        for Excess { place, size, detail } in found {
            match self.allowed.get(place) {
                Some(allowed) if size == allowed => {}
                Some(allowed) if size < allowed => {
                    violations.push(format!("{place}: {size}, no longer {allowed}: {SHRUNK}"))
                }
                Some(allowed) => violations
                    .push(format!("{place}: {size}, the ratchet allows {allowed}: {detail}")),
                None => violations.push(format!("{place}: {size}, {detail}")),
            }
        }
        for place in self.allowed.keys() {
            if !found.iter().any(|excess| excess.place == *place) {
                violations.push(format!("{place}: within the limit now: {SHRUNK}"));
            }
        }
    }

    /// Writes the sizes that shrank to the tree at `root`. None grows, and no place is added.
    pub(super) fn shrink(&mut self, root: &Path, found: &[Excess]) -> Result<()> {
        let size = |place: &str| Some(found.iter().find(|excess| excess.place == place)?.size);
        let mut text = self.header.clone();
        self.allowed.retain(|place, _| size(place).is_some());
        for (place, allowed) in &mut self.allowed {
            *allowed = size(place).unwrap_or(*allowed).min(*allowed);
            writeln!(text, "{place} {allowed}")?;
        }
        fs::write(root.join(FILE), text).context(FILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn excess(place: &str, size: usize) -> Excess {
        Excess { place: place.to_owned(), size, detail: "allowed 500".to_owned() }
    }

    #[test]
    fn sizes_only_shrink() {
        let ratchet = Ratchet::parse("# why\na 600\n").unwrap();
        for (size, expected) in [(599, 1), (600, 0), (601, 1)] {
            let mut violations = Vec::new();
            ratchet.check(&[excess("a", size)], &mut violations);
            assert_eq!(violations.len(), expected, "{size}");
        }
        let mut violations = Vec::new();
        ratchet.check(&[excess("b", 501)], &mut violations);
        assert_eq!(violations[0], "b: 501, allowed 500");
        assert!(violations[1].starts_with("a: within the limit now"));
        assert!(Ratchet::parse("a b\n").is_err());
    }

    #[test]
    fn writing_neither_grows_nor_adds() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("xtask/src/tidy")).unwrap();
        let mut ratchet = Ratchet::parse("# why\na 600\nb 5\nc 7\n").unwrap();
        let found = [excess("a", 700), excess("b", 4), excess("d", 1)];
        ratchet.shrink(root.path(), &found).unwrap();
        let text = fs::read_to_string(root.path().join(FILE)).unwrap();
        assert_eq!(text, "# why\na 600\nb 4\n");
    }
}
