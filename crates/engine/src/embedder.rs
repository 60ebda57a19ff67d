//! A queue of texts to embed. One thread owns the model and packs the texts of all requests into
//! its steps without padding; what a text gives depends on itself alone. Clients read vectors as
//! they are computed. Where the model allows it, a prefix that many texts share is computed with
//! the first of them, and the others reuse its pages in the steps behind.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use bodkin_backend::Model;

use crate::client::OpenRequest;
use crate::embed::{TextBatch, check_texts, longest_text};
use crate::error::{Error, Result, panic_text};
use crate::events::Canceller;
use crate::shared_prefix::{Group, RecentTexts, group};
use crate::stats::{Stats, Status, WeightReads};

/// The texts among which the worker looks for those that fill a step: a large step of short ones.
const WINDOW_TEXTS: usize = 1024;

/// A loaded model that embeds texts for many clients.
pub struct Embedder {
    width: usize,
    longest_text: usize,
    vocabulary: usize,
    /// The most requests at a time, running and waiting.
    most_open: usize,
    queue: usize,
    status: Arc<Status>,
    requests: Option<Sender<Request>>,
    worker: Option<JoinHandle<()>>,
}

/// The number of a request, and the index of a text in it.
type Key = (u64, usize);

/// Receives the embeddings of a request on the model's thread, each with the index of its text, or
/// why the request ends. Returns false if nobody reads them, which ends the request.
pub type EmbeddingSink = Box<dyn FnMut(Result<(usize, Vec<f32>)>) -> bool + Send>;

struct Request {
    /// Those that are not in the window yet, each with its index.
    texts: VecDeque<(usize, Vec<u32>)>,
    tokens: usize,
    /// Texts without an embedding.
    open_texts: usize,
    sink: EmbeddingSink,
    cancelled: Arc<AtomicBool>,
    /// None when the last text has its embedding.
    open: Option<OpenRequest>,
}

impl Embedder {
    /// Starts the thread that runs `model`, for texts of up to `context` tokens, or what the model
    /// allows, and for `parallel` requests at a time while `queue` others wait. Fails if the
    /// model's plan makes no embeddings.
    pub fn open(
        model: Box<dyn Model>,
        context: usize,
        parallel: usize,
        queue: usize,
    ) -> Result<Embedder> {
        let batch = TextBatch::new(&*model);
        let plan = model.plan();
        let longest_text = longest_text(plan)?.min(batch.longest_text(&*model)).min(context);
        let (width, vocabulary) = (plan.output_width(), plan.vocabulary);
        let status = Arc::new(Status::new());
        let worker = Worker {
            weight_reads: WeightReads::of(model.plan()),
            model,
            batch,
            requests: VecDeque::new(),
            submitted: 0,
            window: Vec::new(),
            recent: RecentTexts::default(),
            parallel,
            status: Arc::clone(&status),
        };
        let (requests, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new().name("bodkin-embedder".to_owned());
        let worker = thread.spawn(move || worker.run(&receiver)).map_err(Error::Thread)?;
        Ok(Embedder {
            width,
            longest_text,
            vocabulary,
            most_open: parallel.saturating_add(queue),
            queue,
            status,
            requests: Some(requests),
            worker: Some(worker),
        })
    }

    /// Elements of an embedding.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The most tokens of a text.
    pub fn longest_text(&self) -> usize {
        self.longest_text
    }

    /// Queues texts, given as token ids.
    ///
    /// # Errors
    /// If a text has no embedding, the queue is full, or a step has failed.
    pub fn submit(&self, texts: Vec<Vec<u32>>) -> Result<Embeddings> {
        let (sender, receiver) = mpsc::channel();
        let count = texts.len();
        let canceller = self.submit_to(texts, Box::new(move |one| sender.send(one).is_ok()))?;
        Ok(Embeddings { receiver, early: BTreeMap::new(), next: 0, count, canceller })
    }

    /// Queues texts whose embeddings go to `sink` in any order, for clients that wait for many
    /// requests at once. Returns what ends the request.
    ///
    /// # Errors
    /// As [`Embedder::submit`].
    pub fn submit_to(&self, texts: Vec<Vec<u32>>, sink: EmbeddingSink) -> Result<Canceller> {
        if self.status.failure.get().is_some() {
            return Err(self.failure());
        }
        check_texts(&texts, self.longest_text, self.vocabulary)?;
        let open = OpenRequest::new(&self.status, self.most_open)
            .ok_or(Error::QueueFull { limit: self.queue })?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let request = Request {
            tokens: texts.iter().map(Vec::len).sum(),
            open_texts: texts.len(),
            texts: texts.into_iter().enumerate().collect(),
            sink,
            cancelled: Arc::clone(&cancelled),
            open: Some(open),
        };
        let requests = self.requests.as_ref().expect("it takes requests until it drops");
        requests.send(request).map_err(|_| self.failure())?;
        Ok(Canceller::new(cancelled))
    }

    /// The state of the queue, and totals; does not wait for a step.
    pub fn stats(&self) -> Stats {
        self.status.snapshot()
    }

    /// Why no more texts are embedded; none while they are.
    pub fn failed(&self) -> Option<&str> {
        self.status.failure.get().map(String::as_str)
    }

    fn failure(&self) -> Error {
        let cause = self.failed().unwrap_or("the thread that embeds has ended");
        Error::Failed(cause.to_owned())
    }
}

impl Drop for Embedder {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has said so already.
            let _ = worker.join();
        }
    }
}

/// The embeddings of a request in the order of its texts, `[width]` each as the model pools it.
/// After an error there are no more. Dropping it ends the request at its next step.
pub struct Embeddings {
    receiver: Receiver<Result<(usize, Vec<f32>)>>,
    /// Embeddings that came before those of earlier texts.
    early: BTreeMap<usize, Vec<f32>>,
    next: usize,
    count: usize,
    canceller: Canceller,
}

impl Iterator for Embeddings {
    type Item = Result<Vec<f32>>;

    fn next(&mut self) -> Option<Result<Vec<f32>>> {
        if self.next == self.count {
            return None;
        }
        loop {
            if let Some(embedding) = self.early.remove(&self.next) {
                self.next += 1;
                return Some(Ok(embedding));
            }
            match self.receiver.recv() {
                Ok(Ok((i, embedding))) => {
                    self.early.insert(i, embedding);
                }
                Ok(Err(error)) => {
                    self.next = self.count;
                    return Some(Err(error));
                }
                // It was cancelled.
                Err(_) => {
                    self.next = self.count;
                    return None;
                }
            }
        }
    }
}

impl Embeddings {
    /// Something that ends the request from elsewhere; its embeddings then end early.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }
}

impl Drop for Embeddings {
    fn drop(&mut self) {
        self.canceller.cancel();
    }
}

/// Owns the model.
struct Worker {
    model: Box<dyn Model>,
    batch: TextBatch<Key>,
    /// Those with open texts, each with its number, in order of arrival.
    requests: VecDeque<(u64, Request)>,
    /// Requests that have come.
    submitted: u64,
    /// Texts that may run in the next step, in order of arrival.
    window: Vec<(Key, Vec<u32>)>,
    /// Texts that ran last, where the model reuses prefixes.
    recent: RecentTexts,
    /// The most requests that have texts in the window.
    parallel: usize,
    status: Arc<Status>,
    weight_reads: WeightReads,
}

impl Worker {
    /// Works until the other end of `requests` is gone and every request has ended. If the model
    /// fails, all requests end with the cause.
    fn run(mut self, requests: &Receiver<Request>) {
        let result = catch_unwind(AssertUnwindSafe(|| self.work(requests)));
        let cause = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("the thread that embeds panicked: {}", panic_text(&*panic)),
        };
        self.status.end_step();
        // From here on, clients are refused.
        let cause = self.status.failure.get_or_init(|| cause);
        let open = self.requests.drain(..).map(|(_, request)| request);
        for mut request in open.chain(requests.try_iter()) {
            // The client may have stopped reading.
            let _ = (request.sink)(Err(Error::Failed(cause.clone())));
        }
        let mut stats = self.status.stats();
        (stats.running, stats.waiting) = (0, 0);
    }

    fn work(&mut self, requests: &Receiver<Request>) -> Result<()> {
        while self.receive(requests) {
            self.drop_cancelled();
            self.fill_window();
            self.publish();
            self.step()?;
            self.publish();
        }
        Ok(())
    }

    /// Takes the requests that have come, and waits for one if there is none. Returns false if
    /// none will come.
    fn receive(&mut self, requests: &Receiver<Request>) -> bool {
        if self.requests.is_empty() {
            match requests.recv() {
                Ok(request) => self.admit(request),
                Err(_) => return false,
            }
        }
        requests.try_iter().for_each(|request| self.admit(request));
        true
    }

    fn admit(&mut self, request: Request) {
        let mut stats = self.status.stats();
        stats.requests += 1;
        stats.prompt_tokens += request.tokens as u64;
        drop(stats);
        self.requests.push_back((self.submitted, request));
        self.submitted += 1;
    }

    /// Forgets cancelled requests, and those without texts.
    fn drop_cancelled(&mut self) {
        let is_over = |r: &Request| r.open_texts == 0 || r.cancelled.load(Relaxed);
        if self.requests.iter().any(|(_, request)| is_over(request)) {
            self.requests.retain(|(_, request)| !is_over(request));
            let requests = &self.requests;
            self.window.retain(|((of, _), _)| requests.iter().any(|(id, _)| id == of));
        }
    }

    /// Fills the window with a text of each request in turn.
    fn fill_window(&mut self) {
        loop {
            let before = self.window.len();
            for (id, request) in self.requests.iter_mut().take(self.parallel) {
                if self.window.len() == WINDOW_TEXTS {
                    return;
                }
                if let Some((i, text)) = request.texts.pop_front() {
                    self.window.push(((*id, i), text));
                }
            }
            if self.window.len() == before {
                return;
            }
        }
    }

    /// Fills a step with texts of the window: the oldest, so that none waits for ever, then the
    /// longest that fit. Texts whose prefix another one of the step computes wait for it.
    fn pack(&mut self) -> Result<()> {
        let mut order: Vec<usize> = (0..self.window.len()).collect();
        let [_, rest @ ..] = &mut order[..] else { return Ok(()) };
        rest.sort_by_key(|&i| std::cmp::Reverse(self.window[i].1.len()));
        let groups = self.groups();
        let mut group_of: Vec<Option<&Group>> = vec![None; order.len()];
        for group in &groups {
            group.texts.iter().for_each(|&i| group_of[i] = Some(group));
        }
        let (mut is_taken, mut waits) = (vec![false; order.len()], vec![false; order.len()]);
        for &i in order.iter() {
            if waits[i] {
                continue;
            }
            let (key, text) = &self.window[i];
            let kept = match group_of[i] {
                Some(group) => group.len,
                None => self.recent.shared(text, self.batch.cached_tokens(text)),
            };
            is_taken[i] = self.batch.add(*key, text, kept, self.model.as_mut())?;
            if is_taken[i] && self.batch.reuses_prefixes() {
                self.recent.add(text);
                let group = group_of[i].iter().flat_map(|group| &group.texts);
                group.for_each(|&i| waits[i] = true);
            }
        }
        if !is_taken[0] {
            return Err(Error::OutOfPages { tokens: self.window[0].1.len() });
        }
        let mut is_taken = is_taken.into_iter();
        self.window.retain(|_| is_taken.next() == Some(false));
        Ok(())
    }

    /// Texts of the window that share a prefix, if the model can reuse it.
    fn groups(&self) -> Vec<Group> {
        if !self.batch.reuses_prefixes() {
            return Vec::new();
        }
        let texts: Vec<&[u32]> = self.window.iter().map(|(_, text)| text.as_slice()).collect();
        let cached: Vec<usize> = texts.iter().map(|text| self.batch.cached_tokens(text)).collect();
        group(&texts, &cached)
    }

    /// Runs a step, if there are texts.
    fn step(&mut self) -> Result<()> {
        self.pack()?;
        let (tokens, cached) = (self.batch.tokens(), self.batch.reused_tokens());
        let began = Instant::now();
        if tokens == 0 {
            return Ok(());
        }
        self.status.begin_step();
        let (requests, status) = (&mut self.requests, &self.status);
        let weight_bytes = self.weight_reads.step(tokens);
        let mut is_counted = false;
        let result = self.batch.run(self.model.as_mut(), &mut |(of, i), embedding| {
            // Who reads the last vector of a request sees its steps in the statistics, too.
            let mut stats = status.stats();
            stats.sequences += 1;
            if !std::mem::replace(&mut is_counted, true) {
                stats.steps += 1;
                stats.rows += tokens as u64;
                stats.weight_bytes += weight_bytes;
                stats.cached_tokens += cached as u64;
                stats.step_seconds += began.elapsed().as_secs_f64();
            }
            drop(stats);
            let request = requests.iter_mut().find(|(id, _)| *id == of);
            let Some((_, request)) = request else { return };
            request.open_texts -= 1;
            if request.open_texts == 0 {
                // A client that submits its next request at once finds room in the queue.
                request.open = None;
            }
            let is_broken = embedding.is_err();
            let is_read = (request.sink)(embedding.map(|embedding| (i, embedding.to_vec())));
            if is_broken || !is_read {
                request.cancelled.store(true, Relaxed);
            }
        });
        self.status.end_step();
        result?;
        self.drop_cancelled();
        Ok(())
    }

    fn publish(&self) {
        let open = self.requests.len();
        let mut stats = self.status.stats();
        stats.running = open.min(self.parallel);
        stats.waiting = open - stats.running;
    }
}
