//! `serve --flight-port`: pyarrow's client sends texts and gets vectors.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::server::{Server, kit};
use crate::stand_in::{VERSIONS, pyarrow, run_script, script};

/// A server with a Flight port, and its address.
fn start(args: &[&str]) -> (Server, String) {
    let bert = kit("bert.gguf");
    let args = [&[bert.to_str().unwrap(), "--flight-port", "0"], args].concat();
    let mut server = Server::without_waiting(&args);
    let mut line = String::new();
    server.stderr.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("Flight at ").unwrap().to_owned();
    (server, address)
}

#[test]
fn pyarrow_gets_vectors_while_it_sends_texts() {
    for version in VERSIONS {
        let (server, address) = start(&["--api-key", "secret"]);
        run_script(version, "service.py", &[&address, &server.url(), "secret"]);
    }
}

#[test]
fn a_certificate_protects_both_ports() {
    let folder = tempfile::tempdir().unwrap();
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, secret) = (folder.path().join("c.pem"), folder.path().join("k.pem"));
    fs::write(&certificate, key.cert.pem()).unwrap();
    fs::write(&secret, key.signing_key.serialize_pem()).unwrap();
    let (certificate, secret) = (certificate.to_str().unwrap(), secret.to_str().unwrap());
    let (_server, address) = start(&["--tls-cert", certificate, "--tls-key", secret]);
    let port = address.rsplit(':').next().unwrap();
    assert!(address.starts_with("grpc+tls://"), "{address}");
    run_script(VERSIONS[1], "service.py", &["--tls", port, certificate]);
}

#[test]
fn limits_of_keys_hold_for_flight() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "few requests=3\nshort tokens=20\n").unwrap();
    let (_server, address) = start(&["--api-key-file", keys.to_str().unwrap()]);
    run_script(VERSIONS[1], "limits.py", &["keys", &address]);
}

#[test]
fn results_are_for_the_key_that_sent_their_texts() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "one\nother\n").unwrap();
    let (_server, address) = start(&["--api-key-file", keys.to_str().unwrap()]);
    run_script(VERSIONS[1], "limits.py", &["owners", &address]);
}

#[test]
fn results_and_messages_are_bounded() {
    let (_server, address) = start(&["--max-body", "1M", "--max-bodies", "2M"]);
    for what in ["bytes", "names", "unread"] {
        run_script(VERSIONS[1], "limits.py", &[what, &address]);
    }
}

#[test]
fn texts_may_be_strings_of_any_kind() {
    for version in VERSIONS {
        let (_server, address) = start(&[]);
        run_script(version, "limits.py", &["kinds", &address]);
    }
}

#[test]
fn a_client_that_takes_nothing_is_disconnected() {
    let (_server, address) = start(&["--write-timeout", "1s"]);
    run_script(VERSIONS[1], "limits.py", &["stalled", &address]);
}

#[test]
fn a_stream_without_messages_ends() {
    let (_server, address) = start(&["--body-timeout", "1s"]);
    run_script(VERSIONS[1], "limits.py", &["idle", &address]);
}

#[test]
fn a_full_queue_refuses_texts() {
    let (_server, address) = start(&["--parallel", "1", "--queue", "1"]);
    run_script(VERSIONS[1], "limits.py", &["queue", &address]);
}

#[test]
#[cfg(unix)]
fn a_stream_ends_with_the_drain_time() {
    let (mut server, address) = start(&["--drain", "1s"]);
    let signal = || {
        let pid = server.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    };
    let mut client = Command::new(pyarrow(VERSIONS[1]))
        .arg(script("limits.py"))
        .args(["drain", &address])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "streaming");
    let start = Instant::now();
    signal();
    assert_eq!(lines.next().unwrap().unwrap(), "ended");
    assert!(client.wait().unwrap().success());
    assert!(server.child.wait().unwrap().success());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
