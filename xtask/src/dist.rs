//! `cargo xtask dist`: the binary for machines without a compiler, as a tarball and as a Python
//! wheel that holds nothing else. Both need only the C library of the system. Needs binutils.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use sha2::{Digest, Sha256};
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// Where cargo puts the binary.
const BUILT: &str = "target/release/bodkin";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Files that go along with the binary.
const TEXTS: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// Libraries that every system with glibc has.
const SYSTEM_LIBRARIES: [&str; 4] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];

/// Arguments of `dist`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder for the tarball and the wheel
    #[arg(long, default_value = "target/dist")]
    out: PathBuf,
}

/// Builds the binary and packs it.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let build = ["build", "--locked", "--release", "--package", "bodkin", "--all-features"];
    let status = Command::new("cargo").args(build).current_dir(root).status();
    ensure!(status.context("cannot run cargo")?.success(), "the build failed");
    fs::create_dir_all(&args.out)?;
    let binary = args.out.join("bodkin");
    let strip = Command::new("strip").arg("-o").arg(&binary).arg(root.join(BUILT)).status();
    ensure!(strip.context("cannot run strip")?.success(), "strip failed");
    let glibc = glibc(&binary)?;
    for path in [tarball(root, &binary, &args.out)?, wheel(root, &binary, glibc, &args.out)?] {
        println!("{} ({:.1} MB)", path.display(), path.metadata()?.len() as f64 / 1e6);
    }
    println!("both need Linux on {ARCH} with glibc {}.{} or newer", glibc.0, glibc.1);
    Ok(())
}

/// The newest version of glibc whose symbols the binary uses. Fails if it needs any other library.
fn glibc(binary: &Path) -> Result<(u32, u32)> {
    let output = Command::new("objdump").arg("-p").arg(binary).output();
    let output = output.context("cannot run objdump")?;
    ensure!(output.status.success(), "objdump: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let mut newest = (2, 17);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() == Some("NEEDED") {
            let library = words.next().unwrap_or_default();
            ensure!(SYSTEM_LIBRARIES.contains(&library), "the binary needs {library}");
        }
        let version = line.split_whitespace().find_map(|word| word.strip_prefix("GLIBC_"));
        let version = version.and_then(|version| version.split_once('.'));
        if let Some((major, minor)) = version {
            let minor = minor.split('.').next().unwrap_or_default();
            newest = newest.max((major.parse()?, minor.parse()?));
        }
    }
    Ok(newest)
}

/// Packs a folder with the binary, as gzipped tar.
fn tarball(root: &Path, binary: &Path, out: &Path) -> Result<PathBuf> {
    let name = format!("bodkin-{VERSION}-linux-{ARCH}");
    let folder = tempfile::tempdir()?;
    let files = folder.path().join(&name);
    fs::create_dir(&files)?;
    fs::copy(binary, files.join("bodkin"))?;
    for text in TEXTS {
        fs::copy(root.join(text), files.join(text))?;
    }
    let path = out.join(format!("{name}.tar.gz"));
    let (flags, files) = ("--owner=0 --group=0 --numeric-owner".split(' '), folder.path());
    let mut tar = Command::new("tar");
    tar.args(flags).arg("-C").arg(files).arg("-czf").arg(&path).arg(&name);
    ensure!(tar.status().context("cannot run tar")?.success(), "tar failed");
    Ok(path)
}

/// Packs a wheel, from which pip installs the binary as a command.
fn wheel(root: &Path, binary: &Path, glibc: (u32, u32), out: &Path) -> Result<PathBuf> {
    let tag = format!("py3-none-manylinux_{}_{}_{ARCH}", glibc.0, glibc.1);
    let path = out.join(format!("bodkin-{VERSION}-{tag}.whl"));
    let info = format!("bodkin-{VERSION}.dist-info");
    let metadata = format!(
        "Metadata-Version: 2.4\nName: bodkin\nVersion: {VERSION}\n\
         Summary: Run language models on your own machine\n\
         License-Expression: MIT OR Apache-2.0\nRequires-Python: >=3.8\n\
         Description-Content-Type: text/markdown\n\n{}",
        fs::read_to_string(root.join("README.md"))?
    );
    let tags =
        format!("Wheel-Version: 1.0\nGenerator: bodkin\nRoot-Is-Purelib: false\nTag: {tag}\n");
    let mut zip = ZipWriter::new(File::create(&path)?);
    let mut record = String::new();
    let mut add = |name: String, mode, data: &[u8]| -> Result<()> {
        let options = SimpleFileOptions::default().unix_permissions(mode);
        zip.start_file(&name, options)?;
        zip.write_all(data)?;
        let hash = BASE64_URL_SAFE_NO_PAD.encode(Sha256::digest(data));
        record += &format!("{name},sha256={hash},{}\n", data.len());
        Ok(())
    };
    add(format!("bodkin-{VERSION}.data/scripts/bodkin"), 0o755, &fs::read(binary)?)?;
    for text in TEXTS.iter().filter(|text| text.starts_with("LICENSE")) {
        add(format!("{info}/licenses/{text}"), 0o644, &fs::read(root.join(text))?)?;
    }
    add(format!("{info}/METADATA"), 0o644, metadata.as_bytes())?;
    add(format!("{info}/WHEEL"), 0o644, tags.as_bytes())?;
    // The record lists itself, without a hash.
    record += &format!("{info}/RECORD,,\n");
    zip.start_file(format!("{info}/RECORD"), SimpleFileOptions::default())?;
    zip.write_all(record.as_bytes())?;
    zip.finish()?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::root;

    /// Checks hashes, sizes and completeness of a wheel's record.
    const CHECK: &str = r#"
import base64, csv, hashlib, io, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
assert wheel.testzip() is None
record = next(name for name in wheel.namelist() if name.endswith("/RECORD"))
rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
assert sorted(row[0] for row in rows) == sorted(wheel.namelist()), rows
for name, hash, size in rows:
    data = wheel.read(name)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    expected = ("", "") if name == record else ("sha256=" + digest, str(len(data)))
    assert (hash, size) == expected, name
"#;

    #[test]
    fn pip_installs_the_wheel_as_a_command() {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("binary");
        fs::write(&binary, "#!/bin/sh\necho \"installed $1\"\n").unwrap();
        // A tag that every pip on Linux accepts.
        let wheel = wheel(&root(), &binary, (2, 17), folder.path()).unwrap();
        let python = |args: &[&str]| {
            let output = Command::new("python3").args(args).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        let (wheel, prefix) = (wheel.to_str().unwrap(), folder.path().join("prefix"));
        python(&["-c", CHECK, wheel]);
        let install = ["-m", "pip", "install", "-q", "--no-index", "--ignore-installed"];
        python(&[&install, &["--prefix", prefix.to_str().unwrap(), wheel][..]].concat());
        let installed = ["bin/bodkin", "local/bin/bodkin"].map(|path| prefix.join(path));
        let installed = installed.iter().find(|path| path.exists()).unwrap();
        let output = Command::new(installed).arg("well").output().unwrap();
        assert_eq!(output.stdout, b"installed well\n");
    }

    #[test]
    fn the_tarball_has_the_binary_and_the_licences() {
        let folder = tempfile::tempdir().unwrap();
        let path = tarball(&root(), &root().join("clippy.toml"), folder.path()).unwrap();
        let list = Command::new("tar").arg("-tzf").arg(path).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        for file in ["bodkin", "LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
            assert!(list.lines().any(|line| line.ends_with(&format!("/{file}"))), "{list}");
        }
    }

    #[test]
    fn the_needed_glibc_is_that_of_the_symbols() {
        // The test's own binary is one that the same linker made.
        let (major, minor) = glibc(&std::env::current_exe().unwrap()).unwrap();
        assert!(major == 2 && minor >= 17, "{major}.{minor}");
        assert!(glibc(Path::new("/nothing")).is_err());
    }
}
