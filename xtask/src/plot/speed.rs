//! Tokens a second of bodkin and of llama.cpp on the same machines and files: a bar for each, and
//! the table of the README. Reads the rows of `compare` and of `gpu`, the newest of each.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::compare::KEYS;
use crate::results::{newest, replace, text};
use crate::svg::{self, label};

const OUT: &str = "docs/speed.svg";

/// Tests, with what the README calls them.
const TESTS: [(&str, &str); 2] = [("pp512", "prefill"), ("tg128", "decode")];

/// Model files on CPUs, of which there are rows of both tests.
const CPU_FILES: [(&str, &str); 4] = [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2 135M Q4_1"),
    ("1b-Q4_K.gguf", "Llama shape, 1.2B Q4_K"),
    ("1b-Q8_0.gguf", "Llama shape, 1.2B Q8_0"),
    ("1.5b-Q4_K_M.gguf", "Qwen 2.5 shape, 1.5B Q4_K_M"),
];

/// Model shapes and formats on GPUs.
const GPU_MODELS: [([&str; 2], &str); 3] = [
    (["1b", "Q4_K"], "Llama shape, 1.2B Q4_K"),
    (["8b", "Q4_K"], "Llama shape, 8B Q4_K"),
    (["8b", "Q8_0"], "Llama shape, 8B Q8_0"),
];

const WIDTH: f64 = 860.0;
const LINE: f64 = 30.0;
const TOP: f64 = 46.0;
/// Where the bars of each test begin, and their longest.
const BARS: [f64; 2] = [230.0, 560.0];
const LONGEST: f64 = 190.0;
const COLOURS: [&str; 2] = ["#d62728", "#9a9a9a"];

/// A model on a machine.
struct Entry {
    machine: String,
    model: &'static str,
    tests: [Test; 2],
}

/// The medians of a test in tokens a second, and the median of the ratios of neighbouring runs,
/// which is not the ratio of the medians.
struct Test {
    bodkin: f64,
    peer: f64,
    ratio: f64,
}

/// Writes the plot and the table.
pub(super) fn run(root: &Path) -> Result<()> {
    let results = root.join("benches/results");
    let cpu = newest(&results.join("cpu.jsonl"), &KEYS)?;
    let gpu = newest(&results.join("gpu.jsonl"), &["device", "shape", "format", "test"])?;
    let entries = entries(&cpu, &gpu)?;
    std::fs::write(root.join(OUT), draw(&entries)?)?;
    replace(&root.join("README.md"), "plot speed", &table(&entries)?)?;
    println!("{OUT}: {} models", entries.len());
    Ok(())
}

/// The models on the machine of the newest CPU row, and on the GPU of the newest GPU row.
fn entries(cpu: &[Value], gpu: &[Value]) -> Result<Vec<Entry>> {
    let last = cpu.last().context("no rows of a CPU")?;
    let is_here = |row: &&Value| row["cpu"] == last["cpu"] && row["threads"] == last["threads"];
    let is_llama = |row: &&Value| text(row, "peer").starts_with("llama");
    let machine = format!("{} threads of {}", last["threads"], name(text(last, "cpu")));
    let mut entries = Vec::new();
    for (file, model) in CPU_FILES {
        let rows = cpu.iter().filter(is_here).filter(is_llama).filter(|row| row["file"] == file);
        entries.extend(entry(&machine, model, &rows.collect::<Vec<_>>()));
    }
    let gpu_device = gpu.last().map(|row| &row["device"]);
    for ([shape, format], model) in GPU_MODELS {
        let is_it = |row: &&Value| {
            row["shape"] == shape && row["format"] == format && Some(&row["device"]) == gpu_device
        };
        let rows: Vec<&Value> = gpu.iter().filter(is_it).collect();
        let device = rows.first().map_or("?", |row| text(row, "device"));
        let device = device.split_once('(').map_or(device, |(_, name)| name.trim_end_matches(')'));
        entries.extend(entry(device, model, &rows));
    }
    Ok(entries)
}

/// A model's speeds, if both were measured with the peer.
fn entry(machine: &str, model: &'static str, rows: &[&Value]) -> Option<Entry> {
    let test = |name: &str| {
        let row = rows.iter().rev().find(|row| text(row, "test") == name)?;
        let (bodkin, peer) = (row["tok_s"].as_f64()?, row["peer_tok_s"].as_f64()?);
        Some(Test { bodkin, peer, ratio: row["ratio"].as_f64().unwrap_or(bodkin / peer) })
    };
    let tests = [test(TESTS[0].0)?, test(TESTS[1].0)?];
    Some(Entry { machine: machine.to_owned(), model, tests })
}

/// A processor's name without its family and model.
fn name(cpu: &str) -> &str {
    cpu.split(',').next().unwrap_or(cpu)
}

fn table(entries: &[Entry]) -> Result<String> {
    let mut out = String::from(
        "| machine | model | prefill | llama.cpp | decode | llama.cpp |\n\
         | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    let mut last = "";
    for Entry { machine, model, tests: [prefill, decode] } in entries {
        let machine = if *machine == last { "" } else { machine };
        writeln!(
            out,
            "| {machine} | {model} | **{:.0}** | {:.0} | **{:.0}** | {:.0} |",
            prefill.bodkin, prefill.peer, decode.bodkin, decode.peer
        )?;
        last = if machine.is_empty() { last } else { machine };
    }
    Ok(out)
}

/// A line for each model, with the bars of both tests, each over the longer of its pair.
fn draw(entries: &[Entry]) -> Result<String> {
    let mut svg = svg::start(WIDTH, TOP + LINE * (entries.len() as f64 + 2.0));
    for ((_, test), at) in TESTS.into_iter().zip(BARS) {
        label(&mut svg, (at, TOP - 18.0), "start", &format!("{test}, tokens a second"))?;
    }
    let (mut y, mut last) = (TOP, "");
    for Entry { machine, model, tests } in entries {
        if machine != last {
            label(&mut svg, (10.0, y + 4.0), "start", machine)?;
            y += LINE / 2.0;
            last = machine;
        }
        label(&mut svg, (20.0, y + 12.0), "start", model)?;
        for (test, at) in tests.iter().zip(BARS) {
            let longest = test.bodkin.max(test.peer);
            for (i, (speed, colour)) in [test.bodkin, test.peer].iter().zip(COLOURS).enumerate() {
                let (width, top) = (LONGEST * speed / longest, y + 11.0 * i as f64);
                writeln!(
                    svg,
                    "<rect x=\"{at}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"9\" \
                     fill=\"{colour}\"/>"
                )?;
                let said = match i {
                    0 => format!("{speed:.0}, {:.2}x", test.ratio),
                    _ => format!("{speed:.0}"),
                };
                label(&mut svg, (at + width + 5.0, top + 8.5), "start", &said)?;
            }
        }
        y += LINE;
    }
    for (i, (name, colour)) in ["bodkin", "llama.cpp"].into_iter().zip(COLOURS).enumerate() {
        let at = 20.0 + 90.0 * i as f64;
        writeln!(svg, "<rect x=\"{at}\" y=\"14\" width=\"10\" height=\"9\" fill=\"{colour}\"/>")?;
        label(&mut svg, (at + 15.0, 22.5), "start", name)?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn models_with_both_tests_and_a_peer_are_shown() {
        let cpu = |test: &str, peer: &str, speeds: [f64; 2]| {
            json!({
                "cpu": "A, family 1", "threads": 2, "file": CPU_FILES[0].0, "test": test,
                "peer": peer, "tok_s": speeds[0], "peer_tok_s": speeds[1],
                "ratio": 3.1,
            })
        };
        let rows = [
            cpu("pp512", "llama.cpp 1", [900.0, 300.0]),
            cpu("tg128", "llama.cpp 1", [40.0, 20.0]),
            cpu("tg128", "ik_llama.cpp 1", [40.0, 39.0]),
        ];
        let gpu = [json!({ "device": "cuda:0 (G)", "shape": "8b", "format": "Q8_0",
            "test": "pp512", "tok_s": 5.0 })];
        let entries = entries(&rows, &gpu).unwrap();
        let wanted = "| 2 threads of A | SmolLM2 135M Q4_1 | **900** | 300 | **40** | 20 |\n";
        assert!(table(&entries).unwrap().ends_with(wanted));
        assert_eq!(entries.len(), 1);
        assert!(draw(&entries).unwrap().contains(">900, 3.10x<"));
    }
}
