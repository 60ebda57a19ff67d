//! Embeddings of whole texts, and the steps that several texts share. An encoder looks at a text
//! from both ends, so a text runs in one step. A decoder's text with pooling `last` or `mean` can
//! go on behind a prefix that an earlier step has computed, as a prompt does; a mean goes on with
//! the prefix's sum.

use std::ops::ControlFlow;

use bodkin_backend::{Batch, Limits, Model, OutputRequest, PAGE_TOKENS, Step};
use bodkin_model::Plan;

use crate::error::{Error, Result};
use crate::nonfinite;
use crate::pages::{Pages, Sequence};
use crate::prefix_sums::PrefixSums;
use crate::worker::copy;

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
    let mut batch = TextBatch::new(model);
    check(model.plan(), texts, batch.longest_text(model))?;
    let mut failed = Ok(());
    let mut take = |i: usize, embedding: Result<&mut [f32]>| match embedding {
        Ok(embedding) => {
            normalize(embedding);
            each(i, embedding);
        }
        Err(error) => failed = Err(error),
    };
    for (i, text) in texts.iter().enumerate() {
        if !batch.add(i, text, 0, model)? {
            batch.run(model, &mut take)?;
            if !batch.add(i, text, 0, model)? {
                return Err(Error::OutOfPages { tokens: text.len() });
            }
        }
    }
    batch.run(model, &mut take)?;
    failed
}

/// Whether every text can be had, in steps of `room` tokens.
fn check(plan: &Plan, texts: &[Vec<u32>], room: usize) -> Result<()> {
    let limit = longest_text(plan)?.min(room);
    check_texts(texts, limit, plan.vocabulary)
}

/// Whether every text has 1 to `limit` tokens of a vocabulary.
pub(crate) fn check_texts(texts: &[Vec<u32>], limit: usize, vocabulary: usize) -> Result<()> {
    for (i, ids) in texts.iter().enumerate() {
        let (text, tokens) = (i + 1, ids.len());
        if tokens == 0 {
            return Err(Error::EmptyText { text });
        }
        if tokens > limit {
            return Err(Error::TextTooLong { text, tokens, limit });
        }
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::UnknownToken { id, vocabulary });
        }
    }
    Ok(())
}

/// A step that is being filled with texts; each has a key, by which its embedding is known.
pub(crate) struct TextBatch<K> {
    pages: Pages,
    /// Whether a text can go on behind a prefix of an earlier step.
    reuses_prefixes: bool,
    /// Sums of stored prefixes, where the plan gives sums for the caller to make means of.
    sums: Option<PrefixSums>,
    texts: Vec<(K, Text)>,
    batch: Batch,
    /// Asks for every output row.
    rows: Vec<OutputRequest<'static>>,
}

/// A text in a step.
struct Text {
    /// With the tokens whose state is reused.
    sequence: Sequence,
    /// The tokens whose state is kept for later texts.
    kept: usize,
    /// How many of its tokens end at each of its output rows.
    outputs: Vec<usize>,
    /// The sum of the hidden states that are reused, `[width]`.
    sum: Option<Vec<f32>>,
}

impl<K> TextBatch<K> {
    pub(crate) fn new(model: &dyn Model) -> TextBatch<K> {
        let plan = model.plan();
        TextBatch {
            pages: Pages::of(model),
            reuses_prefixes: !plan.needs_whole_sequences() && plan.states.is_empty(),
            sums: plan.gives_sums().then(PrefixSums::default),
            texts: Vec::new(),
            batch: Batch::default(),
            rows: vec![OutputRequest::Logits; model.limits().outputs],
        }
    }

    /// Whether texts can share the computation of what they begin with. Recurrent state would need
    /// a checkpoint for each prefix, so models that have it compute texts whole.
    pub(crate) fn reuses_prefixes(&self) -> bool {
        self.reuses_prefixes
    }

    /// The tokens of a text that need not be computed.
    pub(crate) fn cached_tokens(&self, text: &[u32]) -> usize {
        if !self.reuses_prefixes {
            return 0;
        }
        let most = self.pages.cached_tokens(text, text.len());
        let Some(sums) = &self.sums else { return most };
        // A page may be too little to be copied.
        let is_cached =
            |&len: &usize| self.pages.cached_tokens(&text[..len + 1], text.len()) == len;
        let known = sums.lengths(text).into_iter().filter(|&len| len <= most);
        let fits = |&len: &usize| text.len() - len <= self.rows.len();
        known.filter(fits).find(is_cached).unwrap_or(0)
    }

    /// The most tokens of a text for which there is room in an empty step.
    pub(crate) fn longest_text(&self, model: &dyn Model) -> usize {
        model.limits().tokens.min(self.pages.longest_sequence())
    }

    /// Tokens to compute.
    pub(crate) fn tokens(&self) -> usize {
        self.batch.tokens.len()
    }

    /// Tokens of the texts that are reused.
    pub(crate) fn reused_tokens(&self) -> usize {
        self.texts.iter().map(|(_, text)| text.sequence.tokens.len()).sum()
    }

    /// Adds a text, if the limits allow it. Its first `kept` tokens stay stored after the step, if
    /// prefixes are reused, until their memory is needed.
    pub(crate) fn add(
        &mut self,
        key: K,
        text: &[u32],
        kept: usize,
        model: &mut dyn Model,
    ) -> Result<bool> {
        let cached = self.cached_tokens(text);
        if text.len() - cached > self.room(model) {
            return Ok(false);
        }
        let mut sequence = self.start(text, cached, model)?;
        let reused = sequence.tokens.len();
        let rest = &text[reused..];
        let kept = if self.reuses_prefixes { kept } else { 0 };
        let outputs = self.outputs(reused, kept, text.len());
        // Where memory for a copy is short, a text waits for the next step; in the first place of a
        // step, less than what is stored is reused.
        let waits = reused < cached && !self.texts.is_empty();
        let has_room = rest.len() <= self.room(model)
            && self.batch.outputs.len() + outputs.len() <= self.rows.len();
        if waits || !has_room || !self.pages.reserve(&mut sequence, rest.len()) {
            self.pages.discard(sequence);
            return Ok(false);
        }
        let first = self.batch.tokens.len();
        self.batch.push(sequence.span(rest.len(), true), rest);
        self.batch.outputs.extend(outputs.iter().map(|len| (first + len - 1 - reused) as u32));
        let sums = self.sums.as_mut().filter(|_| reused > 0);
        let sum =
            sums.map(|sums| sums.get(&sequence.tokens).expect("cached tokens have a sum").to_vec());
        self.texts.push((key, Text { sequence, kept, outputs, sum }));
        Ok(true)
    }

    /// How many tokens more the step takes.
    fn room(&self, model: &dyn Model) -> usize {
        model.limits().tokens - self.batch.tokens.len()
    }

    /// How many of the `len` tokens of a text end at each of its output rows: all of them at the
    /// last one. Behind a stored prefix, each row is one, as its sum goes on.
    fn outputs(&self, reused: usize, kept: usize, len: usize) -> Vec<usize> {
        match self.sums {
            Some(_) if reused > 0 => (reused + 1..=len).collect(),
            Some(_) => {
                let mut outputs = stored_sums(kept).to_vec();
                outputs.retain(|&at| 0 < at && at < len);
                outputs.push(len);
                outputs.dedup();
                // Sums are stored where there is room.
                outputs.drain(..outputs.len().saturating_sub(self.rows.len()));
                outputs
            }
            None => vec![len],
        }
    }

    /// A sequence for a text, with the `cached` tokens that are stored of its start, or fewer where
    /// memory for a copy is short.
    fn start(&mut self, text: &[u32], cached: usize, model: &mut dyn Model) -> Result<Sequence> {
        if !self.reuses_prefixes {
            return Ok(self.pages.unshared());
        }
        // Behind tokens without a sum no text can go on.
        let known = if self.sums.is_some() { &text[..cached + 1] } else { text };
        let (sequence, copies) = self.pages.start(known, text.len());
        copy(model, &copies)?;
        if self.sums.is_none() || sequence.tokens.len() == cached {
            return Ok(sequence);
        }
        self.pages.discard(sequence);
        Ok(self.pages.start(&text[..1], text.len()).0)
    }

    /// Runs the step, passes its embeddings on, or why a text has none, and empties it.
    pub(crate) fn run(
        &mut self,
        model: &mut dyn Model,
        each: &mut dyn FnMut(K, Result<&mut [f32]>),
    ) -> Result<()> {
        let width = model.plan().output_width();
        let rows = &self.rows[..self.batch.outputs.len()];
        if rows.is_empty() {
            return Ok(());
        }
        let step = Step { batch: &self.batch, requests: rows, steps: 1, observer: None };
        let (texts, pages, batch) = (&mut self.texts, &mut self.pages, &self.batch);
        let sums = &mut self.sums;
        let (mut broken, mut start) = (Vec::new(), 0);
        model.step(step, &mut |output| {
            let mut rest = output.logits;
            for ((key, mut text), span) in texts.drain(..).zip(&batch.spans) {
                let tokens = &batch.tokens[start..start + span.len];
                start += span.len;
                let rows = rest.split_off_mut(..text.outputs.len() * width);
                let rows = rows.expect("a row for each output");
                let row = match sums {
                    Some(sums) => text.mean(rows, width, tokens, sums),
                    None => rows,
                };
                if row.iter().all(|x| x.is_finite()) {
                    text.release(pages, tokens);
                    each(key, Ok(row));
                } else {
                    broken.push((key, [&text.sequence.tokens, tokens].concat()));
                    pages.discard(text.sequence);
                }
            }
            ControlFlow::Break(())
        })?;
        for (key, tokens) in broken {
            let error = nonfinite::error(model, pages, &tokens);
            each(key, Err(error));
        }
        self.batch.clear();
        Ok(())
    }
}

impl Text {
    /// The mean of the hidden states, in the place of the last of `rows`: sums of the text's start,
    /// or, behind a stored prefix, the hidden states of `tokens`, which are added to its sum one by
    /// one, as the model adds them.
    fn mean<'a>(
        &mut self,
        rows: &'a mut [f32],
        width: usize,
        tokens: &[u32],
        sums: &mut PrefixSums,
    ) -> &'a mut [f32] {
        if let Some(sum) = &mut self.sum {
            for row in rows.chunks_exact_mut(width) {
                sum.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += x);
                row.copy_from_slice(sum);
            }
        }
        let reused = &self.sequence.tokens;
        for (row, &len) in rows.chunks_exact(width).zip(&self.outputs) {
            if stored_sums(self.kept).contains(&len) {
                let prefix = reused.iter().chain(tokens).take(len).copied().collect();
                sums.insert(prefix, row.to_vec());
            }
        }
        let (_, mean) = rows.split_at_mut(rows.len() - width);
        let len = (reused.len() + tokens.len()) as f32;
        mean.iter_mut().for_each(|x| *x /= len);
        mean
    }

    /// Gives its pages back, but for those of a prefix that is kept. `tokens` were computed.
    fn release(self, pages: &mut Pages, tokens: &[u32]) {
        let Text { mut sequence, kept, .. } = self;
        match kept.checked_sub(sequence.tokens.len()) {
            None | Some(0) => pages.discard(sequence),
            Some(new) => {
                pages.advance(&mut sequence, &tokens[..new]);
                pages.release(sequence);
            }
        }
    }
}

/// The lengths of a prefix of `kept` tokens whose sums are stored: later texts reuse all of it, or
/// its full pages alone.
fn stored_sums(kept: usize) -> [usize; 2] {
    [kept / PAGE_TOKENS * PAGE_TOKENS, kept]
}

/// Scales a vector to length 1; one of zeros has no direction and stays.
pub fn normalize(x: &mut [f32]) {
    let square: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
    if square > 0.0 {
        let factor = 1.0 / square.sqrt();
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * factor) as f32);
    }
}
