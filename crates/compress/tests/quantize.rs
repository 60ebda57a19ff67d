//! Files stored anew: which format each tensor gets, that every type can be made, and that the
//! result is the same on any number of threads.

#![allow(clippy::unwrap_used)]

use bodkin_compress::Pattern;
use bodkin_compress::imatrix::{Entry, Imatrix};
use bodkin_compress::mixture::{FILE_TYPES, FileType};
use bodkin_compress::quantize::{self, Choice, Conversion, Importance, Options};
use bodkin_gguf::{File, Format, Metadata, Value, Writer};

/// A file of 16 layers with matrices of `cols` columns, made of `f32` values.
fn file(cols: u64) -> File {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", Value::String((*b"llama").into()));
    for (key, value) in [("block_count", 16), ("attention.head_count", 8)] {
        metadata.insert(format!("llama.{key}"), Value::U32(value));
    }
    metadata.insert("llama.attention.head_count_kv", Value::U32(2));
    let mut names = vec!["token_embd.weight".to_string(), "output.weight".to_string()];
    for layer in 0..16 {
        for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"] {
            names.push(format!("blk.{layer}.{name}.weight"));
        }
        names.push(format!("blk.{layer}.ffn_gate_inp.weight"));
    }
    let values = (0..cols * 3).map(|i| ((i * 7919 % 1009) as f32 / 500.0 - 1.0).powi(3));
    let data: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let mut writer = Writer::new("test", &metadata).unwrap();
    for name in &names {
        writer.tensor(name, Format::F32, &[cols, 3], &data).unwrap();
    }
    writer.tensor("output_norm.weight", Format::F32, &[cols], &data[..cols as usize * 4]).unwrap();
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    File::from_bytes("test", out).unwrap()
}

fn options(kind: &str) -> Options {
    let kind = Some(FileType::from_name(kind).unwrap());
    Options { kind, pure: false, overrides: Vec::new(), has_imatrix: false }
}

fn choose(file: &File, options: &Options) -> Vec<Choice> {
    quantize::choose(file, options).unwrap()
}

fn format(choices: &[Choice], name: &str) -> Format {
    choices.iter().find(|choice| choice.tensor.name == name).unwrap().format
}

fn written(
    file: &File,
    choices: &[Choice],
    importance: Option<&Importance>,
    threads: usize,
) -> File {
    let mut out = Vec::new();
    let metadata = quantize::metadata(file, None);
    let conversion = Conversion { choices, importance, threads, allows_nan: false };
    conversion.write(file, &metadata, &|_| (), &mut out).unwrap();
    File::from_bytes("made", out).unwrap()
}

fn values(file: &File, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.format.dequantize(file.data(tensor), &mut values);
    values
}

#[test]
fn every_type_is_made_and_near_its_source() {
    let file = file(256);
    for kind in FILE_TYPES {
        let choices = choose(&file, &options(kind.name));
        let made = written(&file, &choices, None, 2);
        for tensor in file.tensors() {
            let (before, after) = (values(&file, &tensor.name), values(&made, &tensor.name));
            let (mut off, mut all) = (0.0, 0.0);
            for (a, b) in before.iter().zip(&after) {
                (off, all) = (off + (a - b).powi(2), all + a * a);
            }
            let format = made.tensor(&tensor.name).unwrap().format;
            let limit = match 8 * format.block_bytes().unwrap() / format.block_elements() {
                0..3 => 0.12,
                3 => 0.03,
                _ => 0.015,
            };
            assert!(off < limit * all, "{} {}: {off} of {all}", kind.name, tensor.name);
        }
        assert_eq!(made.tensor("output_norm.weight").unwrap().format, Format::F32);
        assert_eq!(made.tensor("blk.3.ffn_gate_inp.weight").unwrap().format, Format::F32);
    }
}

#[test]
fn mixtures_give_more_bits_where_it_matters() {
    let file = file(256);
    let q4 = choose(&file, &options("q4_k_m"));
    for (name, wanted) in [
        ("output.weight", Format::Q6_K),
        ("token_embd.weight", Format::Q4_K),
        ("blk.0.attn_v.weight", Format::Q6_K),
        ("blk.2.attn_v.weight", Format::Q4_K),
        ("blk.4.attn_v.weight", Format::Q6_K),
        ("blk.15.ffn_down.weight", Format::Q6_K),
        ("blk.3.ffn_down.weight", Format::Q4_K),
        ("blk.3.attn_output.weight", Format::Q4_K),
    ] {
        assert_eq!(format(&q4, name), wanted, "{name}");
    }
    let q2 = choose(&file, &options("Q2_K"));
    for (name, wanted) in [
        ("blk.2.attn_v.weight", Format::Q4_K),
        ("blk.2.attn_k.weight", Format::Q2_K),
        ("blk.2.attn_output.weight", Format::Q3_K),
        ("blk.2.ffn_down.weight", Format::Q3_K),
    ] {
        assert_eq!(format(&q2, name), wanted, "{name}");
    }
    let pure = choose(&file, &Options { pure: true, ..options("Q2_K") });
    assert_eq!(format(&pure, "output.weight"), Format::Q2_K);
}

#[test]
fn rows_that_do_not_fit_fall_back() {
    for (cols, kind, wanted) in [
        (96, "Q4_K_S", Format::Q5_0),
        (96, "Q6_K", Format::Q8_0),
        (96, "IQ4_XS", Format::IQ4_NL),
        (96, "Q2_K_S", Format::Q4_0),
        (24, "Q4_K_S", Format::F16),
        (24, "Q4_0", Format::F16),
    ] {
        let choices = choose(&file(cols), &options(kind));
        let choice = choices.iter().find(|c| c.tensor.name == "blk.9.attn_q.weight").unwrap();
        assert_eq!(choice.format, wanted, "{kind} in rows of {cols}");
        assert!(choice.instead_of.is_some());
    }
}

#[test]
fn overrides_come_first() {
    let file = file(256);
    let rules = [("attn_(k|v)", Format::Q8_0), ("attn", Format::IQ4_NL)];
    let overrides = rules.map(|(p, f)| (Pattern::new(p).unwrap(), f)).to_vec();
    let choices = choose(&file, &Options { overrides, ..options("Q4_K_M") });
    assert_eq!(format(&choices, "blk.1.attn_v.weight"), Format::Q8_0);
    assert_eq!(format(&choices, "blk.1.attn_q.weight"), Format::IQ4_NL);
    let refused = |format| {
        let overrides = vec![(Pattern::new("attn").unwrap(), format)];
        quantize::choose(&file, &Options { overrides, ..options("Q4_0") }).unwrap_err().to_string()
    };
    let expected = "type for `attn`: expected a type that can be written, found ";
    assert_eq!(refused(Format::IQ1_S), format!("{expected}IQ1_S"));
    assert_eq!(refused(Format::BITMAP_F16), format!("{expected}BITMAP_F16"));
    let error = FileType::from_name("Q9_K").unwrap_err().to_string();
    assert!(error.starts_with("TYPE: expected one of F32, F16, "), "{error}");
}

#[test]
fn threads_do_not_change_a_bit() {
    let file = file(256);
    let choices = choose(&file, &options("Q4_K_M"));
    let files = [1, 2, 5].map(|threads| written(&file, &choices, None, threads));
    for tensor in files[0].tensors() {
        for other in &files[1..] {
            let same = other.tensor(&tensor.name).unwrap();
            assert_eq!(other.data(same), files[0].data(tensor), "{}", tensor.name);
        }
    }
}

/// What matters by the statistics is stored better than without them.
#[test]
fn activations_are_heeded() {
    const NAME: &str = "blk.5.ffn_up.weight";
    let file = file(256);
    let choices = choose(&file, &options("Q2_K"));
    let squares: Vec<f64> = (0..256).map(|i| if i % 16 == 5 { 900.0 } else { 1.0 }).collect();
    let mut imatrix = Imatrix::default();
    let entry = |cols: usize| Entry { square_sums: squares[..cols].to_vec(), counts: vec![1] };
    imatrix.entries.insert(NAME.into(), entry(256));
    let importance = Importance::new(&imatrix, &choices).unwrap();
    assert!(importance.missing().count() > 90);
    let loss = |importance: Option<&Importance>| -> f64 {
        let made = written(&file, &choices, importance, 1);
        let (before, after) = (values(&file, NAME), values(&made, NAME));
        let errors = before.iter().zip(&after).map(|(a, b)| f64::from(a - b).powi(2));
        errors.enumerate().map(|(i, error)| error * squares[i % 256]).sum()
    };
    assert!(loss(Some(&importance)) < 0.5 * loss(None));
    imatrix.entries.insert(NAME.into(), entry(128));
    let error = Importance::new(&imatrix, &choices).unwrap_err().to_string();
    assert_eq!(error, "imatrix of blk.5.ffn_up.weight: expected 256 columns, found 128");
}

#[test]
fn sparse_tensors_become_dense() {
    let source = file(256);
    let name = "blk.0.ffn_up.weight";
    let data = Format::BITMAP_Q8_0.encode(&values(&source, name), 256).unwrap();
    let metadata = source.metadata().clone();
    let mut writer = Writer::new("sparse", &metadata).unwrap();
    writer.tensor(name, Format::BITMAP_Q8_0, &[256, 3], &data).unwrap();
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    let sparse = File::from_bytes("sparse", out).unwrap();
    let choices = choose(&sparse, &Options { kind: None, ..options("F16") });
    assert_eq!(choices[0].format, Format::Q8_0);
    let dense = written(&sparse, &choices, None, 1);
    let off = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.01 * a.abs();
    assert!(values(&sparse, name).iter().zip(&values(&dense, name)).all(off));
}
