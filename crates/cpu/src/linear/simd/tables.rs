//! Tables of byte shuffles, for instruction sets that expand and select bytes by a shuffle.

use crate::linear::lanes::TWO_FOUR_COLUMNS;

/// The byte shuffle that expands eight packed bytes by each mask; 0x80 clears a byte.
pub(super) static EXPANSIONS: [u64; 256] = expansions();

const fn expansions() -> [u64; 256] {
    let mut shuffles = [0x8080_8080_8080_8080; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut place, mut next) = (0, 0);
        while place < 8 {
            if mask >> place & 1 == 1 {
                shuffles[mask] ^= (0x80 ^ next) << (8 * place);
                next += 1;
            }
            place += 1;
        }
        mask += 1;
    }
    shuffles
}

/// The first columns of [`TWO_FOUR_COLUMNS`], then the second ones.
pub(super) static SELECTED: [u8; 16] = {
    let mut columns = [0; 16];
    let mut i = 0;
    while i < 16 {
        columns[i] = TWO_FOUR_COLUMNS[i % 8][i / 8];
        i += 1;
    }
    columns
};
