//! The files that tidy checks: all that git tracks or would track.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A file of the tree.
pub(super) struct Item {
    /// Path from the root, with `/`.
    pub(super) path: String,
    /// The content, if it is text.
    pub(super) text: Option<String>,
}

impl Item {
    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The name of the folder below `crates`, or `emulator`, or `xtask`.
    pub(super) fn crate_name(&self) -> Option<&str> {
        match self.path.split_once('/')? {
            ("crates", rest) => rest.split('/').next(),
            (name @ ("emulator" | "xtask"), _) => Some(name),
            _ => None,
        }
    }

    /// Lines with their numbers, from 1.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let text = self.text.as_deref().unwrap_or_default();
        text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// All files that git tracks or would track.
pub(super) fn read(root: &Path) -> Result<Vec<Item>> {
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
