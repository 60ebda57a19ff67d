//! The most likely next token after each token of a text, and how likely the text's own next token
//! is: `cargo run --release --example logits [MODEL] [TEXT]`.

use bodkin::Scorer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or("smollm2".to_owned());
    let text = args.next().unwrap_or("The capital of France is Paris".to_owned());
    let mut scorer = Scorer::load(&name)?;
    let tokens = scorer.tokenize(&text)?;
    for (row, next) in scorer.logits(&tokens)?.iter().zip(&tokens[1..]) {
        let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        let sum: f64 = row.iter().map(|&x| f64::from(x - row[best]).exp()).sum();
        let log_probability = f64::from(row[*next as usize] - row[best]) - sum.ln();
        let (best, next) = (scorer.detokenize(&[best as u32])?, scorer.detokenize(&[*next])?);
        println!("{best:?} is most likely, {next:?} has log-probability {log_probability:.3}");
    }
    Ok(())
}
