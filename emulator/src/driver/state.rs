//! What the driver keeps: memory, kernels, graphs; and how what is sent is done.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{env, fs, ptr};

use std::ffi::c_int;

use cudarc::driver::sys::{CUfunction, CUresult, CUstream};

use crate::Fault;
use crate::grid::{Blocks, Run};
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::parse::Module;

/// What is sent to a stream.
#[derive(Clone)]
pub(super) enum Work {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// Rows, and the bytes from one to the next.
    CopyRows {
        to: u64,
        from: u64,
        bytes: usize,
        rows: usize,
        pitches: [usize; 2],
    },
    Fill {
        to: u64,
        byte: u8,
        bytes: usize,
    },
    Launch(Launch),
}

#[derive(Clone)]
pub(super) struct Launch {
    pub(super) kernel: Arc<Kernel>,
    pub(super) parameters: Vec<u8>,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: usize,
    pub(super) meets: bool,
}

/// Everything that handles stand for: a handle is a number.
#[derive(Default)]
pub(super) struct State {
    pub(super) memory: Memory,
    blocks: Blocks,
    handles: usize,
    pub(super) modules: HashMap<usize, Arc<Module>>,
    pub(super) functions: HashMap<usize, (Arc<Module>, String)>,
    /// Those of functions, once they have been launched.
    kernels: HashMap<usize, Arc<Kernel>>,
    pub(super) events: HashMap<usize, Instant>,
    pub(super) recording: HashMap<usize, Vec<Work>>,
    pub(super) graphs: HashMap<usize, Vec<Work>>,
    launches: u64,
    /// A kernel that failed leaves nothing that can be relied on.
    pub(super) has_failed: bool,
}

/// What the environment says: multiprocessors, where turns begin, and where Hopper's kernels are.
pub(super) struct Settings {
    pub(super) processors: c_int,
    seed: u64,
    pub(super) hopper: Option<PathBuf>,
}

pub(super) static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let number = |name| env::var(name).ok().and_then(|text| text.parse().ok());
    Settings {
        processors: number("EMULATOR_PROCESSORS").unwrap_or(4) as c_int,
        seed: number("EMULATOR_SEED").unwrap_or(0),
        hopper: env::var_os("EMULATOR_HOPPER").map(PathBuf::from),
    }
});

pub(super) fn state() -> MutexGuard<'static, State> {
    static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub(super) fn handle<T>(&mut self) -> *mut T {
        self.handles += 1;
        self.handles as *mut T
    }

    /// Does what is sent, or keeps it for a graph.
    pub(super) fn send(&mut self, stream: CUstream, work: Work) -> CUresult {
        if let Some(recorded) = self.recording.get_mut(&(stream as usize)) {
            recorded.push(work);
            return CUresult::CUDA_SUCCESS;
        }
        self.work(&work)
    }

    pub(super) fn work(&mut self, work: &Work) -> CUresult {
        if self.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        let done = match *work {
            Work::Copy { to, from, bytes } => {
                // SAFETY: addresses of host and device alike, as the caller promises the driver.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            Work::CopyRows { to, from, bytes, rows, pitches: [to_pitch, from_pitch] } => {
                (0..rows as u64).try_for_each(|row| {
                    let from = from + row * from_pitch as u64;
                    let to = to + row * to_pitch as u64;
                    self.memory.range(from, bytes)?;
                    self.memory.range(to, bytes)?;
                    // SAFETY: so many bytes were taken at both.
                    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                    Ok(())
                })
            }
            Work::Fill { to, byte, bytes } => self.memory.range(to, bytes).map(|_| {
                // SAFETY: so many bytes were taken there.
                unsafe { ptr::write_bytes(to as *mut u8, byte, bytes) };
            }),
            Work::Launch(ref launch) => {
                self.launches += 1;
                launch.run(
                    &self.memory,
                    &mut self.blocks,
                    SETTINGS.seed.wrapping_mul(0x10001) + self.launches,
                )
            }
        };
        done.map_or_else(|fault| self.fail(&fault), |()| CUresult::CUDA_SUCCESS)
    }

    pub(super) fn fail(&mut self, fault: &Fault) -> CUresult {
        eprintln!("emulated driver: {fault}");
        self.has_failed = true;
        CUresult::CUDA_ERROR_LAUNCH_FAILED
    }

    /// The kernel of a function, which is read when it is launched first.
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

impl Launch {
    fn run(&self, memory: &Memory, blocks: &mut Blocks, seed: u64) -> Result<(), Fault> {
        let mut run = Run::new(&self.kernel, &self.parameters, memory, seed);
        (run.grid, run.threads, run.shared_bytes) = (self.grid, self.threads, self.shared_bytes);
        run.meets = self.meets;
        run.all(blocks)
    }
}

/// The PTX of Hopper that belongs to machine code: that of the file with the same bytes.
///
/// # Safety
/// The image is machine code, whole.
pub(super) unsafe fn hopper_ptx(folder: &Path, image: *const u8) -> Option<String> {
    let files = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut codes = files.filter(|path| path.extension().is_some_and(|end| end == "cubin"));
    codes.find_map(|path| {
        let code = fs::read(&path).ok()?;
        // SAFETY: where all bytes so far are the same, the next one is part of the image too, as
        // it says itself how long it is.
        let is_same = (0..code.len()).all(|i| unsafe { *image.add(i) } == code[i]);
        if is_same { fs::read_to_string(path.with_extension("ptx")).ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_copied_where_there_is_room_for_all() {
        let mut state = State::default();
        let [from, to] = [32, 32].map(|bytes| state.memory.take(bytes, 64).expect("there is room"));
        // SAFETY: taken just now.
        unsafe { ptr::write_bytes(from as *mut u8, 7, 32) };
        let rows = |rows| Work::CopyRows { to, from, bytes: 4, rows, pitches: [12, 8] };
        assert_eq!(state.work(&rows(3)), CUresult::CUDA_SUCCESS);
        // SAFETY: as above.
        let copied = unsafe { std::slice::from_raw_parts(to as *const u8, 32) };
        let whole = |row: usize| copied[12 * row..][..4] == [7; 4];
        assert!((0..3).all(whole) && copied[4..12] == [0xff; 8]);
        assert_eq!(state.work(&rows(4)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
}
