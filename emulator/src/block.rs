//! A thread block: its shared memory, barriers and bulk copies.

use std::mem;

use crate::Fault;
use crate::launch::{Launch, Run};
use crate::memory::WINDOW;

/// A barrier of `bar.sync` and `bar.arrive`.
#[derive(Default)]
struct Barrier {
    /// Threads that have arrived.
    arrived: u32,
    /// Threads that must arrive; none for all threads of the block.
    expected: Option<u32>,
    waiting_warps: Vec<usize>,
}

/// A bulk copy (TMA) from global to shared memory in flight, and the mbarrier that it completes.
struct BulkCopy {
    to: u64,
    from: u64,
    bytes: usize,
    mbarrier: u64,
}

#[derive(Default)]
pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    shared: Vec<u8>,
    barriers: [Barrier; 16],
    bulk_copies: Vec<BulkCopy>,
    /// Warps that have not exited.
    pub(crate) live_warps: usize,
    /// Warps whose barrier has completed.
    pub(crate) woken: Vec<usize>,
    /// Counts writes and arrivals that other threads can see, to detect deadlocks.
    pub(crate) effects: u64,
}

impl Block {
    /// A block with some bytes of shared memory, all zero.
    #[cfg(test)]
    pub(crate) fn with_shared(bytes: usize) -> Block {
        Block { shared: vec![0; bytes], ..Block::default() }
    }

    /// Resets the block to the start of a kernel, at an index of the grid.
    pub(crate) fn start(&mut self, launch: &Launch, index: [u32; 3]) {
        let live_warps = launch.threads.div_ceil(32) as usize;
        let shared = mem::take(&mut self.shared);
        *self = Block { index, shared, live_warps, ..Block::default() };
        // All ones: uninitialised memory is NaN.
        self.shared.clear();
        self.shared.resize(launch.kernel.shared_bytes + launch.dynamic_shared, 0xff);
    }

    /// The fast path of [`Block::shared`]: a pointer to naturally aligned bytes.
    #[inline(always)]
    pub(crate) fn shared_fast(&mut self, address: u64, bytes: usize) -> Option<*mut u8> {
        let at = (address & 0xffff_ffff) as usize;
        let is_valid = at < self.shared.len() && at + bytes <= self.shared.len();
        (is_valid && at.is_multiple_of(bytes)).then(|| self.shared[at..].as_mut_ptr())
    }

    /// Bytes of shared memory, checked for bounds and alignment.
    pub(crate) fn shared(
        &mut self,
        address: u64,
        bytes: usize,
        alignment: usize,
    ) -> Result<&mut [u8], Fault> {
        let (at, len) = ((address & !WINDOW & 0xffff_ffff) as usize, self.shared.len());
        if !at.is_multiple_of(alignment) {
            return Err(Fault(format!(
                "misaligned access to shared memory at {at}, not a multiple of {alignment}"
            )));
        }
        let found = self.shared.get_mut(at..).and_then(|rest| rest.get_mut(..bytes));
        found.ok_or_else(|| {
            Fault(format!("out of bounds: {bytes} bytes of shared memory at {at} of {len}"))
        })
    }

    /// A warp arrives at a barrier; `waits` is its number if it waits (`bar.sync`). Returns whether
    /// the warp can continue.
    pub(crate) fn arrive(
        &mut self,
        id: usize,
        expected: Option<u32>,
        waits: Option<usize>,
    ) -> Result<bool, Fault> {
        self.effects += 1;
        let barrier = self.barriers.get_mut(id);
        let barrier = barrier.ok_or_else(|| Fault(format!("no barrier {id}: they are 0 to 15")))?;
        if barrier.arrived > 0 && barrier.expected != expected {
            return Err(Fault(format!(
                "barrier {id} expects both {:?} and {expected:?} threads",
                barrier.expected
            )));
        }
        barrier.expected = expected;
        barrier.arrived += 32;
        barrier.waiting_warps.extend(waits);
        self.release_if_complete(id);
        let still_waits = waits.is_some_and(|warp| self.barriers[id].waiting_warps.contains(&warp));
        if !still_waits {
            self.woken.retain(|&warp| Some(warp) != waits);
        }
        Ok(!still_waits)
    }

    /// Wakes the waiting warps if all expected threads have arrived.
    fn release_if_complete(&mut self, id: usize) {
        let barrier = &mut self.barriers[id];
        let expected = barrier.expected.unwrap_or(32 * self.live_warps as u32);
        if barrier.arrived > 0 && barrier.arrived >= expected {
            self.woken.append(&mut barrier.waiting_warps);
            barrier.arrived = 0;
        }
    }

    /// A warp exits: barriers of the whole block no longer expect it.
    pub(crate) fn exit_warp(&mut self) {
        self.effects += 1;
        self.live_warps -= 1;
        for id in 0..self.barriers.len() {
            if self.barriers[id].expected.is_none() {
                self.release_if_complete(id);
            }
        }
    }

    /// Checks, after all warps have exited, that no bulk copy is in flight: it would write to
    /// shared memory of the next block.
    pub(crate) fn check_exit(&self) -> Result<(), Fault> {
        match self.bulk_copies.len() {
            0 => Ok(()),
            n => Err(Fault(format!(
                "block {:?} exited with {n} bulk copies to its shared memory in flight",
                self.index
            ))),
        }
    }

    /// Updates the mbarrier at an address.
    pub(crate) fn mbarrier(
        &mut self,
        address: u64,
        update: impl FnOnce(&mut Mbarrier),
    ) -> Result<(), Fault> {
        let bytes = self.shared(address, 8, 8)?;
        let mut mbarrier = Mbarrier::from_bytes(bytes.try_into().expect("eight bytes"));
        update(&mut mbarrier);
        bytes.copy_from_slice(&mbarrier.to_bytes());
        Ok(())
    }

    /// Starts a bulk copy.
    pub(crate) fn start_bulk_copy(
        &mut self,
        run: &Run<'_>,
        to: u64,
        from: u64,
        bytes: usize,
        mbarrier: u64,
    ) -> Result<(), Fault> {
        if !bytes.is_multiple_of(16) {
            return Err(Fault(format!("a bulk copy of {bytes} bytes, not a multiple of 16")));
        }
        run.global(from, bytes, 16)?;
        self.shared(to, bytes, 16)?;
        self.bulk_copies.push(BulkCopy { to, from, bytes, mbarrier });
        Ok(())
    }

    /// Completes a random one of the bulk copies in flight, if any.
    pub(crate) fn complete_bulk_copy(&mut self, run: &Run<'_>) -> Result<(), Fault> {
        if self.bulk_copies.is_empty() {
            return Ok(());
        }
        let BulkCopy { to, from, bytes, mbarrier } =
            self.bulk_copies.swap_remove(run.random(self.bulk_copies.len()));
        let from = run.global(from, bytes, 16)?;
        let to = self.shared(to, bytes, 16)?;
        // SAFETY: `global` checked the bytes at `from`.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), bytes) };
        self.effects += 1;
        self.mbarrier(mbarrier, |mbarrier| mbarrier.complete_tx(bytes as i32))
    }
}

/// An mbarrier object in shared memory. A phase completes when no arrivals and no bytes are
/// pending.
pub(crate) struct Mbarrier {
    phase: bool,
    expected_arrivals: u16,
    pending_arrivals: u16,
    pending_bytes: i32,
}

impl Mbarrier {
    fn from_bytes(bytes: [u8; 8]) -> Mbarrier {
        let word = u64::from_le_bytes(bytes);
        Mbarrier {
            phase: word >> 63 == 1,
            expected_arrivals: (word >> 48 & 0x7fff) as u16,
            pending_arrivals: (word >> 32) as u16,
            pending_bytes: word as u32 as i32,
        }
    }

    fn to_bytes(&self) -> [u8; 8] {
        let arrivals =
            u64::from(self.expected_arrivals) << 48 | u64::from(self.pending_arrivals) << 32;
        (u64::from(self.phase) << 63 | arrivals | u64::from(self.pending_bytes as u32))
            .to_le_bytes()
    }

    pub(crate) fn init(&mut self, arrivals: u32) {
        let arrivals = arrivals as u16;
        *self = Mbarrier {
            phase: false,
            expected_arrivals: arrivals,
            pending_arrivals: arrivals,
            pending_bytes: 0,
        };
    }

    pub(crate) fn arrive(&mut self) {
        self.pending_arrivals = self.pending_arrivals.wrapping_sub(1);
        self.complete_phase();
    }

    pub(crate) fn arrive_expect_tx(&mut self, bytes: i32) {
        self.pending_bytes += bytes;
        self.arrive();
    }

    fn complete_tx(&mut self, bytes: i32) {
        self.pending_bytes -= bytes;
        self.complete_phase();
    }

    /// Starts the next phase if nothing is pending.
    fn complete_phase(&mut self) {
        if self.pending_arrivals == 0 && self.pending_bytes == 0 {
            self.phase = !self.phase;
            self.pending_arrivals = self.expected_arrivals;
        }
    }

    /// The parity of the current phase.
    pub(crate) fn parity(&self) -> u64 {
        self.phase.into()
    }
}
