//! Atomic output files: a command writes the complete file or none. This module must not know the
//! content.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tempfile::{Builder, NamedTempFile};

use bodkin::cleanup;

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
        _ => temporary(path).map(drop).with_context(failed),
    }
}

/// Creates or replaces `path` with the output of `fill`. A temporary file in the same folder is
/// renamed at the end, so no reader sees an incomplete file. Pipes and devices are written to.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let mut out = BufWriter::new(File::options().write(true).open(path).with_context(failed)?);
        fill(&mut out)?;
        return out.flush().with_context(failed);
    }
    let file = temporary(path).with_context(failed)?;
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

fn temporary(path: &Path) -> Result<NamedTempFile> {
    let folder = folder(path);
    ensure!(folder.is_dir(), "there is no folder {}", folder.display());
    let mut builder = Builder::new();
    #[cfg(unix)]
    {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;
        // The umask applies, as for any other new file.
        builder.permissions(Permissions::from_mode(0o666));
    }
    Ok(builder.prefix(".bodkin-").tempfile_in(folder)?)
}
