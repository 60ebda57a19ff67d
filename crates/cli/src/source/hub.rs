//! Models from the Hugging Face hub: which files a repository has, and their download. Large files
//! on the hub carry their SHA-256, which is checked before a byte is fetched (against a pin) and
//! after. The address and the token come from `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME`, as in the
//! hub's own tools.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::Cache;
use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};

use super::Fetched;
use super::cache::{Pin, Staging, StoredFile};
use crate::progress::Progress;

/// A hub that does not answer within this time is taken for out of reach.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Models are split into at most this many files.
const PARTS_MAX: u32 = 1000;

/// `owner/repo[:file]`.
pub(crate) struct Reference {
    repo: String,
    pub(crate) file: Option<String>,
}

impl Reference {
    /// A reference to one file.
    pub(crate) fn new(repo: &str, file: &str) -> Reference {
        Reference { repo: repo.to_owned(), file: Some(file.to_owned()) }
    }

    /// Parses what stands after `hf:`.
    pub(crate) fn parse(text: &str) -> Result<Reference> {
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let valid = repo.split('/').count() == 2
            && repo.split('/').all(is_part)
            && file.is_none_or(|file| file.split('/').all(is_part) && is_gguf(file));
        ensure!(valid, "`hf:{text}` is not of the form hf:owner/repo[:file.gguf]");
        Ok(Reference { repo: repo.to_owned(), file: file.map(str::to_owned) })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "hf:{}", self.repo)?;
        self.file.as_ref().map_or(Ok(()), |file| write!(out, ":{file}"))
    }
}

/// Part of a path on the hub: nothing that could leave a folder or change an address's meaning.
fn is_part(part: &str) -> bool {
    part.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+=()".contains(&byte))
}

fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Names the file of a reference that names none: the only model of its repository.
pub(crate) fn complete(reference: &Reference) -> Result<Reference> {
    let repo = &reference.repo;
    if let Some(file) = &reference.file {
        return Ok(Reference::new(repo, file));
    }
    let mut files = model_files(&connect(None)?, repo)?;
    files.retain(|file| split_names(file).is_none_or(|parts| parts[0] == *file));
    files.sort();
    match files.as_slice() {
        [] => bail!("hf:{repo}: expected a .gguf file, found none"),
        [file] => Ok(Reference::new(repo, file)),
        _ => bail!("hf:{repo}: name one of its files as hf:{repo}:FILE: {}", files.join(", ")),
    }
}

/// Fetches a file, and the other parts if it is one of a split set.
pub(crate) fn fetch(
    reference: &Reference,
    pin: Option<&Pin>,
    staging: &Staging,
) -> Result<Fetched> {
    let repo = &reference.repo;
    let file = reference.file.as_ref().context("a file must be named")?;
    let api = connect(Some(staging))?;
    let existing = model_files(&api, repo)?;
    let wanted = split_names(file).unwrap_or_else(|| vec![file.clone()]);
    let mut files = Vec::new();
    for file in &wanted {
        ensure!(existing.contains(file), "hf:{repo}: has no {file}, but {}", existing.join(", "));
        files.push(download(&api, repo, file, pin, staging)?);
    }
    Ok(Fetched { name: reference.to_string(), source: "Hugging Face".to_owned(), files })
}

/// A client that keeps what it fetches in the scratch folder.
fn connect(staging: Option<&Staging>) -> Result<Api> {
    let mut builder = ApiBuilder::from_env().with_progress(false);
    let token = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty());
    builder = builder.with_token(token.or_else(|| Cache::from_env().token()));
    if let Some(staging) = staging {
        builder = builder.with_cache_dir(staging.scratch());
    }
    builder.build().map_err(|error| explain("Hugging Face", &error))
}

/// The .gguf files of a repository. This is also the test whether the hub can be reached at all.
fn model_files(api: &Api, repo: &str) -> Result<Vec<String>> {
    let request = api.model(repo.to_owned()).info_request();
    let request = request
        .config()
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_global(Some(ANSWER_TIMEOUT))
        .build();
    let answer = request.call().and_then(|mut answer| answer.body_mut().read_json::<RepoInfo>());
    let info = answer.map_err(|error| explain(repo, &ApiError::from(Box::new(error))))?;
    let names = info.siblings.into_iter().map(|file| file.rfilename);
    Ok(names.filter(|name| is_gguf(name) && name.split('/').all(is_part)).collect())
}

fn download(
    api: &Api,
    repo: &str,
    file: &str,
    pin: Option<&Pin>,
    staging: &Staging,
) -> Result<StoredFile> {
    let remote = api.model(repo.to_owned());
    let metadata = api.metadata(&remote.url(file)).map_err(|error| explain(repo, &error))?;
    let (bytes, etag) = (metadata.size() as u64, metadata.etag());
    let promised = (etag.len() == 64).then_some(etag);
    if let (Some(pin), Some(found)) = (pin, promised) {
        ensure!(found == pin.sha256, "{file}: expected SHA-256 {}, found {found}", pin.sha256);
    }
    let progress = Progress::start(&format!("downloading {repo}/{file}"), Some(bytes));
    let path = remote
        .download_with_progress(file, &progress)
        .map_err(|error| explain(repo, &error))?
        .canonicalize()
        .with_context(|| file.to_owned())?;
    drop(progress);
    let name = file.rsplit('/').next().unwrap_or(file);
    let stored = staging.adopt(name, &path)?;
    ensure!(stored.bytes == bytes, "{file}: expected {bytes} bytes, found {}", stored.bytes);
    if let Some(sha256) = promised {
        let found = &stored.sha256;
        ensure!(found == sha256, "{file}: expected SHA-256 {sha256}, found {found}");
    }
    Ok(stored)
}

fn explain(repo: &str, error: &ApiError) -> anyhow::Error {
    let text = error.to_string();
    match text.contains("status: 401") || text.contains("status: 404") {
        true => anyhow!("{repo}: not found, or not open to this user (see HF_TOKEN): {text}"),
        false => anyhow!("{repo}: {text}"),
    }
}

/// The names of all parts, if this is the name of one: `*-00001-of-00003.gguf`.
fn split_names(file: &str) -> Option<Vec<String>> {
    let stem = file.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !five_digits(number) || !five_digits(count) {
        return None;
    }
    let parts: u32 = count.parse().ok().filter(|parts| (1..=PARTS_MAX).contains(parts))?;
    Some((1..=parts).map(|part| format!("{base}-{part:05}-of-{count}.gguf")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_keep_to_the_hubs_names() {
        for good in ["a/b", "a/b:c.gguf", "a-1/b.c:q4/c-00001-of-00002.GGUF"] {
            assert_eq!(Reference::parse(good).unwrap().to_string(), format!("hf:{good}"));
        }
        for bad in
            ["a", "a/b/c", "a/..", "a/b:", "a/b:c.bin", "a/b:../c.gguf", "a/b:/c.gguf", "a?/b"]
        {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn parts_of_a_split_model() {
        let parts = split_names("q/x-00002-of-00003.gguf").unwrap();
        assert_eq!(parts[0], "q/x-00001-of-00003.gguf");
        assert_eq!(parts.len(), 3);
        for name in ["x.gguf", "x-1-of-3.gguf", "x-00001-of-00000.gguf", "x-00001-of-99999.gguf"] {
            assert!(split_names(name).is_none(), "{name}");
        }
    }
}
