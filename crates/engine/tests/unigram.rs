//! Unigram tokenizers that SentencePiece trained, against its own results and llama.cpp's.

use std::path::Path;

use bodkin_engine::Tokenizer;
use bodkin_gguf::File;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    model: String,
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

#[test]
fn tokens_are_those_of_sentencepiece() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/unigram");
    let cases = std::fs::read(folder.join("cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    for (model, at_least) in [("merged", 130), ("kept", 140)] {
        let file = File::open(folder.join(format!("{model}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
        let mut seen = 0;
        for case in cases.iter().filter(|case| case.model == model) {
            let context = format!("{model}: {:?}", case.text);
            assert_eq!(tokenizer.encode(&case.text, false, false), case.ids, "{context}");
            let decoded = tokenizer.decode(&case.ids, true);
            assert_eq!(String::from_utf8(decoded).unwrap(), case.decoded, "{context}");
            let mut ended = case.ids.clone();
            ended.push(tokenizer.eos().unwrap());
            assert_eq!(tokenizer.encode(&case.text, true, false), ended, "{context}");
            seen += 1;
        }
        assert!(seen >= at_least, "{model}: only {seen} cases");
    }
}
