//! What the engine computes from rows of logits by itself: sampled tokens, and log-probabilities.

use bodkin_backend::{MAX_ROW_THREADS, are_samplable, for_each_row};

use crate::client::{Client, RowError, RowToken};
use crate::logprobs::logprobs;
use crate::scheduler::{OutputRow, Task};

/// A row of logits.
enum Row<'a> {
    /// The request samples its next token.
    Sampled(&'a mut Client),
    /// The log-probability of a token of a prompt is asked for, beside those of the `top` most
    /// probable ones.
    Prompt { id: u32, top: usize },
}

/// The token of each row of `logits`: the next one of the prompt, or a sampled one. A task
/// samples at most one.
pub(crate) fn tokens<'a>(
    tasks: &mut [Task<Box<Client>>],
    outputs: impl Iterator<Item = &'a OutputRow>,
    (logits, width): (&mut [f32], usize),
) -> Vec<Result<RowToken, RowError>> {
    if logits.is_empty() {
        return Vec::new();
    }
    let known = |tasks: &[Task<Box<Client>>], row: &OutputRow| {
        let task = &tasks[row.task];
        (row.next < task.prompt).then(|| (task.tokens[row.next], task.owner.prompt_logprobs()))
    };
    let rows: Vec<_> = outputs.map(|row| (row.task, known(tasks, row))).collect();
    let mut clients: Vec<_> = tasks.iter_mut().map(|task| Some(&mut *task.owner)).collect();
    let mut client = |task: usize| clients[task].take().expect("one sampled row of a task");
    let row = |(task, known)| match known {
        Some((id, top)) => (Row::Prompt { id, top }, Err(RowError::NonFinite)),
        None => (Row::Sampled(client(task)), Err(RowError::NonFinite)),
    };
    let mut rows: Vec<(Row<'_>, Result<RowToken, RowError>)> = rows.into_iter().map(row).collect();
    let threads = &mut [(); MAX_ROW_THREADS];
    for_each_row(&mut rows, (logits, width), threads, |_, (row, token), logits, ()| {
        *token = match row {
            Row::Sampled(client) => client.sample(logits),
            Row::Prompt { id, top } if are_samplable(logits) => {
                Ok((*id, Some(Box::new(logprobs(logits, *id, *top)))))
            }
            Row::Prompt { .. } => Err(RowError::NonFinite),
        };
    });
    rows.into_iter().map(|(_, token)| token).collect()
}
