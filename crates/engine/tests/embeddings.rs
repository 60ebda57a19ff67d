//! Embeddings of a tiny BERT: packed into steps of any size they have the bits that they have
//! alone, and what a step cannot hold is refused.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Limits, Model};
use bodkin_conformance::Reference;
use bodkin_engine::{
    Embedder, Embeddings, Engine, EngineOptions, Tokenizer, embed, embedding_limits, longest_text,
    normalize,
};
use bodkin_gguf::File;
use bodkin_model::{Plan, Pooling, embedding_plan};

fn file(name: &str) -> Arc<File> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    Arc::new(File::open(folder.join(name)).unwrap())
}

fn plan(file: &File) -> Arc<Plan> {
    Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap())
}

fn load(limits: &Limits) -> Box<dyn Model> {
    let file = file("bert.gguf");
    Reference.load(plan(&file), &file, limits, &|_, _| ()).unwrap()
}

fn texts() -> Vec<Vec<u32>> {
    let text = |len: u32| (0..len).map(|i| 5 + (i * len) % 300).collect();
    [3, 40, 1, 33, 7, 32, 64, 2].map(text).into()
}

fn embeddings(model: &mut dyn Model, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    let each = |i, embedding: &[f32]| {
        assert_eq!(i, found.len(), "in order");
        found.push(embedding.to_vec());
    };
    embed(model, texts, each).unwrap();
    assert_eq!(found.len(), texts.len());
    found
}

#[test]
fn company_changes_nothing() {
    let (texts, plan) = (texts(), plan(&file("bert.gguf")));
    let limits = |texts: &[Vec<u32>], step| embedding_limits(&plan, texts, step).unwrap();
    let alone = |text: &Vec<u32>| {
        let text = std::slice::from_ref(text);
        embeddings(load(&limits(text, 1)).as_mut(), text).remove(0)
    };
    let alone: Vec<Vec<f32>> = texts.iter().map(alone).collect();
    for step in [1, 10, 50, 100, 1000] {
        let mut model = load(&limits(&texts, step));
        assert_eq!(embeddings(model.as_mut(), &texts), alone, "steps of {step}");
        // All pages are there again.
        assert_eq!(embeddings(model.as_mut(), &texts), alone, "steps of {step}, again");
    }
    // A server's sizes know no texts.
    let mut model = load(&Limits { tokens: 70, outputs: 2, pages: vec![3], state_slots: 0 });
    assert_eq!(embeddings(model.as_mut(), &texts), alone);
}

#[test]
fn limits_are_those_of_the_fullest_step() {
    let plan = plan(&file("bert.gguf"));
    let limits = |step| embedding_limits(&plan, &texts(), step).unwrap();
    let of =
        |tokens, outputs, pages| Limits { tokens, outputs, pages: vec![pages], state_slots: 0 };
    assert_eq!(limits(1), of(64, 1, 2));
    // 3 and 40 and 1; 33 and 7; 32; 64; 2.
    assert_eq!(limits(50), of(64, 3, 4));
    assert_eq!(limits(1000), of(182, 8, 11));
}

#[test]
fn what_cannot_be_embedded_is_named() {
    let bert = plan(&file("bert.gguf"));
    assert_eq!(longest_text(&bert).unwrap(), 256);
    let check = |texts: &[Vec<u32>]| embedding_limits(&bert, texts, 10).unwrap_err().to_string();
    let long = "text 2 has 257 tokens, the model takes 256 at most";
    assert_eq!(check(&[vec![5], vec![5; 257]]), long);
    assert_eq!(check(&[vec![5], vec![]]), "text 2 has no tokens");
    assert_eq!(check(&[vec![5, 384]]), "token id 384: the model has 384 tokens");
    let mut model = load(&Limits { tokens: 20, outputs: 1, pages: vec![1], state_slots: 0 });
    let error = embed(model.as_mut(), &[vec![5; 21]], |_, _| ()).unwrap_err();
    assert_eq!(error.to_string(), "text 1 has 21 tokens, the model takes 20 at most");
    let error = longest_text(&plan(&file("llama.gguf"))).unwrap_err().to_string();
    assert!(error.contains("llama") && error.contains("no embeddings"), "{error}");
    let options = EngineOptions::single(20, 20);
    let tokenizer = Tokenizer::from_metadata(file("bert.gguf").metadata()).unwrap();
    let error = Engine::open(model, Arc::new(tokenizer), options).err().unwrap();
    assert_eq!(error.to_string(), "a bert model is an encoder: it makes embeddings and no text");
}

/// What a request gives, scaled as [`embed`] scales.
fn scaled(embeddings: Embeddings) -> Vec<Vec<f32>> {
    let scaled = embeddings.map(|embedding| {
        let mut embedding = embedding.unwrap();
        normalize(&mut embedding);
        embedding
    });
    scaled.collect()
}

#[test]
fn requests_share_steps_and_get_what_they_get_alone() {
    let (texts, plan) = (texts(), plan(&file("bert.gguf")));
    let mut model = load(&embedding_limits(&plan, &texts, 1000).unwrap());
    let alone = embeddings(model.as_mut(), &texts);
    // Steps of up to 70 tokens, so that some texts share one and the longest has its own.
    let limits = Limits { tokens: 70, outputs: 3, pages: vec![5], state_slots: 0 };
    let embedder = Embedder::open(load(&limits), 256, 2, 8).unwrap();
    assert_eq!((embedder.width(), embedder.longest_text()), (alone[0].len(), 70));
    let (first, second) = (embedder.submit(texts.clone()), embedder.submit(texts.clone()));
    let gone = embedder.submit(vec![vec![5; 60]; 500]).unwrap();
    let third = embedder.submit(texts.iter().rev().cloned().collect()).unwrap();
    drop(gone);
    assert_eq!(scaled(second.unwrap()), alone);
    assert_eq!(scaled(first.unwrap()), alone);
    let mut backwards = scaled(third);
    backwards.reverse();
    assert_eq!(backwards, alone);
    assert_eq!(scaled(embedder.submit(Vec::new()).unwrap()), Vec::<Vec<f32>>::new());
    let stats = embedder.stats();
    assert!(stats.requests >= 4);
    assert!(stats.rows < 3 * 182 + 500 * 60, "the dropped request ended early");
}

#[test]
fn a_queue_has_a_limit_and_texts_are_checked_first() {
    let limits = Limits { tokens: 20, outputs: 1, pages: vec![1], state_slots: 0 };
    let embedder = Embedder::open(load(&limits), 256, 1, 1).unwrap();
    let refused = |texts: &[Vec<u32>]| embedder.submit(texts.to_vec()).err().unwrap().to_string();
    assert_eq!(refused(&[vec![5], vec![]]), "text 2 has no tokens");
    assert_eq!(refused(&[vec![5; 21]]), "text 1 has 21 tokens, the model takes 20 at most");
    assert_eq!(refused(&[vec![384]]), "token id 384: the model has 384 tokens");
    let many = || embedder.submit(vec![vec![5; 20]; 1000]).unwrap();
    let (running, waiting) = (many(), many());
    assert_eq!(refused(&[vec![5]]), "the queue is full: 1 requests wait already");
    running.canceller().cancel();
    assert!(running.count() < 1000);
    assert_eq!(waiting.count(), 1000);
    assert_eq!(embedder.submit(vec![vec![5]]).unwrap().count(), 1, "there is room again");
}

/// The mean of the hidden states that the output head reads, and the last of them.
#[test]
fn a_decoder_embeds() {
    let file = file("qwen3.gguf");
    let plan_with = |pooling| {
        let plan = embedding_plan(file.metadata(), file.tensors(), Some(64), Some(pooling));
        Arc::new(plan.unwrap())
    };
    let texts: Vec<Vec<u32>> = texts().into_iter().filter(|text| text.len() <= 33).collect();
    let embedded = |pooling, texts: &[Vec<u32>]| {
        let plan = plan_with(pooling);
        let limits = embedding_limits(&plan, texts, 50).unwrap();
        let mut model = Reference.load(plan, &file, &limits, &|_, _| ()).unwrap();
        embeddings(model.as_mut(), texts)
    };
    let together = embedded(Pooling::Last, &texts);
    for (text, embedding) in texts.iter().zip(&together) {
        assert_eq!(&embedded(Pooling::Last, std::slice::from_ref(text))[0], embedding);
        // Attention is causal: the first row knows nothing of the others.
        let first = &embedded(Pooling::Cls, std::slice::from_ref(text))[0];
        assert_eq!(first, &embedded(Pooling::Last, &[text[..1].to_vec()])[0]);
    }
    assert_ne!(embedded(Pooling::Mean, &texts), together);
}

/// Limits of a step, for a model without recurrent state.
fn step_limits(plan: &Plan, tokens: usize) -> Limits {
    let texts = tokens.div_ceil(8);
    let outputs = if plan.gives_sums() { tokens } else { texts };
    let pages = vec![tokens / 32 + texts; plan.windows().len()];
    let state_slots = if plan.states.is_empty() { 0 } else { texts };
    Limits { tokens, outputs, pages, state_slots }
}

/// A decoder that pools, for steps of up to `tokens` tokens.
fn decoder(name: &str, pooling: Pooling, tokens: usize) -> Box<dyn Model> {
    let file = file(name);
    let plan = embedding_plan(file.metadata(), file.tensors(), Some(256), Some(pooling)).unwrap();
    let limits = step_limits(&plan, tokens);
    Reference.load(Arc::new(plan), &file, &limits, &|_, _| ()).unwrap()
}

/// Texts that begin with the same `prefix` tokens and go on in different ways.
fn prefixed(prefix: usize, count: u32) -> Vec<Vec<u32>> {
    let text = |i: u32| {
        let prefix = (0..prefix as u32).map(|j| 5 + j * 7 % 250);
        prefix.chain((0..2 + i % 5).map(move |j| 260 + (i * 3 + j) % 100)).collect()
    };
    (0..count).map(text).collect()
}

/// The embeddings of one request, and the rows that were computed for it.
fn embedded(embedder: &Embedder, texts: &[Vec<u32>]) -> (Vec<Vec<f32>>, u64) {
    let before = embedder.stats();
    let embeddings: Vec<_> =
        embedder.submit(texts.to_vec()).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(embeddings.len(), texts.len());
    // The last embedding comes before its step is counted.
    let tokens = texts.iter().map(Vec::len).sum::<usize>() as u64;
    for _ in 0..1000 {
        let stats = embedder.stats();
        let rows = stats.rows - before.rows;
        if rows + stats.cached_tokens - before.cached_tokens == tokens {
            return (embeddings, rows);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{tokens} tokens were neither computed nor reused");
}

/// The embeddings of texts that each have a model of their own.
fn alone(name: &str, pooling: Pooling, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let alone = |text: &Vec<u32>| {
        let embedder = Embedder::open(decoder(name, pooling, 256), 256, 1, 1).unwrap();
        embedded(&embedder, std::slice::from_ref(text)).0.remove(0)
    };
    texts.iter().map(alone).collect()
}

#[test]
fn a_shared_prefix_is_computed_once() {
    // Less than a page, more than one, and whole pages; with a sliding window too.
    let sizes = [("qwen3.gguf", 20), ("qwen3.gguf", 50), ("gemma3.gguf", 64)];
    let poolings = [Pooling::Last, Pooling::Mean];
    for ((name, prefix), pooling) in sizes.iter().flat_map(|&s| poolings.map(|p| (s, p))) {
        let texts = prefixed(prefix, 30);
        let wanted = alone(name, pooling, &texts);
        let embedder = Embedder::open(decoder(name, pooling, 128), 256, 2, 8).unwrap();
        let (found, rows) = embedded(&embedder, &texts);
        assert_eq!(found, wanted, "{name}, {prefix} tokens");
        let own: usize = texts.iter().map(|text| text.len() - prefix).sum();
        assert_eq!(rows, (prefix + own) as u64, "{name}, {prefix} tokens");
        // Later requests find it.
        for texts in texts.chunks(3) {
            let (found, rows) = embedded(&embedder, texts);
            let first = wanted.iter().position(|row| *row == found[0]).unwrap();
            assert_eq!(found, wanted[first..first + texts.len()]);
            let own: usize = texts.iter().map(|text| text.len() - prefix).sum();
            assert_eq!(rows as usize, own);
        }
    }
}

#[test]
fn requests_of_one_text_share_a_prefix_too() {
    let texts = prefixed(20, 6);
    for pooling in [Pooling::Last, Pooling::Mean] {
        let embedder = Embedder::open(decoder("qwen3.gguf", pooling, 128), 256, 1, 8).unwrap();
        let wanted = alone("qwen3.gguf", pooling, &texts);
        for (i, (text, wanted)) in texts.iter().zip(wanted).enumerate() {
            let (found, rows) = embedded(&embedder, std::slice::from_ref(text));
            assert_eq!(found, [wanted]);
            // The second text shows what it shares with the first, and keeps it.
            let reused = if i < 2 { 0 } else { 20 };
            assert_eq!(rows as usize, text.len() - reused, "{pooling}, text {i}");
        }
    }
}

#[test]
fn the_first_token_and_recurrent_state_are_computed_whole() {
    let texts = prefixed(20, 30);
    let whole: usize = texts.iter().map(Vec::len).sum();
    // Recurrent state has no pages.
    let cases = [
        ("qwen3.gguf", Pooling::Cls),
        ("mamba2.gguf", Pooling::Mean),
        ("mamba2.gguf", Pooling::Last),
    ];
    for (name, pooling) in cases {
        let embedder = Embedder::open(decoder(name, pooling, 128), 256, 2, 8).unwrap();
        let (found, rows) = embedded(&embedder, &texts);
        assert_eq!(found, alone(name, pooling, &texts), "{name} {pooling}");
        assert_eq!(rows as usize, whole, "{name} {pooling}");
    }
}

/// Many prefixes, more than there are pages for, one after the other and mixed.
#[test]
fn prefixes_take_no_more_than_the_pages_that_there_are() {
    let texts: Vec<Vec<u32>> = (0..300)
        .map(|i: u32| {
            let prefix = (0..40).map(move |j| 5 + (i % 60 * 41 + j * (1 + i % 7)) % 350);
            prefix.chain([100 + i % 200, 7, i % 11]).collect()
        })
        .collect();
    for pooling in [Pooling::Last, Pooling::Mean] {
        let embedder = Embedder::open(decoder("qwen3.gguf", pooling, 64), 256, 2, 8).unwrap();
        let mut whole = decoder("qwen3.gguf", pooling, 64);
        let mut wanted = Vec::new();
        embed(whole.as_mut(), &texts, |_, row| wanted.push(row.to_vec())).unwrap();
        assert_eq!(scaled(embedder.submit(texts.clone()).unwrap()), wanted);
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|i| i % 60);
        let sorted = order.iter().map(|&i| texts[i].clone()).collect();
        let found = scaled(embedder.submit(sorted).unwrap());
        assert!(order.iter().zip(found).all(|(&i, row)| row == wanted[i]), "{pooling}");
    }
}
