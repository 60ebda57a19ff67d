//! Answers on their way to a client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc;
use tonic::Status;

type Answer<T> = Result<T, Status>;

/// The answers up to the first error. If the client takes none of them for `timeout`, what makes
/// them is dropped, with all that it holds, and the stream ends with an error.
pub(super) fn limited<T: Send + 'static>(
    answers: impl Stream<Item = Answer<T>> + Send + 'static,
    timeout: Duration,
) -> BoxStream<'static, Answer<T>> {
    let (sender, receiver) = mpsc::channel(1);
    let is_late = Arc::new(AtomicBool::new(false));
    let late = Arc::clone(&is_late);
    tokio::spawn(async move {
        let mut answers = std::pin::pin!(answers);
        loop {
            let next = tokio::select! {
                next = answers.next() => next,
                () = sender.closed() => return,
            };
            let Some(answer) = next else { return };
            let is_error = answer.is_err();
            match tokio::time::timeout(timeout, sender.send(answer)).await {
                Ok(Ok(())) if !is_error => {}
                Ok(_) => return,
                Err(_) => return late.store(true, Ordering::Relaxed),
            }
        }
    });
    let received = stream::unfold(receiver, |mut receiver| async {
        let answer = receiver.recv().await?;
        Some((answer, receiver))
    });
    let end = stream::once(async move {
        let message = "the client takes nothing of what is written for it";
        is_late.load(Ordering::Relaxed).then(|| Err(Status::deadline_exceeded(message)))
    });
    received.chain(end.filter_map(std::future::ready)).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(future)
    }

    #[test]
    fn answers_that_nobody_takes_are_dropped() {
        run(async {
            let held = Arc::new(());
            let kept = Arc::clone(&held);
            let numbers = stream::iter(0..10).map(move |i| Ok((i, Arc::clone(&kept)).0));
            let mut answers = limited(numbers, Duration::from_millis(50));
            assert_eq!(answers.next().await.unwrap().unwrap(), 0);
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert_eq!(Arc::strong_count(&held), 1);
            assert_eq!(answers.next().await.unwrap().unwrap(), 1);
            assert_eq!(
                answers.next().await.unwrap().unwrap_err().code(),
                tonic::Code::DeadlineExceeded
            );
            assert!(answers.next().await.is_none());
        });
    }

    #[test]
    fn an_error_is_the_last_answer() {
        run(async {
            let numbers = stream::iter([Ok(1), Err(Status::internal("no")), Ok(2)]);
            let all: Vec<_> = limited(numbers, Duration::from_secs(9)).collect().await;
            assert_eq!((all.len(), all[1].is_err()), (2, true));
        });
    }
}
