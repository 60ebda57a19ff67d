//! `logits`: the file against the reference, which positions it has, and what it leaves on failure.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::place::{Place, failure, model, reference};

/// Reads a NumPy file of f32, checking its header.
fn npy(path: &Path) -> Vec<Vec<f32>> {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!(start % 64, 0, "data are aligned");
    let header = std::str::from_utf8(&bytes[10..start]).unwrap();
    assert!(header.ends_with('\n'));
    let shape = header
        .trim_end()
        .strip_prefix("{'descr': '<f4', 'fortran_order': False, 'shape': (")
        .and_then(|rest| rest.strip_suffix("), }"))
        .unwrap_or_else(|| panic!("{header}"));
    let (rows, cols) = shape.split_once(", ").unwrap();
    let (rows, cols): (usize, usize) = (rows.parse().unwrap(), cols.parse().unwrap());
    let data: Vec<f32> =
        bytes[start..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(bytes.len() - start, 4 * rows * cols);
    data.chunks_exact(cols).map(<[f32]>::to_vec).collect()
}

/// The mean square of the difference by that of the reference.
fn error(found: &[f32], wanted: &[Value]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let pairs = || found.iter().zip(wanted).map(|(&f, w)| (f64::from(f), w.as_f64().unwrap()));
    let difference: f64 = pairs().map(|(f, w)| (f - w).powi(2)).sum();
    difference / pairs().map(|(_, w)| w * w).sum::<f64>()
}

fn list(value: &Value) -> String {
    let items = value.as_array().unwrap().iter().map(ToString::to_string);
    items.collect::<Vec<_>>().join(",")
}

#[test]
fn logits_are_those_of_the_reference() {
    let place = Place::new();
    for name in ["llama", "gemma3"] {
        let (model, reference) = (model(name), reference(name));
        let column = reference["reference"].as_str().unwrap();
        let cases = reference["cases"].as_array().unwrap();
        for case in cases.iter().filter(|case| ["n1", "n7", "n48"].contains(&id(case))) {
            let (tokens, positions) = (list(&case["tokens"]), list(&case["positions"]));
            let args = ["logits", &model, "--tokens", &tokens, "-o", "out.npy", "--positions"];
            for flags in [&[][..], &["--batch-size", "3"], &["-t", "1", "--ctx-size", "64"]] {
                place.text(&[&args[..], &[&positions], flags].concat());
                let rows = npy(&place.path("out.npy"));
                let wanted = case["logits"][column].as_array().unwrap();
                assert_eq!(rows.len(), wanted.len());
                for (row, wanted) in rows.iter().zip(wanted) {
                    let error = error(row, wanted.as_array().unwrap());
                    assert!(error <= 1e-6, "{name} {} {flags:?}: {error}", id(case));
                }
            }
        }
    }
}

fn id(case: &Value) -> &str {
    case["id"].as_str().unwrap()
}

#[test]
fn positions_choose_rows() {
    let place = Place::new();
    let model = model("llama");
    let rows = |positions: &[&str]| {
        let args = ["logits", &model, "--tokens", "379,252,371,94", "-o", "out.npy"];
        assert_eq!(place.text(&[&args[..], positions].concat()), "");
        npy(&place.path("out.npy"))
    };
    let all = rows(&[]);
    assert_eq!((all.len(), all[0].len()), (4, 384));
    assert_eq!(rows(&["--positions", "all"]), all);
    assert_eq!(rows(&["--positions", "last"]), all[3..]);
    assert_eq!(rows(&["--positions", "0,2"]), [all[0].clone(), all[2].clone()]);
    // In the order of the text, each once.
    assert_eq!(rows(&["--positions", "2,0,2"]), [all[0].clone(), all[2].clone()]);
}

#[test]
fn an_older_file_is_replaced_only_by_a_whole_one() {
    let place = Place::new();
    let model = model("llama");
    fs::write(place.path("out.npy"), "older").unwrap();
    let args = ["logits", &model, "--tokens", "379,999", "-o", "out.npy"];
    let error = failure(&place.run(&args));
    assert!(error.contains("999") && error.contains("384"), "{error}");
    let args = ["logits", &model, "--tokens", "379,252", "-o", "out.npy"];
    let error = failure(&place.run(&[&args[..], &["--positions", "2"]].concat()));
    assert!(error.contains("--positions") && error.contains("2 tokens"), "{error}");
    assert_eq!(fs::read(place.path("out.npy")).unwrap(), b"older");
    assert_eq!(place.files(), ["home", "out.npy"]);
    place.text(&args);
    assert_eq!(npy(&place.path("out.npy")).len(), 2);
    assert_eq!(place.files(), ["home", "out.npy"]);
}

#[cfg(unix)]
#[test]
fn the_file_may_be_read_by_whom_the_mask_allows() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let model = model("llama");
    place.text(&["logits", &model, "--tokens", "379", "-o", "out.npy"]);
    fs::write(place.path("other"), "").unwrap();
    let mode = |name| fs::metadata(place.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("out.npy"), mode("other"));
}

#[test]
fn where_nothing_can_be_written_nothing_is() {
    let place = Place::new();
    let model = model("llama");
    let to = |path| failure(&place.run(&["logits", &model, "--tokens", "379", "-o", path]));
    let error = to("absent/out.npy");
    assert!(error.contains("absent/out.npy") && error.contains("no folder"), "{error}");
    assert!(to("home").contains("cannot write home"));
    assert_eq!(place.files(), ["home"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_is_written_as_it_stands() {
    use std::os::unix::fs::FileTypeExt;
    let place = Place::new();
    let model = model("llama");
    let args = ["logits", &model, "--tokens", "379", "-o"];
    let error = failure(&place.run(&[&args[..], &["/dev/full"]].concat()));
    assert!(error.contains("/dev/full") && error.contains("No space left"), "{error}");
    assert!(fs::metadata("/dev/full").unwrap().file_type().is_char_device());
    let output = place.run(&[&args[..], &["/dev/stdout"]].concat());
    fs::write(place.path("out.npy"), output.stdout).unwrap();
    assert_eq!(npy(&place.path("out.npy")).len(), 1);
}

/// A model's text must not depend on the machine.
#[test]
fn every_instruction_set_gives_the_same_bits() {
    let place = Place::new();
    let logits = |name: &str, isa: &str| {
        let model = model(name);
        let args = ["logits", &model, "--tokens", "1,45,354,81,84,275,9", "-o", "out.npy"];
        let output = place.bodkin(&args).env("BODKIN_CPU", isa).output().unwrap();
        match output.status.success() {
            true => Some(fs::read(place.path("out.npy")).unwrap()),
            false => {
                let line = failure(&output);
                assert!(line.starts_with("BODKIN_CPU: this processor has "), "{line}");
                None
            }
        }
    };
    // The BF16 dot product of `avx512-bf16` rounds otherwise, where weights are BF16.
    let isas = ["avx2", "avx-vnni", "avx512", "avx512-bf16"];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let models = files.filter(|path| path.extension().is_some_and(|e| e == "gguf"));
    for path in models {
        let name = path.file_stem().unwrap().to_str().unwrap();
        if name.ends_with("bert") {
            continue;
        }
        let portable = logits(name, "portable").unwrap();
        for isa in isas {
            assert!(logits(name, isa).is_none_or(|logits| logits == portable), "{name}: {isa}");
        }
    }
}
