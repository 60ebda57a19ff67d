//! Models whose values are not finite: one line says where they begin, sampled or not.

use crate::place::{Place, failure, model};

/// Where NaN in a weight of layer 1 shows first.
const PLACE: &str = "NaN or infinity first appears in layer 1, the input of ";

#[test]
fn text_and_logits_say_where_nan_begins() {
    let place = Place::new();
    std::fs::write(place.path("text.txt"), "Some words to read, again and again. ".repeat(20))
        .unwrap();
    for (of, weight, next, value) in [
        ("llama-q4_k_m", "blk.1.attn_norm.weight", "blk.1.attn_q.weight", f32::NAN),
        ("llama-q4_k_m", "blk.1.ffn_norm.weight", "blk.1.ffn_gate.weight", f32::INFINITY),
        ("mamba2", "blk.1.ssm_dt.bias", "blk.1.ssm_out.weight", f32::NAN),
    ] {
        let broken = place.with_first_value(of, weight, value);
        let logits = ["logits", &broken, "--tokens", "1,2,3", "--output", "logits.npy"];
        let run = ["run", &broken, "Hello", "--raw", "-n", "8"];
        let greedy = [&run[..], &["--temperature", "0"]].concat();
        // The engine's own sampler.
        let typical = [&run[..], &["--typical", "0.9"]].concat();
        let bench = ["bench", &broken, "-p", "0", "-n", "4", "-r", "1"];
        let prefill = ["bench", &broken, "-p", "8", "-n", "0", "-r", "1"];
        let imatrix = ["imatrix", &broken, "-f", "text.txt", "-o", "new.gguf", "-c", "32"];
        for args in [&logits[..], &run, &greedy, &typical, &bench, &prefill, &imatrix] {
            let line = failure(&place.run(args));
            assert!(line.ends_with(&format!("{PLACE}{next}")), "{weight}: {args:?}: {line}");
        }
        assert!(!place.path("logits.npy").exists() && !place.path("new.gguf").exists());
    }
}

#[test]
fn embeddings_say_where_nan_begins() {
    let place = Place::new();
    let broken = place.with_first_value("bert", "blk.1.attn_output_norm.bias", f32::NAN);
    let line = failure(&place.run(&["embed", &broken, "Hello", "Some more words"]));
    assert!(line.ends_with(&format!("{PLACE}blk.1.ffn_up.weight")), "{line}");
}

#[test]
fn the_head_is_named_where_all_layers_are_finite() {
    let place = Place::new();
    let broken = place.with_first_value("llama-q4_k_m", "output_norm.weight", f32::NAN);
    let line = failure(&place.run(&["run", &broken, "Hello", "--raw", "-n", "8"]));
    assert!(line.ends_with("first appears in the head, the input of output.weight"), "{line}");
    assert!(place.run(&["run", &model("llama-q4_k_m"), "Hi", "--raw", "-n", "8"]).status.success());
}
