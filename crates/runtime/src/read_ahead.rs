//! Reads the file of a model ahead of the threads that load its weights. Those would wait for one
//! page fault after the other, which leaves a disk idle most of the time.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use bodkin_gguf::{File, Tensor};
use bodkin_model::Plan;

/// The most bytes that are asked for before the load comes to their tensor, and the part of the
/// host's free memory that they may take.
const MOST_AHEAD: u64 = 512 << 20;
const FREE_MEMORY_SHARE: u64 = 8;
/// Bytes that the system is asked for at once.
const PIECE_BYTES: usize = 4 << 20;

/// A thread that reads ahead until it is dropped.
pub(crate) struct ReadAhead {
    load: Arc<Load>,
    /// None if the system has no more threads.
    thread: Option<JoinHandle<()>>,
}

/// How far the load is, and how far before it the file is read.
struct Load {
    bytes: AtomicU64,
    is_over: AtomicBool,
    most_ahead: u64,
}

impl ReadAhead {
    /// Reads the weights of a plan in its order, in which backends load them; experts only if none
    /// of them stays in the file.
    pub(crate) fn start(file: &Arc<File>, plan: &Arc<Plan>, loads_experts: bool) -> ReadAhead {
        let free = bodkin_cpu::available_memory().unwrap_or(u64::MAX);
        let most_ahead = MOST_AHEAD.min(free / FREE_MEMORY_SHARE);
        ReadAhead::with_limit(file, plan, loads_experts, most_ahead)
    }

    fn with_limit(
        file: &Arc<File>,
        plan: &Arc<Plan>,
        loads_experts: bool,
        most_ahead: u64,
    ) -> ReadAhead {
        let (bytes, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let load = Arc::new(Load { bytes, is_over, most_ahead });
        let run = {
            let (file, plan, load) = (Arc::clone(file), Arc::clone(plan), Arc::clone(&load));
            move || {
                for (tensor, bytes) in tensors(&file, &plan, loads_experts) {
                    if !read(&file, tensor, bytes, &load) {
                        return;
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("read ahead".to_owned()).spawn(run);
        ReadAhead { load, thread: thread.ok() }
    }

    /// Tells how many bytes of the weights are loaded.
    pub(crate) fn loaded(&self, bytes: u64) {
        self.load.bytes.store(bytes, Relaxed);
        self.thread.iter().for_each(|thread| thread.thread().unpark());
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.load.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic is no reason to fail a load.
            let _ = thread.join();
        }
    }
}

/// The tensors to read, each with the range of its bytes among those of all weights.
fn tensors<'a>(
    file: &'a File,
    plan: &Plan,
    loads_experts: bool,
) -> impl Iterator<Item = (&'a Tensor, Range<u64>)> {
    let experts = if loads_experts { Vec::new() } else { plan.routed_weights().concat() };
    let mut end = 0;
    let weights = plan.weights.iter().enumerate().map(move |(id, weight)| {
        let start = end;
        end += weight.bytes;
        let is_read = experts.iter().all(|expert| expert.0 != id);
        (file.tensor(&weight.name).filter(|_| is_read), start..end)
    });
    weights.filter_map(|(tensor, bytes)| Some((tensor?, bytes))).collect::<Vec<_>>().into_iter()
}

/// Asks for a tensor piece by piece, when the load is near or at it, but for pieces that it has
/// passed. Returns false if the load is over.
fn read(file: &File, tensor: &Tensor, bytes: Range<u64>, load: &Load) -> bool {
    let len = tensor.bytes as usize;
    for start in (0..len).step_by(PIECE_BYTES) {
        let end = len.min(start + PIECE_BYTES);
        let is_far = |loaded: u64| {
            loaded < bytes.start && bytes.start + end as u64 > loaded + load.most_ahead
        };
        while !load.is_over.load(Relaxed) && is_far(load.bytes.load(Relaxed)) {
            thread::park();
        }
        if load.is_over.load(Relaxed) {
            return false;
        }
        if bytes.start + end as u64 > load.bytes.load(Relaxed) {
            file.will_need(tensor, start..end);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn experts_that_stay_in_the_file_are_not_read() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
        let file = Arc::new(bodkin_model::open(models.join("qwen3moe-q4_k_m.gguf")).unwrap());
        let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
        let all: Vec<_> = tensors(&file, &plan, true).collect();
        assert_eq!(all.len(), plan.weights.len());
        assert_eq!(all.last().unwrap().1.end, plan.cost().weight_bytes);
        assert!(all.windows(2).all(|pair| pair[0].1.end == pair[1].1.start));
        let others: Vec<_> = tensors(&file, &plan, false).collect();
        assert!(others.iter().all(|(tensor, _)| !tensor.name.contains("_exps")));
        assert_eq!(all.len() - others.len(), plan.routed_weights().concat().len());
    }

    /// A thread that waits for a load at the second tensor.
    fn waiting() -> (ReadAhead, u64) {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
        let file = Arc::new(bodkin_model::open(models.join("qwen3moe-q4_k_m.gguf")).unwrap());
        let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
        let ahead = ReadAhead::with_limit(&file, &plan, true, 0);
        thread::sleep(Duration::from_millis(50));
        assert!(!ahead.thread.as_ref().unwrap().is_finished());
        (ahead, plan.cost().weight_bytes)
    }

    /// Fails, and does not hang, if something does not happen.
    fn soon(happens: impl Fn() -> bool) {
        let started = Instant::now();
        while !happens() {
            assert!(started.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_thread_follows_the_load() {
        let (ahead, bytes) = waiting();
        ahead.loaded(bytes);
        soon(|| ahead.thread.as_ref().unwrap().is_finished());
    }

    #[test]
    fn a_load_that_fails_ends_the_thread() {
        let (ahead, _) = waiting();
        let dropped = thread::spawn(|| drop(ahead));
        soon(|| dropped.is_finished());
    }
}
