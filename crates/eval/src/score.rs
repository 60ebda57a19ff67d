//! The model's predictions for the tokens of a window, row by row, on several threads: with a large
//! vocabulary the logarithms would else take as long as the model.

use bodkin_backend::{Limits, Model, Observer};
use bodkin_engine::Pages;
use bodkin_model::Plan;

use crate::error::Result;
use crate::windows::Windows;

/// Logits that a step may give, in elements: 128 MiB.
const STEP_LOGITS: usize = 1 << 25;

/// One prediction.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Its number among those of the window that count.
    pub index: usize,
    /// The token that comes next in the text.
    pub next: u32,
    /// `[vocabulary]`.
    pub logits: &'a [f32],
}

/// What a model must be loaded for to read windows of `size` tokens in steps of `step`.
pub fn limits(plan: &Plan, size: usize, step: usize) -> Limits {
    let step = step.min(size);
    let outputs = (STEP_LOGITS / plan.output_width()).clamp(1, (size / 2).max(1));
    let pages = Pages::needed(&plan.windows(), size, step, 1);
    Limits { tokens: step, outputs: outputs.min(step), pages, state_slots: 1 }
}

/// Reads a window and gives what `of` makes of each prediction that counts to `sink`, in order.
/// `of` runs on so many threads.
///
/// # Errors
/// What the engine says about the model.
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

/// Reads a window for the sake of an observer.
///
/// # Errors
/// What the engine says about the model.
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

/// `f` of each number below `n`, in order, computed on so many threads.
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

/// What turns logits into log-probabilities.
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
