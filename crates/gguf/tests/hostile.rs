//! Files changed at random: whatever is in them, reading ends with a file or an error, and what a
//! file promises can be read. Seeds are fixed, so that a failure can be had again.

#![allow(clippy::unwrap_used)]

mod bytes;

use bodkin_gguf::{File, Writer};

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Changes bytes, integers and lengths of a file.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let value = [0, 1, 1 << 31, 1 << 60, 1 << 63, u64::MAX][random.below(6)];
                for (byte, new) in bytes[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
            3 => bytes.insert(at, random.next() as u8),
            4 => drop(bytes.remove(at)),
            _ => bytes.truncate(at.max(8)),
        }
    }
}

/// Reads all of a file, and writes it again: what reads must also be writable.
fn use_file(file: &File) {
    let mut writer = Writer::new("again.gguf", file.metadata()).unwrap();
    for tensor in file.tensors() {
        let data = file.data(tensor);
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.format.dequantize(data, &mut values);
        writer.tensor(&tensor.name, tensor.format, &tensor.shape, data).unwrap();
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    let again = File::from_bytes("again.gguf", bytes).unwrap();
    assert_eq!(again.metadata().len(), file.metadata().len());
    assert_eq!(again.tensors().len(), file.tensors().len());
}

#[test]
fn changed_bytes_do_no_harm() {
    let original = bytes::small().bytes();
    let mut read = 0;
    for seed in 1..=200_000 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
        let mut bytes = original.clone();
        mutate(&mut bytes, &mut random);
        if let Ok(file) = File::from_bytes("changed.gguf", bytes) {
            use_file(&file);
            read += 1;
        }
    }
    // Changes to data, padding and values leave a valid file; both sides must have been reached.
    assert!((10_000..190_000).contains(&read), "{read} of 200000 files were read");
}
