//! `plan`: that its parts are those of `inspect`, and what it says of a model that does not fit.

use crate::place::{Place, model};

#[test]
fn parts_are_those_of_the_file_and_of_memory() {
    let place = Place::new();
    for name in ["llama", "gemma3", "qwen3moe-q4_k_m", "falcon-h1", "mamba2"] {
        let model = model(name);
        let common = ["--device", "cpu", "--ctx-size", "512", "--json"];
        let plan = place.json(&[&["plan", &model], &common[..]].concat());
        let memory = place.json(&[&["inspect", &model, "--memory"], &common[..]].concat());
        let parts = plan["file_bytes"].as_object().unwrap();
        let file: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(memory["file_weight_bytes"], file, "{name}");
        for key in ["weight_bytes", "scratch_bytes", "context", "bytes_read_per_token"] {
            let state = memory["recurrent_bytes_per_sequence"].as_u64().unwrap();
            let state = if key == "bytes_read_per_token" { state } else { 0 };
            assert_eq!(plan[key].as_u64(), memory[key].as_u64().map(|n| n + state), "{name} {key}");
        }
        let kv = plan["kv_bytes"].as_array().unwrap().iter();
        let kv: u64 = kv.map(|kv| kv["bytes"].as_u64().unwrap()).sum();
        let state = kv + plan["recurrent_bytes"].as_u64().unwrap();
        assert_eq!(memory["state_bytes"], state, "{name}");
        let sizes = ["weight_bytes", "scratch_bytes"].map(|key| plan[key].as_u64().unwrap());
        assert_eq!(plan["total_bytes"], sizes.iter().sum::<u64>() + state, "{name}");
        let speed = |key: &str| plan[key].as_f64().unwrap();
        assert!(speed("tokens_per_second_full") <= speed("tokens_per_second"), "{name}");
        assert_eq!((&plan["fits"], &plan["would_fit"]), (&true.into(), &serde_json::json!([])));
    }
    let text = place.text(&["plan", &model("gemma3"), "--device", "cpu", "--parallel", "3"]);
    for part in ["requests at a time: 3", "windows of 24 tokens", "attention", "at most"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_what_would() {
    let place = Place::new();
    let refused = |flags: &[&str]| {
        let model = model("llama");
        let output = place.run(&[&["plan", &model, "--device", "cpu"], flags].concat());
        assert_eq!(output.status.code(), Some(1), "{flags:?}");
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (out, err)
    };
    // It takes 18 MB with 16 requests, and 6 MB with one.
    let flags = ["--parallel", "16", "--ctx-size", "1024", "--memory", "8M"];
    let (out, err) = refused(&flags);
    assert!(err.contains("8.00 MB are free") && err.ends_with("are missing\n"), "{err}");
    let fits: Vec<&str> = out.lines().skip_while(|line| *line != "would fit:").skip(1).collect();
    assert!(fits.len() >= 4, "{out}");
    for line in fits {
        let Some((flags, bytes)) = line.trim().split_once(": ") else { panic!("{line}") };
        if !flags.starts_with("--") {
            continue;
        }
        let wanted: Vec<&str> = flags.split(' ').collect();
        let given = match flags.contains("--parallel") {
            true => &["--memory", "8M"][..],
            false => &["--memory", "8M", "--parallel", "16"],
        };
        let model = model("llama");
        let args = [&["plan", &model, "--device", "cpu"], &wanted[..], given].concat();
        let text = place.text(&args);
        assert!(text.contains(bytes), "{line}: {text}");
    }
    let (out, err) = refused(&["--ctx-size", "1024", "--budget", "100K"]);
    assert!(out.contains("nothing with this device and this file"), "{out}");
    assert!(err.contains("100.00 kB are free"), "{err}");
}

#[test]
fn what_is_no_trace_is_refused() {
    let place = Place::new();
    let trace = place.path("no trace");
    std::fs::write(&trace, "text").unwrap();
    let trace = trace.to_str().unwrap();
    let output = place.run(&["plan", &model("qwen3moe-q4_k_m"), "--routing", trace]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("bodkin routing 1"), "{error}");
}

#[test]
fn a_budget_of_experts_that_changes_nothing_is_named() {
    let place = Place::new();
    for (name, expected) in [("llama", "has no experts"), ("qwen3moe-q4_k_m", "all experts fit")] {
        let common = ["run", &model(name), "--device", "cpu", "-n", "1", "a"];
        let output = place.run(&[&common[..], &["--expert-budget", "8G"]].concat());
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains("expert-budget changes nothing") && said.contains(expected),
            "{said}"
        );
        let said = String::from_utf8(place.run(&common).stderr).unwrap();
        assert!(!said.contains("expert-budget"), "{said}");
    }
}

#[test]
fn experts_without_room_have_slots_and_hits() {
    let place = Place::new();
    let (model, trace) = (model("qwen3moe-q4_k_m"), place.path("trace"));
    let trace = trace.to_str().unwrap();
    let bench = ["bench", &model, "--device", "cpu", "-p", "0", "-n", "64", "-r", "1"];
    place.text(&[&bench[..], &["--record-routing", trace]].concat());
    let plan = |flags: &[&str]| {
        let common = ["plan", &model, "--device", "cpu", "--ctx-size", "1024", "--json"];
        place.json(&[&common[..], flags].concat())
    };
    let (all, half) = (plan(&[]), plan(&["--expert-budget", "50%"]));
    assert_eq!(all["expert_slots"], serde_json::Value::Null);
    let [slots, experts] =
        ["slots", "experts"].map(|key| half["expert_slots"][key].as_u64().unwrap());
    assert_eq!(2 * slots, experts);
    let number = |plan: &serde_json::Value, key: &str| plan[key].as_f64().unwrap();
    assert!(number(&half, "weight_bytes") < number(&all, "weight_bytes"));
    assert_eq!(number(&half, "host_expert_bytes"), 0.0, "they stay in the file");
    // Larger steps read each expert from the file less often.
    assert!(number(&half, "scratch_bytes") > 1.5 * number(&all, "scratch_bytes"));
    let small = plan(&["--expert-budget", "50%", "--batch-size", "512"]);
    assert_eq!(number(&small, "scratch_bytes"), number(&all, "scratch_bytes"));
    // But not where their scratch has no room.
    let between = (number(&small, "total_bytes") + number(&half, "total_bytes")) / 2.0;
    let between = between.round().to_string();
    let limited = plan(&["--expert-budget", "50%", "--memory", &between]);
    assert_eq!(number(&limited, "scratch_bytes"), number(&small, "scratch_bytes"));
    let of_trace = plan(&["--expert-budget", "50%", "--routing", trace]);
    let rates = [&half, &of_trace].map(|plan| number(plan, "hit_rate"));
    assert!(
        rates.iter().all(|rate| (0.2..1.0).contains(rate)) && rates[0] != rates[1],
        "{rates:?}"
    );
    let output = place.run(&["plan", &model, "--device", "cpu", "--routing", trace]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("experts do not all fit"), "{error}");
}
