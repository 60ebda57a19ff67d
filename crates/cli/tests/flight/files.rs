//! Rows from Parquet files, and embeddings as Arrow and Parquet that pyarrow reads.

use std::fs;

use crate::place::{Place, failure, model, stderr};
use crate::stand_in::{VERSIONS, run_script};

const ROWS: &str = "{\"id\":\"a\",\"text\":\"one hen\",\"page\":1,\"tags\":[\"x\"],\"ok\":true}\n\
                    {\"id\":\"b\",\"text\":\"two hens\",\"page\":null,\"tags\":[],\"ok\":false}\n";

#[test]
fn pyarrow_reads_what_embed_writes() {
    let place = Place::new();
    let bert = model("bert");
    fs::write(place.path("rows.jsonl"), ROWS).unwrap();
    for (kind, file) in [("json", "o.jsonl"), ("arrow", "o.arrows"), ("parquet", "o.parquet")] {
        place.text(&["embed", &bert, "-f", "rows.jsonl", "--output", kind, "-o", file]);
        let named = format!("named-{file}");
        place.text(&["embed", &bert, "-f", "rows.jsonl", "-o", &named]);
        assert!(fs::read(place.path(&named)).unwrap() == fs::read(place.path(file)).unwrap());
    }
    // A Parquet file is also read; its vectors are made again.
    place.text(&["embed", &bert, "-f", "o.parquet", "-o", "again.jsonl"]);
    let stream = place.run(&["embed", &bert, "-f", "rows.jsonl", "--output", "arrow"]);
    fs::write(place.path("piped.arrows"), stream.stdout).unwrap();
    assert!(place.files().iter().all(|name| !name.ends_with(".partial")));
    for version in VERSIONS {
        run_script(version, "files.py", &[place.path("").to_str().unwrap()]);
    }
}

#[test]
fn torn_output_goes_on() {
    let place = Place::new();
    let bert = model("bert");
    let lines: String = (0..3000).map(|i| format!("{i} seeds\n")).collect();
    fs::write(place.path("lines.txt"), lines).unwrap();
    let embed = ["embed", &bert, "-f", "lines.txt", "--output"];
    for kind in ["arrow", "parquet"] {
        place.text(&[&embed[..], &["arrow", "-o", "whole"]].concat());
        let whole = fs::read(place.path("whole")).unwrap();
        fs::write(place.path("out.partial"), &whole[..whole.len() * 2 / 3]).unwrap();
        place.text(&[&embed[..], &[kind, "-o", "out", "--resume"]].concat());
        assert!(!place.path("out.partial").exists());
        if kind == "arrow" {
            assert!(fs::read(place.path("out")).unwrap() == whole, "the same bytes");
        } else {
            place.text(&["embed", &bert, "-f", "out", "--input", "parquet", "-o", "o.jsonl"]);
            let rows = fs::read_to_string(place.path("o.jsonl")).unwrap();
            assert_eq!(rows.lines().count(), 3000);
        }
    }
}

#[test]
fn columns_of_parquet_files_keep_their_types_and_values() {
    let place = Place::new();
    let (bert, folder) = (model("bert"), place.path("").display().to_string());
    run_script(VERSIONS[1], "column_types.py", &["write", &folder]);
    let embed = ["embed", &bert, "-f", "types.parquet", "-o"];
    for out in ["types.arrows", "made.parquet", "types.jsonl"] {
        place.text(&[&embed[..], &[out]].concat());
    }
    place.text(&["embed", &bert, "hello", "-f", "types.parquet", "-o", "mixed.arrows"]);
    run_script(VERSIONS[1], "column_types.py", &["read", &folder]);
    let two = ["embed", &bert, "-f", "types.parquet", "-f", "other.parquet", "-o", "two.arrows"];
    let told = stderr(&place.run(&two));
    assert!(told.contains("row 1501: `late`: expected Int32, as in the rows before, found Utf8"));
    for (file, wanted) in [
        ("null-id.parquet", "`id`: expected a value in every row, found 1 without one"),
        ("null-id-unsaid.parquet", "row 1: `id`: expected an integer or a text, found null"),
        ("long.parquet", "expected texts of at most 16000000 bytes, found"),
        ("two-long.parquet", "row 2: expected a text of at most 16000000 bytes, found 17000000"),
        ("number.parquet", "`text`: expected strings, found Int64"),
        ("two-n.parquet", "two-n.parquet: two columns `n`"),
        ("two-text.parquet", "two-text.parquet: two columns `text`"),
    ] {
        let error = failure(&place.run(&["embed", &bert, "-f", file, "-o", "refused.arrows"]));
        assert!(error.contains(wanted), "{file}: {error}");
    }
}

#[test]
fn a_row_that_does_not_fit_the_first_ones_is_an_error() {
    let place = Place::new();
    let bert = model("bert");
    let few = "{\"text\":\"a\"}\n".repeat(1100);
    let numbers = "{\"text\":\"a\",\"n\":1}\n".repeat(1100);
    for (first, last, wanted) in [
        (&few, "{\"text\":\"a\",\"n\":1}", "row 1101: the column `n` is not in the first rows"),
        (
            &numbers,
            "{\"text\":\"a\",\"n\":1.5}",
            "row 1101: `n`: expected an integer of 64 bits, found 1.5",
        ),
        (&numbers, "{\"text\":\"a\",\"m\":1}", "row 1101: the column `m` is not in the first"),
        (
            &few,
            "{\"text\":\"a\",\"n\":18446744073709551615}",
            "row 1101: the column `n` is not in the first rows",
        ),
        (
            &String::new(),
            "{\"text\":\"a\",\"n\":18446744073709551615}",
            "row 1: `n`: expected a number that 64 bits of a float hold, found 184467440737",
        ),
    ] {
        fs::write(place.path("rows.jsonl"), format!("{first}{last}\n")).unwrap();
        let output = place.run(&["embed", &bert, "-f", "rows.jsonl", "-o", "rows.arrows"]);
        let told = stderr(&output);
        assert!(told.contains(wanted) && told.contains("or use Parquet"), "{told}");
        assert!(!output.status.success() && !place.path("rows.arrows").exists());
    }
}

#[test]
fn resume_knows_whose_file_it_is() {
    let place = Place::new();
    let bert = model("bert");
    fs::write(place.path("lines.txt"), "one hen\ntwo hens\n").unwrap();
    let embed = ["embed", &bert, "-f", "lines.txt", "--output", "arrow", "-o"];
    place.text(&[&embed[..], &["whole"]].concat());
    let whole = fs::read(place.path("whole")).unwrap();
    let resume = [&embed[..], &["out", "--resume"]].concat();
    // The schema is not whole: there is nothing to keep.
    for length in [0, 3, 4, 6, 8, 100] {
        fs::write(place.path("out.partial"), &whole[..length]).unwrap();
        place.text(&resume);
        assert!(fs::read(place.path("out")).unwrap() == whole, "after {length} bytes");
    }
    let json = place.text(&["embed", &bert, "-f", "lines.txt"]);
    for foreign in [json.as_bytes(), b"abc", b"PAR1 and so on"] {
        fs::write(place.path("out.partial"), foreign).unwrap();
        let error = failure(&place.run(&resume));
        assert!(error.contains("expected an Arrow stream, found another kind"), "{error}");
        assert!(fs::read(place.path("out.partial")).unwrap() == foreign, "it is left as it is");
    }
    let mean = [&embed[..], &["out", "--resume", "--pooling", "cls"]].concat();
    fs::write(place.path("out.partial"), &whole).unwrap();
    let output = place.run(&mean);
    assert!(stderr(&output).contains("--resume: expected in row 2 the vector that"));
}
