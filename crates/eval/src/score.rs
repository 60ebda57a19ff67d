//! Scores the tokens of a window with the model's predictions, on several threads: with a large
//! vocabulary, the log-softmax of a row takes as long as the model's step.

use bodkin_backend::{Limits, Model, Observer};
use bodkin_engine::Pages;
use bodkin_model::Plan;

use crate::error::Result;
use crate::windows::Windows;

/// The most logits of one step, in elements: 128 MiB.
const STEP_LOGITS: usize = 1 << 25;

/// One prediction.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The index among the window's scored predictions.
    pub index: usize,
    /// The token that comes next in the text.
    pub next: u32,
    /// `[vocabulary]`.
    pub logits: &'a [f32],
}

/// The limits that a model is loaded with to read windows of `size` tokens in steps of `step`.
pub fn limits(plan: &Plan, size: usize, step: usize) -> Limits {
    let step = step.min(size);
    let outputs = (STEP_LOGITS / plan.output_width()).clamp(1, (size / 2).max(1));
    let pages = Pages::needed(&plan.windows(), size, step, 1);
    Limits { tokens: step, outputs: outputs.min(step), pages, state_slots: 1 }
}

/// Reads a window, maps each scored prediction with `of` on `threads` threads, and passes the
/// results to `sink` in order.
///
/// # Errors
/// The engine's error.
pub fn score<T: Send>(
    model: &mut dyn Model,
    windows: &Windows,
    window: usize,
    threads: usize,
    of: impl Fn(Row<'_>) -> T + Sync,
    mut sink: impl FnMut(T),
) -> Result<()> {
    let (vocabulary, scored) = (model.plan().output_width(), windows.scored());
    let text = &windows.tokens()[window * windows.size()..][..windows.size()];
    let (tokens, step) = (windows.input(window), model.limits().tokens);
    let wanted = |position| scored.contains(&position);
    bodkin_engine::steps(model, &tokens, step, wanted, None, |positions, rows| {
        let row = |i: usize| {
            let (position, logits) = (positions[i], &rows[i * vocabulary..][..vocabulary]);
            of(Row { index: position - scored.start, next: text[position + 1], logits })
        };
        parallel(threads, positions.len(), &row).into_iter().for_each(&mut sink);
    })?;
    Ok(())
}

/// Reads a window with an observer attached.
///
/// # Errors
/// The engine's error.
pub fn read(
    model: &mut dyn Model,
    windows: &Windows,
    window: usize,
    wanted: impl Fn(usize) -> bool,
    observer: &mut dyn Observer,
) -> Result<()> {
    let step = model.limits().tokens;
    let tokens = windows.input(window);
    bodkin_engine::steps(model, &tokens, step, wanted, Some(observer), |_, _| ())?;
    Ok(())
}

/// Computes `f` of each number below `n` on `threads` threads. Returns the results in order.
fn parallel<T: Send>(threads: usize, n: usize, f: &(impl Fn(usize) -> T + Sync)) -> Vec<T> {
    let share = |thread: usize| -> Vec<T> {
        (n * thread / threads..n * (thread + 1) / threads).map(f).collect()
    };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads).map(|thread| scope.spawn(move || share(thread))).collect();
        let mut all = share(0);
        others.into_iter().for_each(|other| all.extend(other.join().expect("no share panics")));
        all
    })
}

/// The normalisation that turns logits into log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSoftmax {
    /// The largest logit.
    pub max: f32,
    /// The logarithm of the sum of `exp(logit - max)`.
    pub log_sum: f64,
}

impl LogSoftmax {
    /// Of a row of logits.
    pub fn of(logits: &[f32]) -> LogSoftmax {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
        LogSoftmax { max, log_sum: sum.ln() }
    }

    /// The log-probability of a token with this logit.
    pub fn log_probability(&self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.max) - self.log_sum
    }
}
