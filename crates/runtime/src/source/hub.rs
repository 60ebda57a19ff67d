//! Models from the Hugging Face hub: which files a repository has, which of them a name means, and
//! their download. Files on the hub that are large carry their SHA-256, which is compared with a
//! pin before a byte is fetched, and with the bytes after. The address and the token come from
//! `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME`, as in the hub's own tools.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::download::{Client, Remote, address};
use super::intake::{Pin, Staged, expect_sha256, is_sha256, plausible_bytes};
use super::staging::Staging;
use crate::error::{Error, Result};
use crate::progress::Reporter;

const ENDPOINT: &str = "https://huggingface.co";
/// What precedes the names of repositories in a browser.
pub(crate) const PAGES: &str = "https://huggingface.co/";
const REFUSAL: &str = "it does not exist, or is not open to this user (see HF_TOKEN)";
/// Which of several models is meant if none is named, as in llama.cpp.
const DEFAULT_QUANTS: [&str; 2] = ["Q4_K_M", "Q8_0"];
/// Files beside models: projectors for images, importance matrices and drafts.
const NO_MODELS: [&str; 3] = ["mmproj", "imatrix", "mtp-"];
/// Models are split into at most this many files.
const PARTS_MAX: u32 = 1000;

/// `owner/repo[:file.gguf]` or `owner/repo:QUANT`.
pub(crate) struct Reference {
    repo: String,
    /// A file, or the name of a quantization that files have in their names.
    choice: Option<String>,
}

impl Reference {
    /// A reference to one file.
    pub(crate) fn new(repo: &str, file: &str) -> Reference {
        Reference { repo: repo.to_owned(), choice: Some(file.to_owned()) }
    }

    /// Parses the text after `hf:`, or after the hub's address: there a browser has
    /// `owner/repo/blob/main/file.gguf`, or `resolve` in a link to download it.
    pub(crate) fn parse(text: &str) -> Result<Reference> {
        let parts: Vec<&str> = text.splitn(5, '/').collect();
        let of_page = match parts[..] {
            [owner, name, "blob" | "resolve", "main", file] => {
                let file = file.split_once('?').map_or(file, |(file, _)| file);
                Some(format!("{owner}/{name}:{file}"))
            }
            _ => None,
        };
        let text = of_page.as_deref().unwrap_or(text);
        let (repo, choice) = match text.split_once(':') {
            Some((repo, choice)) => (repo, Some(choice)),
            None => (text, None),
        };
        let is_choice = |it: &str| is_part(it) || it.split('/').all(is_part) && is_gguf(it);
        let valid = repo.split('/').count() == 2
            && repo.split('/').all(is_part)
            && choice.is_none_or(is_choice);
        match valid {
            true => Ok(Reference { repo: repo.to_owned(), choice: choice.map(str::to_owned) }),
            false => {
                let expected = "the form hf:owner/repo[:QUANT] or hf:owner/repo:file.gguf";
                Err(Error::Name { name: format!("hf:{text}"), expected })
            }
        }
    }

    /// The one of `files` that is meant.
    fn choose<'a>(&self, files: &[&'a str]) -> Result<&'a str> {
        let is_model = |file: &&&str| {
            let is_first = split_names(file).is_none_or(|parts| parts[0] == ***file);
            is_first && !NO_MODELS.iter().any(|word| file.contains(word))
        };
        let models: Vec<&str> = files.iter().filter(is_model).copied().collect();
        let quant = |quant: &str| models.iter().copied().find(|file| has_quant(file, quant));
        let found = match &self.choice {
            Some(file) if is_gguf(file) => files.iter().copied().find(|found| found == file),
            Some(name) => quant(name),
            None if models.len() == 1 => models.first().copied(),
            None => DEFAULT_QUANTS.into_iter().find_map(quant),
        };
        found.ok_or_else(|| {
            let expected = match &self.choice {
                Some(choice) => choice.clone(),
                None if models.is_empty() => "a .gguf file".to_owned(),
                None => format!("hf:{}:QUANT, as it has several models", self.repo),
            };
            let found = if files.is_empty() { "none".to_owned() } else { files.join(", ") };
            Error::mismatch(format!("hf:{}", self.repo), expected, found)
        })
    }

    /// The one of these full names that is meant.
    pub(crate) fn choose_name(&self, names: impl Iterator<Item = String>) -> Option<String> {
        let prefix = self.name("");
        let files: Vec<String> =
            names.filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned())).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        self.choose(&files).ok().map(|file| self.name(file))
    }

    /// The full name of a file of the repository.
    pub(crate) fn name(&self, file: &str) -> String {
        format!("hf:{}:{file}", self.repo)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "hf:{}", self.repo)?;
        self.choice.as_ref().map_or(Ok(()), |choice| write!(out, ":{choice}"))
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

/// Whether a file's path has `quant` as a word of its own, in any case: `Q4_K_M` is in
/// `x-q4_k_m.gguf`, but `Q4_K` and `4_K_M` are not.
fn has_quant(file: &str, quant: &str) -> bool {
    let (file, quant) = (file.to_ascii_uppercase(), quant.to_ascii_uppercase());
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    file.match_indices(&quant).any(|(at, _)| {
        let (before, after) = (&file[..at], &file[at + quant.len()..]);
        !before.bytes().next_back().is_some_and(is_word)
            && !after.bytes().next().is_some_and(is_word)
    })
}

/// A commit of a repository.
pub(crate) struct Repository<'a> {
    reference: &'a Reference,
    client: Client<'a>,
    commit: String,
    files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct RemoteFile {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

impl<'a> Repository<'a> {
    /// Asks the hub for the files of the reference's repository.
    pub(crate) fn open(reference: &'a Reference, reporter: &'a Reporter) -> Result<Repository<'a>> {
        let client = Client::new(token().as_deref(), REFUSAL, reporter);
        let repo = &reference.repo;
        let url = format!("{}/api/models/{repo}?blobs=true", endpoint()?);
        let text = client.document(&format!("hf:{repo}"), &url, "application/json")?;
        let info: Info = serde_json::from_slice(&text)
            .map_err(|error| Error::mismatch(url, "a list of files", error))?;
        let mut files = info.siblings;
        let is_safe = |name: &str| is_gguf(name) && name.split('/').all(is_part);
        files.retain(|file| is_safe(&file.rfilename));
        files.sort_by(|a, b| a.rfilename.cmp(&b.rfilename));
        let commit = info.sha;
        if !is_part(&commit) {
            return Err(Error::mismatch(reference, "the name of a commit", format!("`{commit}`")));
        }
        Ok(Repository { reference, client, commit, files })
    }

    /// The file that the reference means.
    pub(crate) fn file(&self) -> Result<&str> {
        let files: Vec<&str> = self.files.iter().map(|file| file.rfilename.as_str()).collect();
        self.reference.choose(&files)
    }

    /// Fetches a file, and the other parts if it is one of a split set.
    pub(crate) fn fetch(
        &self,
        file: &str,
        pin: Option<&Pin>,
        staging: &Staging<'_>,
    ) -> Result<Vec<Staged>> {
        let names = split_names(file).unwrap_or_else(|| vec![file.to_owned()]);
        names.iter().map(|name| self.download(name, pin, staging)).collect()
    }

    fn download(&self, name: &str, pin: Option<&Pin>, staging: &Staging<'_>) -> Result<Staged> {
        let repo = &self.reference.repo;
        let what = format!("{repo}/{name}");
        let file = self.files.iter().find(|file| file.rfilename == name);
        let file =
            file.ok_or_else(|| Error::mismatch(format!("hf:{repo}"), name, "no such file"))?;
        let sha256 = file.lfs.as_ref().map(|lfs| lfs.sha256.as_str());
        if let Some(found) = sha256.filter(|found| !is_sha256(found)) {
            return Err(Error::mismatch(what, "a SHA-256", format!("`{found}`")));
        }
        if let (Some(pin), Some(found)) = (pin, sha256) {
            expect_sha256(&what, &pin.sha256, found)?;
        }
        let bytes = file.size.ok_or_else(|| Error::mismatch(&what, "its size", "none"))?;
        let bytes = plausible_bytes(&what, bytes)?;
        let url = format!("{}/{repo}/resolve/{}/{name}", endpoint()?, self.commit);
        let plain = name.rsplit('/').next().unwrap_or(name);
        staging.download(&self.client, &Remote { what, url, bytes, sha256 }, plain)
    }
}

/// The hub's address without a slash at its end.
pub(crate) fn endpoint() -> Result<String> {
    address("HF_ENDPOINT", ENDPOINT)
}

/// The user's token, from `HF_TOKEN` or where the hub's own tools keep it.
fn token() -> Option<String> {
    let home = || match std::env::var_os("HF_HOME") {
        Some(home) => Some(PathBuf::from(home)),
        None => Some(dirs::home_dir()?.join(".cache/huggingface")),
    };
    let stored = || std::fs::read_to_string(home()?.join("token")).ok();
    let token = std::env::var("HF_TOKEN").ok().or_else(stored)?.trim().to_owned();
    (!token.is_empty()).then_some(token)
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
        for good in ["a/b", "a/b:c.gguf", "a-1/b.c:q4/c-00001-of-00002.GGUF", "a/b:UD-Q4_K_XL"] {
            assert_eq!(Reference::parse(good).unwrap().to_string(), format!("hf:{good}"));
        }
        for bad in
            ["a", "a/b/c", "a/..", "a/b:", "a/b:../c.gguf", "a/b:/c.gguf", "a?/b", "a/b:Q4/K"]
        {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
        for page in ["a/b/blob/main/q4/c.gguf", "a/b/resolve/main/q4/c.gguf?download=true"] {
            assert_eq!(Reference::parse(page).unwrap().to_string(), "hf:a/b:q4/c.gguf");
        }
        assert!(Reference::parse("a/b/tree/main/c.gguf").is_err());
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

    #[test]
    fn a_quantization_chooses_the_file() {
        let files = [
            "mmproj-Q8_0.gguf",
            "x-IQ4_XS.gguf",
            "x-Q4_K_S.gguf",
            "x-q4_k_m.gguf",
            "Q8_0/x-00001-of-00002.gguf",
            "Q8_0/x-00002-of-00002.gguf",
        ];
        let choose =
            |text: &str, files: &[&'static str]| Reference::parse(text).unwrap().choose(files).ok();
        for (text, file) in [
            ("a/b", "x-q4_k_m.gguf"),
            ("a/b:q4_k_s", "x-Q4_K_S.gguf"),
            ("a/b:Q8_0", "Q8_0/x-00001-of-00002.gguf"),
            ("a/b:mmproj-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        ] {
            assert_eq!(choose(text, &files), Some(file), "{text}");
        }
        for text in ["a/b:Q4_K", "a/b:Q4_XS", "a/b:F16", "a/b:y.gguf"] {
            assert_eq!(choose(text, &files), None, "{text}");
        }
        assert_eq!(choose("a/b", &files[..3]), None);
        assert_eq!(choose("a/b", &files[..2]), Some("x-IQ4_XS.gguf"));
        assert_eq!(choose("a/b", &[]), None);
    }
}
