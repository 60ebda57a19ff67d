//! Models from an Ollama registry: the manifest of a name, then its layers by their digests, into
//! an entry of the cache. Layers that are not used are not fetched.

use bodkin_gguf::quoted;

use super::download::{Client, Remote};
use super::intake::Staged;
use super::layers;
use super::ollama::{LayerDigest, Manifest, Name};
use super::staging::Staging;
use crate::error::Result;
use crate::progress::Reporter;

const MANIFEST_TYPE: &str = "application/vnd.docker.distribution.manifest.v2+json";
const REFUSAL: &str = "there is no such model, or it is private";

/// A model that a registry has.
pub(crate) struct RemoteModel<'a> {
    name: &'a Name,
    client: Client<'a>,
    manifest: Manifest,
}

impl<'a> RemoteModel<'a> {
    /// Asks the registry of the name for its manifest.
    pub(crate) fn open(name: &'a Name, reporter: &'a Reporter) -> Result<RemoteModel<'a>> {
        let client = Client::new(None, REFUSAL, reporter);
        let url = format!("{}/manifests/{}", name.address()?, name.tag());
        let text = client.document(&url, &url, MANIFEST_TYPE)?;
        let manifest = Manifest::parse(&text, &url)?;
        Ok(RemoteModel { name, client, manifest })
    }

    /// Fetches the weights and the layers that are used with them.
    pub(crate) fn fetch(&self, staging: &Staging<'_>) -> Result<Vec<Staged>> {
        let (model, layers) = (&self.manifest.model, &self.manifest.layers);
        let mut staged = vec![self.download(model, "model.gguf", staging)?];
        let is_used = |layer: &LayerDigest| layers::USED.contains(&layer.kind.as_str());
        for (index, layer) in layers.iter().enumerate() {
            if !is_used(layer) {
                let kind = quoted(&layer.kind);
                staging.reporter.note(&format!("{}: its layer {kind} is not used", self.name));
                continue;
            }
            // A model may have several licences.
            let mut file = self.download(layer, &format!("{index}-{}", layer.kind), staging)?;
            file.file.layer = Some(layer.kind.clone());
            staged.push(file);
        }
        Ok(staged)
    }

    fn download(&self, layer: &LayerDigest, file: &str, staging: &Staging<'_>) -> Result<Staged> {
        let LayerDigest { kind, digest, bytes } = layer;
        let url = format!("{}/blobs/sha256:{digest}", self.name.address()?);
        let what = format!("{} ({kind})", self.name);
        let remote = Remote { what, url, bytes: *bytes, sha256: Some(digest) };
        staging.download(&self.client, &remote, file)
    }
}
