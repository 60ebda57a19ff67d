//! Vector stores and data frames that take embeddings. Their packages are large, so
//! only `cargo xtask ci --full` runs these tests.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::place::{Place, model};
use crate::python::python;
use crate::server::{Server, kit};

const TEXTS: [&str; 5] = ["one hen", "two hens", "the garden", "a red door", "seven seeds"];
const DATA: [&str; 2] = ["pyarrow==26.0.1", "numpy==2.4.6"];

/// A folder with the texts' vectors as Arrow, and those of a question as JSON.
fn vectors() -> Place {
    let place = Place::new();
    fs::write(place.path("texts.txt"), TEXTS.join("\n")).unwrap();
    let bert = model("bert");
    place.text(&["embed", &bert, "-f", "texts.txt", "--output", "arrow", "-o", "texts.arrows"]);
    place.text(&["embed", &bert, "-f", "texts.txt", "-o", "texts.jsonl"]);
    place.text(&["embed", &bert, TEXTS[2], "-o", "question.jsonl"]);
    place
}

/// The ids of the three texts nearest to the question, best first.
fn nearest(place: &Place) -> Vec<String> {
    let rows = |name: &str| -> Vec<Vec<f64>> {
        let lines = fs::read_to_string(place.path(name)).unwrap();
        let rows = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.map(|row| serde_json::from_value(row["embedding"].clone()).unwrap()).collect()
    };
    let question = &rows("question.jsonl")[0];
    let dot = |row: &Vec<f64>| row.iter().zip(question).map(|(a, b)| a * b).sum::<f64>();
    let mut scored: Vec<(usize, f64)> = rows("texts.jsonl").iter().map(dot).enumerate().collect();
    scored.sort_by(|a, b| b.1.total_cmp(&a.1));
    scored.iter().take(3).map(|(id, _)| id.to_string()).collect()
}

/// Runs a script, which must succeed, and returns the lines that it prints.
fn lines_of(packages: &[&str], script: &str, args: &[&Path]) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let output = Command::new(python(packages)).arg(script).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "large packages: cargo xtask ci --full"]
fn lancedb_finds_the_nearest_texts() {
    let place = vectors();
    let args = [place.path("texts.arrows"), place.path("question.jsonl"), place.path("lance")];
    let packages = [&["lancedb==0.40.0"], &DATA[..]].concat();
    let script = "../../examples/stores/lancedb_search.py";
    assert_eq!(lines_of(&packages, script, &args.each_ref().map(|p| p.as_path())), nearest(&place));
}

#[test]
#[ignore = "large packages: cargo xtask ci --full"]
fn postgres_with_pgvector_finds_the_nearest_texts() {
    let place = vectors();
    let args = [place.path("texts.arrows"), place.path("question.jsonl"), place.path("postgres")];
    let postgres = ["pgserver==0.1.4", "pgvector==0.5.1", "psycopg[binary]==3.3.9"];
    let packages = [&postgres[..], &DATA].concat();
    let script = "../../examples/stores/pgvector_search.py";
    assert_eq!(lines_of(&packages, script, &args.each_ref().map(|p| p.as_path())), nearest(&place));
}

#[test]
#[ignore = "large packages, and needs java: cargo xtask ci --full"]
fn deephaven_gives_back_the_same_bits() {
    let place = vectors();
    let packages = [&["deephaven-server==42.7"], &DATA[..]].concat();
    let lines =
        lines_of(&packages, "tests/flight/deephaven_bits.py", &[&place.path("texts.arrows")]);
    assert_eq!(lines.last().unwrap(), "320 values are equal");
}

#[test]
#[ignore = "large packages: cargo xtask ci --full"]
fn daft_and_langchain_embed_through_the_server() {
    let server = Server::of(&kit("bert.gguf"), &[]);
    let url = format!("{}/v1", server.url());
    let packages = ["daft[openai]==0.7.26", "langchain-openai==1.3.4", "numpy==2.3.5"];
    lines_of(&packages, "tests/flight/frameworks.py", &[Path::new(&url)]);
}
