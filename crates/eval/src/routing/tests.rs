//! Files of traces, good ones and hostile ones.

use std::io::Write;

use super::*;

const NAME: &str = "trace.routing";

/// Three tokens that choose two of five experts in layers 1 and 4.
fn trace() -> RoutingTrace {
    let choices = vec![0, 4, 1, 2, 4, 3, 2, 1, 0, 3, 3, 0];
    RoutingTrace::new(Path::new(NAME), [5, 2], vec![1, 4], choices).unwrap()
}

fn bytes() -> Vec<u8> {
    let mut bytes = Vec::new();
    trace().write(&mut bytes).unwrap();
    bytes
}

/// Reads a file with these bytes.
fn read(bytes: &[u8]) -> Result<RoutingTrace> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    RoutingTrace::read(file.path())
}

#[test]
fn files_are_read_as_written() {
    let found = read(&bytes()).unwrap();
    assert_eq!(found, trace());
    assert_eq!((found.experts(), found.used(), found.tokens()), (5, 2, 3));
    assert_eq!(
        (found.layers(), found.chosen(1, 0), found.chosen(2, 1)),
        (&[1, 4][..], &[4, 3][..], &[3, 0][..])
    );
}

#[test]
fn hostile_files_are_refused_with_what_is_wrong() {
    let good = bytes();
    let changed = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for (bytes, wanted) in [
        (b"GGUF\n".to_vec(), "first line: expected the line `bodkin routing 1`, found `GGUF`"),
        (b"bodkin routing 2\nxxxxxxxxxxxxxxxxxxxx".to_vec(), "found `bodkin routing 2`"),
        (good[..20].to_vec(), "size: expected 33 bytes at least, found 20"),
        (good[..good.len() - 1].to_vec(), "size: expected 65 bytes, found 64"),
        ([&good[..], &[0]].concat(), "size: expected 65 bytes, found more"),
        (changed(17, 0), "experts of a layer: expected 1 to 65536, found 0"),
        (changed(17, 4), "number of an expert: expected less than 4, found 4"),
        (changed(21, 6), "experts that a token chooses: expected 1 to 5, found 6"),
        (changed(25, u32::MAX), "layers: expected 1 to 4096, found 4294967295"),
        (changed(29, 1 << 24), "size: expected 134217769 bytes, found 65"),
        (changed(33, 7), "layers: expected ascending numbers, found [7, 4]"),
        (changed(41, 0x0001_0001), "choices: expected different experts, found expert 1 twice"),
    ] {
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    // Far more choices than memory are refused before they are read.
    let mut bytes = good.clone();
    for (i, count) in [1u32 << 16, 1 << 16, 1 << 12, 1 << 24].into_iter().enumerate() {
        bytes[17 + 4 * i..][..4].copy_from_slice(&count.to_le_bytes());
    }
    let error = read(&bytes).unwrap_err().to_string();
    assert!(error.contains("choices: expected at most 268435456"), "{error}");
}
