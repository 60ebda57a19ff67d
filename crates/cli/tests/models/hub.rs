//! Models from the Hugging Face hub: a stand-in that redirects to another host for the files.

use std::fs;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::place::{Place, error, model, pulled, sha256};
use crate::server::{Answer, Fault, Server};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub, and the host that its files are on.
struct Hub {
    hub: Server,
    files: Server,
}

impl Hub {
    /// Serves a repository with these files, and names their hashes.
    fn with(repo: &str, files: &[(&str, Vec<u8>)]) -> Hub {
        Hub::naming_hashes(true, repo, files)
    }

    fn naming_hashes(names: bool, repo: &str, files: &[(&str, Vec<u8>)]) -> Hub {
        let (hub, host) = (Server::new(), Server::new());
        let siblings = files.iter().map(|(name, data)| {
            let path = format!("/cdn/{}", sha256(data));
            let to = Answer::Redirect(host.url("localhost") + &path);
            hub.answer(&format!("/{repo}/resolve/{COMMIT}/{name}"), to);
            host.answer(&path, Answer::File(data.clone()));
            let lfs = json!({"sha256": sha256(data), "size": data.len(), "pointerSize": 134});
            let lfs = if names { lfs } else { Value::Null };
            json!({"rfilename": name, "size": data.len(), "blobId": "0", "lfs": lfs})
        });
        let mut siblings: Vec<Value> = siblings.collect();
        siblings.push(json!({"rfilename": "README.md", "size": 1, "blobId": "0"}));
        let info = json!({"id": repo, "sha": COMMIT, "siblings": siblings}).to_string();
        hub.answer(&format!("/api/models/{repo}?blobs=true"), Answer::File(info.into_bytes()));
        Hub { hub, files: host }
    }

    fn bodkin(&self, place: &Place, args: &[&str]) -> std::process::Command {
        let mut command = place.bodkin(args);
        command.env("HF_ENDPOINT", self.hub.url("127.0.0.1"));
        command
    }

    fn pull(&self, place: &Place, name: &str) -> std::process::Output {
        self.bodkin(place, &["pull", name]).output().unwrap()
    }
}

#[test]
fn an_address_that_is_none_and_a_proxy_are_named() {
    let place = Place::new();
    for name in ["hf:me/Tiny", "smollm2", "smollm2:latest"] {
        for address in ["foo", "http://", "ftp://x"] {
            let mut pull = place.bodkin(&["pull", name]);
            let wrong = error(&pull.env("HF_ENDPOINT", address).output().unwrap());
            let expected = "expected an address such as https://huggingface.co, found";
            assert_eq!(wrong, format!("error: HF_ENDPOINT: {expected} `{address}`\n"));
        }
    }
    let mut pull = place.bodkin(&["pull", "hf:me/Tiny"]);
    pull.env("HF_ENDPOINT", "http://hub.test").env("ALL_PROXY", "http://me:secret@127.0.0.1:9");
    let wrong = error(&pull.output().unwrap());
    let reason = "(Connection refused, through the proxy 127.0.0.1:9 of ALL_PROXY)";
    assert_eq!(wrong, format!("error: hub.test {reason} could not be reached\n"));
}

#[test]
fn a_known_name_comes_from_the_hub_without_a_registry() {
    let (place, model) = (Place::new(), models()[0].clone());
    let hub = Hub::with("Qwen/Qwen3-8B-GGUF", &[("Qwen3-8B-Q4_K_M.gguf", model.clone())]);
    let pulled = hub.pull(&place, "qwen3:8b");
    let said = String::from_utf8_lossy(&pulled.stderr).into_owned();
    assert!(pulled.status.success(), "{said}");
    let note = "qwen3:8b: from the Hugging Face hub, as hf:Qwen/Qwen3-8B-GGUF:Q4_K_M";
    assert!(said.contains(note), "{said}");
    // Nothing answers any more, and the file is there.
    let again = place.run(&["pull", "qwen3:8b"]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
}

/// Models that differ, as different quantizations do.
fn models() -> [Vec<u8>; 3] {
    let read = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        fs::read(format!("{folder}/{name}.gguf")).unwrap()
    };
    [model(), read("llama-q4_k_m"), read("llama")]
}

#[test]
fn a_quantization_names_the_file() {
    let [q4_0, q4_k_m, f32] = models();
    let files = [
        ("mmproj-F32.gguf", b"no text".to_vec()),
        ("tiny-Q4_0.gguf", q4_0.clone()),
        ("tiny-q4_k_m.gguf", q4_k_m.clone()),
        ("F32/tiny-F32.gguf", f32.clone()),
    ];
    let hub = Hub::with("me/Tiny-GGUF", &files);
    let place = Place::new();
    for (name, data) in [
        ("hf:me/Tiny-GGUF:Q4_0", &q4_0),
        ("hf:me/Tiny-GGUF:F32", &f32),
        ("hf:me/Tiny-GGUF:F32/tiny-F32.gguf", &f32),
        ("hf:me/Tiny-GGUF:Q4_K_M", &q4_k_m),
    ] {
        assert!(fs::read(pulled(&hub.pull(&place, name))).unwrap() == *data, "{name}");
    }
    // What is here is not asked for again, by whichever name.
    hub.hub.seen();
    for name in ["hf:me/Tiny-GGUF:q4_0", "hf:me/Tiny-GGUF:F32", "hf:me/Tiny-GGUF"] {
        pulled(&hub.pull(&place, name));
    }
    assert!(hub.hub.seen().is_empty());
    let absent = error(&hub.pull(&place, "hf:me/Tiny-GGUF:Q8_0"));
    assert!(absent.contains("expected Q8_0, found F32/tiny-F32.gguf, "), "{absent}");
    // Without a choice, the usual one.
    let other = Place::new();
    assert!(fs::read(pulled(&hub.pull(&other, "hf:me/Tiny-GGUF"))).unwrap() == q4_k_m);
    assert!(place.run(&["rm", "hf:me/Tiny-GGUF:q4_0"]).status.success());
    assert_eq!(place.entries().len(), 2);
}

#[test]
fn a_split_model_comes_whole_and_resumes() {
    let place = Place::new();
    let parts = split(&place);
    let files: Vec<(&str, Vec<u8>)> =
        parts.iter().map(|(name, data)| (name.as_str(), data.clone())).collect();
    let hub = Hub::with("me/Tiny", &files);
    hub.files.fail(&[Fault::Cut(500)]);
    let path = pulled(&hub.pull(&place, "hf:me/Tiny:Q4_0"));
    assert!(path.ends_with("tiny-Q4_0-00001-of-00002.gguf"), "{path:?}");
    for (name, data) in &parts {
        assert!(fs::read(path.with_file_name(name)).unwrap() == *data, "{name}");
    }
    let rows: Value = serde_json::from_slice(&place.run(&["list", "--json"]).stdout).unwrap();
    assert_eq!(rows[0]["bytes"], parts.iter().map(|(_, data)| data.len()).sum::<usize>());
}

#[test]
fn a_file_without_a_hash_resumes_if_its_version_is_known() {
    let file = ("tiny-Q4_0.gguf", model());
    for (first, second, fault, from) in [
        (Some("\"one\""), Some("\"one\""), None, vec![100_000]),
        (Some("\"one\""), Some("\"two\""), None, vec![100_000]),
        (Some("\"one\""), Some("\"two\""), Some(Fault::NoIfRange), vec![100_000]),
        (Some("W/\"one\""), Some("W/\"one\""), None, vec![]),
        (None, None, None, vec![]),
    ] {
        let hub = Hub::naming_hashes(false, "me/Tiny", std::slice::from_ref(&file));
        let place = Place::new();
        first.iter().for_each(|etag| hub.files.tag(etag));
        pull_start(&hub, &place, "hf:me/Tiny", 100_000);
        hub.files.seen();
        second.iter().for_each(|etag| hub.files.tag(etag));
        hub.files.fail(fault.as_slice());
        let output = hub.pull(&place, "hf:me/Tiny");
        assert!(fs::read(pulled(&output)).unwrap() == model());
        let seen = hub.files.seen();
        assert_eq!(seen.iter().filter_map(|seen| seen.from).collect::<Vec<_>>(), from);
        let text = String::from_utf8(output.stderr).unwrap();
        let is_whole = first != second || from.is_empty();
        assert_eq!(
            text.contains("tiny-Q4_0.gguf: starting again, as the server"),
            is_whole,
            "{text}"
        );
        assert!(place.leftovers().is_empty());
    }
}

/// Downloads the first `bytes` of a model, and no more.
fn pull_start(hub: &Hub, place: &Place, name: &str, bytes: usize) {
    hub.files.fail(&[Fault::Stall(bytes)]);
    let mut command = hub.bodkin(place, &["pull", name]);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let list = || String::from_utf8(place.run(&["ls"]).stdout).unwrap();
    while place.part_bytes() < bytes as u64 {
        assert!(Instant::now() < deadline, "the download never came so far: {}", list());
        sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[cfg(unix)]
#[test]
fn the_bar_of_a_resumed_download_counts_its_own_bytes_and_goes_away() {
    use crate::terminal::Terminal;
    let (hub, place) = (Hub::with("me/Tiny", &[("tiny-Q4_0.gguf", model())]), Place::new());
    pull_start(&hub, &place, "hf:me/Tiny", 100_000);
    hub.files.fail(&[Fault::Stall(0)]);
    let mut pull = Terminal::with_columns(hub.bodkin(&place, &["pull", "hf:me/Tiny"]), 80);
    pull.expect("100.00 kB/");
    // Several frames.
    sleep(Duration::from_secs(1));
    let id = pull.child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let (shown, mut child) = pull.rest();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mut frames: Vec<&str> = shown.split("\r\x1b[2K").collect();
    assert_eq!(frames.pop(), Some(""), "the bar is gone: {shown:?}");
    assert!(frames.iter().all(|frame| frame.chars().count() <= 80), "{shown:?}");
    // Nothing came in this run.
    assert!(frames.last().unwrap().ends_with("] 100.00 kB/230.27 kB 0 B/s 0s"), "{shown:?}");
}

/// The tiny model in two files.
fn split(place: &Place) -> [(String, Vec<u8>); 2] {
    use bodkin_gguf::{File, Value, Writer};
    let file = File::open(crate::place::MODEL).unwrap();
    let (first, second) = file.tensors().split_at(file.tensors().len() / 2);
    [first, second].map(|tensors| {
        let part = usize::from(std::ptr::eq(tensors, second));
        let name = format!("tiny-Q4_0-0000{}-of-00002.gguf", part + 1);
        let mut metadata = file.metadata().clone();
        metadata.insert("split.no", Value::U16(part as u16));
        metadata.insert("split.count", Value::U16(2));
        metadata.insert("split.tensors.count", Value::I32(file.tensors().len() as i32));
        let path = place.path(&name);
        let mut writer = Writer::new(&path, &metadata).unwrap();
        for tensor in tensors {
            let (format, data) = (tensor.format, file.data(tensor));
            writer.tensor(&tensor.name, format, &tensor.shape, data).unwrap();
        }
        writer.save().unwrap();
        (name, fs::read(path).unwrap())
    })
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let hub = Hub::with("me/Tiny", &[("tiny-Q4_0.gguf", model())]);
    let place = Place::new();
    let output = hub.bodkin(&place, &["pull", "hf:me/Tiny"]).env("HF_TOKEN", "hf_abc").output();
    pulled(&output.unwrap());
    let token = Some("Bearer hf_abc".to_owned());
    assert!(hub.hub.seen().iter().all(|seen| seen.authorization == token));
    assert!(hub.files.seen().iter().all(|seen| seen.authorization.is_none()));
    // It may also lie where the hub's own tools keep it.
    let place = Place::new();
    fs::write(place.path("hub/token"), "hf_def\n").unwrap();
    pulled(&hub.pull(&place, "hf:me/Tiny"));
    assert_eq!(hub.hub.seen()[0].authorization, Some("Bearer hf_def".to_owned()));
}

#[test]
fn what_the_hub_lacks_or_damages_is_one_line() {
    let hub = Hub::with("me/Tiny", &[("tiny-Q4_0.gguf", model())]);
    let place = Place::new();
    let absent = error(&hub.pull(&place, "hf:me/Absent"));
    assert!(absent.contains("404 Not Found") && absent.contains("HF_TOKEN"), "{absent}");
    let offline = error(&place.run(&["pull", "hf:me/Tiny"]));
    for error in [absent, offline] {
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
    let path = format!("/cdn/{}", sha256(&model()));
    hub.files.answer(&path, Answer::File(vec![0; model().len()]));
    let wrong = error(&hub.pull(&place, "hf:me/Tiny"));
    assert!(wrong.contains("expected SHA-256"), "{wrong}");
    assert!(place.entries().is_empty() && place.leftovers().is_empty());
    hub.hub.answer("/api/models/me/Tiny?blobs=true", Answer::File(b"<html>".to_vec()));
    let wrong = error(&hub.pull(&place, "hf:me/Tiny"));
    assert!(wrong.contains("expected a list of files"), "{wrong}");
}
