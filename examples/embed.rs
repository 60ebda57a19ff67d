//! Cosine similarity of texts to the first: `cargo run --release --example embed MODEL TEXT...`.
//! MODEL is best an encoder, such as
//! `hf:CompendiumLabs/bge-small-en-v1.5-gguf:bge-small-en-v1.5-f16.gguf`.

use bodkin::Encoder;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, texts @ ..] = args.as_slice() else { return Err("usage: MODEL TEXT...".into()) };
    let encoder = Encoder::load(model)?;
    let embeddings = encoder.embed(texts)?;
    for (text, embedding) in texts.iter().zip(&embeddings) {
        // Embeddings have length 1, so their dot product is the cosine.
        let cosine: f32 = embedding.iter().zip(&embeddings[0]).map(|(a, b)| a * b).sum();
        println!("{cosine:.4} {text}");
    }
    Ok(())
}
