//! Atomic output files: a command writes the complete file or none. Temporary files are locked
//! while their process lives; those of killed processes are removed by the next one that writes to
//! the folder. This module must not know the content.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tempfile::{Builder, NamedTempFile, TempDir};

use bodkin::cleanup::{self, Guard};

/// How the names of temporary files and folders begin.
const PREFIX: &str = ".bodkin-tmp-";

/// Fails early if `path` cannot be written, or is one of the input files `read`.
pub(crate) fn check<'a>(path: &Path, read: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if let Ok(own) = path.canonicalize() {
        let is_own = |other: &&Path| other.canonicalize().is_ok_and(|other| other == own);
        if read.into_iter().any(|other| is_own(&other)) {
            bail!("{}: expected an output file, found an input file", path.display());
        }
    }
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            bail!("cannot write {}: expected a file, found a folder", path.display())
        }
        Ok(metadata) if !metadata.is_file() => Ok(()),
        // The temporary file is removed at once.
        _ => temporary(folder(path)).map(drop).with_context(failed),
    }
}

/// Creates or replaces `path` with the output of `fill`. A temporary file in the same folder is
/// renamed at the end, so no reader sees an incomplete file. Pipes and devices are written to.
pub(crate) fn write(
    path: &Path,
    fill: impl FnOnce(&mut (dyn Write + Send)) -> Result<()>,
) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let mut out = BufWriter::new(File::options().write(true).open(path).with_context(failed)?);
        fill(&mut out)?;
        return out.flush().with_context(failed);
    }
    let file = temporary(folder(path)).with_context(failed)?;
    let name = file.path().to_owned();
    // The process ends, so an error cannot be reported.
    let _guard = cleanup::register(move || drop(fs::remove_file(&name)));
    let mut out = BufWriter::new(file);
    fill(&mut out)?;
    let file = out.into_inner().map_err(|error| error.into_error()).with_context(failed)?;
    file.persist(path).with_context(failed)?;
    Ok(())
}

/// The folder of a file.
pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file in a folder.
pub(crate) fn temporary(folder: &Path) -> Result<NamedTempFile> {
    ensure!(folder.is_dir(), "there is no folder {}", folder.display());
    remove_leftovers(folder);
    let mut builder = Builder::new();
    #[cfg(unix)]
    {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;
        // The umask applies, as for any other new file.
        builder.permissions(Permissions::from_mode(0o666));
    }
    loop {
        let file = builder.prefix(PREFIX).tempfile_in(folder)?;
        // Where files cannot be locked, nobody takes this one for a leftover.
        let _ = file.as_file().lock();
        // Another process may have done so before.
        if file.path().exists() {
            return Ok(file);
        }
    }
}

/// A new folder for intermediate files.
pub(crate) struct TemporaryFolder {
    pub(crate) folder: TempDir,
    _guard: Guard,
    /// None where folders cannot be opened; then it is never a leftover.
    _lock: Option<File>,
}

/// A new folder in a folder.
pub(crate) fn temporary_folder(parent: &Path) -> Result<TemporaryFolder> {
    remove_leftovers(parent);
    let folder = Builder::new().prefix(PREFIX).tempdir_in(parent)?;
    let lock = File::open(folder.path()).ok();
    lock.as_ref().map(File::lock);
    let name = folder.path().to_owned();
    // The process ends, so an error cannot be reported.
    let guard = cleanup::register(move || drop(fs::remove_dir_all(&name)));
    Ok(TemporaryFolder { folder, _guard: guard, _lock: lock })
}

/// Removes temporary files and folders of killed processes, whose locks nobody holds.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_temporary = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let lock = is_temporary.then(|| File::open(entry.path()).ok()).flatten();
        if lock.as_ref().is_some_and(|lock| lock.try_lock().is_ok()) {
            // What cannot be removed stays.
            let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
        }
    }
}
