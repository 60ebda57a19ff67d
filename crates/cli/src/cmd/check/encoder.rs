//! The checks of an encoder: its embeddings, and the similarities of a suite.

use std::sync::Arc;

use anyhow::{Result, ensure};
use bodkin::ModelFile;
use bodkin_backend::{Backend, Model};
use bodkin_engine::{Tokenizer, embed, embedding_limits, longest_text};
use bodkin_eval::check::baseline::{Record, cosine};
use bodkin_eval::check::suite::{SimilarityCase, Suite};
use bodkin_eval::check::{PROMPTS, TEXT, embeddings};

use super::arguments::Args;
use super::table::{Cases, Report};

/// Checks embeddings of fixed texts, one of them as long as the model allows.
pub(super) fn check(
    args: &Args,
    backend: &dyn Backend,
    opened: &ModelFile,
    tokenizer: &Arc<Tokenizer>,
    suite: Option<&Suite>,
    report: &mut Report,
) -> Result<Record> {
    let encode = |text: &str| Ok(tokenizer.try_encode(text, true, false)?);
    let mut texts = PROMPTS.iter().map(|text| encode(text)).collect::<Result<Vec<_>>>()?;
    let longest = args.machine.context()?.unwrap_or(usize::MAX).min(longest_text(&opened.plan)?);
    texts.push(encode(TEXT)?.into_iter().cycle().take(longest).collect());
    let similarities = suite.map_or(&[][..], |suite| &suite.similarities);
    let own = similarities.iter().flat_map(|case| &case.texts);
    let own = own.map(|text| encode(text)).collect::<Result<Vec<_>>>()?;
    let all = [&texts[..], &own].concat();
    let limits = embedding_limits(&opened.plan, &all, args.machine.step_tokens()?)?;
    let mut model = opened.load(backend, &limits)?;
    let (rows, faults) = embeddings::check(model.as_mut(), &texts)?;
    report.faults.extend(faults);
    report.long_tokens = Some(longest);
    if suite.is_some() {
        ensure!(!similarities.is_empty(), "--suite: expected [[similarity]] for an encoder");
        report.suite = Some(check_suite(model.as_mut(), similarities, &own, report)?);
    }
    let width = opened.plan.output_width();
    let (name, tokens) = (report.model.clone(), texts.concat());
    Ok(Record { name, tokens, perplexity: None, rows, width, speed: None })
}

/// Compares the pairs of a suite, whose texts are `texts`, two for each case.
fn check_suite(
    model: &mut dyn Model,
    cases: &[SimilarityCase],
    texts: &[Vec<u32>],
    report: &mut Report,
) -> Result<Cases> {
    let mut rows = Vec::new();
    embed(model, texts, |_, row| rows.push(row.to_vec()))?;
    let mut good = 0;
    for (case, pair) in cases.iter().zip(rows.chunks_exact(2)) {
        match case.fault(cosine(&pair[0], &pair[1])) {
            None => good += 1,
            Some(fault) => {
                let [first, second] = &case.texts;
                report.faults.push(format!("similarity of `{first}` and `{second}`: {fault}"));
            }
        }
    }
    Ok(Cases { good, all: cases.len() })
}
