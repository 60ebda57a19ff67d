//! Upload of weights through two pinned buffers: the host packs into one while the device copies
//! from the other.

use std::ops::Range;
use std::sync::Arc;

use bodkin_backend::Result;

use crate::driver::{Device, Event, Pinned};

/// Bytes of a piece: enough for all threads of the host, little to wait for.
const BYTES: usize = 16 << 20;

/// Two pieces of memory of the host.
pub(crate) struct Staging {
    device: Arc<Device>,
    /// Each with the moment when its last copy is done.
    pieces: [(Pinned<u8>, Event); 2],
    next: usize,
    len: usize,
}

impl Staging {
    /// Takes pieces that hold at least `least` bytes, and no more than `most` where that is less
    /// than usual.
    pub(crate) fn new(device: &Arc<Device>, least: usize, most: usize) -> Result<Staging> {
        let len = BYTES.min(most).max(least);
        let piece = || Ok((Pinned::zeroed(device, len)?, Event::new(device)?));
        Ok(Staging { device: Arc::clone(device), pieces: [piece()?, piece()?], next: 0, len })
    }

    /// Where pieces are sent.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The bytes of a piece.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Lets `fill` write the first `len` bytes of a piece, whatever is there, and sends parts of
    /// them to addresses, without waiting.
    ///
    /// # Safety
    ///
    /// The addresses have room for their parts.
    pub(crate) unsafe fn send(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
        parts: &[(u64, Range<usize>)],
    ) -> Result<()> {
        let (piece, sent) = &mut self.pieces[self.next];
        sent.wait()?;
        fill(&mut piece.slice_mut()[..len]);
        for (to, part) in parts {
            // SAFETY: the caller's promise; nobody writes the piece before the event is there, and
            // it waits for the device when it is dropped.
            unsafe { self.device.copy_to_device(*to, &piece.slice()[part.clone()]) }?;
        }
        sent.record()?;
        self.next = 1 - self.next;
        Ok(())
    }
}
