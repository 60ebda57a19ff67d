//! Packs tiles of weights on the host's threads.

use std::ops::Range;

use bodkin_gguf::Format;

use crate::constants::TILE_ROWS;
use crate::packed::{Shape, pack};
use crate::threads::LOADERS;

/// Bytes of tiles that are worth a thread.
const THREAD_BYTES: usize = 32 << 10;

/// Tiles to pack.
pub(crate) struct Piece<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) format: Format,
    /// The whole weight, as the file has it.
    pub(crate) data: &'a [u8],
    /// Of all matrices.
    pub(crate) tiles: Range<usize>,
    pub(crate) packed: &'a mut [u8],
    pub(crate) exponents: &'a mut [u8],
}

impl<'a> Piece<'a> {
    /// The same in pieces that are worth a thread each.
    pub(crate) fn split(self) -> impl Iterator<Item = Piece<'a>> {
        let Piece { shape, format, data, tiles, packed, exponents } = self;
        let count = (THREAD_BYTES / shape.tile_bytes()).max(1);
        let parts = packed.chunks_mut(count * shape.tile_bytes());
        let parts = parts.zip(exponents.chunks_mut(count * TILE_ROWS));
        tiles.clone().step_by(count).zip(parts).map(move |(first, (packed, exponents))| {
            let tiles = first..tiles.end.min(first + count);
            Piece { shape, format, data, tiles, packed, exponents }
        })
    }

    pub(crate) fn pack(self) {
        self.packed.fill(0);
        self.exponents.fill(0);
        pack(self.shape, self.format, self.data, self.tiles, self.packed, self.exponents);
    }
}

/// Packs all pieces.
pub(crate) fn pack_all<'a>(pieces: impl Iterator<Item = Piece<'a>>) {
    LOADERS.for_each(pieces.flat_map(Piece::split), Piece::pack);
}
