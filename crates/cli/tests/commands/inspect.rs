//! `inspect`: text, JSON, plan and memory, and that their numbers agree.

use serde_json::Value;

use crate::place::{Place, model, reference};

/// The tiny models that differ in what they hold.
const MODELS: [&str; 6] = ["llama", "llama3-tied", "llama-q4_k_m", "gemma2", "gemma3", "qwen2"];

#[test]
fn the_summary_is_short() {
    let place = Place::new();
    for name in MODELS {
        let summary = place.text(&["show", &model(name)]);
        assert!(summary.lines().count() <= 16, "{summary}");
        assert_eq!(place.text(&["inspect", &model(name)]), summary);
        for key in ["file", "architecture", "formats", "parameters", "context", "sampling"] {
            assert!(summary.lines().any(|line| line.starts_with(key)), "{key}: {summary}");
        }
    }
    // What cannot run has a summary too, and no text of a file reaches the terminal as it is.
    let strange = place.variant("llama", |metadata| {
        metadata.insert(
            "general.architecture",
            bodkin_gguf::Value::String(b"x\x1b[2J".to_vec().into()),
        );
    });
    let summary = place.text(&["show", &strange]);
    assert!(summary.contains("\ncannot run "), "{summary}");
    assert!(!summary.contains('\u{1b}'), "{summary}");
}

#[test]
fn the_text_has_all_keys_and_tensors() {
    let place = Place::new();
    for name in MODELS {
        let model = model(name);
        let (text, json) = (
            place.text(&["inspect", &model, "--metadata", "--tensors"]),
            place.json(&["inspect", &model, "--json"]),
        );
        let tensors = json["tensors"].as_array().unwrap();
        let first = text.lines().next().unwrap();
        assert!(first.contains(&format!("{}.gguf", name)), "{first}");
        assert!(first.contains(&format!("{} tensors", tensors.len())), "{first}");
        for key in json["metadata"].as_object().unwrap().keys() {
            assert!(text.contains(&format!("\n{key} = ")), "{key}");
        }
        for tensor in tensors {
            let start = format!("\n{} ", tensor["name"].as_str().unwrap());
            assert!(text.contains(&start), "{start}");
        }
        assert!(text.lines().all(|line| line.len() < 1000), "long arrays are cut");
    }
}

#[test]
fn zeros_are_counted_in_dense_tensors() {
    let place = Place::new();
    let zeros = |flags: &[&str]| place.text(&[&["inspect", &model("llama")], flags].concat());
    let text = zeros(&["--zeros", "--verbose"]);
    assert_eq!(text, zeros(&["--zeros", "--tensors"]));
    let mut tensors = text.lines().filter(|line| line.contains(".weight "));
    assert!(
        tensors.clone().count() > 20 && tensors.all(|line| line.ends_with(" % zeros")),
        "{text}"
    );
    // By kind of tensor, unless they are asked for.
    let summary = zeros(&["--zeros"]);
    assert!(text.ends_with(summary.split_once("\n\n").unwrap().1), "{summary}");
    let kinds: Vec<&str> = summary.lines().filter(|line| line.ends_with(" % zeros")).collect();
    assert!((8..20).contains(&kinds.len()), "{summary}");
    assert!(kinds.iter().any(|line| line.starts_with("blk.*.ffn_up.weight ")), "{summary}");
    let count = |line: &str| line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap();
    let (all, kinds) = kinds.split_last().unwrap();
    assert!(all.starts_with("all "), "{summary}");
    assert_eq!(count(all), kinds.iter().map(|line| count(line)).sum::<usize>(), "{summary}");
}

#[test]
fn the_json_says_what_the_reference_says() {
    let place = Place::new();
    let json = place.json(&["inspect", &model("llama"), "--json"]);
    let reference = reference("llama");
    for (key, value) in reference["gguf"]["metadata"].as_object().unwrap() {
        assert_eq!(&json["metadata"][key], value, "{key}");
    }
    let tensors = json["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 30);
    assert!(tensors.iter().all(|tensor| tensor["format"] == "F32"));
    let embedding = tensors.iter().find(|tensor| tensor["name"] == "token_embd.weight").unwrap();
    assert_eq!(embedding["shape"], serde_json::json!([384, 64]));
    assert_eq!(embedding["bytes"], 4 * 384 * 64);
}

#[test]
fn the_plan_has_an_operation_a_line() {
    let place = Place::new();
    for (name, head) in [
        ("llama", "plan llama vocabulary 384 context 1024"),
        ("gemma3", "plan gemma3 vocabulary 400 context 1024"),
    ] {
        let plan = place.text(&["inspect", &model(name), "--plan"]);
        let mut lines = plan.lines();
        assert_eq!(lines.next(), Some(head));
        for (i, line) in lines.clone().enumerate() {
            assert!(line.starts_with(&format!("%{i} [")), "{line}");
        }
        assert!(lines.next_back().unwrap().contains("= logits "), "{plan}");
    }
}

#[test]
fn the_weights_in_the_file_are_the_tensors_that_the_plan_names() {
    let place = Place::new();
    for name in MODELS {
        let model = model(name);
        let plan = place.text(&["inspect", &model, "--plan"]);
        let used = |tensor: &&Value| {
            let name = tensor["name"].as_str().unwrap();
            plan.split_whitespace().any(|word| word == name)
        };
        let json = place.json(&["inspect", &model, "--json"]);
        let tensors = json["tensors"].as_array().unwrap();
        let bytes: u64 = tensors.iter().filter(used).map(|t| t["bytes"].as_u64().unwrap()).sum();
        assert!(bytes > 0);
        let memory = place.json(&["inspect", &model, "--memory", "--json"]);
        assert_eq!(memory["file_weight_bytes"], bytes, "{name}");
    }
}

#[test]
fn memory_grows_with_the_context_and_the_step() {
    let place = Place::new();
    let model = model("llama");
    let memory =
        |flags: &[&str]| place.json(&[&["inspect", &model, "--memory", "--json"], flags].concat());
    let bytes = |memory: &Value, key: &str| memory[key].as_u64().unwrap();
    let total = |memory: &Value| {
        let parts = ["weight", "state", "scratch", "text", "program"];
        parts.iter().map(|part| bytes(memory, &format!("{part}_bytes"))).sum::<u64>()
    };
    let (small, large) = (memory(&["--ctx-size", "1024"]), memory(&["--ctx-size", "8192"]));
    assert_eq!((&small["context"], &large["context"]), (&1024.into(), &8192.into()));
    // Keys and values of 3 layers with 2 heads of 16, as precise as the weights.
    assert_eq!(small["kv_bytes_per_1k_tokens"], 4 * 1000 * 3 * 2 * 2 * 16);
    assert_eq!(bytes(&small, "total_bytes"), total(&small));
    assert_eq!(small["kv_bytes_windowed"], 0);
    assert_eq!(small["recurrent_bytes_per_sequence"], 0);
    let grown = bytes(&large, "state_bytes") - bytes(&small, "state_bytes");
    assert_eq!(grown, (8192 - 1024) * bytes(&small, "kv_bytes_per_1k_tokens") / 1000);
    assert_eq!(small["weight_bytes"], large["weight_bytes"]);
    // Half the bytes, and a scale of two bytes for each head of 16.
    for (kv_type, bytes_per_head) in [("f16", 2 * 16), ("q8_0", 16 + 2)] {
        let memory = memory(&["--ctx-size", "1024", "--kv-type", kv_type]);
        assert_eq!(
            memory["kv_bytes_per_1k_tokens"],
            1000 * 3 * 2 * 2 * bytes_per_head,
            "{kv_type}"
        );
        let saved = bytes(&small, "state_bytes") - bytes(&memory, "state_bytes");
        assert!(saved > 0 && total(&memory) == bytes(&memory, "total_bytes"));
    }
    let short = memory(&["--ctx-size", "1024", "--batch-size", "1"]);
    assert!(bytes(&short, "scratch_bytes") < bytes(&small, "scratch_bytes"));

    let windowed = place.json(&["inspect", &self::model("gemma3"), "--memory", "--json"]);
    assert!(bytes(&windowed, "kv_bytes_windowed") > 0);
    assert!(bytes(&windowed, "kv_bytes_windowed") < bytes(&windowed, "state_bytes"));

    let text = place.text(&["inspect", &model, "--memory", "--ctx-size", "1024"]);
    assert!(text.contains("state, context of 1024 tokens"), "{text}");
    assert!(text.contains("weights in the file"), "{text}");
    assert_eq!(place.run(&["inspect", &model, "--plan", "--json"]).status.code(), Some(2));
}

#[test]
fn cached_experts_of_a_gpu_are_in_memory_of_the_host() {
    let place = Place::new();
    let bytes = |budget: &str| {
        let model = model("qwen3moe-q4_k_m");
        let flags = ["--memory", "--json", "--device", "wgpu", "--expert-budget", budget];
        let memory = place.json(&[&["inspect", &model], &flags[..]].concat());
        ["weight_bytes", "host_expert_bytes"].map(|key| memory[key].as_u64().unwrap())
    };
    let ([all, none], [half, host]) = (bytes("100%"), bytes("50%"));
    assert_eq!(none, 0);
    // Half of the experts have a slot; the table of slots takes a little.
    let saved = all - half;
    assert!(2 * saved <= host && host < 3 * saved, "{saved} of {host}");
}
