//! Packing and GEMV of every GGML type, against the dot products of llama.cpp's values
//! (tests/parity/quants).

use std::collections::HashMap;
use std::path::Path;

use bodkin_cpu::Isa;
use bodkin_cpu::linear::{Activations, OutRows, PackedLayout, PackedWeight, matmul};
use bodkin_gguf::Format;

/// A safetensors file: tensor name to bytes.
fn tensors(path: &Path) -> HashMap<String, Vec<u8>> {
    let file = std::fs::read(path).expect("a readable file");
    let (length, rest) = file.split_first_chunk().expect("a header");
    let (header, data) =
        rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("small"));
    let header: serde_json::Value = serde_json::from_slice(header).expect("JSON");
    let header = header.as_object().expect("an object").iter();
    let bytes = |value: &serde_json::Value| {
        let offset = |i: usize| value["data_offsets"][i].as_u64().expect("an offset") as usize;
        data[offset(0)..offset(1)].to_vec()
    };
    let tensors = header.filter(|(name, _)| *name != "__metadata__");
    tensors.map(|(name, value)| (name.clone(), bytes(value))).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
}

/// SourceRows of a weight times one vector.
fn gemv(isa: Isa, format: Format, rows: &[u8], x: &[f32]) -> Vec<f32> {
    let row_bytes = format.row_bytes(x.len()).expect("whole blocks");
    let weight = PackedWeight::pack(format, rows, rows.len() / row_bytes, x.len());
    let format = weight.layout().activation_format(isa);
    let mut activations = Activations::with_bytes(format.bytes(1, x.len()));
    let mut out = vec![f32::NAN; weight.rows()];
    // SAFETY: one thread.
    unsafe {
        activations.reshape(format, 1, x.len()).set(isa, 0, x);
        let target = OutRows::new(&mut out, weight.rows());
        matmul(isa, &weight, None, 0..weight.panels(), &activations, 0..1, target, &mut []);
    }
    out
}

#[test]
fn all_types_of_the_parity_data_multiply() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/quants");
    let mut formats = 0;
    for entry in std::fs::read_dir(&folder).expect("the parity data") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(format) = Format::from_name(name) else { continue };
        let tensors = tensors(&path);
        formats += 1;
        let x = floats(&tensors["x"]);
        for set in ["", "random_"] {
            let part = |name: &str| tensors.get(&format!("{set}{name}"));
            let (Some(rows), Some(dots), Some(bounds)) = (part("q"), part("dot"), part("absdot"))
            else {
                continue;
            };
            for isa in Isa::available() {
                let found = gemv(isa, format, rows, &x);
                let (dots, bounds) = (doubles(dots), doubles(bounds));
                compare(&format!("{name} {set}{isa}"), &found, &dots, &bounds, 1e-3);
            }
        }
    }
    assert!(formats >= 20, "found {formats} types in {}", folder.display());
}

/// Types without a native layout are converted without a relevant loss.
#[test]
fn repacked_types_lose_nothing_that_matters() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/quants");
    let repacked = [Format::NVFP4, Format::Q1_0, Format::Q2_0];
    for format in repacked {
        assert_eq!(PackedLayout::native(format), None, "{format:?}");
        let name = format.name().to_lowercase();
        let tensors = tensors(&folder.join(&name).with_extension("safetensors"));
        let x = floats(&tensors["x"]);
        for set in ["q", "random_q"] {
            let Some(rows) = tensors.get(set) else { continue };
            let (dots, bounds) = exact_dots(format, rows, &x);
            for isa in Isa::available() {
                let found = gemv(isa, format, rows, &x);
                compare(&format!("{name} {set} {isa}"), &found, &dots, &bounds, 1e-6);
            }
        }
    }
}

/// The exact dot products of dequantised rows with one vector, and the sums of their absolute
/// terms.
fn exact_dots(format: Format, rows: &[u8], x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let row_bytes = format.row_bytes(x.len()).expect("whole blocks");
    let mut values = vec![0.0; x.len()];
    let product = |row: &[u8]| {
        format.dequantize(row, &mut values);
        let terms = values.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        terms.fold((0.0, 0.0), |(dot, bound), term| (dot + term, bound + term.abs()))
    };
    rows.chunks_exact(row_bytes).map(product).unzip()
}

/// `bounds` are the sums of the absolute terms, `limit` is the largest NMSE.
fn compare(what: &str, found: &[f32], dots: &[f64], bounds: &[f64], limit: f64) {
    assert_eq!(found.len(), dots.len(), "{what}");
    let (mut error, mut power) = (0.0, 0.0);
    for (row, ((&found, dot), bound)) in found.iter().zip(dots).zip(bounds).enumerate() {
        let difference = f64::from(found) - dot;
        assert!(difference.abs() <= 1e-2 * bound, "{what}, row {row}: {found} for {dot}");
        if *bound > 0.0 {
            // SourceRows differ in size by many orders; each counts as much as its own size.
            error += (difference / bound).powi(2);
            power += (dot / bound).powi(2);
        }
    }
    assert!(error <= limit * power, "{what}: NMSE {:e}", error / power);
}
