//! The door for clients: submit a request, read its events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use bodkin_backend::{Limits, Model};
use bodkin_model::Plan;

use crate::error::{Error, Result};
use crate::pages::Pages;
use crate::request::{Event, Request};
use crate::stats::Stats;
use crate::tokenizer::Tokenizer;
use crate::worker::{Message, Submission, Worker};

/// How an engine is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// The most tokens of a sequence, prompt and output together.
    pub context: usize,
    /// The most tokens of one step: how much of a prompt is read at once.
    pub step_tokens: usize,
    /// The most requests that run at the same time.
    pub parallel: usize,
}

impl EngineOptions {
    /// What the model must be loaded for.
    pub fn limits(&self, plan: &Plan) -> Limits {
        let (len, step) = (self.context, self.step_tokens);
        let state_slots =
            if plan.states.is_empty() { 0 } else { Pages::state_slots_needed(self.parallel) };
        Limits {
            tokens: step,
            outputs: self.parallel,
            pages: Pages::needed(&plan.windows(), len, step, self.parallel),
            state_slots,
        }
    }
}

/// A loaded model that answers requests.
pub struct Engine {
    tokenizer: Arc<Tokenizer>,
    messages: Option<Sender<Message>>,
    worker: Option<JoinHandle<()>>,
}

/// The events of one request, ending with [`Event::Done`] or [`Event::Error`]. Dropping it ends
/// the request at its next step.
pub struct Events {
    receiver: Receiver<Event>,
    cancelled: Arc<AtomicBool>,
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.receiver.recv().ok()
    }
}

impl Events {
    /// Something that ends the request from elsewhere.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::clone(&self.cancelled))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.cancelled.store(true, Relaxed);
    }
}

/// Ends a request at its next step; its events then end with what there is to say about it.
#[derive(Clone, Debug)]
pub struct Canceller(Arc<AtomicBool>);

impl Canceller {
    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Relaxed);
    }
}

impl Engine {
    /// Starts the thread that runs `model`, which must have been loaded with
    /// [`EngineOptions::limits`]. Fails for an encoder.
    pub fn open(
        model: Box<dyn Model>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
    ) -> Result<Engine> {
        if model.plan().is_encoder() {
            return Err(Error::NoText { architecture: model.plan().architecture.clone() });
        }
        let (messages, receiver) = mpsc::channel();
        let worker = Worker::new(model, Arc::clone(&tokenizer), options.context);
        let thread = std::thread::Builder::new().name("bodkin-engine".to_owned());
        let worker = thread.spawn(move || worker.run(&receiver)).map_err(Error::Thread)?;
        Ok(Engine { tokenizer, messages: Some(messages), worker: Some(worker) })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Queues a request.
    pub fn submit(&self, request: Request) -> Events {
        let (events, receiver) = mpsc::channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let submission = Submission { request, events, cancelled: Arc::clone(&cancelled) };
        // If the worker is gone the events end at once, which the client sees.
        let _ = self.messages().send(Message::Submit(Box::new(submission)));
        Events { receiver, cancelled }
    }

    /// How the engine is once the step that runs has ended; none if its thread has failed.
    pub fn stats(&self) -> Option<Stats> {
        let (reply, receiver) = mpsc::channel();
        self.messages().send(Message::Stats(reply)).ok()?;
        receiver.recv().ok()
    }

    fn messages(&self) -> &Sender<Message> {
        self.messages.as_ref().expect("an engine takes messages until it drops")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has said so already.
            let _ = worker.join();
        }
    }
}
