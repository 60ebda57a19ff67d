//! The driver's state: memory, streams, kernels, events, graphs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{env, fs};

use std::ffi::c_int;
use std::fmt::Display;

use cudarc::driver::sys::{CUevent, CUfunction, CUresult, CUstream};

use crate::Fault;
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::parse::Module;
use crate::scheduler::Scheduler;
use crate::stream_op::{Moment, StreamOp};

/// The objects of all handles: a handle is a number.
pub(super) struct State {
    pub(super) memory: Memory,
    scheduler: Scheduler,
    handles: usize,
    pub(super) modules: HashMap<usize, Arc<Module>>,
    pub(super) functions: HashMap<usize, (Arc<Module>, String)>,
    /// Parsed kernels of functions, from their first launch on.
    kernels: HashMap<usize, Arc<Kernel>>,
    /// The latest record of each event.
    events: HashMap<usize, Moment>,
    pub(super) recording: HashMap<usize, Vec<StreamOp>>,
    pub(super) graphs: HashMap<usize, Vec<StreamOp>>,
    /// After a fault all operations fail, as on a device.
    pub(super) has_failed: bool,
    /// Operations that were enqueued.
    enqueued: u64,
    /// The operation with which the device is lost.
    lost_after: Option<u64>,
}

/// Settings from the environment: multiprocessors, the scheduler's seed, faults, the folder of
/// Hopper's kernels.
pub(super) struct Settings {
    pub(super) processors: c_int,
    seed: u64,
    /// The relaxed store that cooperative launches lose, or 0.
    lost_store: u64,
    /// The operation with which the device is lost.
    lost_after: Option<u64>,
    pub(super) hopper: Option<PathBuf>,
}

pub(super) static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let number = |name| env::var(name).ok().and_then(|text| text.parse().ok());
    Settings {
        processors: number("EMULATOR_PROCESSORS").unwrap_or(4) as c_int,
        seed: number("EMULATOR_SEED").unwrap_or(0),
        lost_store: number("EMULATOR_LOST_STORE").unwrap_or(0),
        lost_after: number("EMULATOR_LOST_AFTER"),
        hopper: env::var_os("EMULATOR_HOPPER").map(PathBuf::from),
    }
});

pub(super) fn state() -> MutexGuard<'static, State> {
    static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
        let mut state = State::new(SETTINGS.seed, SETTINGS.lost_store);
        state.lost_after = SETTINGS.lost_after;
        Mutex::new(state)
    });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn new(seed: u64, lost_store: u64) -> State {
        State {
            memory: Memory::default(),
            scheduler: Scheduler::new(seed, lost_store),
            handles: 0,
            modules: HashMap::new(),
            functions: HashMap::new(),
            kernels: HashMap::new(),
            events: HashMap::new(),
            recording: HashMap::new(),
            graphs: HashMap::new(),
            has_failed: false,
            enqueued: 0,
            lost_after: None,
        }
    }

    pub(super) fn handle<T>(&mut self) -> *mut T {
        self.handles += 1;
        self.handles as *mut T
    }

    /// Puts an operation at the end of a stream, or records it if the stream is being captured.
    pub(super) fn enqueue(&mut self, stream: CUstream, op: StreamOp) -> CUresult {
        if self.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        if let Some(recorded) = self.recording.get_mut(&(stream as usize)) {
            recorded.push(op);
            return CUresult::CUDA_SUCCESS;
        }
        self.enqueued += 1;
        if Some(self.enqueued) == self.lost_after {
            return self.fail(&"the device is lost");
        }
        self.scheduler.enqueue(stream as usize, op);
        CUresult::CUDA_SUCCESS
    }

    /// Enqueues the record of an event. Waits from now on are for this one.
    pub(super) fn record(&mut self, event: CUevent, stream: CUstream) -> CUresult {
        if self.recording.contains_key(&(stream as usize)) {
            return CUresult::CUDA_ERROR_NOT_SUPPORTED;
        }
        let moment = Moment::default();
        self.events.insert(event as usize, Arc::clone(&moment));
        self.enqueue(stream, StreamOp::Record(moment))
    }

    /// Lets a stream wait for the latest record of an event, if there is one.
    pub(super) fn wait_for(&mut self, stream: CUstream, event: CUevent) -> CUresult {
        if self.recording.contains_key(&(stream as usize)) {
            return CUresult::CUDA_ERROR_NOT_SUPPORTED;
        }
        match self.events.get(&(event as usize)).map(Arc::clone) {
            Some(moment) => self.enqueue(stream, StreamOp::Wait(moment)),
            None => CUresult::CUDA_SUCCESS,
        }
    }

    /// The milliseconds from one event to another.
    pub(super) fn milliseconds(&self, start: CUevent, end: CUevent) -> Result<f32, CUresult> {
        let [start, end] = [start, end].map(|event| {
            let moment = self.events.get(&(event as usize));
            let moment = moment.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            moment.get().ok_or(CUresult::CUDA_ERROR_NOT_READY)
        });
        let (start, end) = (start?, end?);
        Ok(1e3 * end.duration_since(*start).as_secs_f32())
    }

    /// Forgets an event; streams still wait for its records.
    pub(super) fn destroy_event(&mut self, event: CUevent) {
        self.events.remove(&(event as usize));
    }

    /// Executes operations of all streams until those of one are done.
    pub(super) fn finish(&mut self, stream: CUstream) -> CUresult {
        self.run(|scheduler| scheduler.is_empty(stream as usize))
    }

    /// Likewise until those before the latest record of an event are done, if there is one.
    pub(super) fn finish_event(&mut self, event: CUevent) -> CUresult {
        let moment = self.events.get(&(event as usize)).map(Arc::clone);
        self.run(|_| moment.as_ref().is_none_or(|moment| moment.get().is_some()))
    }

    /// Frees memory after all operations, as a device does.
    pub(super) fn free(&mut self, address: u64) -> CUresult {
        self.after_all(|memory| memory.free(address))
    }

    /// The same for memory that the program owns.
    pub(super) fn unregister(&mut self, address: u64) -> CUresult {
        self.after_all(|memory| memory.unregister(address))
    }

    fn after_all(&mut self, forget: impl FnOnce(&mut Memory) -> bool) -> CUresult {
        // After a fault no operation is left that could use the memory.
        let _ = self.run(|_| false);
        match forget(&mut self.memory) {
            true => CUresult::CUDA_SUCCESS,
            false => CUresult::CUDA_ERROR_INVALID_VALUE,
        }
    }

    fn run(&mut self, is_done: impl Fn(&Scheduler) -> bool) -> CUresult {
        if self.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        match self.scheduler.run(&self.memory, is_done) {
            Ok(()) => CUresult::CUDA_SUCCESS,
            Err(fault) => self.fail(&fault),
        }
    }

    /// Reports a fault, and drops all operations.
    pub(super) fn fail(&mut self, fault: &dyn Display) -> CUresult {
        eprintln!("emulated driver: {fault}");
        self.has_failed = true;
        self.scheduler.clear();
        CUresult::CUDA_ERROR_LAUNCH_FAILED
    }

    /// The kernel of a function, parsed at its first launch.
    pub(super) fn kernel(&mut self, function: CUfunction) -> Result<Arc<Kernel>, Fault> {
        let function = function as usize;
        if let Some(kernel) = self.kernels.get(&function) {
            return Ok(Arc::clone(kernel));
        }
        let (module, name) = &self.functions[&function];
        let kernel = Arc::new(module.kernel(name)?);
        self.kernels.insert(function, Arc::clone(&kernel));
        Ok(kernel)
    }
}

/// The PTX of a Hopper cubin: that beside the file with the same bytes.
///
/// # Safety
/// The image is a complete cubin.
pub(super) unsafe fn hopper_ptx(folder: &Path, image: *const u8) -> Option<String> {
    let files = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut codes = files.filter(|path| path.extension().is_some_and(|end| end == "cubin"));
    codes.find_map(|path| {
        let code = fs::read(&path).ok()?;
        // SAFETY: a cubin contains its own length, so while all bytes are equal, the next one is
        // part of the image.
        let is_same = (0..code.len()).all(|i| unsafe { *image.add(i) } == code[i]);
        if is_same { fs::read_to_string(path.with_extension("ptx")).ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: CUresult = CUresult::CUDA_SUCCESS;
    const FIRST: CUstream = 1 as CUstream;
    const SECOND: CUstream = 2 as CUstream;
    const EVENT: CUevent = 3 as CUevent;

    /// A state, and operations that fill eight bytes and copy them to others; the latter bytes.
    fn state_with(seed: u64) -> (State, [StreamOp; 2], *const u64) {
        let mut state = State::new(seed, 0);
        let [from, to] = [8, 8].map(|bytes| state.memory.allocate(bytes, 64).expect("some memory"));
        let fill = StreamOp::Fill { to: from, byte: 7, bytes: 8 };
        (state, [fill, StreamOp::Copy { to, from, bytes: 8 }], to as *const u64)
    }

    fn is_copied(to: *const u64) -> bool {
        // SAFETY: the state's memory is alive.
        unsafe { to.read() == u64::from_le_bytes([7; 8]) }
    }

    #[test]
    fn a_wait_is_for_the_record_before_it() {
        for seed in 0..20 {
            let (mut state, [fill, copy], copied) = state_with(seed);
            // Nothing was recorded, so this one ends at once.
            assert_eq!(state.wait_for(FIRST, EVENT), DONE);
            assert_eq!(state.finish_event(EVENT), DONE);
            // What was recorded before, and what is recorded later, does not count.
            assert_eq!(state.record(EVENT, FIRST), DONE);
            assert_eq!(state.finish(FIRST), DONE);
            assert_eq!(state.enqueue(FIRST, fill), DONE);
            assert_eq!(state.record(EVENT, FIRST), DONE);
            assert_eq!(state.wait_for(SECOND, EVENT), DONE);
            assert_eq!(state.enqueue(SECOND, copy), DONE);
            assert_eq!(state.record(EVENT, SECOND), DONE);
            assert!(!is_copied(copied));
            assert_eq!(state.finish(SECOND), DONE);
            assert!(is_copied(copied));
        }
    }

    #[test]
    fn waiting_for_an_event_leaves_what_comes_later() {
        let (mut state, [fill, copy], copied) = state_with(0);
        assert_eq!(state.milliseconds(EVENT, EVENT), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(state.enqueue(FIRST, fill), DONE);
        assert_eq!(state.record(EVENT, FIRST), DONE);
        assert_eq!(state.enqueue(FIRST, copy), DONE);
        assert_eq!(state.milliseconds(EVENT, EVENT), Err(CUresult::CUDA_ERROR_NOT_READY));
        assert_eq!(state.finish_event(EVENT), DONE);
        assert_eq!(state.milliseconds(EVENT, EVENT), Ok(0.0));
        assert!(!is_copied(copied));
        assert_eq!(state.finish(FIRST), DONE);
        assert!(is_copied(copied));
    }

    #[test]
    fn memory_is_freed_after_everything_else() {
        let (mut state, [fill, copy], copied) = state_with(0);
        let StreamOp::Copy { from, .. } = copy else { unreachable!("see above") };
        for op in [fill, copy] {
            assert_eq!(state.enqueue(FIRST, op), DONE);
        }
        assert_eq!(state.free(from), DONE);
        assert!(is_copied(copied));
        assert_eq!(state.free(from), CUresult::CUDA_ERROR_INVALID_VALUE);
    }

    #[test]
    fn after_a_fault_everything_fails() {
        let (mut state, [_, copy], copied) = state_with(0);
        let beyond = StreamOp::Fill { to: copied as u64, byte: 7, bytes: 9 };
        for op in [beyond, copy.clone()] {
            assert_eq!(state.enqueue(FIRST, op), DONE);
        }
        let failed = CUresult::CUDA_ERROR_LAUNCH_FAILED;
        assert_eq!(state.finish(FIRST), failed);
        assert_eq!([state.finish(SECOND), state.finish_event(EVENT)], [failed; 2]);
        assert_eq!([state.enqueue(SECOND, copy), state.record(EVENT, SECOND)], [failed; 2]);
        assert_eq!(state.free(copied as u64), DONE);
    }

    #[test]
    fn a_lost_device_fails_from_that_operation_on() {
        let (mut state, [fill, copy], copied) = state_with(0);
        state.lost_after = Some(2);
        assert_eq!(state.enqueue(FIRST, fill), DONE);
        let failed = CUresult::CUDA_ERROR_LAUNCH_FAILED;
        assert_eq!(state.enqueue(FIRST, copy.clone()), failed);
        assert_eq!([state.enqueue(SECOND, copy), state.finish(FIRST)], [failed; 2]);
        assert!(!is_copied(copied));
    }
}
