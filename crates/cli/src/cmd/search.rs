//! `bodkin search`: the texts of a vector store nearest to a question.

use anyhow::Result;

use crate::arguments::{Machine, TokenizerArgs};
use crate::cmd::embed::EmbeddingArgs;
use crate::store::StoreArgs;

const AFTER: &str = "\
Prints the nearest rows, best first: score, text, and the other columns as JSON. MODEL must be the
one whose vectors the dataset holds, with the same --prefix for questions as it was trained with.
Ids must be integers below 2^32, as `bodkin embed` makes them by default. --truncate also cuts the
texts that --rerank reads.";

/// Arguments of `search`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// The model that embeds the question
    model: String,
    /// The question
    question: String,
    /// How many rows to print
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = count)]
    number: usize,
    /// Sort four times --number rows by the scores of this reranker
    #[arg(long, value_name = "MODEL")]
    rerank: Option<String>,
    /// Print one JSON object per row
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten, next_help_heading = "Embedding")]
    embedding: EmbeddingArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = "Machine")]
    machine: Machine,
}

/// Parses a number of rows.
fn count(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=1000).contains(number));
    number.ok_or_else(|| "expected 1 to 1000".to_owned())
}

#[cfg(not(feature = "flight"))]
pub(crate) fn run(_: Args) -> Result<()> {
    anyhow::bail!(crate::store::WITHOUT_ARROW)
}

#[cfg(feature = "flight")]
pub(crate) use flight::run;

#[cfg(feature = "flight")]
mod flight {
    use std::io::Write;

    use anyhow::{Context, ensure};
    use bodkin::{Encoder, Options};
    use bodkin_flight::store::{Hit, search};
    use serde_json::{Map, Value, json};

    use super::{Args, Result};
    use crate::arguments::find;

    /// How many times more rows a reranker gets than are printed.
    const CANDIDATES: usize = 4;

    pub(crate) fn run(args: Args) -> Result<()> {
        let (address, dataset) = (args.store.address()?, args.store.dataset()?);
        ensure!(!args.question.is_empty(), "the question is empty");
        let options = Options {
            embedding: args.embedding.options(),
            assume_pre: args.tokenizer.assume_pre().map(str::to_owned),
            ..args.machine.options()
        };
        let encoder = Encoder::open(find(&args.model)?, &options)?;
        let mut embedded = encoder.submit(vec![encoder.tokenize(&args.question)?])?;
        if embedded.truncated() > 0 {
            eprintln!("the question is cut to {} tokens", encoder.context());
        }
        let vector = embedded.next().transpose()?.context("the model gave no vector")?;
        let wanted = match args.rerank {
            Some(_) => args.number * CANDIDATES,
            None => args.number,
        };
        let mut hits = search(&address, dataset, &vector, wanted)?;
        if let Some(reranker) = &args.rerank {
            drop(encoder);
            let embedding = args.embedding.truncation();
            let options = Options { embedding, ..args.machine.options() };
            let reranker = Encoder::open(find(reranker)?, &options)?;
            rerank(&reranker, &args.question, &mut hits)?;
            hits.truncate(args.number);
        }
        let mut out = std::io::stdout().lock();
        for hit in hits {
            print(&mut out, hit, args.json)?;
        }
        Ok(())
    }

    /// Replaces the scores of the store by those of a model that reads both texts together.
    fn rerank(reranker: &Encoder, question: &str, hits: &mut [Hit]) -> Result<()> {
        let texts: Vec<&str> = hits.iter().map(|hit| text(&hit.columns)).collect();
        let scores = reranker.submit(reranker.tokenize_pairs(question, &texts)?)?;
        let (cut, context) = (scores.truncated(), reranker.context());
        for (hit, score) in hits.iter_mut().zip(scores) {
            hit.score = *score?.first().context("the reranker gave no score")?;
        }
        if cut > 0 {
            let texts = crate::text::count(hits.len(), "text");
            eprintln!("{cut} of {texts} cut to {context} tokens for the reranker");
        }
        hits.sort_by(|a, b| b.score.total_cmp(&a.score));
        Ok(())
    }

    fn text(columns: &Map<String, Value>) -> &str {
        columns.get("text").and_then(Value::as_str).unwrap_or_default()
    }

    fn print(out: &mut dyn Write, mut hit: Hit, as_json: bool) -> Result<()> {
        if as_json {
            let mut line = Map::new();
            line.insert("score".to_owned(), json!(hit.score));
            line.insert("id".to_owned(), json!(hit.id));
            line.extend(hit.columns);
            return Ok(writeln!(out, "{}", Value::Object(line))?);
        }
        let text = text(&hit.columns).to_owned();
        hit.columns.shift_remove("text");
        hit.columns.entry("id").or_insert(json!(hit.id));
        let columns = Value::Object(hit.columns);
        let line = format!("{:.4}  {text}  {columns}", hit.score);
        Ok(writeln!(out, "{}", crate::errors::printable_text(&line))?)
    }
}
