//! Small files in formats of all kinds load, plan, run and have a tokenizer.

use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Limits, PageTable, Reference, Span};
use bodkin_engine::Tokenizer;
use bodkin_gguf::File;

use super::*;

fn tiny(format: &str, seed: u64) -> File {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("tiny.gguf");
    run(&Args { shape: Size::Tiny, format: format.to_owned(), out: out.clone(), seed }).unwrap();
    File::open(out).unwrap()
}

#[test]
fn tiny_models_run() {
    for name in ["F32", "F16", "BF16", "Q8_0", "q4_0", "Q4_K", "Q6_K", "IQ2_XS", "TQ2_0", "MXFP4"] {
        let file = Arc::new(tiny(name, 1));
        let format = Format::from_name(name).unwrap();
        for tensor in file.tensors().iter().filter(|t| t.name.starts_with("blk.")) {
            let is_norm = tensor.name.contains("norm");
            assert_eq!(
                tensor.format,
                if is_norm { Format::F32 } else { format },
                "{}",
                tensor.name
            );
        }
        let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
        let limits = Limits { tokens: 5, outputs: 5, pages: vec![1], states: 0 };
        let mut model = Reference.load(Arc::clone(&plan), &file, &limits, &|_, _| ()).unwrap();
        let tables = vec![PageTable { skipped: 0, pages: vec![0] }];
        let batch = Batch {
            tokens: vec![510, 72, 101, 300, 7],
            spans: vec![Span { len: 5, position: 0, tables, state: 0 }],
            outputs: (0..5).collect(),
        };
        let mut logits = vec![0.0; 5 * plan.vocabulary];
        model.forward(&batch, &mut logits).unwrap();
        assert!(logits.iter().all(|x| x.is_finite()), "{name}");
        let mean_square = logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32;
        assert!((0.01..100.0).contains(&mean_square), "{name}: mean square {mean_square}");
    }
}

#[test]
fn the_tokenizer_takes_any_text() {
    let tokenizer = Tokenizer::from_metadata(tiny("Q8_0", 1).metadata()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 512);
    let text = "cabbage, W\u{f6}rld \u{1f980}\n\0";
    let ids = tokenizer.encode(text, true, true);
    assert_eq!(ids[0], 510, "the text begins with the token for it");
    assert_eq!(tokenizer.decode(&ids[1..], false), text.as_bytes());
    assert!(ids.len() < text.len(), "words of several letters are tokens");
}

#[test]
fn the_seed_decides() {
    let bytes = |seed| {
        let file = tiny("Q4_0", seed);
        let tensor = file.tensor("blk.1.ffn_up.weight").unwrap();
        file.data(tensor).to_vec()
    };
    assert_eq!(bytes(1), bytes(1));
    assert_ne!(bytes(1), bytes(2));
}

#[test]
fn large_shapes_are_those_of_the_models() {
    let parameters = |size: Size| -> u64 {
        tensors(&size.shape()).iter().map(|(_, r, c)| u64::from(*r) * u64::from(*c)).sum()
    };
    assert_eq!(parameters(Size::OneB), 1_235_814_400);
    assert_eq!(parameters(Size::EightB), 8_030_261_248);
}

#[test]
fn what_holds_no_weights_is_refused() {
    for (format, part) in [("Q9", "`Q9` is no format"), ("Q8_K", "holds no weights")] {
        let args = Args { shape: Size::Tiny, format: format.to_owned(), out: "x".into(), seed: 0 };
        assert!(run(&args).unwrap_err().to_string().contains(part));
    }
}
