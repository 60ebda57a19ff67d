//! Matmuls against their definition, dequantised weights times activations in f64, for every packed
//! layout, instruction set and odd shape; and that results do not depend on neighbouring rows,
//! partitions or threads.

use std::ops::Range;

use bodkin_cpu::Isa;
use bodkin_cpu::linear::{
    ActivationFormat, Activations, OutRows, PackedLayout, PackedWeight, SCRATCH_LEN, SourceRows,
    float_layout, matmul,
};
use bodkin_gguf::Format;
use half::bf16;

/// Deterministic noise (SplitMix64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Roughly normal.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum()
    }

    fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// `[rows, cols]` in `format`: random bits wherever they are codes, so that every code occurs, with
/// scales that are ordinary numbers.
fn random_weight(format: Format, rows: usize, cols: usize, noise: &mut Noise) -> Vec<u8> {
    let f16s: &[usize] = match format {
        Format::F32 => {
            return noise.normals(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect();
        }
        Format::BF16 => {
            let top = |v: &f32| (v.to_bits() >> 16) as u16;
            return noise.normals(rows * cols).iter().flat_map(|v| top(v).to_le_bytes()).collect();
        }
        Format::F16 => &[0],
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
        Format::Q2_K => &[80, 82],
        Format::Q3_K => &[108],
        Format::Q6_K => &[208],
        Format::MXFP4 => &[],
        _ => &[0],
    };
    let blocks = rows * cols / format.block_elements();
    let block_bytes = format.block_bytes().expect("a dense format");
    let mut bytes = vec![0; blocks * block_bytes];
    for block in bytes.chunks_exact_mut(block_bytes) {
        block.fill_with(|| noise.next() as u8);
        for &at in f16s {
            // Sign, exponent between 2^-7 and 1, any mantissa.
            let bits = (noise.next() as u16 & 0x83ff) | (0x2000 + (noise.next() as u16 & 0x1c00));
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
        if format == Format::MXFP4 {
            block[0] = 118 + (noise.next() % 12) as u8;
        }
    }
    bytes
}

fn filled(isa: Isa, format: ActivationFormat, x: &[f32], cols: usize) -> Activations {
    let rows = x.len() / cols;
    let mut activations = Activations::with_bytes(format.bytes(rows, cols));
    let writer = activations.reshape(format, rows, cols);
    for (row, x) in x.chunks_exact(cols).enumerate() {
        // SAFETY: one thread.
        unsafe { writer.set(isa, row, x) }
    }
    activations
}

/// The whole matmul, with the given ranges of panels and tokens.
fn run(
    isa: Isa,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    x: &Activations,
    panel_cuts: &[Range<usize>],
    token_cuts: &[Range<usize>],
) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.rows() * weight.rows()];
    let rows = OutRows::new(&mut out, weight.rows());
    let room = &mut vec![0.0; SCRATCH_LEN];
    for panels in panel_cuts {
        for tokens in token_cuts {
            // SAFETY: one thread.
            unsafe { matmul(isa, weight, bias, panels.clone(), x, tokens.clone(), rows, room) }
        }
    }
    out
}

fn whole(isa: Isa, weight: &PackedWeight, x: &Activations) -> Vec<f32> {
    let (panels, tokens) = (0..weight.panels(), 0..x.rows());
    run(isa, weight, None, x, &[panels, 0..0], &[tokens, 0..0])
}

fn top(value: &f32) -> f32 {
    bf16::from_f32(*value).to_f32()
}

/// What a form keeps of `x`: its definition, written a second time.
fn rounded(format: ActivationFormat, x: &[f32]) -> Vec<f32> {
    match format {
        ActivationFormat::F32 => return x.to_vec(),
        ActivationFormat::Bf16 | ActivationFormat::Bf16Tiles => return x.iter().map(top).collect(),
        ActivationFormat::SplitBf16Tiles => {
            return x.iter().map(|v| top(v) + top(&(v - top(v)))).collect();
        }
        ActivationFormat::Int8 => {}
    }
    let block = |x: &[f32]| {
        let largest = x.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
        let (scale, inverse) = (largest / 127.0, 127.0 / largest);
        x.iter().map(|v| scale * (v * inverse).round_ties_even()).collect::<Vec<_>>()
    };
    x.chunks_exact(16).flat_map(block).collect()
}

/// `[tokens, rows]` in f64.
fn expected(weight: &[f32], x: &[f32], cols: usize) -> Vec<f64> {
    let dot =
        |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    x.chunks_exact(cols).flat_map(|x| weight.chunks_exact(cols).map(move |w| dot(w, x))).collect()
}

fn error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference = |(f, e): (&f32, &f64)| (f64::from(*f) - e).powi(2);
    let power: f64 = expected.iter().map(|e| e * e).sum();
    found.iter().zip(expected).map(difference).sum::<f64>() / power
}

fn column_counts(layout: PackedLayout) -> &'static [usize] {
    match layout.cols_multiple() {
        1 => &[1, 7, 32, 33, 256],
        32 => &[32, 96, 256, 512],
        _ => &[256, 512],
    }
}

#[test]
fn every_layout_and_isa_computes_the_matmul() {
    let mut noise = Noise(1);
    for &layout in PackedLayout::ALL {
        for &cols in column_counts(layout) {
            for rows in [1, 5, 16, 17, 40] {
                check_matmul(layout, rows, cols, &mut noise);
            }
        }
    }
}

fn check_matmul(layout: PackedLayout, rows: usize, cols: usize, noise: &mut Noise) {
    let bytes = random_weight(layout.format(), rows, cols, noise);
    let mut values = vec![0.0; rows * cols];
    layout.format().dequantize(&bytes, &mut values);
    let weight = PackedWeight::pack(layout.format(), &bytes, rows, cols);
    assert_eq!((weight.layout(), weight.rows(), weight.cols()), (layout, rows, cols));
    assert_eq!(Some(weight.bytes()), PackedWeight::bytes_for(layout, rows, cols));
    for tokens in [1, 2, 3, 7, 16, 33] {
        let x = noise.normals(tokens * cols);
        let exact = expected(&values, &x, cols);
        for isa in Isa::available() {
            let kept = expected(&values, &rounded(layout.activation_format(isa), &x), cols);
            let found = whole(isa, &weight, &filled(isa, layout.activation_format(isa), &x, cols));
            let what = format!("{layout:?} {rows}x{cols}, {tokens} tokens, {isa}");
            let (near, far) = (error(&found, &kept), error(&found, &exact));
            assert!(near < 1e-10, "{what}: {near:e} from what the activations keep");
            assert!(far < 1e-3 || rows * tokens < 50, "{what}: {far:e} from the exact matmul");
            check_prefill(isa, &weight, (&values, &x), &exact);
        }
    }
}

/// Prefill rows, where they have a format of their own: tiles of bfloat16.
fn check_prefill(isa: Isa, weight: &PackedWeight, (values, x): (&[f32], &[f32]), exact: &[f64]) {
    let (layout, cols) = (weight.layout(), weight.cols());
    let format = layout.prefill_format(isa);
    if format == layout.activation_format(isa) {
        return;
    }
    let found = whole(isa, weight, &filled(isa, format, x, cols));
    // Weights of integer layouts are rounded too.
    let values: Vec<f32> = match format {
        ActivationFormat::Bf16Tiles => values.iter().map(top).collect(),
        _ => values.to_vec(),
    };
    let kept = expected(&values, &rounded(format, x), cols);
    let what = format!("{layout:?} {}x{cols}, {} rows of x, {isa}", weight.rows(), x.len() / cols);
    let (near, far) = (error(&found, &kept), error(&found, exact));
    let [near_limit, far_limit] =
        if format == ActivationFormat::Bf16Tiles { [1e-10, 1e-4] } else { [1e-9, 1e-9] };
    assert!(near < near_limit, "{what}: {near:e} from what tiles keep");
    assert!(far < far_limit || found.len() < 50, "{what}: {far:e} from the exact matmul");
}

/// All instruction sets with the formats of decode rows and of prefill rows.
fn isas_and_formats(layout: PackedLayout) -> Vec<(Isa, ActivationFormat)> {
    let both = |isa| [layout.activation_format(isa), layout.prefill_format(isa)].map(|f| (isa, f));
    let mut all: Vec<_> = Isa::available().flat_map(both).collect();
    all.dedup();
    all
}

/// More tokens and panels than share a block of columns, and panels that are not packed.
#[test]
fn blocks_of_a_large_matmul_change_no_result() {
    let mut noise = Noise(6);
    let (rows, cols, tokens) = (17 * 16 + 3, 512, 530);
    for layout in [PackedLayout::Q4_K, PackedLayout::F16, PackedLayout::BF16] {
        let bytes = random_weight(layout.format(), rows, cols, &mut noise);
        let weight = PackedWeight::pack(layout.format(), &bytes, rows, cols);
        let source = (Box::new(bytes) as _, layout.format());
        let source = PackedWeight::unpacked(layout, source, rows, cols);
        let x = noise.normals(tokens * cols);
        for (isa, format) in isas_and_formats(layout) {
            let found = whole(isa, &weight, &filled(isa, format, &x, cols));
            for token in [0, 15, 511, 512, 529] {
                let x = &x[token * cols..][..cols];
                let alone = whole(isa, &source, &filled(isa, format, x, cols));
                assert!(found[token * rows..][..rows] == alone, "{layout:?} {isa}, token {token}");
            }
        }
    }
}

#[test]
fn a_result_depends_on_its_row_and_token_only() {
    let mut noise = Noise(2);
    let (rows, cols, tokens) = (5 * 16 + 3, 1280, 41);
    for &layout in PackedLayout::ALL {
        let bytes = random_weight(layout.format(), rows, cols, &mut noise);
        let weight = PackedWeight::pack(layout.format(), &bytes, rows, cols);
        let x = noise.normals(tokens * cols);
        let mut reference: Option<Vec<f32>> = None;
        for (isa, format) in isas_and_formats(layout) {
            let all = filled(isa, format, &x, cols);
            let found = whole(isa, &weight, &all);
            let cuts = [0..1, 1..4, 4..weight.panels()];
            let cut = run(isa, &weight, None, &all, &cuts, &[0..3, 3..20, 20..21, 21..41]);
            assert!(found == cut, "{layout:?} {isa}: cutting changed a result");
            for (token, x) in x.chunks_exact(cols).enumerate() {
                let alone = whole(isa, &weight, &filled(isa, format, x, cols));
                assert!(found[token * rows..][..rows] == alone, "{layout:?} {isa}, token {token}");
            }
            if format == layout.activation_format(Isa::Portable) {
                let first = reference.get_or_insert_with(|| found.clone());
                assert!(
                    *first == found,
                    "{layout:?}: {isa} differs from the smaller instruction set"
                );
            }
        }
    }
}

#[test]
fn threads_share_one_result() {
    let mut noise = Noise(3);
    let (rows, cols, tokens) = (160, 512, 19);
    for &layout in &[PackedLayout::F16, PackedLayout::Q4_K, PackedLayout::Q8_0] {
        let bytes = random_weight(layout.format(), rows, cols, &mut noise);
        let alone = PackedWeight::pack(layout.format(), &bytes, rows, cols);
        let mut weight = PackedWeight::zeroed(layout, rows, cols);
        let packer = weight.packer(SourceRows::new(layout.format(), &bytes, rows));
        std::thread::scope(|threads| {
            for panels in [0..3, 3..10] {
                // SAFETY: the ranges are disjoint.
                threads.spawn(move || unsafe { packer.pack(panels) });
            }
        });
        let (isa, x) = (Isa::detect(), noise.normals(tokens * cols));
        let mut activations =
            Activations::with_bytes(layout.activation_format(isa).bytes(tokens, cols));
        let writer = activations.reshape(layout.activation_format(isa), tokens, cols);
        std::thread::scope(|threads| {
            for rows in [0..8, 8..19] {
                let x = &x;
                threads.spawn(move || {
                    for row in rows {
                        // SAFETY: the ranges are disjoint.
                        unsafe { writer.set(isa, row, &x[row * cols..][..cols]) }
                    }
                });
            }
        });
        let mut out = vec![f32::NAN; tokens * rows];
        let target = OutRows::new(&mut out, rows);
        std::thread::scope(|threads| {
            for panels in [0..4, 4..10] {
                let (weight, x) = (&weight, &activations);
                // SAFETY: the ranges are disjoint.
                threads.spawn(move || unsafe {
                    matmul(isa, weight, None, panels, x, 0..tokens, target, &mut [])
                });
            }
        });
        assert!(out == whole(isa, &alone, &activations), "{layout:?}");
    }
}

#[test]
fn a_bias_is_added_and_wider_rows_keep_their_rest() {
    let (rows, width) = (21, 30);
    let mut noise = Noise(4);
    // The second has columns and tokens enough for sums to wait for the last columns.
    for (format, cols, tokens) in [(Format::Q8_0, 32, 2), (Format::F16, 300, 41)] {
        let bytes = random_weight(format, rows, cols, &mut noise);
        let weight = PackedWeight::pack(format, &bytes, rows, cols);
        let (x, bias) = (noise.normals(tokens * cols), noise.normals(rows));
        for (isa, format) in isas_and_formats(weight.layout()) {
            let x = filled(isa, format, &x, cols);
            let plain = whole(isa, &weight, &x);
            let mut out = vec![7.0; tokens * width];
            let (target, room) = (OutRows::new(&mut out, width), &mut vec![0.0; SCRATCH_LEN]);
            // SAFETY: one thread.
            unsafe { matmul(isa, &weight, Some(&bias), 0..2, &x, 0..tokens, target, room) };
            for (token, out) in out.chunks_exact(width).enumerate() {
                for row in 0..width {
                    let sum = || plain[token * rows + row] + bias[row];
                    let expected = if row < rows { sum() } else { 7.0 };
                    assert_eq!(out[row], expected, "{isa}: token {token}, row {row}");
                }
            }
        }
    }
}

#[test]
fn extreme_activations_stay_finite_and_faults_show() {
    let (rows, cols) = (16, 64);
    let weight = PackedWeight::pack(Format::Q8_0, &vec![0x01; rows * 68], rows, cols);
    for isa in Isa::available() {
        for (value, finite) in [(0.0, true), (1e30, true), (1e-42, true), (f32::NAN, false)] {
            let mut x = vec![value; cols];
            x[33] = 0.5;
            let out = whole(isa, &weight, &filled(isa, ActivationFormat::Int8, &x, cols));
            assert_eq!(out.iter().all(|v| v.is_finite()), finite, "{isa}: {value}");
        }
    }
}

#[test]
fn formats_without_a_layout_become_floats() {
    let mut noise = Noise(5);
    let (rows, cols, tokens) = (18, 512, 3);
    let x = noise.normals(tokens * cols);
    // Half precision reaches to 65504, so numbers of 16 bits fit.
    let half = [Format::I8, Format::I16, Format::Q8_1, Format::Q8_K];
    let single = [Format::F64, Format::I32, Format::I64];
    for format in half.into_iter().chain(single) {
        assert_eq!(PackedLayout::native(format), None);
        let bytes: Vec<u8> = match format {
            Format::F64 => noise
                .normals(rows * cols)
                .iter()
                .flat_map(|v| f64::from(*v * 1e6).to_le_bytes())
                .collect(),
            Format::Q8_1 => random_weight(format, rows, cols, &mut noise),
            Format::Q8_K => {
                let mut bytes: Vec<u8> = (0..rows * 584).map(|_| noise.next() as u8).collect();
                for block in bytes.chunks_exact_mut(292) {
                    block[..4].copy_from_slice(&(0.3 * noise.normal()).to_le_bytes());
                }
                bytes
            }
            Format::I32 | Format::I64 => {
                let size = format.row_bytes(1).expect("a number");
                let number = |_| {
                    let bytes = ((noise.next() >> 40) as i64 - (1 << 23)).to_le_bytes();
                    bytes[..size].to_vec()
                };
                (0..rows * cols).flat_map(number).collect()
            }
            Format::I16 => (0..2 * rows * cols).map(|_| noise.next() as u8).collect(),
            Format::TQ2_0 => {
                let mut bytes: Vec<u8> =
                    (0..rows * 132).map(|_| noise.next() as u8 & 0xaa).collect();
                for block in bytes.chunks_exact_mut(66) {
                    block[64..].copy_from_slice(&0x3123u16.to_le_bytes());
                }
                bytes
            }
            _ => (0..rows * cols).map(|_| noise.next() as u8).collect(),
        };
        let layout = if half.contains(&format) { PackedLayout::F16 } else { PackedLayout::F32 };
        assert_eq!(float_layout(format, &bytes, cols), layout, "{format:?}");
        let weight = PackedWeight::pack(format, &bytes, rows, cols);
        assert_eq!(weight.layout(), layout);
        let mut values = vec![0.0; rows * cols];
        format.dequantize(&bytes, &mut values);
        let exact = expected(&values, &x, cols);
        for isa in Isa::available() {
            let found = whole(isa, &weight, &filled(isa, ActivationFormat::F32, &x, cols));
            let limit = if layout == PackedLayout::F32 { 1e-9 } else { 1e-6 };
            assert!(error(&found, &exact) < limit, "{format:?} {isa}");
        }
    }
}
