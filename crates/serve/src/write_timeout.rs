//! A connection that ends when its client takes nothing of what is written for it. One that stops
//! reading would hold its connection and its model for ever.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream whose writes fail if none makes progress for a time.
pub(crate) struct WriteTimeout<S> {
    stream: S,
    timeout: Duration,
    /// Runs while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    pub(crate) fn new(stream: S, timeout: Duration) -> WriteTimeout<S> {
        WriteTimeout { stream, timeout, timer: None }
    }

    /// The result of a write, or an error if it and those before it have waited for too long.
    fn limit<T>(&mut self, result: Poll<Result<T>>, context: &mut Context<'_>) -> Poll<Result<T>> {
        if result.is_ready() {
            self.timer = None;
            return result;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.timeout)));
        ready!(timer.as_mut().poll(context));
        let message = "the client takes nothing of what is written for it";
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, message)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(result, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.limit(result, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(result, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(result, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn a_write_ends_if_nobody_reads_and_goes_on_if_somebody_does() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (server, mut client) = duplex(16);
            let mut server = WriteTimeout::new(server, Duration::from_millis(500));
            // Slow readers make progress.
            let reads = tokio::spawn(async move {
                for _ in 0..8 {
                    sleep(Duration::from_millis(100)).await;
                    client.read_exact(&mut [0; 16]).await.unwrap();
                }
                client
            });
            server.write_all(&[0; 128]).await.unwrap();
            let _client = reads.await.unwrap();
            let error = server.write_all(&[0; 128]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        });
    }
}
