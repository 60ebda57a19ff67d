//! Ollama's names and manifests, and its local store, which is only read: names to manifests,
//! manifests to blobs. Manifests are other programs' files, so every name and digest is checked
//! before it becomes a path. This module must not know what the layers beside the model mean.

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::download::address;
use super::intake::{Check, is_sha256, open_stored, plausible_bytes, verify_file};
use super::layers::Layer;
use crate::error::{Error, Result};
use crate::progress::Reporter;

const DEFAULT_HOST: &str = "registry.ollama.ai";
/// Another address of the default host, with its scheme.
const REGISTRY_VARIABLE: &str = "OLLAMA_REGISTRY";
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

    /// The name of the model in the cache: Ollama ignores case.
    pub(crate) fn key(&self) -> String {
        self.to_string().to_lowercase()
    }

    /// The tag, `latest` by default.
    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    /// Where a registry serves the model: manifests and blobs are below. As for containers, only a
    /// registry on this machine is spoken to without encryption.
    pub(crate) fn address(&self) -> Result<String> {
        let (host, path) = (&self.host, format!("v2/{}/{}", self.namespace, self.model));
        Ok(match host.as_str() {
            DEFAULT_HOST => {
                format!("{}/{path}", address(REGISTRY_VARIABLE, &format!("https://{host}"))?)
            }
            _ if host.starts_with("localhost:") || host.starts_with("127.") => {
                format!("http://{host}/{path}")
            }
            _ => format!("https://{host}/{path}"),
        })
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

/// The layers of a model in Ollama's store or a registry.
#[derive(Debug)]
pub struct Manifest {
    /// The weights.
    pub model: LayerDigest,
    /// All others.
    pub layers: Vec<LayerDigest>,
}

/// A layer that is named by its content.
#[derive(Debug)]
pub struct LayerDigest {
    /// The last word of its media type.
    pub kind: String,
    /// 64 hexadecimal digits.
    pub digest: String,
    /// Size of the layer.
    pub bytes: u64,
}

#[derive(Deserialize)]
struct Document {
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
}

impl Manifest {
    /// Parses a manifest; `origin` is its path or address.
    ///
    /// # Errors
    /// If it is no manifest, has no model layer or several, or an adapter.
    pub fn parse(text: &[u8], origin: &str) -> Result<Manifest> {
        let document: Document = serde_json::from_slice(text)
            .map_err(|error| Error::mismatch(origin, "an Ollama manifest", error))?;
        let (mut model, mut layers) = (None, Vec::new());
        for layer in document.layers {
            let Some(kind) = layer.media_type.strip_prefix(LAYER_PREFIX) else { continue };
            let found = || format!("`{}`", layer.digest);
            let digest =
                layer.digest.strip_prefix("sha256").and_then(|it| it.strip_prefix([':', '-']));
            let digest = digest
                .filter(|digest| is_sha256(digest))
                .ok_or_else(|| Error::mismatch(origin, "a SHA-256 digest", found()))?;
            let (kind, digest) = (kind.to_owned(), digest.to_owned());
            let bytes = plausible_bytes(origin, layer.size)?;
            let layer = LayerDigest { kind, digest, bytes };
            // Without it the model would be another one.
            if layer.kind == "adapter" {
                let expected = "no LoRA adapter, which cannot be applied";
                return Err(Error::mismatch(origin, expected, "one"));
            }
            if layer.kind != "model" {
                layers.push(layer);
            } else if model.replace(layer).is_some() {
                return Err(Error::mismatch(origin, "one model layer", "several"));
            }
        }
        let model = model.ok_or_else(|| Error::mismatch(origin, "a model layer", "none"))?;
        Ok(Manifest { model, layers })
    }
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
    pub(crate) fn find(
        &self,
        name: &Name,
        check: Check,
        reporter: &Reporter,
    ) -> Result<Option<Stored>> {
        let same = |(other, _): &(Name, PathBuf)| name.same(other);
        let Some((name, path)) = self.manifests().into_iter().find(same) else { return Ok(None) };
        let stored = self.read(&name, &path)?;
        verify_file(&stored.path, stored.bytes, &stored.sha256, check, reporter)?;
        Ok(Some(stored))
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
        let mut text = Vec::new();
        let file = open_stored(path)?;
        file.take(MANIFEST_BYTES_MAX).read_to_end(&mut text).map_err(Error::io(&shown))?;
        let Manifest { model, layers } = Manifest::parse(&text, &shown)?;
        let layers = layers.into_iter().map(|LayerDigest { kind, digest, bytes }| {
            let path = self.blob(&digest);
            Layer { kind, path, bytes }
        });
        Ok(Stored {
            name: name.to_string(),
            path: self.blob(&model.digest),
            bytes: model.bytes,
            sha256: model.digest,
            layers: layers.collect(),
        })
    }
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
}
