//! Rows from Parquet files, and embeddings as Arrow and Parquet that pyarrow reads.

use std::fs;

use crate::place::{Place, model};
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
