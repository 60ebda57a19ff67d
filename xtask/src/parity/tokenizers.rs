//! The kit's tokenizers: ids, pieces and detokenized bytes of awkward strings, by llama.cpp, for
//! whole vocabularies and for each tiny model's own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin_engine::{Error, Tokenizer};
use bodkin_gguf::File;
use serde_json::Value;

use super::kit::{Report, Selection, read_json};

/// Runs all cases, those of real models too.
pub(crate) fn run(kit: &Path, chosen: &Selection) -> Result<Report> {
    let mut report = Report::default();
    let folder = kit.join("tokenizers");
    for path in files(&folder, "json")? {
        let case = read_json(&path)?;
        // The index has no strings.
        if case["strings"].is_array() {
            vocabulary(&folder, &case, chosen, &mut report)?;
        }
    }
    for path in files(&folder.join("ggml-vocab"), "inp")? {
        pairs(&path, &mut report)?;
    }
    for path in files(&kit.join("models"), "gguf")? {
        tiny_model(&path, &mut report)?;
    }
    Ok(report)
}

/// Opens a tokenizer; one of a kind that the engine does not have is noted.
fn open(name: &str, path: &Path, pre: Option<&str>, report: &mut Report) -> Option<Tokenizer> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => {
            report.failures.push(format!("{name}: {error}"));
            return None;
        }
    };
    let opened = match pre {
        Some(pre) => Tokenizer::from_metadata_assuming(file.metadata(), pre),
        None => Tokenizer::from_metadata(file.metadata()),
    };
    match opened {
        Ok(tokenizer) => return Some(tokenizer),
        Err(error @ Error::UnknownTokenizer { .. }) => {
            report.not_covered.push(format!("{name}: {error}"));
        }
        Err(error) => report.failures.push(format!("{name}: {error}")),
    }
    None
}

fn vocabulary(folder: &Path, case: &Value, chosen: &Selection, report: &mut Report) -> Result<()> {
    let name = text(&case["name"])?;
    let path = match case["vocab_file"].as_str() {
        Some(file) => folder.join(file),
        None if !name.starts_with(&chosen.model) => return Ok(()),
        None => match chosen.real.get(name) {
            Some(path) => path.clone(),
            None => {
                report.not_covered.push(format!("{name}: the model file was not given"));
                return Ok(());
            }
        },
    };
    // One vocabulary file serves two cases, which differ in the pre-tokenizer. Kinds other than
    // byte-level BPE have none, whatever the metadata names.
    let pre = case["tokenizer"]["tokenizer.ggml.pre"].as_str();
    let pre = pre.filter(|_| case["tokenizer"]["tokenizer.ggml.model"] == "gpt2");
    let Some(tokenizer) = open(name, &path, pre, report) else { return Ok(()) };
    for string in array(&case["strings"])? {
        strings(name, &tokenizer, string, report)?;
    }
    for piece in array(&case["pieces"])? {
        let id = ids(&Value::Array(vec![piece["id"].clone()]))?[0];
        for (key, special) in [("hex", true), ("hex_special_hidden", false)] {
            let found = hex(&tokenizer.piece(id, special));
            let expected = text(&piece[key])?;
            report.check(found == expected, || {
                format!("{name}: piece {id} ({key}): expected {expected}, found {found}")
            });
        }
    }
    for sequence in array(&case["detokenize"])? {
        let ids = ids(&sequence["ids"])?;
        for (key, special) in [("hex", true), ("hex_special_hidden", false)] {
            let found = hex(&tokenizer.decode(&ids, special));
            let expected = text(&sequence[key])?;
            report.check(found == expected, || {
                format!("{name}: detokenize {ids:?} ({key}): expected {expected}, found {found}")
            });
        }
    }
    Ok(())
}

fn strings(name: &str, tokenizer: &Tokenizer, case: &Value, report: &mut Report) -> Result<()> {
    let input = text(&case["text"])?;
    let variants = [
        ("ids", false, false),
        ("ids_parse", false, true),
        ("ids_special", true, false),
        ("ids_special_parse", true, true),
    ];
    for (key, add, parse) in variants {
        let (expected, found) = (ids(&case[key])?, tokenizer.encode(input, add, parse));
        report.check(found == expected, || {
            format!("{name}: {input:?} ({key}): expected {expected:?}, found {found:?}")
        });
    }
    let (plain, all) = (ids(&case["ids"])?, ids(&case["ids_special_parse"])?);
    let decoded = [
        ("detok_hex", tokenizer.decode(&plain, false)),
        ("detok_special_hex", tokenizer.decode(&all, true)),
        ("detok_remove_special_hex", tokenizer.decode_with(&all, true, false)),
    ];
    for (key, found) in decoded {
        // Not every case has every key.
        let Some(expected) = case[key].as_str() else { continue };
        let found = if found == input.as_bytes() { "=".to_owned() } else { hex(&found) };
        let is_equal = found == expected || (found == "=" && expected == hex(input.as_bytes()));
        report.check(is_equal, || {
            format!("{name}: {input:?} ({key}): expected {expected}, found {found}")
        });
    }
    Ok(())
}

/// llama.cpp's own pairs of strings and ids.
fn pairs(input: &Path, report: &mut Report) -> Result<()> {
    let name = input.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    // The vocabulary `qwen35` is `qwen2` with another pre-tokenizer and has no file of its own.
    let is_qwen35 = name == "ggml-vocab-qwen35.gguf";
    let vocabulary = if is_qwen35 { "ggml-vocab-qwen2.gguf" } else { &name };
    let path = input.with_file_name(vocabulary);
    let Some(tokenizer) = open(&name, &path, is_qwen35.then_some("qwen35"), report) else {
        return Ok(());
    };
    let strings = std::fs::read_to_string(input)?;
    let lines = std::fs::read_to_string(input.with_extension("out"))?;
    let strings: Vec<&str> = strings.split("\n__ggml_vocab_test__\n").collect();
    let lines: Vec<&str> = lines.lines().collect();
    ensure!(strings.len() >= lines.len(), "{name}: more lines of ids than strings");
    for (string, line) in strings.iter().zip(lines) {
        let expected: Vec<u32> =
            line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let found = tokenizer.encode(string, false, false);
        report.check(found == expected, || {
            format!("{name}: {string:?}: expected {expected:?}, found {found:?}")
        });
    }
    Ok(())
}

fn tiny_model(path: &Path, report: &mut Report) -> Result<()> {
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(tokenizer) = open(name, path, None, report) else { return Ok(()) };
    let reference = read_json(&path.with_extension("json"))?;
    for case in array(&reference["tokenize"])? {
        let input = text(&case["text"])?;
        let variants = [
            ("ids", false, false),
            ("ids_parse_special", false, true),
            ("ids_add_special", true, true),
        ];
        for (key, add, parse) in variants {
            let (expected, found) = (ids(&case[key])?, tokenizer.encode(input, add, parse));
            report.check(found == expected, || {
                format!("{name}: {input:?} ({key}): expected {expected:?}, found {found:?}")
            });
        }
        // Unknown tokens are shown.
        let found = hex(&tokenizer.decode(&ids(&case["ids"])?, true));
        let expected = text(&case["detokenized_hex"])?;
        report.check(found == expected, || {
            format!("{name}: {input:?} (detokenized): expected {expected}, found {found}")
        });
    }
    Ok(())
}

/// The files of a folder with this extension, sorted.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    ensure!(!files.is_empty(), "{}: no .{extension} files", folder.display());
    Ok(files)
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("expected a text, found {value}"))
}

fn array(value: &Value) -> Result<&[Value]> {
    let array = value.as_array().with_context(|| format!("expected an array, found {value}"))?;
    Ok(array)
}

fn ids(value: &Value) -> Result<Vec<u32>> {
    let number = |id: &Value| u32::try_from(id.as_u64()?).ok();
    let ids: Option<Vec<u32>> = array(value)?.iter().map(number).collect();
    ids.with_context(|| format!("expected token ids, found {value}"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
