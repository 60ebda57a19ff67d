//! Requests whose prompt begins with pages that are on disk: a thread of its own reads these, so
//! that no running request waits for the disk, and the model's thread takes them one by one.

use std::collections::VecDeque;
use std::io::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SendError, Sender, SyncSender, channel, sync_channel};

use bodkin_backend::PAGE_TOKENS;

use crate::client::Client;
use crate::pages::{HeldPrefix, Pages};
use crate::prefix_store::{PageKey, PrefixStore, StoredPage, page_key};

/// Pages that were read and are not taken yet: about what can be read during a step of others.
pub(crate) const READ_AHEAD: usize = 16;

/// A page of the request that waits longest; none behind its last one.
pub(crate) type Found = Option<StoredPage>;

/// A request until its pages are read.
pub(crate) struct Restoring {
    /// None once it was cancelled.
    pub(crate) client: Option<Box<Client>>,
    pub(crate) prompt: Vec<u32>,
    /// Those of its pages that are in memory.
    pub(crate) held: HeldPrefix,
    pub(crate) max_tokens: usize,
    /// Set when no further page is wanted.
    stop: Arc<AtomicBool>,
}

/// What the thread reads for a request.
struct Job {
    prompt: Vec<u32>,
    /// Full pages of the prompt that are in memory.
    known: usize,
    stop: Arc<AtomicBool>,
    /// Tells the worker of each page, and of the end. Returns whether the engine takes messages.
    notify: Box<dyn Fn() -> bool + Send>,
}

/// The requests that wait, and the thread that reads for them in their order.
pub(crate) struct Restorer {
    requests: VecDeque<Restoring>,
    jobs: Sender<Job>,
    found: Receiver<Found>,
}

impl Restorer {
    pub(crate) fn new(store: Arc<PrefixStore>) -> Result<Restorer> {
        let (jobs, receiver) = channel();
        let (sender, found) = sync_channel(READ_AHEAD);
        let thread = std::thread::Builder::new().name("bodkin-restore".to_owned());
        thread.spawn(move || read_all(&store, &receiver, &sender))?;
        Ok(Restorer { requests: VecDeque::new(), jobs, found })
    }

    /// Reads the pages of a request behind those that are in memory.
    pub(crate) fn start(
        &mut self,
        client: Box<Client>,
        (prompt, held): (Vec<u32>, HeldPrefix),
        max_tokens: usize,
        notify: impl Fn() -> bool + Send + 'static,
    ) {
        let notify = Box::new(notify);
        let (stop, known) = (Arc::new(AtomicBool::new(false)), held.len());
        let job = Job { prompt: prompt.clone(), known, stop: Arc::clone(&stop), notify };
        self.jobs.send(job).expect("the thread reads until the restorer drops");
        let client = Some(client);
        self.requests.push_back(Restoring { client, prompt, held, max_tokens, stop });
    }

    /// The page, or the end of pages, that a message has told of, and the request it is for.
    pub(crate) fn next(&mut self) -> (Found, &mut Restoring) {
        let found = self.found.recv().expect("a message comes behind what it tells of");
        (found, self.requests.front_mut().expect("a request for each job"))
    }

    /// Removes the request that waits longest.
    pub(crate) fn pop(&mut self) -> Option<Restoring> {
        self.requests.pop_front()
    }

    /// The clients that have cancelled their requests, with what these hold.
    pub(crate) fn take_cancelled(&mut self) -> Vec<(Box<Client>, HeldPrefix)> {
        let take = |request: &mut Restoring| {
            let client = request.client.take_if(|client| client.is_cancelled())?;
            request.stop();
            Some((client, std::mem::take(&mut request.held)))
        };
        self.requests.iter_mut().filter_map(take).collect()
    }

    /// Gives back what requests hold, which get no further pages then. Returns whether there was
    /// anything.
    pub(crate) fn release_held(&mut self, pages: &mut Pages) -> bool {
        let mut has_any = false;
        for request in self.requests.iter_mut().filter(|request| request.held.len() > 0) {
            request.stop();
            pages.release_prefix(std::mem::take(&mut request.held));
            has_any = true;
        }
        has_any
    }

    /// All clients, because the model has failed.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Box<Client>> {
        self.requests.drain(..).filter_map(|request| request.client)
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.requests.iter().filter(|request| request.client.is_some()).count()
    }
}

impl Restoring {
    /// No further page is read.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

/// Reads the pages of each job, until the restorer drops.
fn read_all(store: &PrefixStore, jobs: &Receiver<Job>, found: &SyncSender<Found>) {
    for job in jobs {
        if read(store, &job, found).is_err() {
            return;
        }
    }
}

/// Reads the pages of a job up to the first that is not stored, or until the engine ends. Fails if
/// the restorer has dropped.
fn read(
    store: &PrefixStore,
    job: &Job,
    found: &SyncSender<Found>,
) -> std::result::Result<(), SendError<Found>> {
    let mut key = PageKey::default();
    // At least one token is left to compute.
    let pages = job.prompt[..job.prompt.len().saturating_sub(1)].chunks_exact(PAGE_TOKENS);
    for (i, tokens) in pages.enumerate() {
        key = page_key(&key, tokens);
        if i < job.known {
            continue;
        }
        let page = if job.stop.load(Relaxed) { None } else { store.load(&key) };
        let Some(page) = page else { break };
        found.send(Some(page))?;
        if !(job.notify)() {
            return Ok(());
        }
    }
    found.send(None)?;
    (job.notify)();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request may still come after the engine has ended: it was sent before.
    #[test]
    fn an_engine_that_ends_lets_later_jobs_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        let prompt = vec![7; PAGE_TOKENS + 1];
        let page = StoredPage { prefill: 0, windows: Vec::new(), state: None };
        let key = page_key(&PageKey::default(), &prompt[..PAGE_TOKENS]);
        store.save(key, page);
        while store.load(&key).is_none() {
            std::thread::yield_now();
        }
        let (jobs, receiver) = channel();
        let (sender, found) = sync_channel(READ_AHEAD);
        for _ in 0..2 {
            let (stop, notify) = (Arc::new(AtomicBool::new(false)), Box::new(|| false));
            jobs.send(Job { prompt: prompt.clone(), known: 0, stop, notify }).unwrap();
        }
        drop(jobs);
        read_all(&store, &receiver, &sender);
        assert_eq!(found.try_iter().flatten().count(), 2);
    }
}
