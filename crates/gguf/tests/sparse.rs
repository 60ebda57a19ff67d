//! Sparse formats: what is stored comes back, a base and its sparse form hold the same values, and
//! indexes and rows of any bytes do no harm.

#![allow(clippy::unwrap_used)]

use bodkin_gguf::{File, Format, Metadata, Writer};

const SPARSE: [Format; 7] = [
    Format::CSR_F16,
    Format::BITMAP_F16,
    Format::BITMAP_Q8_0,
    Format::BITMAP_Q4_0,
    Format::S24_F16,
    Format::S24_Q8_0,
    Format::S24_Q4_0,
];

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From -1 to 1, and zero with a chance of `zeros` percent.
    fn value(&mut self, zeros: u64) -> f32 {
        let bits = self.next();
        let value = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        if (bits & 0xffff) % 100 < zeros { 0.0 } else { value }
    }

    fn values(&mut self, count: usize, zeros: u64) -> Vec<f32> {
        (0..count).map(|_| self.value(zeros)).collect()
    }
}

/// Makes two of every four zero.
fn two_of_four(values: &mut [f32]) {
    values.chunks_exact_mut(4).for_each(|four| (four[0], four[2]) = (0.0, 0.0));
}

fn dequantized(format: Format, data: &[u8], count: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; count];
    format.dequantize(data, &mut values);
    values
}

#[test]
fn a_sparse_format_holds_the_values_of_its_base() {
    let mut random = Random(1);
    for format in SPARSE {
        let base = format.base().unwrap();
        for (rows, cols) in [(1, 32), (3, 96), (5, 256), (2, 2048)] {
            for zeros in [0, 28, 50, 97, 100] {
                let mut values = random.values(rows * cols, zeros);
                if !format.has_index() {
                    two_of_four(&mut values);
                }
                let data = format.encode(&values, cols).unwrap();
                let dense = base.encode(&values, cols).unwrap();
                let expected = dequantized(base, &dense, rows * cols);
                assert_eq!(dequantized(format, &data, rows * cols), expected);
                check_rows(format, &data, &dense, &expected, rows);
            }
        }
    }
}

/// Row by row: values, the base's bytes, and back from these.
fn check_rows(format: Format, data: &[u8], dense: &[u8], values: &[f32], rows: usize) {
    let (cols, row_bytes) = (values.len() / rows, dense.len() / rows);
    let mut again = Vec::new();
    for i in 0..rows {
        let row = format.row(data, rows, i);
        let mut found = vec![f32::NAN; cols];
        format.dequantize_row(row, &mut found);
        assert_eq!(found, values[i * cols..][..cols]);
        let mut densified = vec![0xff; row_bytes];
        format.densify_row(row, &mut densified);
        assert_eq!(densified, dense[i * row_bytes..][..row_bytes], "{} row {i}", format.name());
        again.push(format.sparsify_row(&densified).unwrap());
        let left = found.iter().filter(|&&value| value != 0.0).count();
        let stored = format.stored_elements(row, cols).unwrap();
        assert!(stored == left || !format.has_index() && stored == cols / 2, "{stored} {left}");
    }
    assert_eq!(format.join_rows(&again), data, "{}", format.name());
}

#[test]
fn sizes_are_those_of_the_definitions() {
    let mut values = vec![1.0; 4 * 128];
    two_of_four(&mut values);
    // Bits for a weight, of which half are left: index 40 bytes, then four rows.
    for (format, row) in [
        (Format::CSR_F16, 64 * 4),
        (Format::BITMAP_F16, 16 + 64 * 2),
        (Format::BITMAP_Q8_0, 16 + 8 + 64),
        (Format::BITMAP_Q4_0, 16 + 8 + 32),
    ] {
        assert_eq!(format.encode(&values, 128).unwrap().len(), 40 + 4 * row, "{}", format.name());
        assert_eq!((format.row_bytes(128), format.block_bytes()), (None, None));
    }
    for (format, row) in [(Format::S24_F16, 144), (Format::S24_Q8_0, 88), (Format::S24_Q4_0, 56)] {
        assert_eq!(format.encode(&values, 128).unwrap().len(), 4 * row);
        assert_eq!(format.row_bytes(128), Some(row));
    }
}

#[test]
fn two_of_four_keeps_the_larger_and_refuses_more() {
    for format in [Format::S24_F16, Format::S24_Q8_0, Format::S24_Q4_0] {
        let values: Vec<f32> = (0..32).map(|i| [4.0, -0.5, -8.0, 0.25][i % 4]).collect();
        let data = format.encode(&values, 32).unwrap();
        for four in dequantized(format, &data, 32).chunks(4) {
            assert!(four[0] > 3.5 && four[2] < -7.5, "{four:?}");
            assert_eq!((four[1], four[3]), (0.0, 0.0));
        }
        let dense = format.base().unwrap().encode(&[1.0; 32], 32).unwrap();
        let message = format.sparsify_row(&dense).unwrap_err().to_string();
        assert!(message.contains(format.name()) && message.contains("two zeros"), "{message}");
    }
}

/// A file with one tensor `t` of 5 rows and 64 columns, and one `u` behind it.
fn file(format: Format, zeros: u64) -> Vec<u8> {
    let metadata = Metadata::new();
    let data = format.encode(&Random(7).values(5 * 64, zeros), 64).unwrap();
    let mut writer = Writer::new("sparse.gguf", &metadata).unwrap();
    writer.tensor("t", format, &[64, 5], &data).unwrap();
    writer.tensor("u", Format::F32, &[1], &[0; 4]).unwrap();
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    bytes
}

#[test]
fn files_keep_tensors_whose_size_only_their_data_tell() {
    for format in SPARSE {
        let file = File::from_bytes("sparse.gguf", file(format, 50)).unwrap();
        let tensor = file.tensor("t").unwrap();
        let expected = format.encode(&Random(7).values(5 * 64, 50), 64).unwrap();
        assert_eq!((tensor.format, file.data(tensor)), (format, &expected[..]));
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let metadata = Metadata::new();
    let format = Format::BITMAP_Q8_0;
    let data = format.encode(&Random(7).values(5 * 64, 50), 64).unwrap();
    let writer = || Writer::new("sparse.gguf", &metadata).unwrap();
    for (shape, data) in [
        (vec![64, 5], &data[..data.len() - 1]),
        (vec![64, 4], &data),
        (vec![32, 5], &data),
        (vec![64, 5, 1 << 60], &data),
        (vec![63, 5], &data),
    ] {
        assert!(writer().tensor("t", format, &shape, data).is_err(), "{shape:?}");
    }
    let message = writer().tensor_with("t", format, &[64, 5], |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("one length") && message.contains("BITMAP_Q8_0"), "{message}");
    let mut sized = writer();
    sized.tensor_with_bytes("t", format, &[64, 5], data.len() as u64, |_| Ok(())).unwrap();
    assert!(sized.write_to(&mut Vec::new()).unwrap_err().to_string().contains("found 0 bytes"));
    assert!(writer().tensor_with_bytes("t", Format::F32, &[4], 17, |_| Ok(())).is_err());
    // Columns are numbered by 16 bits.
    let wide = Format::CSR_F16.join_rows(&[Vec::new()]);
    assert!(writer().tensor("t", Format::CSR_F16, &[65536, 1], &wide).is_ok());
    assert!(writer().tensor("t", Format::CSR_F16, &[65537, 1], &wide).is_err());
    assert!(writer().tensor("t", Format::CSR_F16, &[1 << 63, 1], &wide).is_err());
}

#[test]
fn wrong_indexes_are_told() {
    let good = file(Format::BITMAP_Q8_0, 50);
    let opened = File::from_bytes("sparse.gguf", good.clone()).unwrap();
    let start = opened.tensor("t").unwrap().offset as usize;
    for (entry, value, expected) in [
        (0, 47u64, "first row at byte 48"),
        (1, 0, "row 0"),
        (1, u64::MAX, "row 0"),
        (2, 48, "row 1"),
        (5, 1 << 62, "row 4"),
    ] {
        let mut bytes = good.clone();
        bytes[start + 8 * entry..][..8].copy_from_slice(&value.to_le_bytes());
        let message = File::from_bytes("sparse.gguf", bytes).unwrap_err().to_string();
        assert!(message.starts_with("sparse.gguf: tensor `t`: expected"), "{message}");
        assert!(message.contains(expected), "{message}");
    }
    let mut short = good;
    short.truncate(start + 40);
    assert!(File::from_bytes("sparse.gguf", short).is_err());
}

#[test]
fn changed_bytes_do_no_harm() {
    for format in SPARSE {
        let original = file(format, 50);
        let mut read = 0;
        for seed in 1..=4000 {
            let mut random = Random(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
            let mut bytes = original.clone();
            for _ in 0..=random.next() % 4 {
                let at = (random.next() % bytes.len() as u64) as usize;
                match random.next() % 3 {
                    0 => bytes[at] = random.next() as u8,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.truncate(at.max(8)),
                }
            }
            let Ok(file) = File::from_bytes("changed.gguf", bytes) else { continue };
            let Some(tensor) = file.tensor("t") else { continue };
            let values = dequantized(tensor.format, file.data(tensor), tensor.elements() as usize);
            read += usize::from(!values.is_empty());
        }
        assert!((200..3800).contains(&read), "{}: {read} of 4000 were read", format.name());
    }
}

#[test]
fn rows_of_any_bytes_are_defined() {
    let mut random = Random(3);
    for format in SPARSE {
        let dense_bytes = format.base().unwrap().row_bytes(64).unwrap();
        for _ in 0..500 {
            let bytes = match format.row_bytes(64) {
                Some(bytes) => bytes,
                None if format == Format::CSR_F16 => (random.next() % 65) as usize * 4,
                // Masks and scales, and any number of codes.
                None => 12 + (random.next() % 140) as usize,
            };
            let row: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
            let mut dense = [vec![0; dense_bytes], vec![0xff; dense_bytes]];
            dense.iter_mut().for_each(|dense| format.densify_row(&row, dense));
            assert_eq!(dense[0], dense[1], "{}: all bytes are written", format.name());
        }
    }
}
