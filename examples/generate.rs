//! Continues a text, token by token: `cargo run --release --example generate [MODEL] [PROMPT]`.

use bodkin::{Event, Model, Request, SamplerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or("smollm2".to_owned());
    let prompt = args.next().unwrap_or("Once upon a time".to_owned());
    let model = Model::builder(&name).ctx_size(2048).load()?;
    // A temperature of 0 is greedy: the most likely token, the same in every run.
    let sampling = SamplerOptions { temperature: 0.0, ..model.request().sampling };
    let request = Request { sampling, max_tokens: Some(32), ..Request::default() };
    print!("{prompt}");
    for event in model.generate(&prompt, request)? {
        match event {
            Event::Prefill { .. } | Event::PromptToken { .. } => (),
            Event::Token { text, .. } => print!("{text}"),
            Event::Done { text, usage, .. } => {
                println!("{text}\n{} tokens", usage.generated_tokens);
            }
            Event::Error(error) => return Err(error.into()),
        }
    }
    Ok(())
}
