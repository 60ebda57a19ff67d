//! A text in chunks, and a model that is loaded to read them.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bodkin::{MAX_TOKENS, ModelFile, within};
use bodkin_backend::Model;
use bodkin_engine::Tokenizer;
use bodkin_eval::{Windows, limits};

use crate::arguments::{Machine, threads};
use crate::text;

/// Default chunk size.
pub(super) const CHUNK_TOKENS: usize = 512;

/// The chunks of a text file, at most `chunks` of them.
pub(super) fn windows(
    tokenizer: &Tokenizer,
    file: &Path,
    size: usize,
    chunks: Option<usize>,
) -> Result<Windows> {
    ensure!(chunks != Some(0), "--chunks: expected at least 1 chunk, found 0");
    let text = text::read_trimmed(file, "the text")?;
    let mut windows = windows_of(tokenizer, &text, &file.display().to_string(), size)?;
    windows.truncate(chunks.unwrap_or(usize::MAX));
    Ok(windows)
}

/// All chunks of a text; `name` is for messages.
pub(super) fn windows_of(
    tokenizer: &Tokenizer,
    text: &str,
    name: &str,
    size: usize,
) -> Result<Windows> {
    let tokens = tokenizer.try_encode(text, true, false)?;
    Windows::of_text(tokens, size, first_token(tokenizer)).with_context(|| name.to_owned())
}

/// The BOS token that replaces the first token of each chunk, if the model uses one.
pub(super) fn first_token(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos().filter(|_| tokenizer.add_bos())
}

/// A loaded model and its start time.
pub(super) struct Run {
    pub(super) model: Box<dyn Model>,
    threads: usize,
    pub(super) start: Instant,
}

impl Run {
    /// Loads a model for chunks of `size` tokens.
    pub(super) fn new(opened: &mut ModelFile, machine: &Machine, size: usize) -> Result<Run> {
        let step = machine.step_tokens()?;
        within("ctx_size", size, MAX_TOKENS)?;
        opened.plan_for(size)?;
        let backend = machine.backend()?;
        let model = opened.load(backend.as_ref(), &limits(&opened.plan, size, step))?;
        let threads = threads(machine.threads)?;
        Ok(Run { model, threads, start: Instant::now() })
    }

    /// CPU threads that evaluate logits.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Prints an estimate of the total time after the first chunk.
    pub(super) fn estimate_time(&self, chunk: usize, windows: &Windows) {
        if chunk == 0 {
            let (count, size) = (windows.count(), windows.size());
            let seconds = self.start.elapsed().as_secs_f64();
            let minutes = seconds * count as f64 / 60.0;
            let chunks = text::count(count, "chunk");
            eprintln!("{chunks} of {size} tokens: {seconds:.2} s each, {minutes:.2} minutes");
        }
    }
}
