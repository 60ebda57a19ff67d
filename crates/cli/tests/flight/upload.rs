//! Sentences become rows of a store: all, each once, with the same bits, also when a process dies.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::place::{Place, failure, model, printed, stderr};
use crate::reranker::{self, DOCUMENTS, QUERY, SCORES, TOLERANCE};
use crate::stand_in::{Store, VERSIONS, run_script};

const SENTENCES: usize = 10_000;

/// Short sentences, no two alike.
fn sentences(count: usize) -> String {
    let (who, what) = (["hen", "dog", "fox", "owl", "ant"], ["sees", "eats", "hears", "likes"]);
    let line = |i: usize| format!("the {} {} {i} seeds\n", who[i % 5], what[i / 5 % 4]);
    (0..count).map(line).collect()
}

/// A place with sentences, and the command that sends them to a store.
struct Upload {
    place: Place,
    words: Vec<String>,
}

impl Upload {
    fn new(store: &Store, count: usize) -> Upload {
        let place = Place::new();
        fs::write(place.path("sentences.txt"), sentences(count)).unwrap();
        fs::create_dir(place.path("store")).unwrap();
        let bert = model("bert");
        let words = ["embed", &bert, "-f", "sentences.txt", "--put-rows", "500"];
        let mut words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        words.extend(store.flags("sentences"));
        Upload { place, words }
    }

    fn words(&self) -> Vec<&str> {
        self.words.iter().map(String::as_str).collect()
    }

    fn compare(&self, version: &str, store: &Store) {
        let bert = model("bert");
        let out = ["-f", "sentences.txt", "--output", "arrow", "-o", "wanted.arrows"];
        printed(self.place.run(&[&["embed", &bert], &out[..]].concat()));
        let wanted = self.place.path("wanted.arrows");
        let args = [&store.data.to_string(), "sentences", wanted.to_str().unwrap()];
        run_script(version, "compare.py", &args);
    }
}

#[test]
fn the_store_dies_in_the_middle_and_nothing_is_lost_or_twice() {
    for version in VERSIONS {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let keep = ["--folder", folder, "--slow-down", "7"];
        // It stores half of the stream in which it dies, and acknowledges nothing of that.
        let mut store = Store::start(version, &[&keep[..], &["--die-after", "4000"]].concat());
        let upload = Upload::new(&store, SENTENCES);
        let mut command = upload.place.bodkin(&upload.words());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        store.wait();
        let store = store.restart(version, &keep);
        let output = child.wait_with_output().unwrap();
        let told = stderr(&output);
        printed(output);
        assert!(told.contains("trying again"), "{told}");
        assert!(told.contains("10000 rows landed in `sentences`; 15 rows read back"), "{told}");
        upload.compare(version, &store);
    }
}

#[test]
fn a_store_that_asks_to_slow_down_gets_longer_and_longer_pauses() {
    for version in VERSIONS {
        let mut store = Store::start(version, &["--slow-down", "1"]);
        let upload = Upload::new(&store, 2000);
        printed(upload.place.run(&upload.words()));
        let puts: Vec<(usize, Duration)> = (0..4).map(|_| store.next_timed_put()).collect();
        assert!(puts.iter().all(|(rows, _)| *rows == 500), "{puts:?}");
        for ((_, idle), pause) in puts[1..].iter().zip([250, 500, 1000]) {
            assert!(*idle >= Duration::from_millis(pause), "{puts:?}");
        }
    }
}

#[test]
fn a_changed_bit_is_an_error_and_nothing_is_claimed() {
    for version in VERSIONS {
        // Of the first six rows, those with the ids 0, 1, 3 and 5 are read back.
        let store = Store::start(version, &["--flip-bit-of", "3"]);
        let upload = Upload::new(&store, 6);
        let output = upload.place.run(&upload.words());
        let address = format!("127.0.0.1:{}", store.data);
        let wanted = "expected one row with the id 3 and the bits that were sent, found 1 rows, 0";
        assert_eq!(failure(&output), format!("the store at {address}: {wanted} of them equal"),);
    }
}

#[test]
fn a_meta_port_that_goes_and_comes_back_is_asked_again() {
    for version in VERSIONS {
        let store = Store::start(version, &["--meta-away-after", "1000"]);
        let upload = Upload::new(&store, 1000);
        let output = upload.place.run(&upload.words());
        let told = stderr(&output);
        printed(output);
        let meta = format!("cannot reach the store at 127.0.0.1:{}", store.meta);
        assert!(told.contains(&meta) && told.contains("; trying again in 250 ms"), "{told}");
        assert!(told.contains("1000 rows landed in `sentences`; 11 rows read back"), "{told}");
        upload.compare(version, &store);
    }
}

#[test]
fn rows_of_another_model_or_other_options_are_not_added_to() {
    for version in VERSIONS {
        let store = Store::start(version, &[]);
        let upload = Upload::new(&store, 3);
        printed(upload.place.run(&upload.words()));
        fs::write(upload.place.path("sentences.txt"), sentences(5)).unwrap();
        let resume = |others: &[&str]| {
            upload.place.run(&[&upload.words()[..], &["--resume"], others].concat())
        };
        let wanted = "--resume: dataset `sentences` has rows of another model or of other options";
        for others in [&["--pooling", "cls"][..], &["--prefix", "query: "], &["--no-normalize"]] {
            let error = failure(&resume(others));
            assert!(error.starts_with(wanted), "{error}");
            assert!(error.contains("`the fox sees 2 seeds` the vector that "), "{error}");
        }
        let told = stderr(&resume(&[]));
        assert!(told.contains("2 rows landed in `sentences`, which had 3 others"), "{told}");
        upload.compare(version, &store);
        // A text that was cut does not fit without --truncate.
        let long = "word ".repeat(400);
        fs::write(upload.place.path("sentences.txt"), format!("{}{long}\n", sentences(5))).unwrap();
        printed(resume(&["--truncate"]));
        fs::write(upload.place.path("sentences.txt"), sentences(6)).unwrap();
        let error = failure(&resume(&[]));
        assert!(error.starts_with(wanted) && error.contains("word word"), "{error}");
    }
}

#[test]
fn bodkin_is_killed_and_resumes() {
    for version in VERSIONS {
        let mut store = Store::start(version, &["--land-ms", "5"]);
        let upload = Upload::new(&store, SENTENCES);
        let mut child = upload.place.bodkin(&upload.words()).stderr(Stdio::null()).spawn().unwrap();
        let rows: usize = (0..4).map(|_| store.next_put()).sum();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((2000..SENTENCES).contains(&rows));
        // Without the flag nothing is sent.
        let output = upload.place.run(&upload.words());
        assert!(stderr(&output).contains("has rows: --resume adds"), "{}", stderr(&output));
        let output = upload.place.run(&[&upload.words()[..], &["--resume"]].concat());
        assert!(stderr(&output).contains("others already"), "{}", stderr(&output));
        printed(output);
        upload.compare(version, &store);
        // A second time there is nothing to send.
        let output = upload.place.run(&[&upload.words()[..], &["--resume"]].concat());
        let told = stderr(&output);
        assert!(told.contains("0 rows landed") && told.contains("10000 others already"), "{told}");
        // Another text under an id is no row to skip.
        fs::write(upload.place.path("sentences.txt"), "something else\n").unwrap();
        let output = upload.place.run(&[&upload.words()[..], &["--resume"]].concat());
        assert!(stderr(&output).contains("row 1: dataset `sentences` has another text"));
    }
}

#[test]
#[cfg(unix)]
fn ctrl_c_tells_how_many_rows_have_landed() {
    for version in VERSIONS {
        let mut store = Store::start(version, &[]);
        let upload = Upload::new(&store, SENTENCES);
        let child = upload.place.bodkin(&upload.words()).stderr(Stdio::piped()).spawn().unwrap();
        store.next_put();
        let signal = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(signal.success());
        let output = child.wait_with_output().unwrap();
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{told}");
        assert!(told.contains("rows landed in `sentences`; --resume sends the others"), "{told}");
    }
}

#[test]
fn columns_go_along_and_a_search_finds_them() {
    for version in VERSIONS {
        let store = Store::start(version, &[]);
        let upload = Upload::new(&store, 1);
        let rows = "{\"id\":7,\"text\":\"the hen sees seeds\",\"page\":1}\n\
                    {\"id\":9,\"text\":\"a fox\",\"page\":2}\n";
        fs::write(upload.place.path("rows.jsonl"), rows).unwrap();
        let bert = model("bert");
        let flags = store.flags("pages");
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let sent = upload.place.run(&[&["embed", &bert, "-f", "rows.jsonl"], &flags[..]].concat());
        printed(sent);
        let search = [&["search", &bert, "a fox", "--json", "-n", "2"], &flags[..]].concat();
        let found = upload.place.text(&search);
        let found: Vec<Value> =
            found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(found.len(), 2);
        assert_eq!((&found[0]["text"], &found[0]["page"]), (&"a fox".into(), &2.into()));
        assert!(found[0]["score"].as_f64().unwrap() > 0.99);
        assert_eq!(found[1]["id"], 7);
        let plain = upload.place.text(&[&["search", &bert, "a fox"], &flags[..]].concat());
        assert!(plain.starts_with("1.0000  a fox  {"), "{plain}");
    }
}

#[test]
fn a_reranker_sorts_what_a_search_finds() {
    for version in VERSIONS {
        let store = Store::start(version, &[]);
        let upload = Upload::new(&store, 1);
        let place = &upload.place;
        reranker::write(&place.path("reranker.gguf"));
        fs::write(place.path("texts.txt"), DOCUMENTS.join("\n")).unwrap();
        let bert = model("bert");
        let flags = store.flags("texts");
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        printed(place.run(&[&["embed", &bert, "-f", "texts.txt"], &flags[..]].concat()));
        let search = ["search", &bert, QUERY, "--rerank", "reranker.gguf", "--json", "-n", "2"];
        let found = place.text(&[&search, &flags[..]].concat());
        let found: Vec<Value> =
            found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let wanted = [0, 2].map(|i| (DOCUMENTS[i], SCORES[i]));
        assert_eq!(found.len(), wanted.len());
        for (row, (text, score)) in found.iter().zip(wanted) {
            assert_eq!(row["text"], text);
            assert!((row["score"].as_f64().unwrap() - score).abs() < TOLERANCE, "{row}");
        }
        // A text that is too long for the reranker is cut if asked.
        fs::write(place.path("long.txt"), "word ".repeat(400)).unwrap();
        let flags = store.flags("long");
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        printed(
            place.run(&[&["embed", &bert, "-f", "long.txt", "--truncate"], &flags[..]].concat()),
        );
        assert!(!place.run(&[&search, &flags[..]].concat()).status.success());
        let cut = place.run(&[&search[..], &["--truncate"], &flags[..]].concat());
        assert!(stderr(&cut).contains("1 of 1 text cut to"), "{}", stderr(&cut));
        printed(cut);
    }
}
