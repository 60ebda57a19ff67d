//! Files that are wrong in one way each, and what the error must say about it.

#![allow(clippy::unwrap_used)]

mod bytes;

use bodkin_gguf::{File, Value};
use bytes::{ARRAY, BOOL, Parts, STRING, U32, array, count, entry, small, string, tensor};

/// What is wrong, how it is made from the small valid file, and words of the message.
type Case = (&'static str, fn(&mut Parts), &'static [&'static str]);

const HEADER: &[Case] = &[
    ("another magic", |p| p.magic = b"GGML".to_vec(), &["not a GGUF file", "\"GGML\""]),
    ("magic of zeros", |p| p.magic = vec![0; 4], &["not a GGUF file", "\\x00"]),
    ("reversed magic", |p| p.magic = b"FUGG".to_vec(), &["not a GGUF file", "FUGG"]),
    ("version 0", |p| p.version = 0, &["version 2 or 3", "version 0"]),
    ("version 1", |p| p.version = 1, &["version 2 or 3", "version 1"]),
    ("version 4", |p| p.version = 4, &["version 2 or 3", "version 4"]),
    ("version of all ones", |p| p.version = u32::MAX, &["version 4294967295"]),
    ("big-endian", |p| p.version = 3u32.swap_bytes(), &["version 3 in big-endian"]),
    ("big-endian 1", |p| p.version = 1u32.swap_bytes(), &["version 1 in big-endian"]),
    ("2^60 entries", |p| p.entry_count = Some(1 << 60), &["truncated", "1152921504606846976 meta"]),
    ("2^64-1 entries", |p| p.entry_count = Some(u64::MAX), &["truncated", "metadata entries"]),
    ("2^60 tensors", |p| p.tensor_count = Some(1 << 60), &["truncated", "1152921504606846976 ten"]),
    ("2^64-1 tensors", |p| p.tensor_count = Some(u64::MAX), &["truncated", "tensors"]),
    ("one entry more", |p| p.entry_count = Some(7), &["truncated", "tensor number 0"]),
    ("one entry less", |p| p.entry_count = Some(5), &["tensor", "expected"]),
    ("one tensor more", |p| p.tensor_count = Some(4), &["tensor number 3"]),
];

const METADATA: &[Case] = &[
    ("a second key", |p| p.entries.push(entry("flag", BOOL, &[0])), &["`flag`", "second"]),
    ("no key", |p| p.entries[2] = entry("", BOOL, &[1]), &["metadata entry 2", "1 to 65535"]),
    (
        "a long key",
        |p| p.entries[2] = entry(&"k".repeat(65536), BOOL, &[1]),
        &["metadata entry 2", "65536 bytes"],
    ),
    (
        "a key of 2^63 bytes",
        |p| p.entries[2][..8].copy_from_slice(&(1u64 << 63).to_le_bytes()),
        &["truncated", "metadata entry 2", "92233720368547"],
    ),
    (
        "a key that is not UTF-8",
        |p| p.entries[2] = [string(&[0xff, 0xfe]), vec![7, 0, 0, 0, 1]].concat(),
        &["metadata entry 2", "UTF-8"],
    ),
    ("value type 13", |p| p.entries[2] = entry("flag", 13, &[1]), &["`flag`", "0 to 12", "13"]),
    ("value type -1", |p| p.entries[2] = entry("flag", u32::MAX, &[]), &["`flag`", "4294967295"]),
    ("a bool of 2", |p| p.entries[2] = entry("flag", BOOL, &[2]), &["`flag`", "0 or 1", "found 2"]),
    ("a bool of -1", |p| p.entries[2] = entry("flag", BOOL, &[255]), &["`flag`", "found 255"]),
    (
        "a bool of 2 in an array",
        |p| p.entries[3] = array("list", BOOL, 2, &[1, 2]),
        &["`list`", "0 or 1", "found 2"],
    ),
    (
        "a string of 2^63 bytes",
        |p| p.entries[0] = entry("s", STRING, &count(1 << 63)),
        &["truncated", "`s`", "92233720368547"],
    ),
    (
        "a string of 2^64-1 bytes",
        |p| p.entries[0] = entry("s", STRING, &count(u64::MAX)),
        &["truncated", "`s`", "18446744073709551615"],
    ),
    (
        "2^60 array elements",
        |p| p.entries[3] = array("list", U32, 1 << 60, &[]),
        &["truncated", "`list`"],
    ),
    (
        "an array whose bytes wrap around to 0",
        |p| p.entries[3] = array("list", U32, 1 << 62, &[]),
        &["truncated", "`list`"],
    ),
    (
        "2^61 strings",
        |p| p.entries[4] = array("words", STRING, 1 << 61, &[]),
        &["truncated", "`words`"],
    ),
    (
        "a string of 2^63 bytes in an array",
        |p| p.entries[4] = array("words", STRING, 1, &count(1 << 63)),
        &["truncated", "`words`"],
    ),
    (
        "2^60 arrays",
        |p| p.entries[4] = array("words", ARRAY, 1 << 60, &[]),
        &["truncated", "`words`"],
    ),
    (
        "element type 13",
        |p| p.entries[3] = array("list", 13, 1, &[0]),
        &["`list`", "element type", "13"],
    ),
    ("nine nested arrays", |p| p.entries[3] = nested(9), &["`deep`", "at most 8 nested arrays"]),
    ("a hundred nested arrays", |p| p.entries[3] = nested(100), &["at most 8 nested arrays"]),
    ("a line break in a key", |p| p.entries[2] = entry("a\nb", 99, &[]), &["`a\\nb`"]),
];

const ALIGNMENT: &[Case] = &[
    ("alignment 0", |p| align(p, U32, &0u32.to_le_bytes()), &["general.alignment", "found 0"]),
    ("alignment 3", |p| align(p, U32, &3u32.to_le_bytes()), &["power of two", "found 3"]),
    ("alignment 48", |p| align(p, U32, &48u32.to_le_bytes()), &["power of two", "found 48"]),
    ("alignment 2^31", |p| align(p, U32, &(1u32 << 31).to_le_bytes()), &["found 2147483648"]),
    ("alignment 2^63", |p| align(p, 10, &(1u64 << 63).to_le_bytes()), &["power of two up to"]),
    ("alignment -32", |p| align(p, 5, &(-32i32).to_le_bytes()), &["general.alignment", "i32 -32"]),
    ("alignment as text", |p| align(p, STRING, &string(b"32")), &["general.alignment", "string"]),
    ("alignment as float", |p| align(p, 6, &32f32.to_le_bytes()), &["general.alignment", "f32 32"]),
];

const TENSORS: &[Case] = &[
    ("a second tensor", |p| p.tensors[1] = tensor("a", &[32], 2, 32), &["`a`", "second"]),
    ("no name", |p| p.tensors[0] = tensor("", &[4, 2], 0, 0), &["tensor number 0", "1 to 65535"]),
    ("a name that is not UTF-8", |p| p.tensors[0][8] = 0xff, &["tensor number 0", "UTF-8"]),
    (
        "a name of 2^63 bytes",
        |p| p.tensors[0][..8].copy_from_slice(&(1u64 << 63).to_le_bytes()),
        &["truncated", "tensor number 0"],
    ),
    ("no dimensions", |p| p.tensors[0] = tensor("a", &[], 0, 0), &["`a`", "1 to 4", "found 0"]),
    ("five dimensions", |p| p.tensors[0] = tensor("a", &[1; 5], 0, 0), &["`a`", "found 5"]),
    (
        "2^32-1 dimensions",
        |p| p.tensors[0][9..13].copy_from_slice(&[255; 4]),
        &["`a`", "1 to 4", "4294967295"],
    ),
    ("a zero dimension", |p| p.tensors[0] = tensor("a", &[4, 0], 0, 0), &["`a`", "zero", "[4, 0]"]),
    ("a first zero dimension", |p| p.tensors[1] = tensor("b", &[0], 2, 32), &["`b`", "zero"]),
    (
        "elements that overflow",
        |p| p.tensors[0] = tensor("a", &[1 << 33, 1 << 33], 0, 0),
        &["`a`", "at most", "elements"],
    ),
    (
        "elements that wrap around to 0",
        |p| p.tensors[0] = tensor("a", &[1 << 32, 1 << 32], 0, 0),
        &["`a`", "at most", "elements"],
    ),
    (
        "a dimension of 2^64-1",
        |p| p.tensors[0] = tensor("a", &[u64::MAX], 0, 0),
        &["`a`", "at most", "elements"],
    ),
    (
        "bytes that overflow",
        |p| p.tensors[0] = tensor("a", &[1 << 62], 0, 0),
        &["`a`", "at most", "bytes"],
    ),
    (
        "part of a block",
        |p| p.tensors[1] = tensor("b", &[33], 2, 32),
        &["`b`", "Q4_0 blocks of 32", "[33]"],
    ),
    (
        "part of a large block",
        |p| p.tensors[1] = tensor("b", &[32, 8], 12, 32),
        &["`b`", "Q4_K blocks of 256", "[32, 8]"],
    ),
    ("type 5", |p| p.tensors[1] = tensor("b", &[32], 5, 32), &["`b`", "known type", "type 5"]),
    ("type 31", |p| p.tensors[1] = tensor("b", &[32], 31, 32), &["`b`", "type 31"]),
    ("type 1000", |p| p.tensors[1] = tensor("b", &[32], 1000, 32), &["`b`", "type 1000"]),
    ("type 2^32-1", |p| p.tensors[1] = tensor("b", &[32], u32::MAX, 32), &["type 4294967295"]),
];

const PLACES: &[Case] = &[
    (
        "an offset between alignments",
        |p| p.tensors[1] = tensor("b", &[32], 2, 33),
        &["`b`", "multiple of 32", "found 33"],
    ),
    ("an offset past the end", |p| p.tensors[2] = tensor("c", &[3], 1, 96), &["truncated", "`c`"]),
    ("an offset of 2^63", |p| p.tensors[2] = tensor("c", &[3], 1, 1 << 63), &["truncated", "`c`"]),
    (
        "an offset that wraps around",
        |p| p.tensors[2] = tensor("c", &[3], 1, u64::MAX - 31),
        &["truncated", "`c`", "18446744073709551615"],
    ),
    (
        "a tensor larger than the file",
        |p| p.tensors[0] = tensor("a", &[1 << 40], 0, 0),
        &["truncated", "`a`"],
    ),
    (
        "two tensors in one place",
        |p| p.tensors[1] = tensor("b", &[32], 2, 0),
        &["`b`", "overlap", "`a`"],
    ),
    (
        "a tensor that reaches into the next",
        |p| p.tensors[0] = tensor("a", &[9], 0, 0),
        &["`b`", "after those of `a`", "overlap"],
    ),
    (
        "an overlap against the order of the list",
        |p| p.tensors[2] = tensor("c", &[17], 1, 0),
        &["overlap"],
    ),
    ("no data", |p| p.data.clear(), &["truncated", "`a`"]),
    ("data without their last byte", |p| p.data.truncate(69), &["truncated", "`c`"]),
];

fn align(parts: &mut Parts, kind: u32, value: &[u8]) {
    parts.entries[1] = entry("general.alignment", kind, value);
}

/// An array in an array and so on, `depth` of them, the innermost empty.
fn nested(depth: usize) -> Vec<u8> {
    let mut value = [U32.to_le_bytes().to_vec(), count(0)].concat();
    for _ in 1..depth {
        value = [ARRAY.to_le_bytes().to_vec(), count(1), value].concat();
    }
    entry("deep", ARRAY, &value)
}

#[test]
fn the_small_file_is_valid() {
    let file = File::from_bytes("small.gguf", small().bytes()).unwrap();
    assert_eq!((file.version(), file.alignment(), file.bytes()), (3, 32, 32 + 18 + 6));
    assert_eq!(file.metadata().architecture().unwrap(), "llama");
    assert_eq!(file.metadata().u32s("list").unwrap(), Some(vec![1, 2]));
    assert_eq!(file.metadata().get("last"), Some(&Value::F64(1.5)));
    let b = file.tensor("b").unwrap();
    assert_eq!(file.data(b), (32..50).collect::<Vec<u8>>());
    assert!(file.tensor("d").is_none());
}

#[test]
fn eight_nested_arrays_are_read() {
    let mut parts = small();
    parts.entries[3] = nested(8);
    File::from_bytes("small.gguf", parts.bytes()).unwrap();
}

#[test]
fn each_fault_is_named() {
    let groups = [HEADER, METADATA, ALIGNMENT, TENSORS, PLACES];
    assert!(groups.iter().map(|cases| cases.len()).sum::<usize>() >= 60);
    for (name, mutate, words) in groups.into_iter().flatten() {
        let mut parts = small();
        mutate(&mut parts);
        let Err(error) = File::from_bytes("small.gguf", parts.bytes()) else {
            panic!("{name}: no error");
        };
        let message = error.to_string();
        assert!(message.starts_with("small.gguf: "), "{name}: {message}");
        assert!(!message.contains('\n'), "{name}: {message}");
        for word in *words {
            assert!(message.contains(word), "{name}: no {word:?} in {message:?}");
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_truncated() {
    let bytes = small().bytes();
    // The padding after the last tensor may be missing, as other readers allow.
    let needed = bytes.len() - (96 - 70);
    for length in 0..needed {
        let error = File::from_bytes("small.gguf", bytes[..length].to_vec()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("truncated"), "{length}: {message}");
        assert!(message.contains(&format!("the file has {length}")), "{length}: {message}");
    }
    for length in needed..=bytes.len() {
        File::from_bytes("small.gguf", bytes[..length].to_vec()).unwrap();
    }
}

#[test]
fn data_start_at_the_header_end_rounded_up() {
    for alignment in [1usize, 8, 64, 4096] {
        let mut parts = small();
        align(&mut parts, U32, &(alignment as u32).to_le_bytes());
        parts.alignment = alignment;
        parts.tensors = vec![tensor("a", &[4, 2], 0, 0)];
        let header = Parts { data: Vec::new(), alignment: 1, ..parts.clone() };
        let header_end = header.bytes().len();
        let file = File::from_bytes("small.gguf", parts.bytes()).unwrap();
        let expected = header_end.next_multiple_of(alignment) as u64;
        assert_eq!(file.tensors()[0].offset, expected);
        assert_eq!(file.data(&file.tensors()[0]), (0..32).collect::<Vec<u8>>());
    }
}
