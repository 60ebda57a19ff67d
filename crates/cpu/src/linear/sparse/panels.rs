//! Sparse panels in memory. A panel is as long as its non-zeros make it, and a kernel reads all of
//! them as one stream. A GEMV reads the panels as they are; a GEMM expands some of them to the
//! dense layout first, into scratch that stays in L2.

use std::ops::Range;

use super::csr;
use super::format::{SparseFormat, VisitSparse};
use super::layout::{SparseFloat, SparseInteger, SparseLayout};
use crate::isa::Isa;
use crate::linear::kernel::MicroKernels;
#[cfg(target_arch = "aarch64")]
use crate::linear::simd::Neon;
use crate::linear::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::linear::simd::{Avx2, Avx512};
use crate::memory::AlignedMemory;

/// Bytes that kernels may read after the end of a panel.
const SLACK: usize = 64;

/// Contiguous panels of different lengths.
pub(crate) struct SparsePanels {
    pub(crate) format: SparseFormat,
    memory: AlignedMemory,
    /// The offset of each panel, and the end of the last.
    starts: Vec<usize>,
}

impl SparsePanels {
    /// Concatenates packed panels: their bytes, and the end of each panel in them.
    pub(super) fn concat(format: SparseFormat, parts: &[(&[u8], &[usize])]) -> SparsePanels {
        let bytes: usize = parts.iter().map(|(bytes, _)| bytes.len()).sum();
        let mut memory = AlignedMemory::zeroed(bytes + SLACK);
        let (mut starts, mut offset) = (vec![0], 0);
        for (bytes, ends) in parts {
            memory.bytes_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
            starts.extend(ends.iter().map(|end| offset + end));
            offset += bytes.len();
        }
        SparsePanels { format, memory, starts }
    }

    /// The number of panels.
    pub(super) fn count(&self) -> usize {
        self.starts.len() - 1
    }

    /// Bytes of all panels.
    pub(crate) fn len(&self) -> usize {
        self.memory.len() - SLACK
    }

    /// Flushes the panels from the processor's caches.
    pub(crate) fn evict(&self) {
        self.memory.evict();
    }

    /// The first byte of a panel.
    pub(crate) fn panel(&self, panel: usize) -> *const u8 {
        let start = self.starts[panel];
        assert!(start < self.len(), "panel {panel} of {}", self.count());
        // SAFETY: inside the memory.
        unsafe { self.memory.start().add(start) }
    }

    /// The address of a panel, or the end of the last one.
    pub(crate) fn address(&self, panel: usize) -> *const u8 {
        self.memory.start().wrapping_add(self.starts[panel])
    }

    /// The first panel at or after an offset.
    pub(crate) fn first_at(&self, bytes: usize) -> usize {
        self.starts.partition_point(|&start| start < bytes)
    }

    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self, panel: usize) -> usize {
        self.starts[panel + 1] - self.starts[panel]
    }

    /// Expands some panels to the dense layout, `dense_bytes` each, contiguously.
    ///
    /// # Safety
    /// `scratch` has space for the panels, of `cols` columns, and no other thread accesses it.
    pub(crate) unsafe fn expand_into(
        &self,
        isa: Isa,
        panels: Range<usize>,
        cols: usize,
        dense_bytes: usize,
        scratch: *mut u8,
    ) {
        for (i, panel) in panels.enumerate() {
            // SAFETY: the caller provides the scratch; a `Isa` that expands proves its
            // instructions.
            unsafe {
                let dense = scratch.add(i * dense_bytes);
                let expansion = Expansion { isa, panel: self.panel(panel), cols, dense };
                if self.format == SparseFormat::CsrF16 {
                    dense.write_bytes(0, dense_bytes);
                }
                self.format.visit(expansion);
            }
        }
    }
}

/// The expansion of one panel to the dense layout.
struct Expansion {
    isa: Isa,
    panel: *const u8,
    cols: usize,
    dense: *mut u8,
}

impl Expansion {
    fn run<K: SparseLayout>(self) {
        let Expansion { isa, panel, cols, dense } = self;
        // SAFETY: `expand_into` has a panel and space for it; an `Isa` proves its instructions.
        unsafe {
            match isa.for_expansion() {
                Isa::Portable => Portable::expand::<K>(panel, cols, dense),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => Avx2::<0, false>::expand::<K>(panel, cols, dense),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxEmulated => {
                    Avx512::expand::<K>(panel, cols, dense)
                }
                #[cfg(target_arch = "aarch64")]
                Isa::Neon | Isa::DotProd => Neon::<0, 4, false>::expand::<K>(panel, cols, dense),
            }
        }
    }
}

impl VisitSparse for Expansion {
    type Output = ();

    fn integer<K: SparseInteger>(self) {
        self.run::<K>();
    }

    fn float<K: SparseFloat>(self) {
        self.run::<K>();
    }

    fn csr(self) {
        // SAFETY: as in `run`; the scratch was zeroed.
        unsafe { csr::expand(self.panel, self.dense) }
    }
}
