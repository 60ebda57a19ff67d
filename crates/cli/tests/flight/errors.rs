//! What goes wrong with stores and files: one clear line each.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::place::{Place, failure, model};
use crate::server::Server;
use crate::stand_in::{Store, VERSIONS, run_script};

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
    for version in VERSIONS {
        let place = Place::new();
        let (bert, other) = (model("bert"), model("modern-bert"));
        let store = Store::start(version, &["--api-key", "secret"]);
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
}

fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

#[test]
fn a_wrong_port_or_host_is_named() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let store = Store::start(version, &[]);
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
}

#[test]
fn a_host_that_is_not_there_or_says_nothing_is_named() {
    let place = Place::new();
    let bert = model("bert");
    // Names under this one never exist.
    let unknown = ["--flight", "store.invalid", "--dataset", "d"].map(str::to_owned);
    for command in ["embed", "search"] {
        let found = error(&place, &[command, &bert, "hello"], &unknown);
        assert!(found.contains("cannot reach the store at store.invalid:3000: "), "{found}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // It accepts connections and keeps them.
    std::thread::spawn(move || listener.incoming().collect::<Vec<_>>());
    let mute = ["--flight", &address, "--flight-meta", &address, "--dataset", "d"];
    let mute = [&mute[..], &["--flight-timeout", "500ms"]].concat();
    let mute: Vec<String> = mute.into_iter().map(str::to_owned).collect();
    for (command, call) in [("embed", "check_readiness"), ("search", "DoGet")] {
        let start = Instant::now();
        let found = error(&place, &[command, &bert, "hello"], &mute);
        let wanted = format!("cannot reach the store at {address}: no answer to {call} in 0.5 s");
        assert!(found.ends_with(&wanted), "{found}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
    for time in ["soon", "0ms"] {
        let wrong = ["embed", &bert, "x", "--flight", &address, "--flight-timeout", time];
        assert_eq!(place.run(&wrong).status.code(), Some(2));
    }
}

#[test]
fn a_store_that_does_not_come_back_is_given_up() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let store = Store::start(version, &["--die-after", "150"]);
        fs::write(place.path("lines.txt"), "a hen\n".repeat(400)).unwrap();
        let embed = ["embed", &bert, "--put-rows", "100", "-f", "lines.txt"];
        let embed = [&embed[..], &["--flight-timeout", "1s"]].concat();
        let output = place.run(&[&embed[..], &words(&store.flags("gone"))].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("trying again in 250 ms"), "{told}");
        assert!(told.contains("100 rows acknowledged by the store, which does not say"), "{told}");
        let last = told.lines().last().unwrap();
        assert!(last.starts_with("error: cannot reach the store at 127.0.0.1:"), "{told}");
    }
}

#[test]
fn what_landed_before_an_error_is_told() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let store = Store::start(version, &[]);
        let long = format!("{}{}\n", "short\n".repeat(1500), "long ".repeat(300));
        fs::write(place.path("long.txt"), long).unwrap();
        let embed = ["embed", &bert, "--put-rows", "100", "-f"];
        let found = error(&place, &[&embed[..], &["long.txt"]].concat(), &store.flags("long"));
        assert!(
            found.contains("text 1501 has") && found.contains("the model takes 256"),
            "{found}"
        );
        let output =
            place.run(&[&embed[..], &["long.txt"], &words(&store.flags("e"))[..]].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("rows landed in `e`; --resume sends the others"), "{told}");
        fs::write(place.path("empty.jsonl"), "{\"text\":\"one\"}\n{\"text\":\"\"}\n").unwrap();
        let found = error(&place, &[&embed[..], &["empty.jsonl"]].concat(), &store.flags("empty"));
        assert!(found.contains("the text is empty"), "{found}");
        fs::write(place.path("ids.jsonl"), "{\"id\":4294967296,\"text\":\"x\"}\n").unwrap();
        let found = error(&place, &[&embed[..], &["ids.jsonl"]].concat(), &store.flags("ids"));
        assert!(found.contains("row 1: `id`: expected 0 to 4294967295"), "{found}");
    }
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

#[test]
#[cfg(unix)]
fn a_full_disk_claims_no_row_that_is_not_in_the_arrow_stream() {
    let place = Place::new();
    let bert = model("bert");
    let texts: String = (0..3000).map(|i| format!("{i} hens\n")).collect();
    fs::write(place.path("texts.txt"), texts).unwrap();
    let embed = ["embed", &bert, "-f", "texts.txt", "-o"];
    place.text(&[&embed[..], &["whole.arrows"]].concat());
    place.text(&[&embed[..], &["whole.parquet"]].concat());
    let whole = fs::read(place.path("whole.arrows")).unwrap();
    for out in ["x.arrows", "x.parquet"] {
        // Files may have 400 000 bytes or so.
        let output = place.limited(390, &[&embed[..], &[out]].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        let (note, last) = told.trim_end().split_once('\n').unwrap();
        let claimed: usize = note.split(' ').nth(2).unwrap().parse().unwrap();
        assert_eq!(note, format!("{out}.partial has {claimed} rows; --resume goes on from there"));
        assert!(last.starts_with(&format!("error: cannot write {out}.partial: ")), "{told}");
        assert!(last.contains("File too large"), "{told}");
        assert!(!place.path(out).exists());
        // The stream is torn behind the rows that are claimed.
        let partial = place.path(&format!("{out}.partial"));
        let rows = run_script(VERSIONS[1], "torn_rows.py", &[partial.to_str().unwrap()]);
        assert!(claimed > 0 && claimed <= rows.trim().parse().unwrap(), "{told}{rows}");
        place.text(&[&embed[..], &[out, "--resume"]].concat());
        assert!(!partial.exists());
        if out == "x.arrows" {
            assert!(fs::read(place.path(out)).unwrap() == whole, "the same bytes");
        }
    }
    // The stream fits, and the Parquet file that is made of it does not.
    let output = place.limited(900, &[&embed[..], &["y.parquet"]].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let wanted = "y.parquet.partial has 3000 rows; --resume goes on from there\n\
                  error: cannot write y.parquet: ";
    assert!(told.starts_with(wanted) && told.contains("File too large"), "{told}");
    let leftovers = place.files().into_iter().filter(|name| name.contains(".bodkin-tmp-"));
    assert_eq!(leftovers.count(), 0);
    place.text(&[&embed[..], &["y.parquet", "--resume"]].concat());
    let bytes = |name: &str| fs::read(place.path(name)).unwrap();
    assert!(bytes("y.parquet") == bytes("whole.parquet"), "the same bytes");
    assert_eq!(
        place.text(&["embed", &bert, "-f", "x.parquet"]),
        place.text(&["embed", &bert, "-f", "whole.parquet"]),
    );
}

#[test]
fn an_id_comes_once_and_is_searchable_or_said_not_to_be() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let store = Store::start(version, &[]);
        let twice =
            "{\"id\":5,\"text\":\"a\"}\n{\"id\":6,\"text\":\"b\"}\n{\"id\":5,\"text\":\"a\"}\n";
        fs::write(place.path("twice.jsonl"), twice).unwrap();
        let found = error(&place, &["embed", &bert, "-f", "twice.jsonl"], &store.flags("twice"));
        assert!(found.contains("row 3: `id`: row 1 has 5 already"), "{found}");
        fs::write(place.path("texts.csv"), "id,text\na1,a fox\n2,a hen\n").unwrap();
        let embed = ["embed", &bert, "-f", "texts.csv"];
        let output = place.run(&[&embed[..], &words(&store.flags("texts"))].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("ids of `texts` are texts: it cannot be searched"), "{told}");
        assert!(told.contains("2 rows landed in `texts`"), "{told}");
        let found = error(&place, &["search", &bert, "a fox"], &store.flags("texts"));
        assert!(found.contains("`texts` cannot be searched: expected integers as ids, found Utf8"));
        // Integers of a CSV file are integers.
        fs::write(place.path("numbers.csv"), "id,text\n71,a fox\n72,a hen\n").unwrap();
        let embed = ["embed", &bert, "-f", "numbers.csv"];
        place.text(&[&embed[..], &words(&store.flags("numbers"))].concat());
        let search = ["search", &bert, "a fox", "--json", "-n", "1"];
        let line = place.text(&[&search[..], &words(&store.flags("numbers"))].concat());
        assert!(line.contains("\"id\":71") && line.contains("a fox"), "{line}");
        fs::write(place.path("mixed.csv"), "id,text\n71,a fox\nx,a hen\n").unwrap();
        let found = error(&place, &["embed", &bert, "-f", "mixed.csv"], &store.flags("mixed"));
        assert!(
            found.contains("mixed.csv:3: `id`: expected an integer, as in the first"),
            "{found}"
        );
    }
}

#[test]
fn an_error_in_the_last_batch_tells_what_landed() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let store = Store::start(version, &[]);
        let rows = format!("{}{}", "{\"text\":\"a\"}\n".repeat(109), "{\"text\":\"a\",\"n\":1}\n");
        fs::write(place.path("last.jsonl"), rows).unwrap();
        let embed = ["embed", &bert, "--put-rows", "100", "-f", "last.jsonl"];
        let output = place.run(&[&embed[..], &words(&store.flags("last"))].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("row 110: the column `n` is not in the first rows"), "{told}");
        assert!(told.contains("rows landed in `last`; --resume sends the others"), "{told}");
    }
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_an_upload_to_a_store_that_hangs() {
    for version in VERSIONS {
        let place = Place::new();
        let bert = model("bert");
        let mut store = Store::start(version, &["--hang-after", "100"]);
        fs::write(place.path("lines.txt"), "a hen\n".repeat(2000)).unwrap();
        let embed = ["embed", &bert, "--put-rows", "100", "-f", "lines.txt"];
        let mut command = place.bodkin(&[&embed[..], &words(&store.flags("hung"))].concat());
        let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        assert_eq!((store.next_put(), store.next_put()), (100, 0), "the second hangs");
        let start = Instant::now();
        let pid = child.id().to_string();
        let signal = std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap();
        assert!(signal.success());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(start.elapsed().as_secs() < 30, "{told}");
        assert_eq!(output.status.code(), Some(130), "{told}");
        assert!(told.contains("; --resume sends the others"), "{told}");
        assert!(told.contains("100 rows acknowledged by the store, which does not say"), "{told}");
    }
}
