//! 32 columns of a row in the form that all formats of small codes have in common.

use super::block::Block;

/// 32 columns of a row: `scale * code + min`.
pub(super) struct Group {
    pub(super) scales: [f32; 2],
    pub(super) mins: [f32; 2],
    pub(super) codes: [u8; 32],
}

impl Group {
    /// A group with one scale and minimum.
    pub(super) fn of(scale: f32, min: f32, codes: [u8; 32]) -> Group {
        Group { scales: [scale; 2], mins: [min; 2], codes }
    }
}

/// All columns of a row, 32 in a group.
#[derive(Clone, Debug)]
pub struct Groups {
    /// Of each 16 columns; where a format has one scale for 32, twice the same.
    pub scales: Vec<[f32; 2]>,
    /// Likewise; 0 in formats without.
    pub mins: Vec<[f32; 2]>,
    /// See [`super::Codes`].
    pub codes: Vec<[u8; 32]>,
}

impl Groups {
    /// Of a row with this number of columns: all zero.
    pub fn zeroed(columns: usize) -> Groups {
        let count = columns.div_ceil(32);
        let (scales, codes) = (vec![[0.0; 2]; count], vec![[0; 32]; count]);
        Groups { mins: scales.clone(), scales, codes }
    }

    /// Reads a row of blocks. `read` gives a function of a block that gives group `i` of it.
    pub(super) fn read<'a, B: Block, G: Fn(usize) -> Group>(
        &mut self,
        row: &'a [u8],
        read: impl Fn(&'a B) -> G,
    ) {
        let count = B::ELEMENTS / 32;
        let parts = self.scales.chunks_exact_mut(count).zip(self.mins.chunks_exact_mut(count));
        let parts = parts.zip(self.codes.chunks_exact_mut(count));
        for (block, ((scales, mins), codes)) in bytemuck::cast_slice(row).iter().zip(parts) {
            let group = read(block);
            for (i, ((scales, mins), codes)) in scales.iter_mut().zip(mins).zip(codes).enumerate() {
                Group { scales: *scales, mins: *mins, codes: *codes } = group(i);
            }
        }
    }
}

/// Reads all groups of a row, whose columns these are.
pub type GroupReader = fn(row: &[u8], &mut Groups);
