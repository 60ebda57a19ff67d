//! Changes to open files, and the one block layout that is changed while a file is opened.

#![allow(clippy::unwrap_used)]

mod bytes;

use std::borrow::Cow;

use bodkin_gguf::{File, Format, Value, format::fp4};

fn small() -> File {
    File::from_bytes("small", bytes::small().bytes()).unwrap()
}

fn names(file: &File) -> Vec<&str> {
    file.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
}

#[test]
fn tensors_take_other_names() {
    let mut file = small();
    let before = file.data(file.tensor("a").unwrap()).to_vec();
    file.rename_tensors(|name| (name == "a").then(|| "d".to_owned())).unwrap();
    assert_eq!(names(&file), ["d", "b", "c"]);
    assert!(file.tensor("a").is_none());
    assert_eq!(file.data(file.tensor("d").unwrap()), before);
    // Names may change places, but no two tensors may have the same.
    let swap = |name: &str| Some(if name == "b" { "c" } else { "b" }.to_owned());
    file.retain_tensors(|tensor| tensor.name != "d");
    file.rename_tensors(swap).unwrap();
    assert_eq!(names(&file), ["c", "b"]);
    assert_eq!(file.tensor("c").unwrap().format, Format::Q4_0);
    let error = file.rename_tensors(|_| Some("x".to_owned())).unwrap_err().to_string();
    assert!(error.contains("`x`") && error.contains("a second one"), "{error}");
    assert_eq!(names(&file), ["c", "b"], "a refused change changes nothing");
}

#[test]
fn data_are_made_of_other_data() {
    let mut file = small();
    let a = file.tensor("a").unwrap().clone();
    file.retain_tensors(|tensor| tensor.name != "a");
    let copy = a.clone();
    let swap = move |file: &File| file.data(&a).iter().rev().copied().collect();
    file.add_tensor("e", Format::F32, &[8], swap).unwrap();
    let made = file.tensor("e").unwrap();
    assert!(matches!(file.read(made), Cow::Owned(_)), "a single read is not cached");
    assert_eq!((made.cols(), made.rows(), made.bytes), (8, 1, 32));
    let mut wanted = file.data(&copy).to_vec();
    wanted.reverse();
    assert_eq!(*file.read(made), wanted);
    assert_eq!(file.data(made), wanted);
    assert!(matches!(file.read(made), Cow::Borrowed(_)), "cached data are borrowed");
    let empty = |_: &File| Vec::new();
    for (name, shape, part) in [("e", [8], "a second one"), ("f", [0], "no dimension of zero")] {
        let error = file.add_tensor(name, Format::F32, &shape, empty).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains(name), "{error}");
    }
    file.metadata_mut().insert("flag", Value::Bool(false));
    assert_eq!(file.metadata().bool("flag").unwrap(), Some(false));
}

/// The type under which older files have MXFP4 with neighbours in a byte.
#[test]
fn paired_codes_are_brought_in_order() {
    let mut parts = bytes::small();
    parts.tensors[1] = bytes::tensor("b", &[32], 4, 32);
    let exponent = 128;
    parts.data[32] = exponent;
    for i in 0..16u8 {
        parts.data[33 + usize::from(i)] = (2 * i % 16) | (((2 * i + 1) % 16) << 4);
    }
    let file = File::from_bytes("paired", parts.bytes()).unwrap();
    let tensor = file.tensor("b").unwrap();
    assert_eq!((tensor.format, tensor.bytes), (Format::MXFP4, 17));
    let mut values = [0.0; 32];
    tensor.format.dequantize(file.data(tensor), &mut values);
    let unit = fp4::half_e8m0(exponent);
    let wanted = (0..32).map(|i| f32::from(fp4::CODEBOOK[i % 16]) * unit);
    assert!(values.iter().copied().eq(wanted), "{values:?}");
}
