//! Embeddings of whole texts: what `bodkin embed` and servers read. An encoder looks at a text
//! from both ends, so a text runs in one step, which several short texts share.

use std::ops::ControlFlow;

use bodkin_backend::{Batch, Limits, Model, PAGE_TOKENS, RowOutput, Step};
use bodkin_model::Plan;

use crate::error::{Error, Result};
use crate::nonfinite;
use crate::pages::{Pages, Sequence};

/// The most tokens of a text. Fails if the plan makes no embeddings.
pub fn longest_text(plan: &Plan) -> Result<usize> {
    match plan.is_encoder() {
        true => Ok(plan.context_length.min(plan.max_positions())),
        false => Err(Error::NoEmbeddings { architecture: plan.architecture.clone() }),
    }
}

/// What a model must be loaded for, so that [`embed`] runs these texts in steps of at most `step`
/// tokens; a longer text has a step of its own. Fails where [`embed`] would.
pub fn embedding_limits(plan: &Plan, texts: &[Vec<u32>], step: usize) -> Result<Limits> {
    check(plan, texts, usize::MAX)?;
    let mut limits = Limits { tokens: 0, outputs: 0, pages: Vec::new(), state_slots: 0 };
    let (mut tokens, mut outputs, mut pages, mut most_pages) = (0, 0, 0, 0);
    for text in texts {
        if tokens + text.len() > step {
            (tokens, outputs, pages) = (0, 0, 0);
        }
        tokens += text.len();
        outputs += 1;
        pages += text.len().div_ceil(PAGE_TOKENS);
        limits.tokens = limits.tokens.max(tokens);
        limits.outputs = limits.outputs.max(outputs);
        most_pages = most_pages.max(pages);
    }
    limits.pages = vec![most_pages; plan.windows().len()];
    limits.state_slots = if plan.states.is_empty() { 0 } else { limits.outputs };
    Ok(limits)
}

/// Runs texts, given as token ids, through an encoder, and calls `each` with the index and the
/// embedding of every one, in order: `[output_width]`, scaled to length 1. What a text gives
/// depends on itself alone.
pub fn embed(
    model: &mut dyn Model,
    texts: &[Vec<u32>],
    each: impl FnMut(usize, &[f32]),
) -> Result<()> {
    embed_until(model, texts, || false, each)
}

/// As [`embed`], but before each step asks `is_cancelled` whether to end without the other texts.
pub fn embed_until(
    model: &mut dyn Model,
    texts: &[Vec<u32>],
    is_cancelled: impl Fn() -> bool,
    mut each: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let mut batch = TextBatch::new(model);
    let room = model.limits().tokens.min(batch.pages.longest_sequence());
    check(model.plan(), texts, room)?;
    for (i, text) in texts.iter().enumerate() {
        if !batch.add(i, text, model.limits()) {
            if is_cancelled() {
                return Ok(());
            }
            batch.run(model, texts, &mut each)?;
            if !batch.add(i, text, model.limits()) {
                return Err(Error::OutOfPages { tokens: text.len() });
            }
        }
    }
    match is_cancelled() {
        true => Ok(()),
        false => batch.run(model, texts, &mut each),
    }
}

/// Whether every text can be had, in steps of `room` tokens.
fn check(plan: &Plan, texts: &[Vec<u32>], room: usize) -> Result<()> {
    let limit = longest_text(plan)?.min(room);
    for (i, ids) in texts.iter().enumerate() {
        let (text, tokens) = (i + 1, ids.len());
        if tokens == 0 {
            return Err(Error::EmptyText { text });
        }
        if tokens > limit {
            return Err(Error::TextTooLong { text, tokens, limit });
        }
        let vocabulary = plan.vocabulary;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::UnknownToken { id, vocabulary });
        }
    }
    Ok(())
}

/// A batch that is being filled with texts.
struct TextBatch {
    pages: Pages,
    /// The index of each text, and its sequence.
    sequences: Vec<(usize, Sequence)>,
    batch: Batch,
    /// Asks for the embedding of every text.
    rows: Vec<RowOutput<'static>>,
}

impl TextBatch {
    fn new(model: &dyn Model) -> TextBatch {
        TextBatch {
            pages: Pages::of(model),
            sequences: Vec::new(),
            batch: Batch::default(),
            rows: vec![RowOutput::Logits; model.limits().outputs],
        }
    }

    /// Adds the text of this index, if the limits allow it.
    fn add(&mut self, index: usize, text: &[u32], limits: &Limits) -> bool {
        let Batch { tokens, outputs, .. } = &self.batch;
        if tokens.len() + text.len() > limits.tokens || outputs.len() == limits.outputs {
            return false;
        }
        let mut sequence = self.pages.unshared();
        if !self.pages.reserve(&mut sequence, text.len()) {
            return false;
        }
        // Of an encoder, any row of a span is the whole text's.
        self.batch.push(sequence.span(text.len(), true), text);
        self.batch.output_last();
        self.sequences.push((index, sequence));
        true
    }

    /// Runs the batch, passes its embeddings on, and empties it.
    fn run(
        &mut self,
        model: &mut dyn Model,
        texts: &[Vec<u32>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let width = model.plan().output_width();
        let rows = &self.rows[..self.batch.outputs.len()];
        if rows.is_empty() {
            return Ok(());
        }
        let step = Step { batch: &self.batch, rows, steps: 1, observer: None };
        let (sequences, pages) = (&mut self.sequences, &mut self.pages);
        let mut broken = None;
        model.step(step, &mut |output| {
            let rows = output.logits.chunks_exact_mut(width);
            for ((index, sequence), row) in sequences.drain(..).zip(rows) {
                pages.release(sequence);
                if !row.iter().all(|x| x.is_finite()) {
                    broken.get_or_insert(index);
                    continue;
                }
                normalize(row);
                each(index, row);
            }
            ControlFlow::Break(())
        })?;
        self.batch.clear();
        match broken {
            None => Ok(()),
            Some(index) => Err(nonfinite::error(model, pages, &texts[index])),
        }
    }
}

/// Scales a vector to length 1; one of zeros has no direction and stays.
fn normalize(x: &mut [f32]) {
    let square: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
    if square > 0.0 {
        let factor = 1.0 / square.sqrt();
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * factor) as f32);
    }
}
