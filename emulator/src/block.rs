//! A block of threads: its shared memory, its barriers, and copies that run by themselves.

use std::mem;

use crate::Fault;
use crate::grid::Run;
use crate::kernel::SPECIALS;
use crate::memory::WINDOW;
use crate::warp::Warp;

/// A barrier at which warps of a block meet.
#[derive(Default)]
struct Barrier {
    /// Threads that are there, and of how many; none: all of the block.
    there: u32,
    of: Option<u32>,
    /// Warps that wait.
    waiting: Vec<usize>,
}

/// A copy from global memory, and the barrier in shared memory that is told.
struct Bulk {
    to: u64,
    from: u64,
    bytes: usize,
    barrier: u64,
}

#[derive(Default)]
pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    bytes: Vec<u8>,
    barriers: [Barrier; 16],
    bulks: Vec<Bulk>,
    /// Warps that have not ended.
    pub(crate) live: usize,
    /// Warps that need not wait any more.
    pub(crate) woken: Vec<usize>,
    /// Counts what others can see, so that it is seen when nothing happens any more.
    pub(crate) effects: u64,
}

impl Block {
    /// Begins at a place of the grid, with its warps.
    pub(crate) fn begin(&mut self, run: &Run<'_>, index: [u32; 3], warps: &mut Vec<Warp>) {
        let shared = run.kernel.shared_bytes + run.shared_bytes;
        let bytes = mem::take(&mut self.bytes);
        *self = Block { index, bytes, live: run.threads.div_ceil(32) as usize, ..Block::default() };
        // What nobody wrote is no number.
        self.bytes.clear();
        self.bytes.resize(shared, 0xff);
        let [x, y, z] = index.map(u64::from);
        let specials: [u64; SPECIALS.len()] = [
            0,
            run.threads.into(),
            x,
            y,
            z,
            run.grid[0].into(),
            run.grid[1].into(),
            run.grid[2].into(),
            0,
            run.shared_bytes as u64,
            run.kernel.shared_bytes as u64,
        ];
        warps.resize_with(self.live, Warp::default);
        for (i, warp) in (0..).zip(warps) {
            warp.begin(run.kernel, 32 * i, &specials);
        }
    }

    /// Where so many bytes of shared memory are, at a multiple of their number.
    #[inline(always)]
    pub(crate) fn near(&mut self, address: u64, bytes: usize) -> Option<*mut u8> {
        let at = (address & 0xffff_ffff) as usize;
        let is_there = at < self.bytes.len() && at + bytes <= self.bytes.len();
        (is_there && at.is_multiple_of(bytes)).then(|| self.bytes[at..].as_mut_ptr())
    }

    /// So many bytes of shared memory, at a multiple of some number.
    pub(crate) fn shared(
        &mut self,
        address: u64,
        bytes: usize,
        alignment: usize,
    ) -> Result<&mut [u8], Fault> {
        let (at, len) = ((address & !WINDOW & 0xffff_ffff) as usize, self.bytes.len());
        if !at.is_multiple_of(alignment) {
            return Err(Fault(format!(
                "shared memory at {at}, which is no multiple of {alignment}"
            )));
        }
        let within = self.bytes.get_mut(at..).and_then(|rest| rest.get_mut(..bytes));
        within.ok_or_else(|| Fault(format!("{bytes} bytes of shared memory at {at}, of {len}")))
    }

    /// A warp comes to a barrier, and waits there if it has a number. Whether it may go on.
    pub(crate) fn arrive(
        &mut self,
        id: usize,
        of: Option<u32>,
        waits: Option<usize>,
    ) -> Result<bool, Fault> {
        self.effects += 1;
        let barrier = self.barriers.get_mut(id);
        let barrier = barrier.ok_or_else(|| Fault(format!("there is no barrier {id}")))?;
        if barrier.there > 0 && barrier.of != of {
            return Err(Fault(format!("barrier {id} is for {:?} and {of:?} threads", barrier.of)));
        }
        barrier.of = of;
        barrier.there += 32;
        barrier.waiting.extend(waits);
        self.open(id);
        let still_waits = waits.is_some_and(|warp| self.barriers[id].waiting.contains(&warp));
        if !still_waits {
            self.woken.retain(|&warp| Some(warp) != waits);
        }
        Ok(!still_waits)
    }

    /// Opens a barrier if all are there.
    fn open(&mut self, id: usize) {
        let barrier = &mut self.barriers[id];
        if barrier.there > 0 && barrier.there >= barrier.of.unwrap_or(32 * self.live as u32) {
            self.woken.append(&mut barrier.waiting);
            barrier.there = 0;
        }
    }

    /// A warp has ended: others need not wait for it.
    pub(crate) fn end_warp(&mut self) {
        self.effects += 1;
        self.live -= 1;
        for id in 0..self.barriers.len() {
            if self.barriers[id].of.is_none() {
                self.open(id);
            }
        }
    }

    /// All warps have ended. Copies would come to memory that is another block's by now.
    pub(crate) fn end(&self) -> Result<(), Fault> {
        match self.bulks.len() {
            0 => Ok(()),
            n => Err(Fault(format!(
                "block {:?} ended before {n} copies to its shared memory",
                self.index
            ))),
        }
    }

    /// Does something with a barrier in shared memory.
    pub(crate) fn phases(
        &mut self,
        address: u64,
        f: impl FnOnce(&mut Phases),
    ) -> Result<(), Fault> {
        let bytes = self.shared(address, 8, 8)?;
        let mut phases = Phases::of(bytes.try_into().expect("eight bytes"));
        f(&mut phases);
        bytes.copy_from_slice(&phases.bytes());
        Ok(())
    }

    /// Begins a copy that runs by itself.
    pub(crate) fn send(
        &mut self,
        run: &Run<'_>,
        to: u64,
        from: u64,
        bytes: usize,
        barrier: u64,
    ) -> Result<(), Fault> {
        if !bytes.is_multiple_of(16) {
            return Err(Fault(format!("a copy of {bytes} bytes, which is no multiple of 16")));
        }
        run.global(from, bytes, 16)?;
        self.shared(to, bytes, 16)?;
        self.bulks.push(Bulk { to, from, bytes, barrier });
        Ok(())
    }

    /// Ends one of the copies that run by themselves.
    pub(crate) fn end_copy(&mut self, run: &Run<'_>) -> Result<(), Fault> {
        if self.bulks.is_empty() {
            return Ok(());
        }
        let Bulk { to, from, bytes, barrier } =
            self.bulks.swap_remove(run.random(self.bulks.len()));
        let from = run.global(from, bytes, 16)?;
        let to = self.shared(to, bytes, 16)?;
        // SAFETY: `global` found so many bytes there.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), bytes) };
        self.effects += 1;
        self.phases(barrier, |phases| phases.receive(bytes as i32))
    }
}

/// A barrier in shared memory: threads and bytes that its phase still waits for.
pub(crate) struct Phases {
    parity: bool,
    threads: u16,
    missing: u16,
    bytes: i32,
}

impl Phases {
    fn of(bytes: [u8; 8]) -> Phases {
        let word = u64::from_le_bytes(bytes);
        Phases {
            parity: word >> 63 == 1,
            threads: (word >> 48 & 0x7fff) as u16,
            missing: (word >> 32) as u16,
            bytes: word as u32 as i32,
        }
    }

    fn bytes(&self) -> [u8; 8] {
        let counts = u64::from(self.threads) << 48 | u64::from(self.missing) << 32;
        (u64::from(self.parity) << 63 | counts | u64::from(self.bytes as u32)).to_le_bytes()
    }

    pub(crate) fn init(&mut self, threads: u32) {
        let threads = threads as u16;
        *self = Phases { parity: false, threads, missing: threads, bytes: 0 };
    }

    pub(crate) fn arrive(&mut self) {
        self.missing = self.missing.wrapping_sub(1);
        self.pass();
    }

    pub(crate) fn expect(&mut self, bytes: i32) {
        self.bytes += bytes;
        self.arrive();
    }

    fn receive(&mut self, bytes: i32) {
        self.bytes -= bytes;
        self.pass();
    }

    fn pass(&mut self) {
        if self.missing == 0 && self.bytes == 0 {
            self.parity = !self.parity;
            self.missing = self.threads;
        }
    }

    /// That of the phase which is not complete yet.
    pub(crate) fn parity(&self) -> u64 {
        self.parity.into()
    }
}
