//! Every block format against GGML's own results: blocks that its quantisers made, blocks of
//! random bits, and products of the rows with a vector.

#![allow(clippy::unwrap_used)]

mod safetensors;

use bodkin_gguf::Format;
use safetensors::Safetensors;

/// Rows of every file under test.
const COLS: usize = 1024;

/// Formats that the reference has, as its index lists them.
fn references() -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(safetensors::folder().join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    index["types"].as_array().unwrap().clone()
}

fn reference(entry: &serde_json::Value) -> (Format, Safetensors) {
    let format = Format::from_name(entry["name"].as_str().unwrap())
        .unwrap_or_else(|| panic!("no format {}", entry["name"]));
    (format, Safetensors::open(entry["file"].as_str().unwrap()))
}

fn dequantize(format: Format, bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.len() / format.block_bytes().unwrap() * format.block_elements();
    let mut values = vec![0.0; elements];
    format.dequantize(bytes, &mut values);
    values
}

#[test]
fn the_table_agrees_with_the_reference() {
    let references = references();
    assert_eq!(references.len(), 27);
    for entry in &references {
        let (format, _) = reference(entry);
        assert_eq!(u64::from(format.id()), entry["ggml_type"], "{}", format.name());
        assert_eq!(format.block_elements() as u64, entry["block_elements"], "{}", format.name());
        assert_eq!(format.block_bytes().unwrap() as u64, entry["block_bytes"], "{}", format.name());
        assert_eq!(format.row_bytes(COLS).unwrap() as u64, entry["row_bytes"]);
        assert_eq!(Format::from_id(format.id()), Some(format));
    }
}

#[test]
fn dequantize_is_bit_exact() {
    for entry in &references() {
        let (format, file) = reference(entry);
        for (blocks, values) in [("q", "dequant"), ("random_q", "random_dequant")] {
            let (found, expected) = (dequantize(format, file.u8s(blocks)), file.f32s(values));
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    found.to_bits(),
                    expected.to_bits(),
                    "{} {values}[{i}]: {found} is not {expected}",
                    format.name(),
                );
            }
        }
    }
}

#[test]
fn rows_times_a_vector_agree() {
    for entry in &references() {
        let (format, file) = reference(entry);
        let x = file.f32s("x");
        for (blocks, dots, scales) in
            [("q", "dot", "absdot"), ("random_q", "random_dot", "random_absdot")]
        {
            let rows = dequantize(format, file.u8s(blocks));
            let (dots, scales) = (file.f64s(dots), file.f64s(scales));
            for (row, (dot, scale)) in rows.chunks(COLS).zip(dots.into_iter().zip(scales)) {
                let products = row.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let found: f64 = products.sum();
                assert!((found - dot).abs() <= 1e-12 * scale, "{}: {found} {dot}", format.name());
            }
        }
    }
}

#[test]
fn quantize_loses_no_more_than_the_reference() {
    let source = Safetensors::open("source.safetensors").f32s("src");
    let mut tested = 0;
    for entry in &references() {
        let (format, file) = reference(entry);
        let theirs = dequantize(format, file.u8s("q"));
        let mut blocks = vec![0; file.u8s("q").len()];
        if format.quantize(&source, None, &mut blocks).is_err() {
            continue;
        }
        let ours = dequantize(format, &blocks);
        let mut ratios = Vec::new();
        for (row, values) in source.chunks(COLS).enumerate() {
            let ours = root_of_errors(values, &ours[row * COLS..][..COLS]);
            let theirs = root_of_errors(values, &theirs[row * COLS..][..COLS]);
            assert!(ours <= 1.05 * theirs, "{} row {row}: {ours} / {theirs}", format.name());
            if theirs > 0.0 {
                ratios.push(ours / theirs);
            }
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean <= 1.001, "{}: {mean} of the reference's error", format.name());
        tested += 1;
    }
    assert_eq!(tested, 15);
}

fn root_of_errors(a: &[f32], b: &[f32]) -> f64 {
    let errors = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
    errors.sum::<f64>().sqrt()
}

/// Under the weights, fits that know them lose no more than fits that do not.
#[test]
fn weights_are_heeded() {
    let source = Safetensors::open("source.safetensors").f32s("src");
    // As uneven as activations are: a few columns count a hundred times as much as the others.
    let weights: Vec<f32> =
        (0..source.len()).map(|i| if i % COLS % 23 == 5 { 100.0 } else { 1.0 }).collect();
    let mut tested = 0;
    for entry in &references() {
        let (format, file) = reference(entry);
        let size = file.u8s("q").len();
        let stored = |weights: Option<&[f32]>| {
            let mut blocks = vec![0; size];
            format.quantize(&source, weights, &mut blocks).ok()?;
            Some(dequantize(format, &blocks))
        };
        let (Some(plain), Some(heeding)) = (stored(None), stored(Some(&weights))) else { continue };
        let loss = |stored: &[f32], range: std::ops::Range<usize>| -> f64 {
            let terms = range.map(|i| weights[i] as f64 * f64::from(source[i] - stored[i]).powi(2));
            terms.sum()
        };
        let rows: Vec<_> = (0..source.len()).step_by(COLS).map(|row| row..row + COLS).collect();
        let losses =
            rows.iter().map(|row| (loss(&plain, row.clone()), loss(&heeding, row.clone())));
        let ratios: Vec<f64> = losses.filter(|l| l.0 > 0.0).map(|l| l.1 / l.0).collect();
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        // Whole numbers have no scale to choose, and those of eight bits gain nothing by choosing.
        let plain = matches!(format.name(), "F32" | "F16" | "BF16" | "Q8_0");
        let most = if plain { 1.0 } else { 0.98 };
        assert!(mean <= most, "{}: {mean} of the loss without weights", format.name());
        tested += 1;
    }
    assert_eq!(tested, 15);
}

#[test]
fn quantize_takes_any_floats() {
    let awkward = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-45, -0.0];
    for &format in Format::all() {
        for start in 0..awkward.len() {
            let values: Vec<f32> = awkward.iter().copied().cycle().skip(start).take(256).collect();
            if let Ok(data) = format.encode(&values, 256) {
                format.dequantize(&data, &mut [0.0; 256]);
            }
        }
    }
}
