//! Where the workspace is.

use std::path::PathBuf;

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
