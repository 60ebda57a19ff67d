//! Memory for weights, activations and the KV cache: zeroed, aligned to 64 bytes, in huge pages
//! where the system has them.

#[cfg(target_os = "linux")]
mod slabs;

/// Allocations of this size or more use huge pages.
#[cfg(target_os = "linux")]
const HUGE_BYTES: usize = 64 << 10;

/// One cache line, which gives the memory its alignment.
#[derive(Copy, Clone)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Numbers of at most 64 bits for which every bit pattern is valid.
pub(crate) trait Number: Copy {}

impl Number for i8 {}
impl Number for u16 {}
impl Number for f32 {}

enum Store {
    Lines(Vec<Line>),
    #[cfg(target_os = "linux")]
    Part(slabs::Part),
}

/// Defines a prefetch of a cache line, where the processor has an instruction for that. Any address
/// is valid.
macro_rules! prefetch {
    ($name:ident, $hint:ident, $operation:literal) => {
        #[inline(always)]
        pub(crate) fn $name(line: *const u8) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: every x86-64 processor has the instruction, which has no visible effect.
            unsafe {
                use std::arch::x86_64::{_mm_prefetch, $hint};
                _mm_prefetch::<$hint>(line.cast());
            }
            #[cfg(target_arch = "aarch64")]
            // SAFETY: every 64-bit Arm processor has the instruction, which has no visible effect.
            unsafe {
                std::arch::asm!(
                    concat!("prfm ", $operation, ", [{line}]"),
                    line = in(reg) line,
                    options(nostack, preserves_flags, readonly)
                );
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = line;
        }
    };
}

prefetch!(prefetch_l1, _MM_HINT_T0, "pldl1keep");
prefetch!(prefetch_l2, _MM_HINT_T1, "pldl2keep");

/// Bytes that the models of this process hold outside the heap: large weights, activations and KV
/// caches.
pub fn mapped_bytes() -> u64 {
    #[cfg(target_os = "linux")]
    return slabs::allocated_bytes() as u64;
    #[cfg(not(target_os = "linux"))]
    0
}

/// Zeroed bytes, aligned to 64 bytes.
pub(crate) struct AlignedMemory {
    store: Store,
    bytes: usize,
}

impl AlignedMemory {
    /// `bytes` zeros.
    pub(crate) fn zeroed(bytes: usize) -> AlignedMemory {
        #[cfg(target_os = "linux")]
        if bytes >= HUGE_BYTES
            && let Some(part) = slabs::Part::zeroed(bytes)
        {
            return AlignedMemory { store: Store::Part(part), bytes };
        }
        let lines = vec![Line([0; 64]); bytes.div_ceil(64)];
        AlignedMemory { store: Store::Lines(lines), bytes }
    }

    /// Lets the system swap out none of it, as far as it allows that: Linux lets most users lock a
    /// few megabytes.
    pub(crate) fn lock(&mut self) {
        #[cfg(target_os = "linux")]
        if let Store::Part(part) = &mut self.store {
            let _ = part.lock();
        }
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

    /// Flushes all lines from the processor's caches, where it has an instruction for that.
    pub(crate) fn evict(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..self.bytes).step_by(64) {
            // SAFETY: the line belongs to this memory; every x86-64 processor has the instruction.
            unsafe { std::arch::x86_64::_mm_clflush(self.start().add(line)) }
        }
        #[cfg(all(target_arch = "aarch64", target_os = "linux"))]
        for line in (0..self.bytes).step_by(64) {
            // SAFETY: the line belongs to this memory; Linux lets programs use the instruction.
            unsafe {
                let line = self.start().add(line);
                std::arch::asm!("dc civac, {line}", line = in(reg) line, options(nostack));
            }
        }
    }

    /// All bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        // SAFETY: the memory has this length, is initialised, and stays borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start_mut(), bytes) }
    }

    /// All bytes as numbers; a remainder is left out.
    pub(crate) fn numbers_mut<T: Number>(&mut self) -> &mut [T] {
        let len = self.bytes / size_of::<T>();
        // SAFETY: the memory has this length, is aligned for numbers, whose bit patterns are all
        // valid, and stays borrowed.
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
