//! A chat in the terminal: `cargo run --release --example chat [MODEL]`. The model remembers the
//! conversation, and each turn reuses the KV cache of the turns before.

use std::io::{BufRead, Write};

use bodkin::{Answer, Message, Model, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or("smollm2".to_owned());
    let model = Model::load(&name)?;
    let mut messages = vec![Message::new("system", "You are a helpful assistant.")];
    for line in std::io::stdin().lock().lines() {
        messages.push(Message::user(&line?));
        let request = Request { max_tokens: Some(256), ..model.request() };
        let events = model.chat(&messages, request)?;
        let answer = Answer::read_with::<Box<dyn std::error::Error>>(events, |text| {
            print!("{text}");
            Ok(std::io::stdout().flush()?)
        })?;
        println!();
        messages.push(Message::new("assistant", &answer.text));
    }
    Ok(())
}
