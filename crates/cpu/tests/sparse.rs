//! Sparse and column-major weights against the same dense weights: bit-identical results for every
//! layout, instruction set, shape, density and number of tokens.

#![allow(clippy::unwrap_used)]

use bodkin_cpu::Isa;
use bodkin_cpu::linear::{
    Activations, OutRows, PackedLayout, PackedWeight, SCRATCH_LEN, SourceRows, SparsePacker,
    matmul, pack_columns,
};
use bodkin_gguf::Format;

const FORMATS: [Format; 7] = [
    Format::CSR_F16,
    Format::BITMAP_F16,
    Format::BITMAP_Q8_0,
    Format::BITMAP_Q4_0,
    Format::S24_F16,
    Format::S24_Q8_0,
    Format::S24_Q4_0,
];

/// Deterministic noise (xorshift64*).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From -1 to 1, zero with a chance of `zeros` percent.
    fn values(&mut self, count: usize, zeros: u64) -> Vec<f32> {
        let value = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let one = |bits: u64| if bits % 100 < zeros { 0.0 } else { value(bits) };
        (0..count).map(|_| one(self.next())).collect()
    }
}

fn run(isa: Isa, weight: &PackedWeight, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let (format, cols) = (weight.layout().activation_format(isa), weight.cols());
    let tokens = x.len() / cols;
    let mut activations = Activations::with_bytes(format.bytes(tokens, cols)).with_nonzeros(cols);
    let writer = activations.reshape(format, tokens, cols);
    for (row, x) in x.chunks_exact(cols).enumerate() {
        // SAFETY: one thread.
        unsafe { writer.set(isa, row, x) }
    }
    let mut out = vec![f32::NAN; tokens * weight.rows()];
    let rows = OutRows::new(&mut out, weight.rows());
    let (room, half) = (&mut vec![0.0; SCRATCH_LEN], weight.panels() / 2);
    for panels in [0..half, half..weight.panels()] {
        // SAFETY: one thread.
        unsafe { matmul(isa, weight, bias, panels, &activations, 0..tokens, rows, room) }
    }
    out
}

#[test]
fn zeros_left_out_change_no_bit() {
    let mut noise = Noise(1);
    for format in FORMATS {
        for (rows, cols) in [(1, 32), (17, 96), (40, 256), (83, 512), (150, 64)] {
            for zeros in [0, 28, 60, 100] {
                check(format, rows, cols, zeros, &mut noise);
            }
        }
    }
}

fn check(format: Format, rows: usize, cols: usize, zeros: u64, noise: &mut Noise) {
    let data = format.encode(&noise.values(rows * cols, zeros), cols).unwrap();
    let dense = PackedWeight::pack(format, &data, rows, cols);
    let sparse = PackedWeight::pack_sparse(format, &data, rows, cols);
    assert_eq!((dense.layout(), dense.rows()), (sparse.layout(), sparse.rows()));
    let bias = noise.values(rows, 0);
    for tokens in [1, 2, 5, 19] {
        let x = noise.values(tokens * cols, 10);
        for isa in Isa::available() {
            for bias in [None, Some(&bias[..])] {
                let found = run(isa, &sparse, &x, bias);
                let wanted = run(isa, &dense, &x, bias);
                let what = format!("{} {rows}x{cols}, {zeros} %, {tokens}, {isa}", format.name());
                assert!(found == wanted, "{what}");
                let first = run(isa, &sparse, &x[..cols], bias);
                assert!(found[..rows] == first, "{what}: the first token alone");
            }
        }
    }
}

#[test]
fn columns_whose_input_is_zero_change_no_bit() {
    let mut noise = Noise(5);
    for layout in [
        PackedLayout::F32,
        PackedLayout::F16,
        PackedLayout::BF16,
        PackedLayout::Q8_0,
        PackedLayout::Q4_0,
    ] {
        for (rows, cols) in [(1, 32), (40, 96), (128, 64), (300, 256)] {
            let format = layout.format();
            let data = format.encode(&noise.values(rows * cols, 0), cols).unwrap();
            let dense = PackedWeight::pack(format, &data, rows, cols);
            let columns = pack_columns(layout, SourceRows::new(format, &data, rows), rows, cols);
            let bias = noise.values(rows, 0);
            for zeros in [0, 50, 97, 100] {
                for tokens in [1, 3, 19] {
                    let x = noise.values(tokens * cols, zeros);
                    for isa in Isa::available() {
                        let found = run(isa, &columns, &x, Some(&bias));
                        let wanted = run(isa, &dense, &x, Some(&bias));
                        let what = format!("{layout:?} {rows}x{cols}, {zeros} %, {tokens}, {isa}");
                        assert!(found == wanted, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn faults_show_where_all_else_is_zero() {
    for format in [Format::Q8_0, Format::F16] {
        let data = format.encode(&[1.0; 64], 64).unwrap();
        let layout = PackedLayout::native(format).unwrap();
        let columns = pack_columns(layout, SourceRows::new(format, &data, 1), 1, 64);
        let mut x = [0.0; 64];
        x[40] = f32::NAN;
        for isa in Isa::available() {
            assert!(run(isa, &columns, &x, None)[0].is_nan(), "{format:?}, {isa}");
        }
    }
}

#[test]
fn panels_are_as_short_as_their_zeros_make_them() {
    let (rows, cols) = (64, 1024);
    let values = Noise(2).values(rows * cols, 50);
    // Bytes of a weight: masks, scales, half of the codes; pairs of nibbles take a little more.
    for (format, bits, slack) in [
        (Format::BITMAP_F16, 9.0, 0.02),
        (Format::BITMAP_Q8_0, 5.5, 0.02),
        (Format::BITMAP_Q4_0, 3.5, 0.04),
        (Format::S24_F16, 8.75, 0.01),
        (Format::S24_Q8_0, 5.25, 0.01),
        (Format::S24_Q4_0, 3.25, 0.01),
    ] {
        let data = format.encode(&values, cols).unwrap();
        let bytes = PackedWeight::pack_sparse(format, &data, rows, cols).bytes() as f64;
        let found = 8.0 * bytes / (rows * cols) as f64;
        assert!((found / bits - 1.0).abs() < slack, "{}: {found} bits", format.name());
    }
}

#[test]
fn threads_pack_parts_of_one_weight() {
    let (rows, cols) = (100, 64);
    let data = Format::BITMAP_Q8_0.encode(&Noise(3).values(rows * cols, 40), cols).unwrap();
    let whole = PackedWeight::pack_sparse(Format::BITMAP_Q8_0, &data, rows, cols);
    let packer = SparsePacker::new(SourceRows::new(Format::BITMAP_Q8_0, &data, rows), rows, cols);
    let parts = [packer.pack(0..3), packer.pack(3..3), packer.pack(3..7)];
    let joined = packer.join(&parts);
    let x = Noise(4).values(cols, 0);
    let isa = Isa::detect();
    assert_eq!(joined.bytes(), whole.bytes());
    assert_eq!(run(isa, &joined, &x, None), run(isa, &whole, &x, None));
}
