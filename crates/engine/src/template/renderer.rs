//! Threads that have compiled a template and wait for conversations. A compiled template borrows
//! its source, so that it stays on the stack of a thread, which needs a large one anyway.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use minijinja::machinery::CompiledTemplate;

use super::errors::{error, template};
use super::program;
use crate::error::{Error, Result, panic_text};

/// The name of the threads that templates run on. minijinja panics on some hostile ones, which
/// becomes an error with the panic's message: a program's panic hook can be silent about these
/// threads.
pub const TEMPLATE_THREAD: &str = "bodkin-template";

/// The stack of a thread. Only what is used of it takes memory.
const STACK_BYTES: usize = 256 << 20;

/// The most threads that wait. More than these may render at one time.
const IDLE_MAX: usize = 4;

/// Something to do with a compiled template.
type Job = Box<dyn FnOnce(&CompiledTemplate<'_>) + Send>;

/// A thread with the compiled template. It has ended when this is dropped: under a limit of a
/// process's data (`ulimit -d`), which counts whole stacks, the next thread may need its memory.
#[derive(Debug)]
struct Renderer {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Renderer {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Panics of jobs are caught.
            let _ = thread.join();
        }
    }
}

impl Renderer {
    /// Compiles a template.
    fn new(source: &str) -> Result<Renderer> {
        let (jobs, received) = channel();
        let (compiled, result) = sync_channel(1);
        let source = source.to_owned();
        let thread = thread::Builder::new().name(TEMPLATE_THREAD.to_owned());
        let thread = thread.stack_size(STACK_BYTES);
        let thread = thread.spawn(move || run_jobs(&source, &compiled, &received));
        let thread = thread.map_err(Error::Thread)?;
        let renderer = Renderer { jobs: Some(jobs), thread: Some(thread) };
        result.recv().unwrap_or_else(|_| Err(template("its thread ended")))?;
        Ok(renderer)
    }

    /// Runs something on the thread.
    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CompiledTemplate<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let ended = || template("its thread ended");
        let (done, result) = sync_channel(1);
        let job: Job = Box::new(move |program| {
            let _ = done.send(caught(|| work(program)));
        });
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())?;
        result.recv().unwrap_or_else(|_| Err(ended()))
    }
}

/// Compiles a template, says whether that worked, and runs jobs on it.
fn run_jobs(source: &str, compiled: &SyncSender<Result<()>>, jobs: &Receiver<Job>) {
    let adapted = match caught(|| program::bounded_source(source).map_err(error)) {
        Ok(adapted) => adapted,
        Err(error) => return drop(compiled.send(Err(error))),
    };
    let program = match caught(|| program::compile(&adapted).map_err(error)) {
        Ok(program) => program,
        Err(error) => return drop(compiled.send(Err(error))),
    };
    let _ = compiled.send(Ok(()));
    for job in jobs {
        job(&program);
    }
}

/// Makes a panic an error.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(template(format!("it panicked: {}", panic_text(&*panic)))))
}

/// The threads of one template.
#[derive(Debug)]
pub(super) struct Renderers {
    source: String,
    idle: Mutex<Vec<Renderer>>,
}

impl Renderers {
    /// Compiles a template. Fails if it does not parse.
    pub(super) fn new(source: &str) -> Result<Renderers> {
        let first = Renderer::new(source)?;
        Ok(Renderers { source: source.to_owned(), idle: Mutex::new(vec![first]) })
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Runs something on a thread that waits, or on a new one.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CompiledTemplate<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let renderer = match waiting {
            Some(renderer) => renderer,
            None => Renderer::new(&self.source)?,
        };
        let result = renderer.run(work)?;
        // What has failed may have used much of the stack, whose memory goes with the thread.
        let mut idle = idle();
        if idle.len() < IDLE_MAX {
            idle.push(renderer);
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_compiled_once() {
        let renderers = Renderers::new("{{ messages }}").unwrap();
        let id = || renderers.run(|_| Ok(thread::current().id())).unwrap();
        let first = id();
        assert_eq!((id(), id()), (first, first));
        // One for each that renders at the same time.
        let other = renderers.run(|_| Err::<(), _>(template("refused")));
        assert!(other.is_err());
        let second = id();
        assert_ne!(second, first);
        assert_eq!(id(), second);
        let error = renderers.run::<()>(|_| panic!("a fault")).unwrap_err();
        assert!(error.to_string().contains("it panicked: a fault"), "{error}");
        assert!(Renderers::new("{% if %}").is_err());
    }

    #[test]
    fn renderings_do_not_wait_for_each_other() {
        let renderers = Renderers::new("").unwrap();
        let barrier = std::sync::Arc::new(std::sync::Barrier::new(8));
        thread::scope(|scope| {
            for _ in 0..8 {
                let (barrier, renderers) = (barrier.clone(), &renderers);
                scope.spawn(move || renderers.run(move |_| Ok(barrier.wait().is_leader())));
            }
        });
        assert_eq!(renderers.idle.lock().unwrap().len(), IDLE_MAX);
    }
}
