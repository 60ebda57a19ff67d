//! `bench`: the rows in each of their shapes.

use std::fs;

use bodkin_eval::RoutingTrace;
use serde_json::Value;

use crate::place::{Place, failure, model, stderr};

const FIELDS: [&str; 26] = [
    "build_version",
    "backends",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_batch",
    "n_threads",
    "type_k",
    "type_v",
    "n_prompt",
    "n_gen",
    "n_depth",
    "n_sequences",
    "test",
    "test_time_unix_s",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "gb_s",
    "bandwidth_gb_s",
    "bandwidth_stddev_gb_s",
    "bandwidth_share",
    "samples_ns",
    "samples_ts",
];

fn bench(place: &Place, flags: &[&str]) -> String {
    place.text(&[&["bench", &model("llama"), "-r", "2"], flags].concat())
}

fn tests(rows: &Value) -> Vec<&str> {
    rows.as_array().unwrap().iter().map(|row| row["test"].as_str().unwrap()).collect()
}

#[cfg(unix)]
#[test]
fn a_terminal_shows_what_is_measured() {
    use crate::terminal::Terminal;
    let place = Place::new();
    let args = ["bench", &model("llama"), "-p", "8", "-n", "0", "-r", "2"];
    let (shown, _) = Terminal::of_stderr(place.bodkin(&args)).rest();
    for part in ["pp8: warm-up", "pp8: run 1 of 2", "pp8: run 2 of 2"] {
        assert!(shown.contains(part), "{shown:?}");
    }
}

/// Of software here, as machines without a GPU have it.
#[test]
fn a_report_compares_a_gpu_with_the_cpu() {
    let place = Place::new();
    let short = ["-p", "4", "-n", "0", "-r", "1", "--device", "wgpu", "--report"];
    for name in ["llama", "bert"] {
        let report = place.text(&[&["bench", &model(name)], &short[..]].concat());
        let (_, error) = report.split_once("results beside those of the CPU: NMSE ").unwrap();
        let error: f64 = error.lines().next().unwrap().parse().unwrap();
        assert!((1e-16..1e-6).contains(&error), "{report}");
        for part in ["- bodkin 0.", "\n- cpu: cpu (", "\n- wgpu:0: ", "\n- model: ", "| pp4 |"] {
            assert!(report.contains(part), "{part}: {report}");
        }
    }
    let cpu = place.text(&["bench", &model("llama"), "-p", "4", "-n", "0", "--report"]);
    assert!(!cpu.contains("beside"), "{cpu}");
}

#[test]
fn a_table_has_a_row_for_each_test() {
    let table = bench(&Place::new(), &["-p", "8", "-n", "4", "-o", "md"]);
    let cells = |line: &str| -> Vec<String> {
        let inner = line.strip_prefix("| ").and_then(|line| line.strip_suffix(" |")).unwrap();
        inner.split(" | ").map(str::to_owned).collect()
    };
    let lines: Vec<Vec<String>> = table.lines().map(cells).collect();
    let head = "model,size,params,backend,threads,test,t/s,GB/s,of bandwidth";
    assert_eq!(lines[0], head.split(',').collect::<Vec<_>>());
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{table}");
    assert_eq!(lines.len(), 4);
    assert_eq!((lines[2][5].as_str(), lines[3][5].as_str()), ("pp8", "tg4"));
}

#[test]
fn json_has_numbers_that_agree() {
    let rows = bench(&Place::new(), &["-p", "8", "-n", "4", "-o", "json", "-t", "1", "-d", "3"]);
    let rows: Value = serde_json::from_str(&rows).unwrap();
    assert_eq!(tests(&rows), ["pp8 @ d3", "tg4 @ d3"]);
    for row in rows.as_array().unwrap() {
        let fields: Vec<&String> = row.as_object().unwrap().keys().collect();
        assert_eq!(fields, FIELDS);
        let number = |key: &str| row[key].as_f64().unwrap();
        assert_eq!((number("n_threads"), number("n_depth")), (1.0, 3.0));
        let samples: Vec<f64> =
            row["samples_ns"].as_array().unwrap().iter().map(|ns| ns.as_f64().unwrap()).collect();
        assert_eq!(samples.len(), 2);
        assert!((number("avg_ns") - (samples[0] + samples[1]) / 2.0).abs() <= 1.0);
        let tokens = number("n_prompt") + number("n_gen");
        let rate = row["samples_ts"][0].as_f64().unwrap();
        assert!((rate * samples[0] / 1e9 / tokens - 1.0).abs() < 1e-9);
        let share = number("gb_s") / number("bandwidth_gb_s");
        assert!((share / number("bandwidth_share") - 1.0).abs() < 1e-9);
    }
}

#[test]
fn encoders_have_texts_a_second_and_their_share_of_the_limit() {
    let args = ["bench", &model("bert"), "-p", "32", "-s", "1,4", "-r", "2", "-o", "json"];
    let rows: Value = serde_json::from_str(&Place::new().text(&args)).unwrap();
    assert_eq!(tests(&rows), ["pp32", "pp32 x4"]);
    let mut operations = Vec::new();
    for (row, texts) in rows.as_array().unwrap().iter().zip([1.0, 4.0]) {
        let fields: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields[..FIELDS.len()], FIELDS);
        assert_eq!(fields[FIELDS.len()..], ["avg_texts_s", "gop_s", "compute_share"]);
        let number = |key: &str| row[key].as_f64().unwrap();
        assert_eq!((number("n_prompt"), number("n_gen")), (32.0, 0.0));
        // Tokens a second are those of all texts.
        let ns: Vec<f64> =
            row["samples_ns"].as_array().unwrap().iter().map(|ns| ns.as_f64().unwrap()).collect();
        let rates = ns.iter().map(|ns| 32.0 * texts / ns * 1e9).sum::<f64>() / ns.len() as f64;
        assert!((number("avg_ts") / rates - 1.0).abs() < 1e-9, "{row}");
        assert!((number("avg_texts_s") * 32.0 / rates - 1.0).abs() < 1e-9, "{row}");
        // The limit is a speed of the device's arithmetic, which no run can exceed by much.
        let share = number("compute_share");
        assert!(share > 0.0 && share < 1.5, "{row}");
        operations.push(number("gop_s") / number("avg_texts_s"));
    }
    // A text has the same operations in company, and at least two for each weight of a matrix and
    // each token: the layers have more than 50 000 weights.
    assert!((operations[0] / operations[1] - 1.0).abs() < 0.05, "{operations:?}");
    assert!(operations[0] > 2.0 * 32.0 * 50_000.0 / 1e9, "{operations:?}");
}

#[test]
fn sequences_generate_at_the_same_time() {
    let rows = bench(&Place::new(), &["-p", "0", "-n", "4", "-s", "1,2", "-o", "json"]);
    let rows: Value = serde_json::from_str(&rows).unwrap();
    assert_eq!(tests(&rows), ["tg4", "tg4 x2"]);
    for (row, tokens) in rows.as_array().unwrap().iter().zip([4.0, 8.0]) {
        let [ns, rate] = ["samples_ns", "samples_ts"].map(|key| row[key][0].as_f64().unwrap());
        assert!((rate * ns / 1e9 / tokens - 1.0).abs() < 1e-9, "{row}");
    }
}

#[test]
fn encoders_read_texts_at_once() {
    let place = Place::new();
    let bert = model("bert");
    let bench = |flags: &[&str]| -> Value {
        let args = [&["bench", &bert, "-r", "1", "-o", "json"], flags].concat();
        serde_json::from_str(&place.text(&args)).unwrap()
    };
    let rows = bench(&["-p", "8,16", "-s", "1,4", "--trace", "trace.json"]);
    assert_eq!(tests(&rows), ["pp8", "pp8 x4", "pp16", "pp16 x4"]);
    for (row, tokens) in rows.as_array().unwrap().iter().zip([8.0, 32.0, 16.0, 64.0]) {
        let [ns, rate] = ["samples_ns", "samples_ts"].map(|key| row[key][0].as_f64().unwrap());
        assert!((rate * ns / 1e9 / tokens - 1.0).abs() < 1e-9, "{row}");
        assert!(row["step_ms"]["compute"].as_f64().unwrap() > 0.0, "{row}");
        let texts = row["n_sequences"].as_f64().unwrap();
        assert!((row["avg_texts_s"].as_f64().unwrap() * ns / 1e9 / texts - 1.0).abs() < 1e-9);
        assert!(row["compute_share"].as_f64().unwrap() > 0.0, "{row}");
    }
    // By default as long as it may be, and no longer.
    assert_eq!(tests(&bench(&[])), ["pp256"]);
    let error = failure(&place.run(&["bench", &bert, "-p", "257"]));
    assert!(error.starts_with("--n-prompt: expected 1 to 256, found 257"), "{error}");
}

#[test]
fn a_profile_accounts_for_the_run() {
    let flags = ["-p", "0", "-n", "200", "-o", "json", "-t", "1", "--profile"];
    let rows: Value = serde_json::from_str(&bench(&Place::new(), &flags)).unwrap();
    let parts = rows[0]["profile"].as_array().unwrap();
    // Of one step of 200, not of all; another process may have the core for some of them.
    let profiled: f64 = parts.iter().map(|part| part["ms"].as_f64().unwrap()).sum();
    let step = rows[0]["samples_ns"][0].as_f64().unwrap() / 200e6;
    assert!(profiled < 50.0 * step, "{profiled} ms in a step of {step} ms");
    let has = |what: &str| parts.iter().any(|part| part["what"] == what);
    assert!(has("attention") && has("ffn_gate + ffn_up") && has("glu, quantize"), "{parts:?}");
    assert!(parts.iter().all(|part| part["ms"].as_f64().unwrap() > 0.0));
}

#[test]
fn a_trace_is_the_timeline_of_a_run() {
    let place = Place::new();
    let flags = ["-p", "8", "-n", "3", "-t", "2", "-o", "json", "--trace", "trace.json"];
    let rows: Value = serde_json::from_str(&bench(&place, &flags)).unwrap();
    let trace: Value =
        serde_json::from_slice(&fs::read(place.path("trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for (id, (test, steps)) in [("pp8", 1), ("tg3", 3)].into_iter().enumerate() {
        let of = |ph: &str| {
            let of = |event: &&Value| event["pid"] == id && event["ph"] == ph;
            events.iter().filter(of).collect::<Vec<_>>()
        };
        let names = of("M").into_iter().map(|event| event["args"]["name"].as_str().unwrap());
        let names: Vec<&str> = names.collect();
        assert!(names[0].starts_with(test), "{names:?}");
        assert_eq!(names[1..], ["thread 0", "thread 1"]);
        let (mut ends, mut lengths) = ([0.0; 2], [0.0; 2]);
        for event in of("X") {
            let number = |key: &str| event[key].as_f64().unwrap();
            let thread = event["tid"].as_u64().unwrap() as usize;
            // One after the other, without a gap.
            assert!((number("ts") - ends[thread]).abs() < 1e-3 && number("dur") > 0.0, "{event}");
            ends[thread] = number("ts") + number("dur");
            lengths[thread] += number("dur");
        }
        assert!((ends[0] - ends[1]).abs() < 1e-3, "both threads are there to the end");
        for thread in 0..2 {
            let count = |name: &str, category: &str| {
                let is_one = |event: &&&Value| {
                    let name = event["name"].as_str().unwrap().split("; ").any(|part| part == name);
                    event["tid"] == thread && event["cat"] == category && name
                };
                of("X").iter().filter(is_one).count()
            };
            // Of 3 layers, in every step.
            assert_eq!(count("attention", "compute"), 3 * steps);
            assert_eq!(count("ffn_gate + ffn_up", "compute"), 3 * steps);
            assert!(count("barrier", "wait") >= 6 * steps);
        }
        // The split of a step adds up to the whole run.
        let split = rows[id]["step_ms"].as_object().unwrap();
        let part = |key: &str| split[key].as_f64().unwrap();
        assert_eq!(part("transfers"), 0.0);
        assert!(part("compute") > 0.0 && part("host") > 0.0 && part("waiting") > 0.0, "{split:?}");
        let sum = part("compute") + part("host") + part("waiting");
        assert!((sum * steps as f64 / (ends[0] / 1e3) - 1.0).abs() < 1e-3, "{split:?} {ends:?}");
    }
    let table = bench(&place, &["-p", "8", "-n", "3", "--profile"]);
    assert!(
        table.contains("\n| a step of | ms | compute | transfers | host | waiting |\n"),
        "{table}"
    );
    assert!(table.contains("\n| tg3 | "), "{table}");
}

/// The tiny Mixtral: of 4 experts in each of its layers, every token chooses 2.
#[test]
fn a_profile_counts_the_choices_of_experts() {
    let place = Place::new();
    let bench = |format| {
        let flags = ["-p", "8", "-n", "3", "-d", "5", "-r", "1", "--profile", "-o", format];
        place.text(&[&["bench", &model("mixtral")], &flags[..]].concat())
    };
    let rows: Value = serde_json::from_str(&bench("json")).unwrap();
    for (row, tokens) in rows.as_array().unwrap().iter().zip([8, 3]) {
        let layers = row["experts"].as_array().unwrap();
        assert_eq!(layers.len(), 2);
        for (i, layer) in layers.iter().enumerate() {
            assert_eq!(layer["layer"], i);
            let counts = layer["counts"].as_array().unwrap();
            assert_eq!(counts.len(), 4);
            let sum: u64 = counts.iter().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!(sum, 2 * tokens, "of the measured tokens only");
            let ms = layer["ms"].as_array().unwrap().iter().map(|ms| ms.as_f64().unwrap());
            let took: Vec<bool> = ms.map(|ms| ms > 0.0).collect();
            let chosen = counts.iter().map(|count| count.as_u64().unwrap() > 0);
            assert!(chosen.eq(took), "what is chosen takes time: {layer}");
        }
    }
    let table = bench("md");
    assert!(
        table.contains("| pp8 @ d5: layer | experts chosen | least | mean | most |"),
        "{table}"
    );
    assert!(table.lines().any(|line| line.starts_with("| 1 | ") && line.contains(" | 4.0 | ")));
    let dense = self::bench(&place, &["-p", "8", "-n", "0", "-o", "md", "--profile"]);
    assert!(!dense.contains("experts"), "{dense}");
}

#[test]
fn choices_of_experts_are_recorded_and_drawn() {
    let place = Place::new();
    let flags = ["-p", "8", "-n", "3", "-d", "5", "-r", "1", "-b", "6"];
    let out = ["--record-routing", "a.routing", "--experts", "a.svg"];
    place.text(&[&["bench", &model("mixtral")], &flags[..], &out].concat());
    let trace = RoutingTrace::read(&place.path("a.routing")).unwrap();
    assert_eq!((trace.experts(), trace.used(), trace.layers()), (4, 2, &[0, 1][..]));
    assert_eq!(trace.tokens(), 8 + 3, "those of the tests, without their depth");
    // The image is of the model's own counts.
    let svg = fs::read_to_string(place.path("a.svg")).unwrap();
    let (prefill, decode) = svg.split_once("tg3 @ d5: choices").unwrap();
    assert!(prefill.contains("pp8 @ d5: choices"), "{svg}");
    for (svg, tokens) in [(prefill, 0..8), (decode, 8..11)] {
        for (layer, expert) in (0..2).flat_map(|layer| (0..4).map(move |expert| (layer, expert))) {
            let chose = |token: &usize| trace.chosen(*token, layer).contains(&expert);
            let square = match tokens.clone().filter(chose).count() {
                0 => None,
                count => Some(format!("layer {layer}, expert {expert}: {count}<")),
            };
            let any = format!("layer {layer}, expert {expert}: ");
            let is_there = svg.contains(square.as_ref().unwrap_or(&any));
            assert_eq!(is_there, square.is_some(), "{any}{square:?} in {svg}");
        }
    }
    for (name, more, wanted) in [
        ("llama", &["--record-routing", "b"][..], "expected a model with experts, found none"),
        ("llama", &["--experts", "b"], "--experts: expected a model with experts"),
        ("mixtral", &["--record-routing", "b", "-s", "2"], "one sequence (-s 1)"),
        ("mixtral", &["--record-routing", "no/b"], "cannot write no/b"),
    ] {
        let model = model(name);
        let args = [&["bench", &model, "-p", "8", "-n", "1", "-r", "1"], more].concat();
        let error = failure(&place.run(&args));
        assert!(error.contains(wanted), "{more:?}: {error}");
    }
    assert!(!place.path("b").exists());
}

#[test]
fn csv_has_the_same_fields() {
    let csv = bench(&Place::new(), &["-p", "8", "-n", "0", "-o", "csv"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0], FIELDS.join(","));
    let inner = lines[1].strip_prefix('"').and_then(|line| line.strip_suffix('"')).unwrap();
    let cells: Vec<&str> = inner.split("\",\"").collect();
    assert_eq!(cells.len(), FIELDS.len());
    let cell = |name| cells[FIELDS.iter().position(|field| *field == name).unwrap()];
    assert_eq!((cell("n_prompt"), cell("test")), ("8", "pp8"));
    assert_eq!(cell("samples_ns").split(';').count(), 2);
}

#[test]
fn lists_and_ranges_multiply() {
    let place = Place::new();
    let flags = ["-p", "0,4-8+4", "-n", "1-4*2", "-d", "0,2", "-t", "1,2", "-o", "json"];
    let rows: Value = serde_json::from_str(&bench(&place, &flags)).unwrap();
    let plain = ["pp4", "pp8", "tg1", "tg2", "tg4"];
    let deep = ["pp4 @ d2", "pp8 @ d2", "tg1 @ d2", "tg2 @ d2", "tg4 @ d2"];
    let once = [&plain[..], &deep].concat();
    assert_eq!(tests(&rows), [&once[..], &once].concat());
    assert_eq!((&rows[0]["n_threads"], &rows[10]["n_threads"]), (&1.into(), &2.into()));
}

#[test]
fn a_context_beyond_the_trained_one_is_spoken_of() {
    let output = Place::new().run(&[
        "bench",
        &model("llama"),
        "-p",
        "8",
        "-n",
        "0",
        "-r",
        "1",
        "-d",
        "1024",
    ]);
    assert!(output.status.success());
    let note = "a context of 1032 tokens: the model was trained for 1024";
    assert!(stderr(&output).contains(note), "{}", stderr(&output));
}

#[test]
fn what_cannot_be_measured_is_named() {
    let place = Place::new();
    let model = model("llama");
    for (flags, needle) in [
        (&["-p", "0", "-n", "0"][..], "nothing to measure"),
        (&["-p", "x"], "--n-prompt: expected a whole number, found `x`"),
        (&["-p", "8-4"], "`8-4`"),
        (&["-p", "18446744073709551615", "-d", "1"], "--n-prompt"),
        (&["-d", "1000000000"], "are missing"),
        (&["-b", "0"], "--batch-size"),
        (&["-s", "0"], "--n-sequences: expected 1 to"),
        (&["-t", "0"], "threads"),
        (&["--device", "nonsense"], "nonsense"),
    ] {
        let error = failure(&place.run(&[&["bench", &model], flags].concat()));
        assert!(error.contains(needle), "{flags:?}: {error}");
    }
    assert_eq!(place.run(&["bench", &model, "-r", "0"]).status.code(), Some(2));
    assert_eq!(place.run(&["bench", &model, "-o", "xml"]).status.code(), Some(2));
}
