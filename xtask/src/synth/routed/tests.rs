//! Models with a trace follow it.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, Limits, OutputRequest, PAGE_TOKENS, PageTable, SamplingParams, Span, Step,
};
use bodkin_cpu::Cpu;
use bodkin_eval::Recorder;
use bodkin_gguf::File;

use super::*;
use crate::expert_trace::Generated;
use crate::synth::{Size, write};

/// Four of 16 experts, or another trace.
fn generated(experts: u16, used: u16) -> RoutingTrace {
    let (layers, first_layer, tokens, seed) = (2, 0, 300, 5);
    let generated = Generated { experts, used, layers, first_layer, tokens, seed };
    generated.trace(Path::new("generated")).unwrap()
}

/// The shape of the trace with some layers that have experts, and of the given width.
fn shape(width: u32, kind: Kind) -> Shape {
    let layers = if let Kind::SharedExpert { .. } = kind { 3 } else { 2 };
    Shape { width, layers, hidden: 256, kind, vocabulary: 512, tied: false, ..Size::Small.shape() }
}

/// What tokens choose that a model generates greedily after a prompt of one page, and these tokens.
fn follow(shape: &Shape, format: &str, prompt: &[u32], steps: usize) -> (RoutingTrace, Vec<u32>) {
    let (Kind::Experts { count, used } | Kind::SharedExpert { count, used, .. }) = shape.kind
    else {
        panic!("experts")
    };
    let trace = generated(count as u16, used as u16);
    let routed = Routed::new(trace, shape, 1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("routed.gguf");
    let format = Format::from_name(format).unwrap();
    write((shape, Some(&routed)), format, 0.0, 1, "routed", &out).unwrap();
    let file = Arc::new(File::open(&out).unwrap());
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let mut recorder = Recorder::new(&plan, &out).unwrap();
    let pages = (prompt.len() + steps).div_ceil(PAGE_TOKENS);
    let rows = prompt.len();
    let limits = Limits { tokens: rows, outputs: 1, pages: vec![pages], state_slots: 0 };
    let backend = Cpu::new(Some(1)).unwrap();
    let mut model = backend.load(plan, &file, &limits, &|_, _| ()).unwrap();
    let greedy = SamplingParams::greedy();
    let (mut tokens, mut next) = (Vec::new(), prompt.to_vec());
    // The prompt, then all other steps at once.
    for (position, steps) in [(0, 1), (rows, steps)] {
        let tables = vec![PageTable { skipped: 0, pages: (0..pages as u32).collect() }];
        let (len, is_prefill) = (next.len(), position == 0);
        let span = Span { len, position, tables, state_slot: 0, is_prefill };
        let mut batch = Batch::default();
        batch.push(span, &next);
        batch.output_last();
        let rows = [OutputRequest::Token(&greedy)];
        let step = Step { batch: &batch, requests: &rows, steps, observer: Some(&mut recorder) };
        let sink = &mut |output: bodkin_backend::StepOutput<'_>| {
            tokens.extend(output.tokens[0]);
            ControlFlow::Continue(())
        };
        model.step(step, sink).unwrap();
        next = vec![*tokens.last().unwrap()];
    }
    (recorder.finish(&out).unwrap(), tokens)
}

#[test]
fn greedy_decoding_follows_the_trace() {
    let experts = Kind::Experts { count: 16, used: 4 };
    let shared = Kind::SharedExpert { count: 32, used: 8, hidden: 256 };
    for (shape, format, steps) in [
        (shape(256, experts), "Q4_K", 256),
        // The codes have 256 of the columns.
        (shape(384, experts), "F16", 256),
        (shape(256, shared), "Q8_0", 256),
    ] {
        let prompt = [3, 511, 200, 250];
        let (found, tokens) = follow(&shape, format, &prompt, 300);
        let wanted: Vec<u32> = (251..552).map(|token| token % steps).collect();
        assert_eq!(tokens, wanted, "{format}");
        let trace = generated(found.experts() as u16, found.used() as u16);
        let (mut equal, mut all) = (0, 0);
        for (i, token) in prompt.iter().chain(&tokens[..300]).enumerate() {
            for layer in 0..2 {
                let wanted = trace.chosen((token % steps) as usize, layer);
                let found = found.chosen(i, layer);
                equal += found.iter().filter(|expert| wanted.contains(expert)).count();
                all += wanted.len();
            }
        }
        assert_eq!(found.tokens(), prompt.len() + 300);
        assert!(equal as f64 >= 0.99 * all as f64, "{format}: {equal} of {all} choices are equal");
    }
}

#[test]
fn traces_of_other_shapes_are_refused() {
    let experts = Kind::Experts { count: 16, used: 4 };
    for (trace, shape, wanted) in [
        (generated(16, 4), Size::Tiny.shape(), "expected a shape with experts"),
        (generated(16, 5), shape(256, experts), "expected 4 of 16 experts"),
        (
            generated(16, 4),
            Shape { layers: 3, ..shape(256, experts) },
            "expected 3 layers or more, as the shape has, found 2",
        ),
    ] {
        let error = Routed::new(trace, &shape, 0).err().unwrap().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
