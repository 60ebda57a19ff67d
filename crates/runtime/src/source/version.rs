//! The version of a file on a server that names no hash of it, kept beside the beginning of its
//! download: the next download goes on only if the server still has this version. This module must
//! not know how files are downloaded.

use std::fs;
use std::path::{Path, PathBuf};

use ureq::http::{HeaderMap, HeaderValue};

use crate::error::{Error, Result};

/// Ends the name of the file that holds a version, in place of that of the download.
pub(crate) const EXTENSION: &str = "version";

/// The version that the beginning of a download is of, if the server names one.
pub(crate) struct Version {
    path: PathBuf,
    name: Option<String>,
}

impl Version {
    /// The version of this download.
    pub(crate) fn of(part: &Path) -> Version {
        let path = part.with_extension(EXTENSION);
        let stored = fs::read_to_string(&path).ok();
        let is_name = |name: &String| !name.is_empty() && HeaderValue::from_str(name).is_ok();
        Version { path, name: stored.filter(is_name) }
    }

    /// The value of `If-Range`, which makes a server send the whole of another version.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether a response is of this version, as far as it says: some servers ignore `If-Range`.
    pub(crate) fn is_of(&self, headers: &HeaderMap) -> bool {
        named(headers).is_none_or(|name| Some(name) == self.name())
    }

    /// Remembers the version of a download that begins.
    pub(crate) fn begin(&mut self, headers: &HeaderMap) -> Result<()> {
        self.name = named(headers).map(str::to_owned);
        let name = self.name.as_deref().unwrap_or_default();
        fs::write(&self.path, name).map_err(Error::io(self.path.display().to_string()))
    }
}

/// The version that a response names: a strong ETag, or else the time of the last change. A weak
/// ETag says only that two versions mean the same.
fn named(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let strong = text("etag").filter(|tag| tag.starts_with('"'));
    strong.or_else(|| text("last-modified"))
}
