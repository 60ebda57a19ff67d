//! Memory for weights and activations: zeroed, on 64-byte boundaries, in huge pages where the
//! system has them. It knows bytes only.

#[cfg(target_os = "linux")]
mod slabs;

/// From this size on, memory lies in huge pages.
#[cfg(target_os = "linux")]
const HUGE_BYTES: usize = 64 << 10;

/// One cache line; its alignment is that of the whole memory.
#[derive(Copy, Clone)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// What any bytes are one of: numbers of at most 64 bits.
pub(crate) trait Number: Copy {}

impl Number for i8 {}
impl Number for u16 {}
impl Number for f32 {}

enum Store {
    Lines(Vec<Line>),
    #[cfg(target_os = "linux")]
    Part(slabs::Part),
}

/// Asks for a line of memory into the second-level cache, where the processor has an instruction
/// for that. The address may be any.
#[inline(always)]
pub(crate) fn ask(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, which reads nothing that can be seen.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Zeroed bytes that begin on a 64-byte boundary.
pub(crate) struct Memory {
    store: Store,
    bytes: usize,
}

impl Memory {
    /// `bytes` zeros.
    pub(crate) fn zeroed(bytes: usize) -> Memory {
        #[cfg(target_os = "linux")]
        if bytes >= HUGE_BYTES
            && let Some(part) = slabs::Part::zeroed(bytes)
        {
            return Memory { store: Store::Part(part), bytes };
        }
        let lines = vec![Line([0; 64]); bytes.div_ceil(64)];
        Memory { store: Store::Lines(lines), bytes }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The first byte, to read from.
    pub(crate) fn start(&self) -> *const u8 {
        match &self.store {
            Store::Lines(lines) => lines.as_ptr().cast(),
            #[cfg(target_os = "linux")]
            Store::Part(part) => part.start(),
        }
    }

    /// Takes all lines out of the processor's caches, where it has an instruction for that.
    pub(crate) fn evict(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..self.bytes).step_by(64) {
            // SAFETY: the line belongs to this memory; every x86-64 processor has the instruction.
            unsafe { std::arch::x86_64::_mm_clflush(self.start().add(line)) }
        }
    }

    /// All bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        // SAFETY: the memory is as long as that, initialised, and borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.start_mut(), bytes) }
    }

    /// All bytes as numbers, as many as are whole.
    pub(crate) fn numbers_mut<T: Number>(&mut self) -> &mut [T] {
        let len = self.bytes / size_of::<T>();
        // SAFETY: the memory is as long as that, aligned for numbers, of which any bytes are one,
        // and borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.start_mut().cast(), len) }
    }

    /// The first byte, to write to.
    pub(crate) fn start_mut(&mut self) -> *mut u8 {
        match &mut self.store {
            Store::Lines(lines) => lines.as_mut_ptr().cast(),
            #[cfg(target_os = "linux")]
            Store::Part(part) => part.start(),
        }
    }
}
