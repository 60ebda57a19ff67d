//! `quantize` and `prune` from the outside.

#[cfg(unix)]
use std::time::{Duration, Instant};

use bodkin_gguf::{File, Format, Writer};

#[cfg(unix)]
use crate::chat::interrupt;
use crate::place::{Place, failure, model, stderr};

const MODEL: &str = "llama";

/// What a model predicts after some tokens.
fn logits(place: &Place, model: &str) -> Vec<u8> {
    place.text(&["logits", model, "--tokens", "1,2,3,30,200", "--output", "logits.npy"]);
    std::fs::read(place.path("logits.npy")).unwrap()
}

fn formats(place: &Place, name: &str) -> Vec<(String, Format)> {
    let file = File::open(place.path(name)).unwrap();
    file.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.format)).collect()
}

#[test]
fn every_type_of_file_opens_and_runs() {
    let place = Place::new();
    for kind in [
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M",
        "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    ] {
        let args = ["quantize", &model("llama-q4_k_m"), "out.gguf", kind, "-t", "2"];
        let said = place.text(&[&args[..], &["--allow-requantize"]].concat());
        assert!(said.contains("bits per weight"), "{said}");
        assert!(!logits(&place, "out.gguf").is_empty(), "{kind}");
    }
    assert!(!place.files().iter().any(|name| name.starts_with(".bodkin-")));
}

#[test]
fn overrides_pure_and_dry_runs() {
    let place = Place::new();
    let of = |args: &[&str]| {
        let mut all = vec!["quantize", "--json", "--dry-run"];
        all.extend(args);
        place.json(&all)
    };
    let input = model(MODEL);
    let plan = of(&[&input, "out.gguf", "Q8_0", "--tensor-type", "ffn_(up|gate)=Q4_0"]);
    let to = |name: &str| {
        let tensors = plan["tensors"].as_array().unwrap();
        tensors.iter().find(|t| t["name"] == name).unwrap()["to"].clone()
    };
    assert_eq!(
        (to("blk.0.ffn_up.weight"), to("blk.0.ffn_down.weight")),
        ("Q4_0".into(), "Q8_0".into())
    );
    assert!(!place.path("out.gguf").exists());
    let wrong = place.run(&["quantize", &input, "out.gguf", "Q9"]);
    let error = stderr(&wrong);
    assert!(error.contains("invalid value 'Q9' for '[TYPE]': expected one of F32,"), "{error}");
    assert_eq!(wrong.status.code(), Some(2));
    let wrong = place.run(&["quantize", &input, "out.gguf", "Q8_0", "--tensor-type", "x=Q9"]);
    let expected = "--tensor-type x=Q9: expected the name of a format such as Q8_0, found `Q9`";
    assert!(failure(&wrong).contains(expected), "{}", stderr(&wrong));
    let wrong = place.run(&["quantize", &input, "out.gguf", "Q8_0", "--tensor-type", "fnn=Q4_0"]);
    let expected = "expected a pattern that is found in the name of a matrix, found `fnn`";
    assert!(failure(&wrong).contains(expected), "{}", stderr(&wrong));
}

#[test]
fn quantized_tensors_are_quantized_again_only_if_asked() {
    let place = Place::new();
    let input = model("llama-q4_k_m");
    let output = place.run(&["quantize", &input, "out.gguf", "Q8_0"]);
    let error = failure(&output);
    for needle in ["expected F32, F16 or BF16 to make Q8_0", "--allow-requantize"] {
        assert!(error.contains(needle), "{error}");
    }
    assert_eq!(place.files(), ["home"]);
    // No error is added by more bits, nor where nothing changes.
    place.text(&["quantize", &input, "out.gguf", "F16"]);
    place.text(&["quantize", "out.gguf", "again.gguf", "Q8_0"]);
    place.text(&["quantize", "again.gguf", "copy.gguf", "Q8_0"]);
}

#[test]
fn the_table_of_formats_is_a_summary_unless_asked_for() {
    let place = Place::new();
    let args = ["quantize", &model(MODEL), "out.gguf", "Q8_0"];
    let summary = place.text(&args);
    assert!(summary.contains("F32         -> Q8_0          23 tensors "), "{summary}");
    assert!(!summary.contains("blk.0."), "{summary}");
    let whole = place.text(&[&args[..], &["--verbose"]].concat());
    assert!(whole.contains("\nblk.0.attn_q.weight "), "{whole}");
    assert!(whole.ends_with(&summary), "{whole}");
}

#[test]
fn names_of_tensors_do_not_command_a_terminal() {
    let place = Place::new();
    let rename = |name: &str| name.replace("blk.0.attn_q", "blk.0.\x1b[2J\u{202e}attn_q");
    rewrite(&place, |name, _| *name = rename(name));
    let output = place.run(&["quantize", "new.gguf", "out.gguf", "Q8_0", "--verbose"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
    assert!(text.contains("blk.0.\u{fffd}[2J\u{fffd}attn_q") && !text.contains('\x1b'), "{text:?}");
}

#[test]
fn nan_is_refused_by_the_name_of_its_tensor() {
    let place = Place::new();
    for (tensor, value) in
        [("blk.1.ffn_up.weight", f32::NAN), ("output_norm.weight", f32::INFINITY)]
    {
        rewrite(&place, |name, data| {
            if name == tensor {
                data[12..16].copy_from_slice(&value.to_le_bytes()[..]);
            }
        });
        let output = place.run(&["quantize", "new.gguf", "out.gguf", "Q8_0"]);
        let wanted =
            format!("new.gguf: {tensor}: expected finite values, found {value} in row 0; ");
        assert_eq!(failure(&output), wanted + "--allow-nan converts it");
        assert_eq!(place.files(), ["home", "new.gguf"]);
        place.text(&["quantize", "new.gguf", "out.gguf", "Q8_0", "--allow-nan"]);
        std::fs::remove_file(place.path("out.gguf")).unwrap();
    }
}

/// Writes `new.gguf`, a copy of the tiny model whose tensors `change` has changed.
fn rewrite(place: &Place, change: impl Fn(&mut String, &mut [u8])) {
    let file = File::open(model(MODEL)).unwrap();
    let mut writer = Writer::new(place.path("new.gguf"), file.metadata()).unwrap();
    for tensor in file.tensors() {
        let (mut name, mut data) = (tensor.name.clone(), file.data(tensor).to_vec());
        change(&mut name, &mut data);
        let write = move |out: &mut dyn std::io::Write| out.write_all(&data);
        writer.tensor_with(&name, tensor.format, &tensor.shape, write).unwrap();
    }
    writer.save().unwrap();
}

#[test]
fn pruned_files_run_and_go_back() {
    let place = Place::new();
    let input = model(MODEL);
    let prune = |out: &str, more: &[&str]| {
        let mut args = vec!["prune", &input, out, "--method", "magnitude", "--format", "Q8_0"];
        args.extend(more);
        place.text(&args)
    };
    prune("sparse.gguf", &["--sparsity", "0.5"]);
    prune("dense.gguf", &["--sparsity", "0.5", "--dense"]);
    place.text(&["quantize", "sparse.gguf", "back.gguf", "--dense"]);
    assert_eq!(formats(&place, "back.gguf"), formats(&place, "dense.gguf"));
    assert_eq!(logits(&place, "back.gguf"), logits(&place, "dense.gguf"));
    let sparse = place.json(&["inspect", "sparse.gguf", "--json"]);
    let tensors = sparse["tensors"].as_array().unwrap();
    let up = tensors.iter().find(|t| t["name"] == "blk.0.ffn_up.weight").unwrap();
    assert_eq!(up["format"], "BITMAP_Q8_0");
    // A weight that is small beside its block's scale may become zero too.
    assert!((0.5..0.53).contains(&up["sparsity"].as_f64().unwrap()), "{up}");
    assert_eq!(sparse["metadata"]["bodkin.prune.method"], "magnitude");
    prune("groups.gguf", &["--pattern", "2:4"]);
    assert!(formats(&place, "groups.gguf").iter().any(|(_, format)| *format == Format::S24_Q8_0));
    prune("quarter.gguf", &["--pattern", "1:4"]);
    let is_bitmap = |(_, format): &(String, Format)| *format == Format::BITMAP_Q8_0;
    assert!(formats(&place, "quarter.gguf").iter().any(is_bitmap));
}

#[test]
fn no_file_that_is_read_is_written() {
    let place = Place::new();
    std::fs::copy(model(MODEL), place.path("m.gguf")).unwrap();
    std::fs::write(place.path("text"), "one two three ".repeat(200)).unwrap();
    let before = std::fs::read(place.path("m.gguf")).unwrap();
    for args in [
        &["quantize", "m.gguf", "./m.gguf", "Q8_0"][..],
        &["prune", "m.gguf", "m.gguf", "--sparsity", "0.5", "--method", "magnitude"],
        &["imatrix", "m.gguf", "-f", "text", "-c", "32", "-o", "m.gguf"],
        &["imatrix", "m.gguf", "-f", "text", "-c", "32", "-o", "text"],
        &["perplexity", "m.gguf", "-f", "text", "-c", "32", "--kl-divergence-base", "text"],
        &["check", "m.gguf", "--save-baseline", "m.gguf"],
        &["logits", "m.gguf", "--tokens", "1,2", "--output", "m.gguf"],
    ] {
        let output = place.run(args);
        let expected = "expected an output file, found an input file";
        assert!(failure(&output).contains(expected), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read(place.path("m.gguf")).unwrap(), before);
    assert!(std::fs::read_to_string(place.path("text")).unwrap().starts_with("one two"));
}

#[test]
fn a_model_with_nan_is_neither_measured_nor_pruned_by_them() {
    let place = Place::new();
    let nan = &place.with_first_value(MODEL, "blk.0.attn_norm.weight", f32::NAN);
    std::fs::write(place.path("text"), "one two three ".repeat(200)).unwrap();
    let output = place.run(&["perplexity", nan, "-f", "text", "-c", "32"]);
    let wanted = "NaN or infinity first appears in layer 0, the input of blk.0.attn_q.weight";
    assert!(failure(&output).ends_with(wanted), "{}", stderr(&output));
    let args = ["perplexity", nan, "-f", "text", "-c", "32", "--kl-divergence-base", "b"];
    assert!(failure(&place.run(&args)).ends_with(wanted));
    let input = model(MODEL);
    place.text(&["perplexity", &input, "-f", "text", "-c", "32", "--kl-divergence-base", "b"]);
    let args = ["perplexity", nan, "--kl-divergence", "--kl-divergence-base", "b"];
    let output = place.run(&args);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(wanted), "{}", stderr(&output));
    let args = ["prune", nan, "out.gguf", "--sparsity", "0.5", "--method", "wanda"];
    let output = place.run(&[&args[..], &["--calibrate", "text", "-c", "32"]].concat());
    assert!(failure(&output).starts_with("inputs of blk.0.attn_"), "{}", stderr(&output));
    assert!(!place.path("out.gguf").exists());
}

#[cfg(unix)]
#[test]
fn ctrl_c_while_measuring_leaves_the_pruned_file_alone() {
    let place = Place::new();
    std::fs::write(place.path("text"), "one two three ".repeat(4000)).unwrap();
    let input = model(MODEL);
    let args = ["prune", &input, "out.gguf", "--sparsity", "0.5", "--method", "magnitude"];
    let more = ["--evaluate", "text", "-c", "32", "--evaluate-chunks", "100000"];
    let mut child = place.bodkin(&[&args[..], &more[..]].concat()).spawn().unwrap();
    let is_kept = |name: &String| {
        name.starts_with(".bodkin-tmp-") && place.path(name).join("base.kld").exists()
    };
    let is_measuring = || place.files().iter().any(is_kept);
    let start = Instant::now();
    while !is_measuring() && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(place.files(), ["home", "out.gguf", "text"]);
}

#[test]
fn surgery_happens_at_load() {
    let place = Place::new();
    let rule = "[[rule]]\nmethod = \"magnitude\"\nsparsity = 0.5\nformat = \"F16\"\n";
    std::fs::write(place.path("surgery.toml"), rule).unwrap();
    let input = model(MODEL);
    place.text(&["prune", &input, "out.gguf", "--surgery", "surgery.toml"]);
    let run = |model: &str, more: &[&str]| {
        let mut args = vec!["run", model, "a b c", "--raw", "-q", "-n", "8", "--temperature", "0"];
        args.extend(more);
        place.text(&args)
    };
    assert_eq!(run(&input, &["--surgery", "surgery.toml"]), run("out.gguf", &[]));
}

#[test]
fn what_is_wrong_with_a_surgery_file_is_said() {
    let place = Place::new();
    let input = model(MODEL);
    let rule = "[[rule]]\nmethod = 'magnitude'\n";
    for (text, wanted) in [
        (format!("{rule}sparsity = 1.5\n"), "s.toml: rule 1: sparsity: expected 0 <= x < 1"),
        (format!("{rule}sparsity = 0.5\nx = 1\n"), "s.toml: line 4: expected a surgery file"),
        (
            format!("{rule}sparsity = 0.5\ntensors = 'fnn'\n"),
            "rule 1: tensors: expected a pattern that is found in the name of such a tensor, found",
        ),
        (
            format!("{rule}sparsity = 0.5\ntensors = '('\n"),
            "s.toml: rule 1: tensors: expected a regular expression",
        ),
    ] {
        std::fs::write(place.path("s.toml"), &text).unwrap();
        let output = place.run(&["prune", &input, "out.gguf", "--surgery", "s.toml"]);
        assert!(failure(&output).contains(wanted), "{text}: {}", stderr(&output));
    }
    std::fs::write(place.path("s.toml"), "[[rule]]\nmethod = 'ria'\nsparsity = 0.5\n").unwrap();
    let output = place.run(&["run", &input, "a", "--surgery", "s.toml"]);
    let wanted = "ria needs statistics: imatrix = FILE in the surgery file, or `prune`";
    assert!(failure(&output).contains(wanted), "{}", stderr(&output));
    let output = place.run(&["prune", &input, "out.gguf", "--surgery", "none.toml"]);
    assert!(failure(&output).starts_with("cannot read none.toml: "), "{}", stderr(&output));
}

#[test]
fn what_pruning_needs_is_asked_for() {
    let place = Place::new();
    let input = model(MODEL);
    for (args, wanted) in [
        (
            &["--imatrix", "m.gguf", "--method", "sparsegpt"][..],
            "sparsegpt needs a calibration text: leave the importance matrix out",
        ),
        (&["--chunks", "0"], "--chunks: expected at least 1 chunk, found 0"),
        (&["-c", "8192"], "the built-in text: "),
        (
            &["--sparsity", "0.5", "--method", "magnitude", "--evaluate", "none"],
            "--evaluate: cannot read the text from none",
        ),
        (&["--pattern", "4:2"], "--pattern: expected unstructured, or N:M"),
        (&["--sparsity", "0.5", "--method", "x"], "--method: expected one of magnitude"),
    ] {
        let mut all = vec!["prune", &input, "out.gguf"];
        all.extend(args);
        let output = place.run(&all);
        assert!(failure(&output).contains(wanted), "{args:?}: {}", stderr(&output));
        assert!(!place.path("out.gguf").exists());
    }
}

#[test]
fn pruning_needs_no_flags() {
    let place = Place::new();
    let input = model(MODEL);
    let output = place.run(&["prune", &input, "out.gguf"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("calibrating"), "{}", stderr(&output));
    let output = place.run(&["prune", &input, "out.gguf", "--verbose"]);
    assert!(stderr(&output).contains("calibrating\n"), "{}", stderr(&output));
    let recorded = |key: &str| {
        let file = place.json(&["inspect", "out.gguf", "--json"]);
        file["metadata"][format!("bodkin.prune.{key}")].clone()
    };
    assert_eq!(recorded("method"), "sparsegpt");
    assert_eq!(recorded("calibration"), "the built-in text");
    assert!((0.5..0.53).contains(&recorded("sparsity").as_f64().unwrap()));
    // An importance matrix is enough for a method that loses less than the others which use one.
    std::fs::write(place.path("text"), "one two three ".repeat(200)).unwrap();
    place.text(&["imatrix", &input, "-f", "text", "-c", "32", "-o", "m.gguf"]);
    place.text(&["prune", &input, "out.gguf", "--imatrix", "m.gguf", "--pattern", "2:4"]);
    assert_eq!((recorded("method"), recorded("calibration")), ("wanda".into(), "m.gguf".into()));
}

#[test]
fn zeros_that_are_there_are_left_out_without_a_change() {
    let place = Place::new();
    let input = model(MODEL);
    let zeros = |out: &str, flags: &[&str]| {
        let args = ["prune", &input, out, "--method", "magnitude", "--dense"];
        place.text(&[&args[..], flags].concat());
    };
    for (flags, wanted) in [
        (["--sparsity", "0.5", "--format", "F16"], Format::BITMAP_F16),
        (["--sparsity", "0.5", "--format", "Q8_0"], Format::BITMAP_Q8_0),
        (["--sparsity", "0.5", "--format", "Q4_0"], Format::BITMAP_Q4_0),
        (["--pattern", "2:4", "--format", "Q8_0"], Format::S24_Q8_0),
        (["--sparsity", "0.98", "--format", "F16"], Format::CSR_F16),
    ] {
        zeros("zeros.gguf", &flags);
        let said = place.json(&["prune", "zeros.gguf", "packed.gguf", "--pack", "--json"]);
        let packed = formats(&place, "packed.gguf");
        let formats_found: Vec<&str> = said["formats"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f["format"].as_str().unwrap())
            .collect();
        assert_eq!(formats_found, [wanted.name()], "{said}");
        assert!(packed.iter().any(|(_, format)| *format == wanted), "{packed:?}");
        assert!(said["bytes"].as_u64() < said["source_bytes"].as_u64(), "{said}");
        assert_eq!(logits(&place, "packed.gguf"), logits(&place, "zeros.gguf"), "{flags:?}");
        let tensors = packed.iter().filter(|(_, format)| *format == wanted).count();
        let again = stderr(&place.run(&["prune", "packed.gguf", "out.gguf", "--pack"]));
        let found = format!(
            "packed.gguf: expected F16, Q8_0 or Q4_0 matrices that a sparse format makes smaller, \
             found {tensors} that are packed already ({}) and no other",
            wanted.name()
        );
        assert!(again.trim_end().ends_with(&found), "{again}");
        // Bit by bit.
        place.text(&["quantize", "packed.gguf", "back.gguf", "--dense"]);
        let [before, after] =
            ["zeros.gguf", "back.gguf"].map(|name| File::open(place.path(name)).unwrap());
        for tensor in before.tensors() {
            let same = after.tensor(&tensor.name).unwrap();
            assert_eq!(before.data(tensor), after.data(same), "{}", tensor.name);
        }
    }
    let error = stderr(&place.run(&["prune", &input, "out.gguf", "--pack"]));
    assert!(error.contains("llama.gguf: expected F16, Q8_0 or Q4_0 matrices that"), "{error}");
    let both = ["prune", "zeros.gguf", "out.gguf", "--pack", "--sparsity", "0.5"];
    assert_eq!(place.run(&both).status.code(), Some(2));
    assert!(!place.path("out.gguf").exists());
}

#[test]
fn zeros_are_counted_in_any_file() {
    let place = Place::new();
    rewrite(&place, |name, data| {
        if name == "token_embd.weight" || name == "blk.1.ffn_up.weight" {
            let bytes = data.len();
            data[..bytes / 4].fill(0);
        }
    });
    let shares = |file: &str, flags: &[&str]| {
        let json = place.json(&[&["inspect", file, "--json"], flags].concat());
        let tensors = json["tensors"].as_array().unwrap().clone();
        let share = |name: &str| {
            tensors.iter().find(|tensor| tensor["name"] == name).unwrap()["sparsity"].as_f64()
        };
        ["token_embd.weight", "blk.1.ffn_up.weight", "blk.0.ffn_up.weight"].map(share)
    };
    assert_eq!(shares("new.gguf", &[]), [None; 3]);
    assert_eq!(shares("new.gguf", &["--zeros"]), [Some(0.25), Some(0.25), Some(0.0)]);
    let summary = place.text(&["inspect", "new.gguf", "--zeros"]);
    let line = |kind: &str| summary.lines().find(|line| line.starts_with(kind)).unwrap();
    assert!(line("token_embd.weight ").ends_with(" 1 tensor   25.0 % zeros"), "{summary}");
    // A quarter of one of three layers.
    assert!(line("blk.*.ffn_up.weight ").ends_with(" 3 tensors    8.3 % zeros"), "{summary}");
    place.text(&["quantize", "new.gguf", "small.gguf", "Q4_0"]);
    assert!(shares("small.gguf", &["--zeros"])[0] >= Some(0.25));
}

#[test]
fn what_killed_processes_left_is_removed() {
    let place = Place::new();
    let (killed, running) = (place.path(".bodkin-tmp-killed"), place.path(".bodkin-tmp-running"));
    let folder = place.path(".bodkin-tmp-folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("base.kld"), "half").unwrap();
    std::fs::write(&killed, "half of a model").unwrap();
    let lock = std::fs::File::create(&running).unwrap();
    lock.lock().unwrap();
    place.text(&["quantize", &model(MODEL), "out.gguf", "Q8_0"]);
    assert!(!killed.exists() && !folder.exists() && running.exists(), "{:?}", place.files());
}

#[test]
fn an_output_that_cannot_be_written_leaves_nothing() {
    let place = Place::new();
    let input = model(MODEL);
    std::fs::write(place.path("old.gguf"), "as it was").unwrap();
    let output = place.run(&["quantize", &input, "none/out.gguf", "Q8_0"]);
    assert!(failure(&output).contains("there is no folder none"), "{}", stderr(&output));
    let output = place.run(&["quantize", &input, "old.gguf", "Q8_0", "--tensor-type", "up=IQ1_S"]);
    assert!(failure(&output).contains("expected a type that can be written"));
    assert_eq!(std::fs::read(place.path("old.gguf")).unwrap(), b"as it was");
}

#[test]
fn the_table_tells_what_it_cost() {
    let place = Place::new();
    let words: Vec<String> = (0..400).map(|i| format!("w{} is {}", i * 7 % 31, i % 13)).collect();
    std::fs::write(place.path("text"), words.join(". ")).unwrap();
    let input = model(MODEL);
    let args =
        ["prune", &input, "out.gguf", "--method", "sparsegpt", "--sparsity", "0.5", "--json"];
    let more = ["--calibrate", "text", "--evaluate", "text", "-c", "32", "--evaluate-chunks", "3"];
    let table = place.json(&[&args[..], &more[..]].concat());
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert!(row["perplexity"].as_f64().unwrap() > 1.0, "{row}");
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
    }
    let divergence = |i: usize| rows[i]["divergence"].as_f64().unwrap();
    assert!(divergence(1) > divergence(2), "{table}");
    assert!(table["dense_type_of_the_size"].is_string());
    // Better is what is better in both.
    let perplexity = |i: usize| rows[i]["perplexity"].as_f64().unwrap();
    let (predicts, is_near) = (perplexity(3) < perplexity(1), divergence(3) < divergence(1));
    let agreed = (predicts == is_near).then_some(predicts);
    assert_eq!(table["dense_is_better"].as_bool(), agreed, "{table}");
}
