//! Embeddings of whole texts: what `bodkin embed` and servers read. An encoder looks at a text
//! from both ends, so a text runs in one step; as many texts share a step as fit into it.

use bodkin_backend::{Batch, Limits, Model, PAGE_TOKENS, Span};
use bodkin_model::Plan;

use crate::error::{Error, Result};
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
    mut each: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let mut step = Step::new(model);
    let room = model.limits().tokens.min(step.pages.longest_sequence());
    check(model.plan(), texts, room)?;
    for (i, text) in texts.iter().enumerate() {
        if !step.add(i, text, model.limits()) {
            step.run(model, &mut each)?;
            if !step.add(i, text, model.limits()) {
                return Err(Error::OutOfPages { tokens: text.len() });
            }
        }
    }
    step.run(model, &mut each)
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

/// A step that is being filled with texts.
struct Step {
    pages: Pages,
    /// With the index of each text.
    sequences: Vec<(usize, Sequence)>,
    batch: Batch,
    /// `[limits.outputs, output_width]`.
    rows: Vec<f32>,
}

impl Step {
    fn new(model: &dyn Model) -> Step {
        Step {
            pages: Pages::of(model),
            sequences: Vec::new(),
            batch: Batch::default(),
            rows: vec![0.0; model.limits().outputs * model.plan().output_width()],
        }
    }

    /// Adds the text of this index, if there is room for it.
    fn add(&mut self, index: usize, text: &[u32], limits: &Limits) -> bool {
        let Batch { tokens, spans, outputs, .. } = &mut self.batch;
        if tokens.len() + text.len() > limits.tokens || outputs.len() == limits.outputs {
            return false;
        }
        let mut sequence = self.pages.start(&[]);
        if !self.pages.reserve(&mut sequence, text.len()) {
            return false;
        }
        let (tables, state_slot) = (sequence.tables.clone(), sequence.state_slot());
        spans.push(Span { len: text.len(), position: 0, tables, state_slot, is_prefill: true });
        outputs.push(tokens.len() as u32);
        tokens.extend(text);
        self.sequences.push((index, sequence));
        true
    }

    /// Runs what was added and says its embeddings; the step is empty then.
    fn run(&mut self, model: &mut dyn Model, each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let width = model.plan().output_width();
        let rows = &mut self.rows[..self.batch.outputs.len() * width];
        if !rows.is_empty() {
            model.forward(&self.batch, rows)?;
        }
        for ((index, sequence), row) in self.sequences.drain(..).zip(rows.chunks_exact_mut(width)) {
            normalize(row);
            each(index, row);
            self.pages.release(sequence);
        }
        self.batch = Batch::default();
        Ok(())
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
