//! The events of a request that Ctrl-C ends.

use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use bodkin::{Finish, Request, Timings, Usage};
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
    _catch: Catch,
}

enum Message {
    Update(Update),
    Interrupted,
}

impl InterruptibleEvents {
    pub(super) fn submit(engine: &Engine, request: Request) -> Result<InterruptibleEvents> {
        let (sender, receiver) = mpsc::channel();
        let (interrupted, prompt_tokens) = (sender.clone(), request.prompt.len());
        let sink = Box::new(move |update| sender.send(Message::Update(update)).is_ok());
        let decoder = engine.submit_to(request, sink)?;
        let canceller = decoder.canceller();
        let _catch = interrupt::catch(move || {
            canceller.cancel();
            // The events may have ended.
            let _ = interrupted.send(Message::Interrupted);
        });
        let (submitted, has_answer) = (Instant::now(), false);
        Ok(InterruptibleEvents { receiver, decoder, prompt_tokens, submitted, has_answer, _catch })
    }
}

impl Iterator for InterruptibleEvents {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            match self.receiver.recv().ok()? {
                Message::Update(update) => {
                    let Some(event) = self.decoder.decode(update) else { continue };
                    self.has_answer |= matches!(event, Event::Token { .. });
                    return Some(event);
                }
                Message::Interrupted if self.has_answer => (),
                Message::Interrupted => {
                    let prompt_ms = self.submitted.elapsed().as_secs_f64() * 1e3;
                    let timings = Timings { prompt_ms, ..Timings::default() };
                    let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
                    let (reason, text) = (Finish::Cancelled, String::new());
                    return Some(Event::Done { reason, text, usage, timings });
                }
            }
        }
    }
}
