//! The local Ollama store, read only: names to manifests, manifests to blobs. Manifests are other
//! programs' files, so every name and digest is checked before it becomes a path. This module must
//! not know what the layers beside the model mean.

use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cache::{Check, verify_file};
use crate::error::{Error, Result};
use crate::progress::Reporter;

const DEFAULT_HOST: &str = "registry.ollama.ai";
const DEFAULT_NAMESPACE: &str = "library";
const DEFAULT_TAG: &str = "latest";
const LAYER_PREFIX: &str = "application/vnd.ollama.image.";
/// Manifests are a few kilobytes.
const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// A full name: `[host/][namespace/]model[:tag]`.
#[derive(Debug, PartialEq)]
pub(crate) struct Name {
    host: String,
    namespace: String,
    model: String,
    tag: String,
}

impl Name {
    /// Parses a name by Ollama's rules; the parts left out take Ollama's defaults.
    pub(crate) fn parse(text: &str) -> Result<Name> {
        let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
        // A colon before the last slash belongs to a host's port.
        let (path, tag) = match rest.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, tag),
            _ => (rest, DEFAULT_TAG),
        };
        let mut parts = path.rsplitn(3, '/');
        let model = parts.next().unwrap_or_default();
        let namespace = parts.next().unwrap_or(DEFAULT_NAMESPACE);
        let host = parts.next().unwrap_or(DEFAULT_HOST);
        let valid = is_part(host, 350, ".:")
            && is_part(namespace, 80, "")
            && is_part(model, 80, ".")
            && is_part(tag, 80, ".");
        if !valid {
            let expected =
                "a path to a .gguf file or a model's name ([host/][namespace/]model[:tag])";
            return Err(Error::Name { name: text.to_owned(), expected });
        }
        let [host, namespace, model, tag] = [host, namespace, model, tag].map(str::to_owned);
        Ok(Name { host, namespace, model, tag })
    }

    /// The name of a manifest at this place below the manifests' folder.
    fn of_manifest(path: &Path) -> Option<Name> {
        let parts: Option<Vec<&str>> = path.iter().map(|part| part.to_str()).collect();
        match parts?.as_slice() {
            [host, namespace, model, tag] => {
                Name::parse(&format!("{host}/{namespace}/{model}:{tag}")).ok()
            }
            _ => None,
        }
    }

    fn same(&self, other: &Name) -> bool {
        let parts =
            |name: &Name| format!("{}/{}/{}:{}", name.host, name.namespace, name.model, name.tag);
        parts(self).eq_ignore_ascii_case(&parts(other))
    }
}

/// The short form: what Ollama's defaults supply is left out, but for the tag.
impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host != DEFAULT_HOST {
            write!(out, "{}/{}/", self.host, self.namespace)?;
        } else if self.namespace != DEFAULT_NAMESPACE {
            write!(out, "{}/", self.namespace)?;
        }
        write!(out, "{}:{}", self.model, self.tag)
    }
}

/// A part starts with a letter, digit or `_`, and goes on with those, `-` and the `extra` ones.
fn is_part(part: &str, bytes_max: usize, extra: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let inner = |byte: u8| word(byte) || byte == b'-' || extra.as_bytes().contains(&byte);
    part.len() <= bytes_max && part.bytes().next().is_some_and(word) && part.bytes().all(inner)
}

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
}

/// A layer beside the model: `template`, `system`, `params`, `adapter`, `projector` and so on.
#[derive(Clone, Debug, Serialize)]
pub struct Layer {
    /// The last word of its media type.
    pub kind: String,
    /// The layer's blob in the store.
    pub path: PathBuf,
    /// Size of the blob.
    pub bytes: u64,
}

/// A model in the store.
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// Hexadecimal hash of the model's blob.
    sha256: String,
    pub(crate) layers: Vec<Layer>,
}

/// The store's folder.
pub(crate) struct Store {
    folder: PathBuf,
}

impl Store {
    /// The store of this user: `$OLLAMA_MODELS`, or `~/.ollama/models`.
    pub(crate) fn of_user() -> Result<Store> {
        let folder = match std::env::var_os("OLLAMA_MODELS").filter(|value| !value.is_empty()) {
            Some(folder) => PathBuf::from(folder),
            None => dirs::home_dir()
                .ok_or_else(|| Error::mismatch("OLLAMA_MODELS", "a folder", "none for this user"))?
                .join(".ollama")
                .join("models"),
        };
        Ok(Store { folder })
    }

    /// Finds a model by its name, ignoring case as Ollama does.
    pub(crate) fn find(&self, name: &Name, check: Check, reporter: &Reporter) -> Result<Stored> {
        let Some((name, path)) = self.manifests().into_iter().find(|(other, _)| name.same(other))
        else {
            let store = format!("the Ollama store {}", self.folder.display());
            return Err(Error::mismatch(store, name.to_string(), "no such model"));
        };
        let stored = self.read(&name, &path)?;
        verify_file(&stored.path, stored.bytes, &stored.sha256, check, reporter)?;
        Ok(stored)
    }

    /// All readable models in the store, sorted by name.
    pub(crate) fn models(&self) -> Vec<Stored> {
        let found = self.manifests();
        let mut models: Vec<Stored> =
            found.iter().filter_map(|(name, path)| self.read(name, path).ok()).collect();
        models.retain(|model| model.path.is_file());
        models.sort_by(|a, b| a.name.cmp(&b.name));
        models
    }

    /// The blob with this hexadecimal SHA-256, whatever names use it.
    pub(crate) fn blob(&self, sha256: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("sha256-{sha256}"))
    }

    /// The manifests' names and paths: four levels of folders, as in `host/namespace/model/tag`.
    fn manifests(&self) -> Vec<(Name, PathBuf)> {
        let root = self.folder.join("manifests");
        let mut level = vec![root.clone()];
        for _ in 0..4 {
            let children = |folder: &PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
            level = level.iter().flat_map(children).map(|child| child.path()).collect();
        }
        let name = |path: &PathBuf| Name::of_manifest(path.strip_prefix(&root).ok()?);
        level.into_iter().filter_map(|path| Some((name(&path)?, path))).collect()
    }

    fn read(&self, name: &Name, path: &Path) -> Result<Stored> {
        let shown = path.display().to_string();
        let file = File::open(path).map_err(Error::io(&shown))?;
        let manifest: Manifest = serde_json::from_reader(file.take(MANIFEST_BYTES_MAX))
            .map_err(|error| Error::mismatch(&shown, "an Ollama manifest", error))?;
        let mut model = None;
        let mut layers = Vec::new();
        for layer in manifest.layers {
            let Some(kind) = layer.media_type.strip_prefix(LAYER_PREFIX) else { continue };
            let found = || format!("`{}`", layer.digest);
            let hex = digest_hex(&layer.digest)
                .ok_or_else(|| Error::mismatch(&shown, "a SHA-256 digest", found()))?;
            let path = self.blob(hex);
            if kind != "model" {
                layers.push(Layer { kind: kind.to_owned(), path, bytes: layer.size });
            } else if model.replace((path, layer.size, hex.to_owned())).is_some() {
                return Err(Error::mismatch(&shown, "one model layer", "several"));
            }
        }
        let (path, bytes, sha256) =
            model.ok_or_else(|| Error::mismatch(&shown, "a model layer", "none"))?;
        Ok(Stored { name: name.to_string(), path, bytes, sha256, layers })
    }
}

/// The hexadecimal part of `sha256:` (or `sha256-`) and 64 hexadecimal digits.
fn digest_hex(digest: &str) -> Option<&str> {
    let hex = digest.strip_prefix("sha256")?.strip_prefix([':', '-'])?;
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_take_ollamas_defaults() {
        for (text, full, short) in [
            ("mistral", "registry.ollama.ai/library/mistral:latest", "mistral:latest"),
            ("me/Mistral:7b-q4_0", "registry.ollama.ai/me/Mistral:7b-q4_0", "me/Mistral:7b-q4_0"),
            ("hf.co/a/b.GGUF:Q4_K_M", "hf.co/a/b.GGUF:Q4_K_M", "hf.co/a/b.GGUF:Q4_K_M"),
            ("localhost:5000/a/b", "localhost:5000/a/b:latest", "localhost:5000/a/b:latest"),
            ("https://hf.co/a/b", "hf.co/a/b:latest", "hf.co/a/b:latest"),
        ] {
            let name = Name::parse(text).unwrap();
            assert_eq!(name, Name::parse(full).unwrap(), "{text}");
            assert_eq!(name.to_string(), short, "{text}");
        }
    }

    #[test]
    fn names_that_could_leave_the_store_are_refused() {
        let long = "m".repeat(81);
        for text in
            ["", "..", "a/../b", "/etc/passwd", "a//b", "a:..", "a b", "a:", "a.b/c", "x\\y", &long]
        {
            assert!(Name::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn digests_are_exact() {
        let hex = "0123456789abcdefABCDEF0123456789abcdef0123456789abcdef0123456789";
        assert_eq!(digest_hex(&format!("sha256:{hex}")), Some(hex));
        assert_eq!(digest_hex(&format!("sha256-{hex}")), Some(hex));
        for bad in [hex, "sha256:../../x", &format!("sha256:{hex}0"), &format!("sha512:{hex}")] {
            assert_eq!(digest_hex(bad), None, "{bad}");
        }
    }
}
