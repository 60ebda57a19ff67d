//! The client's side of a request: what the worker reports becomes text here, so that detokenizing
//! and the search for stop texts take no time of the model's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Receiver;

use crate::error::Error;
use crate::request::{Event, Finish, Logprobs, Request, Timings, Usage};
use crate::stop::StopTexts;
use crate::stream::TextStream;
use crate::tokenizer::Tokenizer;

/// What the worker reports of a request.
#[derive(Debug)]
pub enum Update {
    /// Some of the prompt is stored; the last part comes with the first token.
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
        /// Whether the request ends with it; it has no text then.
        is_end: bool,
    },
    /// The request ended well; the last update.
    Done {
        /// Why.
        reason: Finish,
        /// Token counts.
        usage: Usage,
        /// Durations.
        timings: Timings,
    },
    /// The request failed; the last update.
    Error(Error),
}

/// Receives the updates of a request, on the model's thread. Returns false if nobody reads them,
/// which ends the request.
pub type UpdateSink = Box<dyn FnMut(Update) -> bool + Send>;

/// Turns the updates of a request into events. Dropping it cancels the request.
pub struct EventDecoder {
    stream: TextStream,
    stop: StopTexts,
    /// The stop text that was found, and the tokens until then.
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
            stop: StopTexts::new(&request.stop),
            stopped: None,
            tokens: 0,
            cancelled,
        }
    }

    /// The event that follows from an update; none after a stop text, until the request has ended.
    pub fn decode(&mut self, update: Update) -> Option<Event> {
        match update {
            Update::Prefill { done, total } => Some(Event::Prefill { done, total }),
            Update::PromptToken { id, logprobs } => Some(Event::PromptToken { id, logprobs }),
            Update::Token { .. } if self.stopped.is_some() => None,
            Update::Token { id, logprobs, is_end } => {
                self.tokens += 1;
                let text = if is_end { String::new() } else { self.stream.push(id) };
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
                        (Finish::Stop(stop), String::new())
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

    /// Something that ends the request from elsewhere.
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
    /// Something that ends the request from elsewhere.
    pub fn canceller(&self) -> Canceller {
        self.decoder.canceller()
    }
}

/// Ends a request at its next step; its events then end with what there is to say about it.
#[derive(Clone, Debug)]
pub struct Canceller(Arc<AtomicBool>);

impl Canceller {
    /// Sets a flag that the worker reads.
    pub(crate) fn new(cancelled: Arc<AtomicBool>) -> Canceller {
        Canceller(cancelled)
    }

    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Relaxed);
    }
}
