//! Memory accesses and asynchronous copies of a warp.

use super::Warp;
use crate::Fault;
use crate::async_copy::PendingCopy;
use crate::block::Block;
use crate::kernel::{Access, AsyncCopy, Instruction, NONE, Space};
use crate::lanes::lanes_of;
use crate::launch::Run;
use crate::memory::{LOCAL, PARAMETERS, SHARED, WINDOW};

impl Warp {
    /// A pointer to bytes of a lane's address: the fast paths of global and shared memory, then
    /// [`Warp::resolve`].
    #[inline(always)]
    fn pointer(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        space: Space,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Result<*mut u8, Fault> {
        let fast = match space {
            Space::Global => run.global_fast(address, bytes),
            Space::Shared => block.shared_fast(address, bytes),
            _ => None,
        };
        fast.map_or_else(|| self.resolve(run, block, space, address, bytes, lane), Ok)
    }

    /// A pointer to bytes of a lane's address, checked for bounds and natural alignment.
    fn resolve(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        space: Space,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Result<*mut u8, Fault> {
        let space = match (space, address & WINDOW) {
            (Space::Generic, SHARED) => Space::Shared,
            (Space::Generic, LOCAL) => Space::Local,
            (Space::Generic, PARAMETERS) => Space::Parameters,
            (Space::Generic, _) => Space::Global,
            (space, _) => space,
        };
        if space == Space::Global {
            return run.global(address, bytes, bytes);
        }
        let at = (address & !WINDOW) as usize;
        let local = match space {
            Space::Shared => return Ok(block.shared(address, bytes, bytes)?.as_mut_ptr()),
            Space::Local => {
                let lane_bytes = self.local.len() / 32;
                &mut self.local[lane * lane_bytes..][..lane_bytes]
            }
            _ => {
                let parameters = &run.launch.parameters;
                let found = parameters.get(at..).and_then(|rest| rest.get(..bytes));
                let found = found.ok_or_else(|| {
                    Fault(format!("out of bounds: {bytes} bytes of parameters at {at}"))
                })?;
                return Ok(found.as_ptr().cast_mut());
            }
        };
        let found = local.get_mut(at..).and_then(|rest| rest.get_mut(..bytes));
        found
            .map(<[u8]>::as_mut_ptr)
            .ok_or_else(|| Fault(format!("out of bounds: {bytes} bytes of local memory at {at}")))
    }

    /// Loads or stores the registers of an instruction.
    pub(super) fn transfer(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        access: Access,
        mask: u32,
        is_store: bool,
    ) -> Result<(), Fault> {
        let bytes = usize::from(access.bytes);
        let all_bytes = bytes * usize::from(access.count);
        if is_store && access.is_relaxed && run.loses_store() {
            return Ok(());
        }
        block.effects += u64::from(is_store);
        for lane in lanes_of(mask) {
            let address = self.get(i.args[0], lane).wrapping_add_signed(i.offset);
            let start = self.pointer(run, block, access.space, address, all_bytes, lane)?;
            for (n, &register) in i.list.iter().enumerate() {
                let (register, at) =
                    (&mut self.registers[register as usize], start.wrapping_add(n * bytes));
                if is_store {
                    // SAFETY: `pointer` checked the bytes and their alignment.
                    unsafe { write(at, bytes, register.get(lane)) };
                } else {
                    // SAFETY: as above.
                    register.set(lane, unsafe { read(at, bytes) });
                }
            }
        }
        Ok(())
    }

    /// Adds to a 4-byte integer, one lane after the other.
    pub(super) fn atomic_add(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        access: Access,
        mask: u32,
    ) -> Result<(), Fault> {
        let (result, address, value) = match i.args {
            [address, value, NONE, ..] => (None, address, value),
            [result, address, value, ..] => (Some(result), address, value),
        };
        block.effects += 1;
        for lane in lanes_of(mask) {
            let address = self.get(address, lane).wrapping_add_signed(i.offset);
            let at = self.resolve(run, block, access.space, address, 4, lane)?.cast::<u32>();
            let value = self.get(value, lane) as u32;
            // SAFETY: `resolve` checked four bytes and their alignment.
            let before = unsafe { at.read() };
            // SAFETY: as above.
            unsafe { at.write(before.wrapping_add(value)) };
            if let Some(result) = result {
                self.registers[result as usize].low[lane] = before;
            }
        }
        Ok(())
    }

    pub(super) fn async_copy(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        copy: AsyncCopy,
        mask: u32,
    ) -> Result<(), Fault> {
        match copy {
            AsyncCopy::Start => self.start_copies(run, block, i, mask),
            AsyncCopy::CommitGroup => {
                self.commit_group(mask);
                Ok(())
            }
            AsyncCopy::WaitGroup => {
                let in_flight = self.uniform(i.args[0]) as u32;
                self.complete_copies(run, block, mask, in_flight)
            }
            AsyncCopy::WaitAll => {
                self.commit_group(mask);
                self.complete_copies(run, block, mask, 0)
            }
        }
    }

    fn commit_group(&mut self, mask: u32) {
        lanes_of(mask).for_each(|lane| self.committed_groups[lane] += 1);
    }

    /// Starts copies. At random they complete at once, or only when the kernel waits for them.
    fn start_copies(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        mask: u32,
    ) -> Result<(), Fault> {
        let [to, from, bytes, source_bytes] = [0, 1, 2, 3].map(|n| i.args[n]);
        let is_late = run.random(2) == 0;
        for lane in lanes_of(mask) {
            let bytes = self.get(bytes, lane) as u32;
            let source_bytes = match source_bytes {
                NONE => bytes,
                register => bytes.min(self.get(register, lane) as u32),
            };
            let copy = PendingCopy {
                lane: lane as u32,
                group: self.committed_groups[lane],
                to: self.get(to, lane),
                from: self.get(from, lane),
                bytes,
                source_bytes,
            };
            if is_late {
                copy.resolve(run, block)?;
                self.pending_copies.push(copy);
            } else {
                copy.complete(run, block)?;
            }
        }
        Ok(())
    }

    /// Completes the pending copies of lanes, except those of their latest `in_flight` groups.
    fn complete_copies(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        mask: u32,
        in_flight: u32,
    ) -> Result<(), Fault> {
        let committed = self.committed_groups;
        let is_waited_for = |copy: &mut PendingCopy| {
            mask >> copy.lane & 1 == 1 && copy.group + in_flight < committed[copy.lane as usize]
        };
        let mut completed = self.pending_copies.extract_if(.., is_waited_for);
        completed.try_for_each(|copy| copy.complete(run, block))
    }
}

/// Reads a value of one, two, four or eight bytes.
///
/// # Safety
/// The bytes are readable and naturally aligned.
unsafe fn read(at: *const u8, bytes: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            1 => at.read().into(),
            2 => at.cast::<u16>().read().into(),
            4 => at.cast::<u32>().read().into(),
            _ => at.cast::<u64>().read(),
        }
    }
}

/// Writes a value of one, two, four or eight bytes.
///
/// # Safety
/// The bytes are writable and naturally aligned.
unsafe fn write(at: *mut u8, bytes: usize, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            1 => at.write(value as u8),
            2 => at.cast::<u16>().write(value as u16),
            4 => at.cast::<u32>().write(value as u32),
            _ => at.cast::<u64>().write(value),
        }
    }
}
