//! Asynchronous copies of a lane to shared memory (`cp.async`).

use std::ptr;

use crate::Fault;
use crate::block::Block;
use crate::launch::Run;

/// A copy that has started and may be in flight.
pub(crate) struct PendingCopy {
    pub(crate) lane: u32,
    /// The number of its group among the lane's.
    pub(crate) group: u32,
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u32,
    /// Bytes that are copied; the others are set to zero.
    pub(crate) source_bytes: u32,
}

impl PendingCopy {
    /// Writes the bytes to shared memory.
    pub(crate) fn complete(&self, run: &Run<'_>, block: &mut Block) -> Result<(), Fault> {
        let (from, to) = self.resolve(run, block)?;
        let source_bytes = self.source_bytes as usize;
        to[source_bytes..].fill(0);
        if source_bytes > 0 {
            // SAFETY: `global` checked the bytes at `from`.
            unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), source_bytes) };
        }
        Ok(())
    }

    /// Pointers to source and destination, after a check of both.
    pub(crate) fn resolve<'b>(
        &self,
        run: &Run<'_>,
        block: &'b mut Block,
    ) -> Result<(*const u8, &'b mut [u8]), Fault> {
        let (bytes, source_bytes) = (self.bytes as usize, self.source_bytes as usize);
        let from = match source_bytes {
            0 => ptr::null(),
            _ => run.global(self.from, source_bytes, bytes)?.cast_const(),
        };
        Ok((from, block.shared(self.to, bytes, bytes)?))
    }
}
