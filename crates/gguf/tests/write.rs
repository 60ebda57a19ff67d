//! Writing: the inverse of reading, all or nothing.

#![allow(clippy::unwrap_used)]

mod bytes;

use std::io;

use bodkin_gguf::{Array, File, Format, Metadata, Value, Writer};

/// One entry of every type, in an order that is not alphabetical.
fn every_type() -> Metadata {
    let text = |text: &[u8]| -> Box<[u8]> { text.into() };
    let mut metadata = Metadata::new();
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60000),
        Value::I16(-30000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::F32(-0.0),
        Value::Bool(true),
        Value::String(text(b"not \xff UTF-8")),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(1e300),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![3])),
        Value::Array(Array::I16(vec![-3])),
        Value::Array(Array::U32(vec![])),
        Value::Array(Array::I32(vec![-4, 4])),
        Value::Array(Array::F32(vec![0.5])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::String(vec![text(b""), text(b"a")])),
        Value::Array(Array::Array(vec![Array::U8(vec![9]), Array::String(vec![text(b"b")])])),
        Value::Array(Array::U64(vec![5])),
        Value::Array(Array::I64(vec![-5])),
        Value::Array(Array::F64(vec![0.25])),
    ];
    for (index, value) in values.into_iter().enumerate() {
        metadata.insert(format!("key.{}", (index * 7) % 25), value);
    }
    metadata
}

#[test]
fn every_type_of_value_survives_in_order() {
    let metadata = every_type();
    for version in [2, 3] {
        let mut bytes = Vec::new();
        let writer = Writer::new("x.gguf", &metadata).unwrap().version(version).unwrap();
        writer.write_to(&mut bytes).unwrap();
        let file = File::from_bytes("x.gguf", bytes).unwrap();
        assert_eq!(file.version(), version);
        assert!(file.metadata().iter().eq(metadata.iter()));
    }
    assert!(Writer::new("x.gguf", &metadata).unwrap().version(1).is_err());
}

#[test]
fn a_file_made_by_hand_comes_out_the_same() {
    let bytes = bytes::small().bytes();
    let file = File::from_bytes("small.gguf", bytes.clone()).unwrap();
    let mut writer = Writer::new("small.gguf", file.metadata()).unwrap();
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, tensor.format, &tensor.shape, file.data(tensor)).unwrap();
    }
    let mut written = Vec::new();
    writer.write_to(&mut written).unwrap();
    assert_eq!(written, bytes);
}

#[test]
fn a_failing_write_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, b"old").unwrap();
    let metadata = Metadata::new();
    let mut writer = Writer::new(&path, &metadata).unwrap();
    writer
        .tensor_with("full", Format::F32, &[4], |out| {
            out.write_all(&[0; 8])?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        })
        .unwrap();
    let message = writer.save().unwrap_err().to_string();
    assert!(message.contains("model.gguf: cannot write tensor `full`: "), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_device_is_reported() {
    let metadata = Metadata::new();
    let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let writer = Writer::new("model.gguf", &metadata).unwrap();
    let message = writer.write_to(&mut full).unwrap_err().to_string();
    assert!(message.starts_with("model.gguf: cannot write: "), "{message}");
}

#[test]
fn a_saved_file_replaces_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, b"old").unwrap();
    let (metadata, data) = (every_type(), 1f32.to_le_bytes());
    let mut writer = Writer::new(&path, &metadata).unwrap();
    writer.tensor("t", Format::F32, &[1], &data).unwrap();
    writer.save().unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(file.data(file.tensor("t").unwrap()), data);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn data_of_another_size_are_refused() {
    let metadata = Metadata::new();
    for size in [15, 17] {
        let data = vec![0; size];
        let mut writer = Writer::new("x.gguf", &metadata).unwrap();
        writer.tensor("t", Format::F32, &[4], &data).unwrap();
        let message = writer.write_to(&mut Vec::new()).unwrap_err().to_string();
        let expected = format!("data of tensor `t`: expected 16 bytes, found {size} bytes");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn what_could_not_be_read_is_refused() {
    let metadata = Metadata::new();
    let mut writer = Writer::new("x.gguf", &metadata).unwrap();
    assert!(writer.tensor("", Format::F32, &[1], &[]).is_err());
    assert!(writer.tensor("t", Format::F32, &[], &[]).is_err());
    assert!(writer.tensor("u", Format::F32, &[1, 0], &[]).is_err());
    assert!(writer.tensor("v", Format::Q4_K, &[255], &[]).is_err());
    writer.tensor("w", Format::F32, &[1], &[0; 4]).unwrap();
    assert!(writer.tensor("w", Format::F32, &[1], &[0; 4]).is_err());
    for (key, value) in [("general.alignment", 31), ("", 0), (&"k".repeat(65536), 0)] {
        let mut metadata = Metadata::new();
        metadata.insert(key, Value::U32(value));
        assert!(Writer::new("x.gguf", &metadata).is_err(), "{key}");
    }
}

#[test]
fn a_missing_folder_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let metadata = Metadata::new();
    let writer = Writer::new(folder.path().join("absent/model.gguf"), &metadata).unwrap();
    let message = writer.save().unwrap_err().to_string();
    assert!(message.contains("model.gguf: cannot create a file in its folder: "), "{message}");
}
