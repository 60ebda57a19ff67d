//! A kernel launch: what all its threads share.

use std::cell::Cell;
use std::sync::Arc;

use crate::Fault;
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::random::Random;

/// The arguments of a kernel launch.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) parameters: Vec<u8>,
    /// Blocks in each dimension.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) dynamic_shared: usize,
    /// Whether all blocks must be resident at the same time, because they synchronise.
    pub(crate) cooperative: bool,
}

impl Launch {
    /// Blocks of the grid.
    pub(crate) fn blocks(&self) -> usize {
        self.grid.iter().map(|&n| n as usize).product()
    }
}

/// What a launch in execution keeps from one slice to the next.
pub(crate) struct RunState {
    /// The allocation of the latest global access, which most accesses hit again.
    latest: Cell<[u64; 2]>,
    random: Random,
    /// Relaxed stores until one is lost, or 0.
    lost_store: Cell<u64>,
}

impl RunState {
    /// A state from which the schedule depends on `seed` alone. If `lost_store` is not 0, the
    /// launch loses the relaxed store of this number, to test how kernels detect a result that
    /// never comes.
    pub(crate) fn new(seed: u64, lost_store: u64) -> RunState {
        RunState {
            latest: Cell::new([0; 2]),
            random: Random::new(seed),
            lost_store: Cell::new(lost_store),
        }
    }
}

/// A launch in execution, as its warps see it.
pub(crate) struct Run<'a> {
    pub(crate) launch: &'a Launch,
    pub(crate) kernel: &'a Kernel,
    memory: &'a Memory,
    state: &'a RunState,
}

impl<'a> Run<'a> {
    pub(crate) fn new(launch: &'a Launch, memory: &'a Memory, state: &'a RunState) -> Run<'a> {
        Run { launch, kernel: &launch.kernel, memory, state }
    }

    /// Counts a relaxed store; whether it is the one that is lost.
    pub(crate) fn loses_store(&self) -> bool {
        let left = self.state.lost_store.get();
        self.state.lost_store.set(left.saturating_sub(1));
        left == 1
    }

    /// A random number below `end`.
    pub(crate) fn random(&self, end: usize) -> usize {
        self.state.random.below(end)
    }

    /// Whether the bytes are in the allocation of the latest access.
    #[inline(always)]
    fn is_latest(&self, address: u64, bytes: usize) -> bool {
        let [start, end] = self.state.latest.get();
        address >= start && bytes as u64 <= end.saturating_sub(address)
    }

    /// The fast path of [`Run::global`]: a pointer to naturally aligned bytes in the allocation of
    /// the latest access.
    #[inline(always)]
    pub(crate) fn global_fast(&self, address: u64, bytes: usize) -> Option<*mut u8> {
        let is_valid = self.is_latest(address, bytes) && address.is_multiple_of(bytes as u64);
        is_valid.then_some(address as *mut u8)
    }

    /// A pointer to bytes of global memory, checked for bounds and alignment.
    pub(crate) fn global(
        &self,
        address: u64,
        bytes: usize,
        alignment: usize,
    ) -> Result<*mut u8, Fault> {
        if !self.is_latest(address, bytes) {
            self.state.latest.set(self.memory.allocation(address, bytes)?);
        }
        if !address.is_multiple_of(alignment as u64) {
            return Err(Fault(format!(
                "misaligned access to global memory at {address:#x}, not a multiple of {alignment}"
            )));
        }
        Ok(address as *mut u8)
    }
}
