//! Split files: all parts are one file, and each thing that can be wrong with them is named.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use bodkin_gguf::{File, Format, Metadata, Value, Writer};

/// Writes part `number` of `count` with one tensor of four floats, all equal to `number`.
fn write_part(folder: &Path, number: u16, count: u16, change: impl FnOnce(&mut Metadata)) {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", Value::String((*b"llama").into()));
    metadata.insert("split.no", Value::U16(number - 1));
    metadata.insert("split.count", Value::U16(count));
    metadata.insert("split.tensors.count", Value::I32(count.into()));
    let name = format!("t{number}");
    change(&mut metadata);
    write(&folder.join(part(number, count)), &metadata, &name, number.into());
}

fn write(path: &Path, metadata: &Metadata, name: &str, value: f32) {
    let data: Vec<u8> = [value; 4].iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut writer = Writer::new(path, metadata).unwrap();
    writer.tensor(name, Format::F32, &[4], &data).unwrap();
    writer.save().unwrap();
}

fn part(number: u16, count: u16) -> PathBuf {
    PathBuf::from(format!("m-{number:05}-of-{count:05}.gguf"))
}

fn three_parts() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    (1..=3).for_each(|number| write_part(folder.path(), number, 3, |_| ()));
    folder
}

fn message(path: &Path) -> String {
    File::open(path).unwrap_err().to_string()
}

#[test]
fn parts_read_as_one_file() {
    let folder = three_parts();
    let file = File::open(folder.path().join(part(1, 3))).unwrap();
    assert_eq!(file.bytes(), 48);
    for (index, tensor) in file.tensors().iter().enumerate() {
        assert_eq!((tensor.name.as_str(), tensor.shard), (["t1", "t2", "t3"][index], index));
        let mut values = [0.0; 4];
        tensor.format.dequantize(file.data(file.tensor(&tensor.name).unwrap()), &mut values);
        assert_eq!(values, [index as f32 + 1.0; 4]);
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = three_parts();
    std::fs::remove_file(folder.path().join(part(2, 3))).unwrap();
    let message = message(&folder.path().join(part(1, 3)));
    assert!(message.ends_with("m-00002-of-00003.gguf: missing file"), "{message}");
}

#[test]
fn another_part_names_the_first() {
    let folder = three_parts();
    let message = message(&folder.path().join(part(2, 3)));
    assert!(message.contains("m-00001-of-00003.gguf, found part 2 of 3"), "{message}");
}

#[test]
fn a_first_part_under_another_name_is_refused() {
    let folder = three_parts();
    let renamed = folder.path().join("model.gguf");
    std::fs::rename(folder.path().join(part(1, 3)), &renamed).unwrap();
    let message = message(&renamed);
    assert!(message.contains("the name *-00001-of-00003.gguf"), "{message}");
}

#[test]
fn a_part_of_another_file_is_refused() {
    let folder = three_parts();
    let third = folder.path().join(part(3, 3));
    std::fs::copy(&third, folder.path().join(part(2, 3))).unwrap();
    let message = message(&folder.path().join(part(1, 3)));
    assert!(
        message.contains("m-00002-of-00003.gguf: split file: expected split.no 1"),
        "{message}"
    );
    assert!(message.contains("found split.no 2"), "{message}");
}

#[test]
fn a_wrong_number_of_tensors_is_refused() {
    let folder = three_parts();
    write_part(folder.path(), 1, 3, |metadata| {
        metadata.insert("split.tensors.count", Value::I32(4));
    });
    let message = message(&folder.path().join(part(1, 3)));
    assert!(message.contains("split.tensors.count"), "{message}");
    assert!(message.contains("expected 4 tensors in all 3 parts, found 3"), "{message}");
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let folder = three_parts();
    let mut metadata = Metadata::new();
    metadata.insert("split.no", Value::U16(2));
    metadata.insert("split.count", Value::U16(3));
    write(&folder.path().join(part(3, 3)), &metadata, "t1", 0.0);
    let message = message(&folder.path().join(part(1, 3)));
    assert!(message.contains("tensor `t1`"), "{message}");
    assert!(message.contains("a second one in part 3"), "{message}");
}

#[test]
fn a_part_in_memory_is_refused() {
    let folder = three_parts();
    let bytes = std::fs::read(folder.path().join(part(1, 3))).unwrap();
    let message = File::from_bytes("buffer", bytes).unwrap_err().to_string();
    assert!(message.contains("expected a whole file, found one of 3 parts"), "{message}");
}

#[test]
fn paths_that_are_no_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.gguf");
    assert!(message(&absent).ends_with("absent.gguf: missing file"));
    assert!(message(folder.path()).contains("is a directory"));
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, []).unwrap();
    assert!(message(&empty).contains("truncated or damaged: header needs 4 bytes, the file has 0"));
    for (count, tensors) in [(1, "1 tensor"), (272, "272 tensors")] {
        let header = [b"GGUF\x03\0\0\0", &u64::to_le_bytes(count)[..], &[0; 8]].concat();
        std::fs::write(&empty, header).unwrap();
        let message = message(&empty);
        assert!(message.contains(&format!("a header of {tensors} needs ")), "{message}");
    }
}
