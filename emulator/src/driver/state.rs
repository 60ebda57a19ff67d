//! The driver's state: memory, kernels, events, graphs; and the execution of stream operations.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{env, fs, ptr};

use std::ffi::c_int;

use cudarc::driver::sys::{CUfunction, CUresult, CUstream};

use crate::Fault;
use crate::kernel::Kernel;
use crate::launch::{Launch, Run};
use crate::memory::Memory;
use crate::parse::Module;
use crate::scheduler::{Blocks, run_blocks};

/// An operation of a stream.
#[derive(Clone)]
pub(super) enum StreamOp {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// A 2D copy; the pitches are the bytes from one row to the next.
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

/// The objects of all handles: a handle is a number.
#[derive(Default)]
pub(super) struct State {
    pub(super) memory: Memory,
    blocks: Blocks,
    handles: usize,
    pub(super) modules: HashMap<usize, Arc<Module>>,
    pub(super) functions: HashMap<usize, (Arc<Module>, String)>,
    /// Parsed kernels of functions, from their first launch on.
    kernels: HashMap<usize, Arc<Kernel>>,
    pub(super) events: HashMap<usize, Instant>,
    pub(super) recording: HashMap<usize, Vec<StreamOp>>,
    pub(super) graphs: HashMap<usize, Vec<StreamOp>>,
    launches: u64,
    /// After a fault all operations fail, as on a device.
    pub(super) has_failed: bool,
}

/// Settings from the environment: multiprocessors, the scheduler's seed, the folder of Hopper's
/// kernels.
pub(super) struct Settings {
    pub(super) processors: c_int,
    seed: u64,
    /// The relaxed store that cooperative launches lose, or 0.
    lost_store: u64,
    pub(super) hopper: Option<PathBuf>,
}

pub(super) static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let number = |name| env::var(name).ok().and_then(|text| text.parse().ok());
    Settings {
        processors: number("EMULATOR_PROCESSORS").unwrap_or(4) as c_int,
        seed: number("EMULATOR_SEED").unwrap_or(0),
        lost_store: number("EMULATOR_LOST_STORE").unwrap_or(0),
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

    /// Executes an operation at once, or records it if the stream is being captured.
    pub(super) fn enqueue(&mut self, stream: CUstream, op: StreamOp) -> CUresult {
        if let Some(recorded) = self.recording.get_mut(&(stream as usize)) {
            recorded.push(op);
            return CUresult::CUDA_SUCCESS;
        }
        self.execute(&op)
    }

    pub(super) fn execute(&mut self, op: &StreamOp) -> CUresult {
        if self.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        let done = match *op {
            StreamOp::Copy { to, from, bytes } => {
                // SAFETY: host and device addresses are pointers, as the caller promises the
                // driver.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            StreamOp::CopyRows { to, from, bytes, rows, pitches: [to_pitch, from_pitch] } => {
                (0..rows as u64).try_for_each(|row| {
                    let from = from + row * from_pitch as u64;
                    let to = to + row * to_pitch as u64;
                    self.memory.allocation(from, bytes)?;
                    self.memory.allocation(to, bytes)?;
                    // SAFETY: the bytes are allocated at both.
                    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                    Ok(())
                })
            }
            StreamOp::Fill { to, byte, bytes } => self.memory.allocation(to, bytes).map(|_| {
                // SAFETY: the bytes are allocated.
                unsafe { ptr::write_bytes(to as *mut u8, byte, bytes) };
            }),
            StreamOp::Launch(ref launch) => {
                self.launches += 1;
                let seed = SETTINGS.seed.wrapping_mul(0x10001) + self.launches;
                let lost_store = if launch.cooperative { SETTINGS.lost_store } else { 0 };
                let run = Run::new(launch, &self.memory, seed, lost_store);
                run_blocks(&run, &mut self.blocks)
            }
        };
        done.map_or_else(|fault| self.fail(&fault), |()| CUresult::CUDA_SUCCESS)
    }

    pub(super) fn fail(&mut self, fault: &Fault) -> CUresult {
        eprintln!("emulated driver: {fault}");
        self.has_failed = true;
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

    #[test]
    fn two_dimensional_copies_are_checked_for_bounds() {
        let mut state = State::default();
        let [from, to] =
            [32, 32].map(|bytes| state.memory.allocate(bytes, 64).expect("below the capacity"));
        // SAFETY: just allocated.
        unsafe { ptr::write_bytes(from as *mut u8, 7, 32) };
        let rows = |rows| StreamOp::CopyRows { to, from, bytes: 4, rows, pitches: [12, 8] };
        assert_eq!(state.execute(&rows(3)), CUresult::CUDA_SUCCESS);
        // SAFETY: as above.
        let copied = unsafe { std::slice::from_raw_parts(to as *const u8, 32) };
        let whole = |row: usize| copied[12 * row..][..4] == [7; 4];
        assert!((0..3).all(whole) && copied[4..12] == [0xff; 8]);
        assert_eq!(state.execute(&rows(4)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
}
