//! The operations of a stream.

use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::Fault;
use crate::launch::Launch;
use crate::memory::Memory;

/// The time at which the record of an event was executed, once it was.
pub(crate) type Moment = Arc<OnceLock<Instant>>;

/// An operation of a stream.
#[derive(Clone)]
pub(crate) enum StreamOp {
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
    /// Records an event.
    Record(Moment),
    /// Waits for a record of an event.
    Wait(Moment),
}

impl StreamOp {
    /// Whether it can start now: a wait has to come behind the record.
    pub(crate) fn is_ready(&self) -> bool {
        !matches!(self, StreamOp::Wait(moment) if moment.get().is_none())
    }

    /// Executes all of an operation that is ready; a launch is returned, because it takes turns
    /// with others.
    pub(crate) fn execute(self, memory: &Memory) -> Result<Option<Launch>, Fault> {
        match self {
            StreamOp::Copy { to, from, bytes } => {
                // SAFETY: host and device addresses are pointers, as the caller promises the
                // driver; memory of the host stays as it is until the copy, as it promises too.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
            StreamOp::CopyRows { to, from, bytes, rows, pitches: [to_pitch, from_pitch] } => {
                for row in 0..rows as u64 {
                    let from = from + row * from_pitch as u64;
                    let to = to + row * to_pitch as u64;
                    memory.allocation(from, bytes)?;
                    memory.allocation(to, bytes)?;
                    // SAFETY: the bytes are allocated at both.
                    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                }
            }
            StreamOp::Fill { to, byte, bytes } => {
                memory.allocation(to, bytes)?;
                // SAFETY: the bytes are allocated.
                unsafe { ptr::write_bytes(to as *mut u8, byte, bytes) };
            }
            StreamOp::Launch(launch) => return Ok(Some(launch)),
            StreamOp::Record(moment) => drop(moment.set(Instant::now())),
            StreamOp::Wait(_) => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_dimensional_copies_are_checked_for_bounds() {
        let mut memory = Memory::default();
        let [from, to] = [32, 32].map(|bytes| memory.allocate(bytes, 64).expect("below the limit"));
        // SAFETY: just allocated.
        unsafe { ptr::write_bytes(from as *mut u8, 7, 32) };
        let rows = |rows| StreamOp::CopyRows { to, from, bytes: 4, rows, pitches: [12, 8] };
        assert!(rows(3).execute(&memory).is_ok());
        // SAFETY: as above.
        let copied = unsafe { std::slice::from_raw_parts(to as *const u8, 32) };
        let whole = |row: usize| copied[12 * row..][..4] == [7; 4];
        assert!((0..3).all(whole) && copied[4..12] == [0xff; 8]);
        assert!(rows(4).execute(&memory).is_err());
    }
}
