//! A machine of its own for every test: a cache, an Ollama store and a folder of wheels, and the
//! binary that reaches nothing else.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// A tiny but whole model.
pub(crate) const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models/llama-q4_0.gguf");

/// Nothing listens on this port.
const NOTHING: &str = "http://127.0.0.1:9";

/// A machine that reaches nothing but a folder of wheels.
pub(crate) struct Place {
    root: TempDir,
}

impl Place {
    pub(crate) fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        for folder in ["cache", "wheels", "ollama", "hub"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        Place { root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn bodkin(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bodkin"));
        command
            .args(args)
            .env("BODKIN_CACHE", self.path("cache"))
            .env("OLLAMA_MODELS", self.path("ollama"))
            .env("HF_HOME", self.path("hub"))
            .env("HF_ENDPOINT", NOTHING)
            .env("OLLAMA_REGISTRY", NOTHING)
            .env_remove("HF_TOKEN")
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", self.path("wheels"))
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.bodkin(args).output().unwrap()
    }

    /// Puts a wheel of `package` with this member into the local index.
    pub(crate) fn wheel(&self, package: &str, version: &str, member: &str, data: &[u8]) -> PathBuf {
        self.wheel_of(package, version, &[(member.to_owned(), data.to_vec())])
    }

    /// Puts a wheel of `package` with these members into the local index.
    pub(crate) fn wheel_of(
        &self,
        package: &str,
        version: &str,
        members: &[(String, Vec<u8>)],
    ) -> PathBuf {
        let module = package.replace('-', "_");
        let path = self.path("wheels").join(format!("{module}-{version}-py3-none-any.whl"));
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        let info = format!("{module}-{version}.dist-info");
        let metadata = format!("Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n");
        let tags =
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n";
        let files = members.iter().map(|(name, data)| (name.clone(), data.as_slice()));
        for (name, data) in files.chain([
            (format!("{info}/METADATA"), metadata.as_bytes()),
            (format!("{info}/WHEEL"), tags.as_bytes()),
            (format!("{info}/RECORD"), b"".as_slice()),
        ]) {
            zip.start_file(name, SimpleFileOptions::default()).unwrap();
            zip.write_all(data).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    /// The folders of finished entries in the cache.
    pub(crate) fn entries(&self) -> Vec<String> {
        self.cached().into_iter().filter(|name| !name.starts_with('.')).collect()
    }

    /// Folders of unfinished entries.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        self.cached().into_iter().filter(|name| name.contains('~')).collect()
    }

    /// The bytes of the largest unfinished download.
    pub(crate) fn part_bytes(&self) -> u64 {
        let folders = self.leftovers().into_iter().map(|name| self.path("cache/models").join(name));
        let files = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        let parts = files.filter(|file| file.path().extension().is_some_and(|it| it == "part"));
        parts.filter_map(|part| Some(part.metadata().ok()?.len())).max().unwrap_or(0)
    }

    pub(crate) fn cached(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("cache/models")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Lays a model out as Ollama does, and gives the path of its blob.
    pub(crate) fn ollama(&self, name: &str, data: &[u8], template: &[u8]) -> PathBuf {
        let blobs = self.path("ollama/blobs");
        fs::create_dir_all(&blobs).unwrap();
        let manifest = self.path("ollama/manifests").join(name);
        fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        let layer = |kind: &str, data: &[u8]| {
            let sha256 = sha256(data);
            fs::write(blobs.join(format!("sha256-{sha256}")), data).unwrap();
            serde_json::json!({
                "mediaType": format!("application/vnd.ollama.image.{kind}"),
                "digest": format!("sha256:{sha256}"),
                "size": data.len(),
            })
        };
        let layers = [layer("model", data), layer("template", template)];
        let text = serde_json::json!({ "schemaVersion": 2, "layers": layers }).to_string();
        fs::write(manifest, text).unwrap();
        blobs.join(format!("sha256-{}", sha256(data)))
    }
}

pub(crate) fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn model() -> Vec<u8> {
    fs::read(MODEL).unwrap()
}

/// The path that a successful `pull` prints.
pub(crate) fn pulled(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{}", stderr(output));
    PathBuf::from(String::from_utf8(output.stdout.clone()).unwrap().trim_end())
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The error that a failed command prints, without the lines about its progress.
pub(crate) fn error(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
    assert!(output.stdout.is_empty());
    let text = stderr(output);
    text[text.find("error: ").expect("an error line")..].to_owned()
}
