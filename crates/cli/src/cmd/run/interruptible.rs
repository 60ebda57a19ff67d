//! The events of a request that Ctrl-C ends.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use bodkin::{FinishReason, Request, Timings, Usage};
use bodkin_engine::{Engine, Event, EventDecoder, Result, Update};

use crate::interrupt::{self, Catch};

/// Events up to the end or Ctrl-C. While the prompt is read there is no answer to keep, so Ctrl-C
/// ends them without waiting for the step that is running: the engine drops the request behind it.
pub(super) struct InterruptibleEvents {
    receiver: Receiver<Message>,
    decoder: EventDecoder,
    prompt_tokens: usize,
    submitted: Instant,
    has_answer: bool,
    has_ended: bool,
    _catch: Catch,
}

enum Message {
    Update(Update),
    Interrupted,
    /// The engine sends no more updates.
    Closed,
}

/// The engine's end of the channel. The catch of Ctrl-C has another, so that the channel itself
/// does not end with this one.
struct Updates(Sender<Message>);

impl Drop for Updates {
    fn drop(&mut self) {
        // The receiver may be gone.
        let _ = self.0.send(Message::Closed);
    }
}

impl InterruptibleEvents {
    pub(super) fn submit(engine: &Engine, request: Request) -> Result<InterruptibleEvents> {
        let (sender, receiver) = mpsc::channel();
        let (interrupted, prompt_tokens) = (sender.clone(), request.prompt.len());
        let updates = Updates(sender);
        let sink = Box::new(move |update| updates.0.send(Message::Update(update)).is_ok());
        let decoder = engine.submit_to(request, sink)?;
        let canceller = decoder.canceller();
        let _catch = interrupt::catch(move || {
            canceller.cancel();
            // The events may have ended.
            let _ = interrupted.send(Message::Interrupted);
        });
        Ok(InterruptibleEvents {
            receiver,
            decoder,
            prompt_tokens,
            submitted: Instant::now(),
            has_answer: false,
            has_ended: false,
            _catch,
        })
    }
}

impl Iterator for InterruptibleEvents {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        while !self.has_ended {
            match self.receiver.recv().ok()? {
                Message::Closed => self.has_ended = true,
                Message::Update(update) => {
                    let Some(event) = self.decoder.decode(update) else { continue };
                    self.has_answer |= matches!(event, Event::Token { .. });
                    self.has_ended |= matches!(event, Event::Done { .. });
                    return Some(event);
                }
                Message::Interrupted if self.has_answer => (),
                Message::Interrupted => {
                    self.has_ended = true;
                    let prompt_ms = self.submitted.elapsed().as_secs_f64() * 1e3;
                    let timings = Timings { prompt_ms, ..Timings::default() };
                    let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
                    let (reason, text) = (FinishReason::Cancelled, String::new());
                    return Some(Event::Done { reason, text, usage, timings });
                }
            }
        }
        None
    }
}
