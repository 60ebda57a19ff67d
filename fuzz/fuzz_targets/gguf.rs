//! Any bytes at all: reading them ends with a file or an error, and what a file promises holds.
//! Run with `cargo +nightly fuzz run gguf`; models of `tests/parity/models` make good seeds.

#![no_main]

use std::hint::black_box;

use bodkin_gguf::{File, Writer};
use libfuzzer_sys::fuzz_target;

/// The longest row that is dequantised, in elements, to keep runs short.
const MAX_ELEMENTS: usize = 1 << 12;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = File::from_bytes("fuzz.gguf", bytes.to_vec()) else { return };
    let _ = black_box(file.metadata().architecture());
    for (key, _) in file.metadata().iter() {
        let _ = black_box(file.metadata().u32s(key));
        let _ = black_box(file.metadata().f32s(key));
        let _ = black_box(file.metadata().bools(key));
        let _ = black_box(file.metadata().str(key));
        let _ = black_box(file.metadata().strings(key));
    }
    let mut writer = Writer::new("fuzz.gguf", file.metadata()).expect("what reads also writes");
    for tensor in file.tensors() {
        let format = tensor.format;
        let data = file.data(tensor);
        assert_eq!(data.len() as u64, tensor.bytes);
        let mut values = vec![0.0; tensor.cols().min(MAX_ELEMENTS)];
        if values.len() == tensor.cols() {
            format.dequantize_row(format.row(data, tensor.rows(), 0), &mut values);
        }
        black_box(&values);
        writer.tensor(&tensor.name, format, &tensor.shape, data).expect("what reads also writes");
    }
    let mut written = Vec::new();
    writer.write_to(&mut written).expect("memory does not run full");
    File::from_bytes("again.gguf", written).expect("what was written also reads");
});
