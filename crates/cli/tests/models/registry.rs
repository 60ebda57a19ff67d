//! Models from an Ollama registry: a stand-in that redirects to another host for the layers, cuts
//! connections, stalls and refuses.

use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::place::{Place, error, model, pulled, sha256, stderr};
use crate::server::{Answer, Fault, Server};

/// A registry, and the host that its layers are on.
struct Registry {
    registry: Server,
    files: Server,
}

impl Registry {
    /// Serves `library/tiny:1b`.
    fn new() -> Registry {
        Registry::with(&[
            ("model", &model()),
            ("template", b"{{ .Prompt }}"),
            ("params", br#"{"temperature": 0, "stop": ["<end>"], "num_ctx": 4096}"#),
            ("system", b"Answer as a cat."),
            ("license", b"The MIT License"),
            ("projector", b"not for text"),
        ])
    }

    fn with(layers: &[(&str, &[u8])]) -> Registry {
        let (registry, files) = (Server::new(), Server::new());
        let layers = layers.iter().map(|&(kind, data)| {
            let digest = format!("sha256:{}", sha256(data));
            let path = format!("/signed/{digest}?expires=1");
            let to = Answer::Redirect(files.url("localhost") + &path);
            registry.answer(&format!("/v2/library/tiny/blobs/{digest}"), to);
            files.answer(&path, Answer::File(data.to_vec()));
            json!({
                "mediaType": format!("application/vnd.ollama.image.{kind}"),
                "digest": digest,
                "size": data.len(),
            })
        });
        let layers: Vec<Value> = layers.collect();
        let manifest = json!({ "schemaVersion": 2, "config": {}, "layers": layers });
        let path = "/v2/library/tiny/manifests/1b";
        registry.answer(path, Answer::File(manifest.to_string().into_bytes()));
        Registry { registry, files }
    }

    fn bodkin(&self, place: &Place, args: &[&str]) -> std::process::Command {
        let mut command = place.bodkin(args);
        command.env("OLLAMA_REGISTRY", self.registry.url("127.0.0.1"));
        command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1");
        command
    }

    fn run(&self, place: &Place, args: &[&str]) -> std::process::Output {
        self.bodkin(place, args).output().unwrap()
    }

    /// The first bytes of the ranges that were asked of the model's file.
    fn starts(&self) -> Vec<usize> {
        let path = format!("/signed/sha256:{}?expires=1", sha256(&model()));
        let seen = self.files.seen().into_iter().filter(|seen| seen.path == path);
        seen.map(|seen| seen.from.unwrap_or(0)).collect()
    }
}

#[test]
fn a_model_comes_with_the_layers_that_are_used() {
    let (place, registry) = (Place::new(), Registry::new());
    let path = pulled(&registry.run(&place, &["pull", "tiny:1b"]));
    assert!(std::fs::read(&path).unwrap() == model());
    assert_eq!(place.entries(), ["tiny%3A1b"]);
    assert!(place.leftovers().is_empty());
    let seen = registry.registry.seen();
    assert_eq!(seen.len(), 6, "a manifest and five layers: {seen:?}");
    registry.files.seen();

    // Nothing is asked again, also offline.
    let row = place.run(&["pull", "Tiny:1B", "--json"]);
    let row: Value = serde_json::from_slice(&row.stdout).unwrap();
    let kinds = row["layers"].as_array().unwrap().iter().map(|layer| &layer["kind"]);
    assert_eq!(kinds.collect::<Vec<_>>(), ["template", "params", "system", "license"]);
    assert_eq!(registry.run(&place, &["pull", "tiny:1b"]).status.code(), Some(0));
    assert!(registry.registry.seen().is_empty() && registry.files.seen().is_empty());
    let show = String::from_utf8(place.run(&["show", "tiny:1b"]).stdout).unwrap();
    for text in ["temperature 0,", "`<end>`", "Answer as a cat.", "The MIT License"] {
        assert!(show.contains(text), "{show}");
    }
}

#[test]
fn parameters_and_system_prompt_are_those_of_the_layers() {
    let place = Place::new();
    let path = model_path();
    let reference = |args: &[&str]| {
        let args = [&["run", &path, "Hello", "-n", "8", "--json"], args].concat();
        serde_json::from_slice::<Value>(&place.run(&args).stdout).unwrap()
    };
    let greedy = reference(&["--temperature", "0"]);
    let as_cat = reference(&["--temperature", "0", "-s", "Answer as a cat."]);
    assert_ne!(greedy["prompt_tokens"], as_cat["prompt_tokens"]);
    // The stop string is the end of what the model says.
    let text = as_cat["text"].as_str().unwrap();
    let (half, _) = text.char_indices().nth(text.chars().count() / 2).unwrap();
    let params = json!({"temperature": 0, "stop": [text[half..]]}).to_string();
    let registry = Registry::with(&[
        ("model", &model()),
        ("params", params.as_bytes()),
        ("system", b"Answer as a cat."),
    ]);
    let run = |args: &[&str]| {
        let args = [&["run", "tiny:1b", "Hello", "-n", "8", "--json"], args].concat();
        let output = registry.run(&place, &args);
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    };
    let answer = run(&[]);
    assert_eq!(answer["prompt_tokens"], as_cat["prompt_tokens"]);
    assert_eq!(answer["reason"], "stop");
    assert!(text.starts_with(answer["text"].as_str().unwrap()));
    // What the user says takes precedence.
    assert_eq!(run(&["-s", "Hi"])["prompt_tokens"], reference(&["-s", "Hi"])["prompt_tokens"]);
}

fn model_path() -> String {
    crate::place::MODEL.to_owned()
}

#[test]
fn a_cut_connection_goes_on_where_it_ended() {
    let (place, registry) = (Place::new(), Registry::new());
    registry.files.fail(&[Fault::Cut(1000), Fault::Cut(50_000), Fault::Stall(2000), Fault::Cut(0)]);
    let output = registry.run(&place, &["pull", "tiny:1b"]);
    assert!(std::fs::read(pulled(&output)).unwrap() == model());
    assert_eq!(registry.starts(), [0, 1000, 51_000, 53_000, 53_000]);
    let said = stderr(&output);
    assert!(said.contains("has stalled; trying again in 0.5 s"), "{said}");
}

#[test]
fn a_busy_server_is_asked_again() {
    let (place, registry) = (Place::new(), Registry::new());
    registry.files.fail(&[
        Fault::Status("429 Too Many Requests", "Retry-After: 1"),
        Fault::Status("503 Service Unavailable", "X-Nothing: 1"),
        Fault::Status("429 Too Many Requests", "RateLimit: \"resolvers\";r=0;t=1"),
    ]);
    let started = Instant::now();
    let output = registry.run(&place, &["pull", "tiny:1b"]);
    assert!(std::fs::read(pulled(&output)).unwrap() == model());
    assert!(started.elapsed() >= Duration::from_secs(3));
    assert_eq!(stderr(&output).matches("429 Too Many Requests; trying again in 1.0 s").count(), 1);
    // A pause of hours is not waited for.
    let other = Place::new();
    registry.files.fail(&[Fault::Status("429 Too Many Requests", "Retry-After: 7200")]);
    let error = error(&registry.run(&other, &["pull", "tiny:1b"]));
    assert!(error.contains("429 Too Many Requests; try again in 120 minutes"), "{error}");
}

#[test]
fn a_range_may_be_ignored_or_refused() {
    let (place, registry) = (Place::new(), Registry::new());
    registry.files.fail(&[Fault::Cut(1000), Fault::NoRange]);
    let output = registry.run(&place, &["pull", "tiny:1b"]);
    assert!(std::fs::read(pulled(&output)).unwrap() == model());
    assert_eq!(registry.starts(), [0, 1000]);

    let place = Place::new();
    registry
        .files
        .fail(&[Fault::Cut(1000), Fault::Status("416 Range Not Satisfiable", "X-Nothing: 1")]);
    let output = registry.run(&place, &["pull", "tiny:1b"]);
    assert!(std::fs::read(pulled(&output)).unwrap() == model());
    assert_eq!(registry.starts(), [0, 1000, 0]);
}

#[test]
fn a_killed_download_is_resumed_or_removed() {
    let (place, registry) = (Place::new(), Registry::new());
    let begin = |end: &str| {
        registry.files.fail(&[Fault::Stall(100_000)]);
        let mut command = registry.bodkin(&place, &["pull", "tiny:1b"]);
        command.env("HF_HUB_DOWNLOAD_TIMEOUT", "60").stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let list = || String::from_utf8(place.run(&["list"]).stdout).unwrap();
        let part = format!("cache/models/.tiny%3A1b~/{}.part", sha256(&model()));
        while place.path(&part).metadata().map_or(0, |part| part.len()) < 100_000 {
            assert!(Instant::now() < deadline, "the download never came so far: {}", list());
            sleep(Duration::from_millis(5));
        }
        // While the download goes on, it is not unfinished.
        assert!(!list().contains("unfinished"), "{}", list());
        let id = child.id().to_string();
        let kill = std::process::Command::new("kill").args([end, &id]).status();
        assert!(kill.unwrap().success());
        child.wait().unwrap();
        assert!(place.entries().is_empty());
        assert!(list().contains("tiny:1b  100.00 kB  -          unfinished"), "{}", list());
    };
    begin("-KILL");
    let removed = place.run(&["rm", "tiny:1b"]);
    assert_eq!(String::from_utf8(removed.stdout).unwrap(), "removed tiny:1b (100.00 kB)\n");
    assert!(place.leftovers().is_empty());

    begin("-INT");
    assert_eq!(registry.starts(), [0, 0]);
    // Another fetch leaves the download alone.
    place.wheel("tinywheel", "1.0", "tinywheel/tiny.gguf", &model());
    pulled(&place.run(&["pull", "pip:tinywheel"]));
    let output = registry.run(&place, &["pull", "tiny:1b"]);
    assert!(std::fs::read(pulled(&output)).unwrap() == model());
    assert_eq!(registry.starts(), [100_000]);
    assert!(place.leftovers().is_empty());
    let removed = place.run(&["rm", "tiny:1b", "pip:tinywheel"]);
    assert!(removed.status.success() && place.entries().is_empty());
}

#[test]
fn wrong_bytes_are_never_used() {
    let place = Place::new();
    let registry = Registry::new();
    let path = format!("/signed/sha256:{}?expires=1", sha256(&model()));
    let mut damaged = model();
    *damaged.last_mut().unwrap() ^= 1;
    registry.files.answer(&path, Answer::File(damaged));
    let error = error(&registry.run(&place, &["pull", "tiny:1b"]));
    assert!(error.contains("expected SHA-256"), "{error}");
    assert!(place.entries().is_empty() && place.leftovers().is_empty());

    // A file that ends too early is asked for until that is hopeless.
    registry.files.answer(&path, Answer::File(model()[..5000].to_vec()));
    registry.files.seen();
    let mut command = registry.bodkin(&place, &["pull", "tiny:1b"]);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut starts = Vec::new();
    while starts.len() < 4 {
        assert!(Instant::now() < deadline, "{starts:?}");
        starts.extend(registry.starts());
        sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(starts[..4], [0, 5000, 0, 5000]);
    assert!(place.entries().is_empty());
}

#[test]
fn what_a_registry_lacks_is_one_line() {
    let (place, registry) = (Place::new(), Registry::new());
    let started = Instant::now();
    let absent = error(&registry.run(&place, &["pull", "absent:7b"]));
    assert!(absent.contains("/v2/library/absent/manifests/7b: 404 Not Found"), "{absent}");
    assert!(absent.contains("smollm2") && absent.trim_end().lines().count() == 1, "{absent}");
    // Without a registry too.
    let offline = error(&place.run(&["pull", "absent:7b"]));
    assert!(offline.trim_end().lines().count() == 1, "{offline}");
    assert!(
        offline.contains("and 127.0.0.1:9 (Connection refused) could not be reached; known names"),
        "{offline}"
    );
    for (name, hint) in [
        ("qwen3:8bb", "could not be reached; did you mean `qwen3:8b`?\n"),
        ("smolm2", "could not be reached; did you mean `smollm2`?\n"),
        ("o/tiny-GGUF", "the Hugging Face hub's models are named `hf:o/tiny-GGUF`\n"),
        (
            "qwen3:8b",
            "could not be reached; the Hugging Face hub has it as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`\n",
        ),
        ("hf:some/where", "error: 127.0.0.1:9 (Connection refused) could not be reached\n"),
    ] {
        let offline = error(&place.run(&["pull", name]));
        assert!(offline.ends_with(hint), "{offline}");
    }
    // A server says so before it listens.
    for name in ["absent:7b", "hf:some/where"] {
        let absent = error(&registry.run(&place, &["serve", name, "--port", "0"]));
        assert!(absent.starts_with("error: ") && absent.lines().count() == 1, "{absent}");
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(place.cached().is_empty());

    let manifest = |kind: &str, digest: &str| {
        let media_type = format!("application/vnd.ollama.image.{kind}");
        let digest = format!("sha256:{digest}");
        json!({"layers": [{"mediaType": media_type, "digest": digest, "size": 1}]}).to_string()
    };
    for (manifest, expected) in [
        (manifest("model", "../../../etc/passwd"), "expected a SHA-256 digest"),
        (manifest("adapter", &sha256(b"")), "expected no LoRA adapter"),
        (json!({"layers": []}).to_string(), "expected a model layer, found none"),
        (
            manifest("model", &sha256(b"")).replace("\"size\":1", "\"size\":18446744073709551615"),
            "expected at most 17592186044416 bytes, found 18446744073709551615",
        ),
        ("<html>".to_owned(), "expected an Ollama manifest"),
    ] {
        let path = "/v2/library/tiny/manifests/1b";
        registry.registry.answer(path, Answer::File(manifest.into_bytes()));
        let error = error(&registry.run(&place, &["pull", "tiny:1b"]));
        assert!(error.contains(expected) && error.trim_end().lines().count() == 1, "{error}");
    }
    assert!(place.cached().is_empty());
}

#[test]
fn an_offline_machine_is_one_line() {
    let place = Place::new();
    let no_index = ["PIP_NO_INDEX", "PIP_FIND_LINKS"].map(|name| (name, ""));
    let index = [("PIP_INDEX_URL", "http://127.0.0.1:9/simple")];
    let mut pull = place.bodkin(&["pull", "gemma3-270m"]);
    let offline = error(&pull.envs(no_index).envs(index).output().unwrap());
    let hosts = "127.0.0.1:9 (Connection refused) and the package index of pip";
    assert_eq!(offline, format!("error: {hosts} could not be reached\n"));
}
