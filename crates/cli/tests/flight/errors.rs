//! What goes wrong with stores and files: one clear line each.

use std::fs;

use crate::place::{Place, failure, model};
use crate::server::Server;
use crate::stand_in::{Store, VERSIONS};

/// The line of a command that must fail.
#[track_caller]
fn error(place: &Place, words: &[&str], flags: &[String]) -> String {
    let words: Vec<&str> = words.iter().copied().chain(flags.iter().map(String::as_str)).collect();
    let output = place.run(&words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{text}");
    errors[0].to_owned()
}

#[test]
fn a_store_that_refuses_is_quoted() {
    let place = Place::new();
    let (bert, other) = (model("bert"), model("nomic-bert"));
    let store = Store::start(VERSIONS[1], &["--api-key", "secret"]);
    let key = |key: &str| [store.flags("d"), vec!["--api-key".into(), key.into()]].concat();
    let found = error(&place, &["embed", &bert, "hello"], &store.flags("d"));
    assert!(found.contains("wrong or missing API key"), "{found}");
    let found = error(&place, &["embed", &bert, "hello"], &key("wrong"));
    assert!(found.contains("wrong or missing API key"), "{found}");
    place.text(&[&["embed", &bert, "hello"], &words(&key("secret"))[..]].concat());
    let found = error(&place, &["search", &bert, "hello", "--dimensions", "8"], &key("secret"));
    assert!(found.contains("dimension mismatch: expected"), "{found}");
    let found = error(&place, &["embed", &bert, "x", "--dimensions", "8"], &key("secret"));
    assert!(found.contains("dimension mismatch: the model gives vectors of 8"), "{found}");
    let mut absent = key("secret");
    absent[5] = "absent".into();
    let found = error(&place, &["search", &other, "hello"], &absent);
    assert!(found.contains("dataset not found: absent"), "{found}");
}

fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

#[test]
fn a_wrong_port_or_host_is_named() {
    let place = Place::new();
    let bert = model("bert");
    let store = Store::start(VERSIONS[1], &[]);
    // The ports the wrong way round.
    let mut flags = store.flags("d");
    flags.swap(1, 3);
    let found = error(&place, &["embed", &bert, "hello"], &flags);
    assert!(found.contains("refused DoPut") && found.contains("right port"), "{found}");
    // Nothing listens there, or something else does.
    flags[1] = "127.0.0.1:9".into();
    let found = error(&place, &["embed", &bert, "hello"], &flags);
    assert!(found.contains("cannot reach the store at 127.0.0.1:9"), "{found}");
    let http = Server::start(&[]);
    flags[1] = http.address.to_string();
    let found = error(&place, &["search", &bert, "hello"], &flags);
    assert!(found.contains(&http.address.to_string()), "{found}");
    assert_eq!(place.run(&["embed", &bert, "x", "--dataset", "d"]).status.code(), Some(2));
}

#[test]
fn what_landed_before_an_error_is_told() {
    let place = Place::new();
    let bert = model("bert");
    let store = Store::start(VERSIONS[1], &[]);
    let long = format!("{}{}\n", "short\n".repeat(1500), "long ".repeat(300));
    fs::write(place.path("long.txt"), long).unwrap();
    let embed = ["embed", &bert, "--put-rows", "100", "-f"];
    let found = error(&place, &[&embed[..], &["long.txt"]].concat(), &store.flags("long"));
    assert!(found.contains("text 1501 has") && found.contains("the model takes 256"), "{found}");
    let output = place.run(&[&embed[..], &["long.txt"], &words(&store.flags("e"))[..]].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("rows landed in `e`; --resume sends the others"), "{told}");
    fs::write(place.path("empty.txt"), "one\n\nthree\n").unwrap();
    let found = error(&place, &[&embed[..], &["empty.txt"]].concat(), &store.flags("empty"));
    assert!(found.contains("empty.txt:2: the text is empty"), "{found}");
    fs::write(place.path("ids.jsonl"), "{\"id\":4294967296,\"text\":\"x\"}\n").unwrap();
    let found = error(&place, &[&embed[..], &["ids.jsonl"]].concat(), &store.flags("ids"));
    assert!(found.contains("row 1: `id`: expected 0 to 4294967295"), "{found}");
}

#[test]
fn damaged_parquet_and_a_full_disk_are_errors() {
    let place = Place::new();
    let bert = model("bert");
    place.text(&["embed", &bert, "hello", "--output", "parquet", "-o", "rows.parquet"]);
    let bytes = fs::read(place.path("rows.parquet")).unwrap();
    fs::write(place.path("torn.parquet"), &bytes[..bytes.len() - 10]).unwrap();
    let found = failure(&place.run(&["embed", &bert, "-f", "torn.parquet"]));
    assert!(found.contains("torn.parquet: no complete Parquet file"), "{found}");
    for output in ["json", "arrow"] {
        let full = ["embed", &bert, "hello", "--output", output, "-o", "/dev/full"];
        let found = failure(&place.run(&full));
        assert!(found.contains("cannot write /dev/full"), "{found}");
        assert!(found.contains("No space left"), "{found}");
    }
}
