//! The client's side of a request: what the worker thread reports becomes text here, so that
//! detokenizing and the search for stop strings take none of that thread's time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Receiver;

use crate::error::Error;
use crate::request::{Event, FinishReason, Logprobs, Request, Timings, Usage};
use crate::stop::StopStrings;
use crate::stream::TextStream;
use crate::tokenizer::Tokenizer;

/// What the worker thread reports of a request.
#[derive(Debug)]
pub enum Update {
    /// Progress of prefill: sent at admission with the tokens of the prefix cache, and after each
    /// chunk but the last, which the first token follows, or `Done`.
    Prefill {
        /// Tokens of the prompt in the KV cache.
        done: usize,
        /// Tokens of the whole prompt.
        total: usize,
    },
    /// A token of the prompt, from the second on, if the request asks for its log-probabilities.
    PromptToken {
        /// The token's id.
        id: u32,
        /// Given the tokens before it.
        logprobs: Box<Logprobs>,
    },
    /// A token was generated.
    Token {
        /// The token's id.
        id: u32,
        /// If the request asks for it.
        logprobs: Option<Box<Logprobs>>,
        /// Whether it is an end-of-generation token or one of the request's stop tokens. It has no
        /// text, and is reported only if the request asks for log-probabilities of its prompt.
        is_end_token: bool,
    },
    /// The request ended without an error, though it may have been cancelled; the last update.
    Done {
        /// Why.
        reason: FinishReason,
        /// Token counts.
        usage: Usage,
        /// Durations.
        timings: Timings,
    },
    /// The request failed; the last update.
    Error(Error),
}

/// Receives the updates of a request, on the worker thread. Returns false if nobody reads them: if
/// the update was a token, the request then ends.
pub type UpdateSink = Box<dyn FnMut(Update) -> bool + Send>;

/// Turns the updates of a request into events. Dropping it cancels the request.
pub struct EventDecoder {
    stream: TextStream,
    stop: StopStrings,
    /// The stop string that was found, and the tokens until then.
    stopped: Option<(String, usize)>,
    tokens: usize,
    cancelled: Arc<AtomicBool>,
}

impl EventDecoder {
    /// `cancelled` ends the request.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        request: &Request,
        cancelled: Arc<AtomicBool>,
    ) -> EventDecoder {
        EventDecoder {
            stream: TextStream::new(tokenizer, request.show_special),
            stop: StopStrings::new(&request.stop),
            stopped: None,
            tokens: 0,
            cancelled,
        }
    }

    /// The event that follows from an update; none after a stop string, until the request has
    /// ended.
    pub fn decode(&mut self, update: Update) -> Option<Event> {
        match update {
            Update::Prefill { done, total } => Some(Event::Prefill { done, total }),
            Update::PromptToken { id, logprobs } => Some(Event::PromptToken { id, logprobs }),
            Update::Token { .. } if self.stopped.is_some() => None,
            Update::Token { id, logprobs, is_end_token } => {
                self.tokens += 1;
                let text = if is_end_token { String::new() } else { self.stream.push(id) };
                let (text, stop) = self.stop.push(&text);
                if let Some(stop) = stop {
                    self.stopped = Some((stop, self.tokens));
                    self.cancelled.store(true, Relaxed);
                }
                Some(Event::Token { id, text, logprobs })
            }
            Update::Done { reason, mut usage, timings } => {
                let (reason, text) = match self.stopped.take() {
                    Some((stop, tokens)) => {
                        usage.generated_tokens = tokens;
                        (FinishReason::Stop(stop), String::new())
                    }
                    None => {
                        let rest = self.stream.finish();
                        (reason, self.stop.push(&rest).0 + &self.stop.finish())
                    }
                };
                Some(Event::Done { reason, text, usage, timings })
            }
            Update::Error(error) => Some(Event::Error(error)),
        }
    }

    /// A handle that cancels the request from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(Arc::clone(&self.cancelled))
    }
}

impl Drop for EventDecoder {
    fn drop(&mut self) {
        self.cancelled.store(true, Relaxed);
    }
}

/// The events of one request, ending with [`Event::Done`] or [`Event::Error`]. Dropping it ends
/// the request at its next step.
pub struct Events {
    pub(crate) receiver: Receiver<Update>,
    pub(crate) decoder: EventDecoder,
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            let update = self.receiver.recv().ok()?;
            if let Some(event) = self.decoder.decode(update) {
                return Some(event);
            }
        }
    }
}

impl Events {
    /// A handle that cancels the request from another thread.
    pub fn canceller(&self) -> Canceller {
        self.decoder.canceller()
    }
}

/// Cancels a request before its next step. Its events then end with [`FinishReason::Cancelled`],
/// its embeddings early.
#[derive(Clone, Debug)]
pub struct Canceller(Arc<AtomicBool>);

impl Canceller {
    /// A handle that sets this flag, which the worker thread reads.
    pub(crate) fn new(cancelled: Arc<AtomicBool>) -> Canceller {
        Canceller(cancelled)
    }

    /// Requests cancellation and returns at once.
    pub fn cancel(&self) {
        self.0.store(true, Relaxed);
    }
}
