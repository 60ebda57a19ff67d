//! Permutation tables that select the activations of the weights that a 2:4 layout stores. Each
//! lane of a vector holds two bytes for one step and two for the next; a u64 holds two rows.

use crate::linear::lanes::TWO_FOUR_COLUMNS;

/// Builds a table from a function of the byte.
macro_rules! table {
    ($byte:ident => $value:expr) => {{
        let mut table = [0; 64];
        let mut $byte = 0;
        while $byte < 64 {
            table[$byte] = $value as u8;
            $byte += 1;
        }
        table
    }};
}

/// Gathers the mask bits of two rows into each u64, from the masks of four steps: two bytes per
/// step, since the six bits may straddle bytes.
pub(super) static SPREAD: [u8; 64] = table!(i => 6 * (i % 8 / 2) + 6 * (i / 8) / 8 + i % 2);

/// For each of two pairs, the first of the three mask bits of a byte's row and step in that u64.
pub(super) static SHIFTS: [[u8; 64]; 2] = [shifts(0), shifts(1)];

const fn shifts(pair: usize) -> [u8; 64] {
    table!(i => 16 * step(pair, i) + 6 * (i / 8) % 8 + 3 * (i / 4 % 2))
}

/// The step of four that a byte of a pair belongs to.
const fn step(pair: usize, byte: usize) -> usize {
    2 * pair + byte % 4 / 2
}

/// For each of four steps and each value `i % 8` of three mask bits, the first (bytes 0 to 7) and
/// the second (8 to 15) of the selected activations, out of 16.
pub(super) static CHOICES: [u8; 64] =
    table!(i => 4 * (i / 16) + TWO_FOUR_COLUMNS[i % 8][i / 8 % 2] as usize);

/// For each of two pairs, the eight entries of [`CHOICES`] that a byte selects from.
pub(super) static CHOSEN: [[u8; 64]; 2] = [chosen(0), chosen(1)];

const fn chosen(pair: usize) -> [u8; 64] {
    table!(i => 16 * step(pair, i) + 8 * (i % 2))
}
