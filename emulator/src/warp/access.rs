//! What a warp reads, writes and copies.

use std::ptr;

use super::{Warp, threads_of};
use crate::Fault;
use crate::block::Block;
use crate::grid::Run;
use crate::kernel::{Access, Instruction, NONE, Op, Space};
use crate::memory::{LOCAL, PARAMETERS, SHARED, WINDOW};

/// A copy to shared memory that may still be under way.
pub(super) struct Copy {
    thread: u32,
    /// The number of its group among the thread's.
    group: u32,
    to: u64,
    from: u64,
    bytes: u32,
    /// So many are copied, and zeros for the others.
    read: u32,
}

impl Warp {
    /// Where a thread finds so many bytes, of what addresses mostly are.
    #[inline(always)]
    fn near(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        space: Space,
        address: u64,
        bytes: usize,
        thread: usize,
    ) -> Result<*mut u8, Fault> {
        let at = match space {
            Space::Global => run.near(address, bytes),
            Space::Shared => block.near(address, bytes),
            _ => None,
        };
        at.map_or_else(|| self.place(run, block, space, address, bytes, thread), Ok)
    }

    /// Where a thread finds so many bytes.
    fn place(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        space: Space,
        address: u64,
        bytes: usize,
        thread: usize,
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
        let of = match space {
            Space::Shared => return Ok(block.shared(address, bytes, bytes)?.as_mut_ptr()),
            Space::Local => {
                let each = self.local.len() / 32;
                &mut self.local[thread * each..][..each]
            }
            _ => {
                let within = run.parameters.get(at..).and_then(|rest| rest.get(..bytes));
                let within = within.ok_or_else(|| Fault(format!("no parameter at {at}")))?;
                return Ok(within.as_ptr().cast_mut());
            }
        };
        let within = of.get_mut(at..).and_then(|rest| rest.get_mut(..bytes));
        within.map(<[u8]>::as_mut_ptr).ok_or_else(|| Fault(format!("no local memory at {at}")))
    }

    pub(super) fn load(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        access: Access,
        threads: u32,
    ) -> Result<(), Fault> {
        let bytes = usize::from(access.bytes);
        let whole = bytes * usize::from(access.count);
        for thread in threads_of(threads) {
            let address = self.get(i.args[0], thread).wrapping_add_signed(i.offset);
            let at = self.near(run, block, access.space, address, whole, thread)?;
            for (n, &to) in i.list.iter().enumerate() {
                // SAFETY: `place` found so many bytes there, aligned.
                let value = unsafe { read(at.add(n * bytes), bytes) };
                self.registers[to as usize].set(thread, value);
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        access: Access,
        threads: u32,
    ) -> Result<(), Fault> {
        let bytes = usize::from(access.bytes);
        let whole = bytes * usize::from(access.count);
        block.effects += 1;
        for thread in threads_of(threads) {
            let address = self.get(i.args[0], thread).wrapping_add_signed(i.offset);
            let at = self.near(run, block, access.space, address, whole, thread)?;
            for (n, &from) in i.list.iter().enumerate() {
                // SAFETY: `place` found so many bytes there, aligned.
                unsafe { write(at.add(n * bytes), bytes, self.get(from, thread)) };
            }
        }
        Ok(())
    }

    /// Adds to a number of four bytes, a thread behind the other.
    pub(super) fn add(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        access: Access,
        threads: u32,
    ) -> Result<(), Fault> {
        let (result, address, value) = match i.args {
            [address, value, NONE, ..] => (None, address, value),
            [result, address, value, ..] => (Some(result), address, value),
        };
        block.effects += 1;
        for thread in threads_of(threads) {
            let address = self.get(address, thread).wrapping_add_signed(i.offset);
            let at = self.place(run, block, access.space, address, 4, thread)?.cast::<u32>();
            let value = self.get(value, thread) as u32;
            // SAFETY: `place` found four bytes there, aligned.
            let before = unsafe { at.read() };
            // SAFETY: as above.
            unsafe { at.write(before.wrapping_add(value)) };
            if let Some(result) = result {
                self.registers[result as usize].low[thread] = before;
            }
        }
        Ok(())
    }

    /// Copies, and waiting for them.
    pub(super) fn copies(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        threads: u32,
    ) -> Result<(), Fault> {
        match i.op {
            Op::Copy => return self.copy(run, block, i, threads),
            Op::WaitGroups => {
                let open = self.first(i.args[0]) as u32;
                return self.finish_copies(run, block, threads, open);
            }
            _ => threads_of(threads).for_each(|thread| self.committed[thread] += 1),
        }
        match i.op {
            Op::WaitCopies => self.finish_copies(run, block, threads, 0),
            _ => Ok(()),
        }
    }

    /// Begins copies, of which some are done at once, and the others when they are waited for.
    fn copy(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        threads: u32,
    ) -> Result<(), Fault> {
        let [to, from, bytes, read] = [0, 1, 2, 3].map(|n| i.args[n]);
        let is_late = run.toss(2);
        for thread in threads_of(threads) {
            let bytes = self.get(bytes, thread) as u32;
            let read = if read == NONE { bytes } else { self.get(read, thread) as u32 };
            let copy = Copy {
                thread: thread as u32,
                group: self.committed[thread],
                to: self.get(to, thread),
                from: self.get(from, thread),
                bytes,
                read: read.min(bytes),
            };
            copy.run(run, block, !is_late)?;
            if is_late {
                self.copies.push(copy);
            }
        }
        Ok(())
    }

    /// Ends copies of threads but those of their last `open` groups.
    fn finish_copies(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        threads: u32,
        open: u32,
    ) -> Result<(), Fault> {
        let committed = self.committed;
        let is_ended = |copy: &mut Copy| {
            threads >> copy.thread & 1 == 1 && copy.group + open < committed[copy.thread as usize]
        };
        self.copies.extract_if(.., is_ended).try_for_each(|copy| copy.run(run, block, true))
    }
}

impl Copy {
    /// Looks whether it is possible, and maybe does it.
    fn run(&self, run: &Run<'_>, block: &mut Block, really: bool) -> Result<(), Fault> {
        let (bytes, read) = (self.bytes as usize, self.read as usize);
        let from =
            if read > 0 { run.global(self.from, read, bytes)?.cast_const() } else { ptr::null() };
        let to = block.shared(self.to, bytes, bytes)?;
        if really {
            to[read..].fill(0);
            if read > 0 {
                // SAFETY: `global` found so many bytes there.
                unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), read) };
            }
        }
        Ok(())
    }
}

/// Reads a value of one, two, four or eight bytes.
///
/// # Safety
/// They are there, aligned.
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

/// Writes a value of so many bytes.
///
/// # Safety
/// They are there, aligned.
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
