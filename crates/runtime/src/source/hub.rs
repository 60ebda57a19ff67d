//! Models from the Hugging Face hub: which files a repository has, and their download. Large files
//! on the hub carry their SHA-256, which is checked before a byte is fetched (against a pin) and
//! after. The address and the token come from `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME`, as in the
//! hub's own tools.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use hf_hub::Cache;
use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};

use super::cache::{Fetched, Pin, Staging, StoredFile, expect_bytes, expect_sha256};
use crate::error::{Error, Result};

/// A hub that does not answer within this time counts as unreachable.
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

    /// Parses the text after `hf:`.
    pub(crate) fn parse(text: &str) -> Result<Reference> {
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let valid = repo.split('/').count() == 2
            && repo.split('/').all(is_part)
            && file.is_none_or(|file| file.split('/').all(is_part) && is_gguf(file));
        match valid {
            true => Ok(Reference { repo: repo.to_owned(), file: file.map(str::to_owned) }),
            false => {
                let expected = "the form hf:owner/repo[:file.gguf]";
                Err(Error::Name { name: format!("hf:{text}"), expected })
            }
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "hf:{}", self.repo)?;
        self.file.as_ref().map_or(Ok(()), |file| write!(out, ":{file}"))
    }
}

/// Whether this is a safe part of a path on the hub: it cannot leave a folder or alter the URL.
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
        [file] => Ok(Reference::new(repo, file)),
        [] => Err(Error::mismatch(format!("hf:{repo}"), "a .gguf file", "none")),
        _ => {
            let expected = format!("hf:{repo}:FILE, as it has several files");
            Err(Error::mismatch(format!("hf:{repo}"), expected, files.join(", ")))
        }
    }
}

/// Fetches a file, and the other parts if it is one of a split set.
pub(crate) fn fetch(
    reference: &Reference,
    pin: Option<&Pin>,
    staging: &Staging,
) -> Result<Fetched> {
    let repo = &reference.repo;
    let unnamed = || Error::mismatch(reference, "the name of a file", "none");
    let file = reference.file.as_ref().ok_or_else(unnamed)?;
    let api = connect(Some(staging))?;
    let existing = model_files(&api, repo)?;
    let wanted = split_names(file).unwrap_or_else(|| vec![file.clone()]);
    let mut files = Vec::new();
    for file in &wanted {
        if !existing.contains(file) {
            return Err(Error::mismatch(format!("hf:{repo}"), file, existing.join(", ")));
        }
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

/// The .gguf files of a repository. The request also shows whether the hub is reachable.
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
        expect_sha256(file, pin.sha256, found)?;
    }
    let phase = staging.reporter.begin(&format!("downloading {repo}/{file}"), Some(bytes));
    let path = remote
        .download_with_progress(file, &phase)
        .map_err(|error| explain(repo, &error))?
        .canonicalize()
        .map_err(Error::io(file))?;
    drop(phase);
    let name = file.rsplit('/').next().unwrap_or(file);
    let stored = staging.adopt(name, &path)?;
    expect_bytes(file, bytes, stored.bytes)?;
    if let Some(sha256) = promised {
        expect_sha256(file, sha256, &stored.sha256)?;
    }
    Ok(stored)
}

fn explain(repo: &str, error: &ApiError) -> Error {
    let mut reason = error.to_string();
    if reason.contains("status: 401") || reason.contains("status: 404") {
        reason = format!("not found, or not open to this user (see HF_TOKEN): {reason}");
    }
    Error::Download { from: repo.to_owned(), reason }
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
