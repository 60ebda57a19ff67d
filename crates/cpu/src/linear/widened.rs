//! Weights over which many tokens pass: some columns of a few panels at a time become what tiles
//! read fastest, f32 or unpacked integers, in a thread's room. It knows jobs, and no arithmetic.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::activations::BLOCK_COLS;
use super::activations::TILE_ROWS;
#[cfg(target_arch = "x86_64")]
use super::kind::{FloatKind, IntegerKind, Visit};
use super::level::PANEL_ROWS;
#[cfg(target_arch = "x86_64")]
use super::tile::unpacked;
use super::{Job, Panels, ROOM};

/// Columns of float weights that are widened to f32 at a time, so that those of a few panels stay
/// in the first-level cache while all tokens pass over them.
pub(super) const WIDE_COLS: usize = 256;

/// The same for integer weights that are unpacked, of one panel.
#[cfg(target_arch = "x86_64")]
const UNPACKED_COLS: usize = 512;

/// Panels that are unpacked one after the other, so that the activations of so many columns stay in
/// the second-level cache meanwhile.
#[cfg(target_arch = "x86_64")]
const UNPACKED_TURNS: usize = 8;

/// Tokens that pass over widened or unpacked weights at most: their sums wait in the second-level
/// cache for the next columns.
const WIDE_TOKENS: usize = 1024;

/// What is widened at a time.
#[derive(Clone, Copy)]
pub(super) struct Wide {
    pub(super) panels: usize,
    /// How often, with the next panels, before the next columns.
    pub(super) turns: usize,
    pub(super) cols: usize,
    /// Bytes that so many columns of a panel become, a multiple of 4.
    pub(super) bytes: usize,
}

impl Job<'_> {
    /// Whether there are so many tokens that weights are widened first, which costs a quarter of a
    /// tile, and room for it.
    pub(super) fn is_worth_widening(&self) -> bool {
        let is_packed = self.weight.start().is_some();
        is_packed && self.tokens.len() >= 2 * TILE_ROWS && self.room.len() >= ROOM
    }

    /// As [`Job::packed`], for many tokens: a few panels at a time, some columns of them after the
    /// others. `widen` makes of so many columns of a panel what the tiles read.
    pub(super) fn widened(
        &mut self,
        wide: Wide,
        widen: impl Fn(*const u8, Range<usize>, *mut u8),
        mut run: impl FnMut(&Self, Panels),
    ) {
        let (cols, panel_bytes) = (self.weight.cols(), self.weight.panel_bytes());
        let start = self.weight.start().expect("the weight is packed");
        let room = self.room.as_mut_ptr();
        let len = wide.panels * wide.bytes / size_of::<f32>();
        let sums_len = wide.panels * PANEL_ROWS * WIDE_TOKENS;
        assert!(len + wide.turns * sums_len <= self.room.len(), "room for sums");
        let (tokens, panels) = (self.tokens.clone(), self.panels.clone());
        for token in tokens.clone().step_by(WIDE_TOKENS) {
            self.tokens = token..tokens.end.min(token + WIDE_TOKENS);
            for begin in panels.clone().step_by(wide.turns * wide.panels) {
                let end = panels.end.min(begin + wide.turns * wide.panels);
                for col in (0..cols).step_by(wide.cols) {
                    let cols = wide.cols.min(cols - col);
                    for (turn, first) in (begin..end).step_by(wide.panels).enumerate() {
                        let count = wide.panels.min(end - first);
                        for i in 0..count {
                            // SAFETY: the memory holds all panels, the room so many columns.
                            let (panel, to) = unsafe {
                                let to = room.cast::<u8>().add(i * wide.bytes);
                                (start.add((first + i) * panel_bytes), to)
                            };
                            widen(panel, col..col + cols, to);
                        }
                        // SAFETY: as asserted.
                        let sums = unsafe { room.add(len + turn * sums_len) };
                        let (start, bytes) = (room.cast(), wide.bytes);
                        run(self, Panels { first, count, start, bytes, col, cols, sums });
                    }
                }
            }
        }
    }
}

/// Runs a job with many tokens in AVX2 alone, once its kind is known.
#[cfg(target_arch = "x86_64")]
pub(super) struct RunUnpacked<'a>(pub(super) Job<'a>);

#[cfg(target_arch = "x86_64")]
impl Visit for RunUnpacked<'_> {
    type Output = ();

    fn integer<K: IntegerKind>(self) {
        const { assert!(UNPACKED_COLS.is_multiple_of(K::COLS)) };
        let bytes = UNPACKED_COLS / BLOCK_COLS * unpacked::BYTES;
        let wide = Wide { panels: 1, turns: UNPACKED_TURNS, cols: UNPACKED_COLS, bytes };
        // SAFETY: the panel has the columns, the room is long enough, and a `Simd` proves its
        // instructions.
        let unpack = |panel: *const u8, cols, room| unsafe {
            unpacked::unpack::<K>(panel, cols, room);
        };
        let mut job = self.0;
        job.widened(wide, unpack, |job, group| {
            // SAFETY: tiles lie inside the operands that `multiply` checked, its caller keeps other
            // threads away, and a `Simd` proves its instructions.
            job.tiles(group, &[(1, 1), (2, 1), (4, 1), (16, 1)], |tile, _, tokens| unsafe {
                match tokens {
                    16 => unpacked::tile::<K, 4, 4>(tile),
                    4 => unpacked::tile::<K, 1, 4>(tile),
                    2 => unpacked::tile::<K, 1, 2>(tile),
                    _ => unpacked::tile::<K, 1, 1>(tile),
                }
            });
        });
    }

    fn float<K: FloatKind>(self) {
        unreachable!("floats are multiplied with no blocks");
    }
}
