//! Tables that bring activations to the weights in 2:4 that are kept. A vector has, in each lane,
//! two places for a step and two for the next; a u64 has those of two rows.

use crate::linear::level::PLACES;

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

/// Brings the bits of two rows into each u64, from the masks of four steps: two bytes a step, as
/// the six bits may begin inside a byte.
pub(super) static SPREAD: [u8; 64] = table!(i => 6 * (i % 8 / 2) + 6 * (i / 8) / 8 + i % 2);

/// For each of two pairs, where the three bits of a byte's row and step begin in such a u64.
pub(super) static SHIFTS: [[u8; 64]; 2] = [shifts(0), shifts(1)];

const fn shifts(pair: usize) -> [u8; 64] {
    table!(i => 16 * step(pair, i) + 6 * (i / 8) % 8 + 3 * (i / 4 % 2))
}

/// The step of four that a byte of a pair belongs to.
const fn step(pair: usize, byte: usize) -> usize {
    2 * pair + byte % 4 / 2
}

/// For each three bits, of which `i % 8` are those of a byte of [`CHOICES`], which of 16
/// activations is the first (bytes 0 to 7), or the second (8 to 15), for each of four steps.
pub(super) static CHOICES: [u8; 64] = table!(i => 4 * (i / 16) + PLACES[i % 8][i / 8 % 2] as usize);

/// For each of two pairs, which eight of these bytes a byte chooses among.
pub(super) static CHOSEN: [[u8; 64]; 2] = [chosen(0), chosen(1)];

const fn chosen(pair: usize) -> [u8; 64] {
    table!(i => 16 * step(pair, i) + 8 * (i % 2))
}
