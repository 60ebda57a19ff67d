//! Typed reads of metadata: what converts, what does not, and what the error says.

#![allow(clippy::unwrap_used)]

use bodkin_gguf::{Array, Format, Metadata, Value};

fn with(value: Value) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("key", value);
    metadata
}

#[test]
fn integers_of_any_width_convert_if_they_fit() {
    for value in [Value::U8(7), Value::I16(7), Value::I32(7), Value::U64(7), Value::I64(7)] {
        assert_eq!(with(value.clone()).u32("key").unwrap(), Some(7));
        assert_eq!(with(value.clone()).u64("key").unwrap(), Some(7));
        assert_eq!(with(value).u32s("key").unwrap(), Some(vec![7]));
    }
    assert_eq!(with(Value::U64(1 << 40)).u64("key").unwrap(), Some(1 << 40));
    for value in [Value::U64(1 << 32), Value::I8(-1), Value::F32(1.0), Value::Bool(true)] {
        assert!(with(value).u32("key").is_err());
    }
    let items = Value::Array(Array::I64(vec![1, -1]));
    assert!(with(items).u32s("key").is_err());
    let items = Value::Array(Array::U16(vec![1, 2]));
    assert_eq!(with(items).u32s("key").unwrap(), Some(vec![1, 2]));
}

#[test]
fn other_types_convert_only_from_their_like() {
    assert_eq!(with(Value::F64(0.5)).f32("key").unwrap(), Some(0.5));
    assert!(with(Value::U32(1)).f32("key").is_err());
    assert_eq!(with(Value::F32(0.5)).f32s("key").unwrap(), Some(vec![0.5]));
    assert_eq!(with(Value::Bool(true)).bools("key").unwrap(), Some(vec![true]));
    assert!(with(Value::U8(1)).bool("key").is_err());
    let strings = Value::Array(Array::String(vec![(*b"a").into()]));
    assert_eq!(with(strings).strings("key").unwrap().unwrap()[0].as_ref(), b"a");
    assert!(with(Value::String((*b"a").into())).strings("key").is_err());
}

#[test]
fn errors_name_key_expected_and_found() {
    let says = |result: bodkin_gguf::Result<Option<u32>>| result.unwrap_err().to_string();
    let expected = "metadata key `key`: expected u32, found i32 -1";
    assert_eq!(says(with(Value::I32(-1)).u32("key")), expected);
    let expected = "metadata key `key`: expected u32, found an array of 2 x f32";
    assert_eq!(says(with(Value::Array(Array::F32(vec![0.0; 2]))).u32("key")), expected);
    let message = with(Value::String([0xff].into())).str("key").unwrap_err().to_string();
    assert!(message.ends_with("found a string of 1 bytes that is not UTF-8"), "{message}");
    let message = Metadata::new().need_u32("a.b").unwrap_err().to_string();
    assert_eq!(message, "metadata key `a.b`: expected u32, found no such key");
    assert!(Metadata::new().architecture().is_err());
}

#[test]
fn order_is_kept() {
    let mut metadata = Metadata::new();
    for key in ["c", "a", "b", "d"] {
        metadata.insert(key, Value::U8(0));
    }
    metadata.insert("a", Value::U8(1));
    metadata.remove("c");
    let keys: Vec<&str> = metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["a", "b", "d"]);
    assert_eq!(metadata.get("a"), Some(&Value::U8(1)));
    assert_eq!((metadata.len(), metadata.get("c")), (3, None));
}

#[test]
fn formats_have_names_and_sizes() {
    assert_eq!(Format::all().len(), 42);
    for &format in Format::all() {
        assert_eq!(Format::from_id(format.id()), Some(format));
        assert_eq!(Format::from_name(&format.name().to_lowercase()), Some(format));
    }
    assert!(Format::all().windows(2).all(|pair| pair[0].id() < pair[1].id()));
    assert_eq!(Format::from_id(4), None);
    assert_eq!(Format::from_name("Q4_K_M"), None);
    assert_eq!(Format::Q4_K.row_bytes(512), Some(288));
    assert_eq!(Format::Q4_K.row_bytes(300), None);
    assert_eq!(Format::F64.row_bytes(usize::MAX), None);
}

#[test]
fn formats_without_a_quantiser_say_so() {
    let message = Format::IQ1_S.quantize(&[0.0; 256], None, &mut [0; 50]).unwrap_err().to_string();
    assert_eq!(message, "format IQ1_S: expected a format with a quantiser, found none");
}
