//! `serve --flight-port`: pyarrow's client sends texts and gets vectors.

use std::fs;
use std::io::BufRead;

use crate::server::{Server, kit};
use crate::stand_in::{VERSIONS, run_script};

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
