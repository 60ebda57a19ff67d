//! Products of small matrices, whose elements lie spread over a warp's threads.

use std::sync::OnceLock;

use half::f16;

use crate::Fault;
use crate::block::Block;
use crate::kernel::Register;
use crate::lanes::{Lanes, Value};
use crate::warp::{ALL, Warp};

/// Every half as a float.
fn halves() -> &'static [f32] {
    static HALVES: OnceLock<Vec<f32>> = OnceLock::new();
    HALVES.get_or_init(|| (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).collect())
}

/// The two halves of a register in a thread.
fn pair(lanes: &Lanes, thread: usize) -> [f64; 2] {
    let bits = lanes.low[thread];
    [bits as u16, (bits >> 16) as u16].map(|half| f64::from(halves()[usize::from(half)]))
}

/// A factor with 16 rows, from registers: of rows `g` and `g + 8`, pairs of columns `c` and, behind
/// them, `c + 4`.
fn rows<const COLUMNS: usize>(
    warp: &Warp,
    registers: &[Register],
    mut put: impl FnMut(&mut [f64; COLUMNS], usize, usize, [f64; 2]),
) -> [[f64; COLUMNS]; 16] {
    let mut rows = [[0.0; COLUMNS]; 16];
    for (n, &register) in registers.iter().enumerate() {
        for thread in 0..32 {
            let row = thread / 4 + n % 2 * 8;
            let values = pair(&warp.registers[register as usize], thread);
            put(&mut rows[row], row, thread % 4 + n / 2 * 4, values);
        }
    }
    rows
}

/// Pairs of columns as they are.
fn dense(row: &mut [f64; 16], _: usize, n: usize, values: [f64; 2]) {
    row[2 * n..][..2].copy_from_slice(&values);
}

/// Eight columns of a factor, from registers: of column `g`, pairs of rows `c`, `c + 4` and so on.
fn columns<const ROWS: usize>(warp: &Warp, registers: &[Register]) -> [[f64; 8]; ROWS] {
    let mut columns = [[0.0; 8]; ROWS];
    for (n, &register) in registers.iter().enumerate() {
        for thread in 0..32 {
            let row = 2 * (thread % 4 + 4 * n);
            let [first, second] = pair(&warp.registers[register as usize], thread);
            (columns[row][thread / 4], columns[row + 1][thread / 4]) = (first, second);
        }
    }
    columns
}

/// `to = a * b + from` of 16 rows and 8 columns, which lie in four registers.
fn product<const N: usize>(
    warp: &mut Warp,
    a: &[[f64; N]; 16],
    b: &[[f64; 8]; N],
    to: &[Register],
    from: Option<&[Register]>,
) {
    let mut sums = [[0.0; 8]; 16];
    for (sums, a) in sums.iter_mut().zip(a) {
        for (a, b) in a.iter().zip(b) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    for (n, &to) in to.iter().enumerate() {
        let values = std::array::from_fn(|thread| {
            let sum = sums[thread / 4 + n / 2 * 8][2 * (thread % 4) + n % 2];
            let before = from.map(|from| &warp.registers[from[n] as usize]);
            (sum + before.map_or(0.0, |before| f64::from(f32::read(before, thread)))) as f32
        });
        warp.put(to, ALL, values);
    }
}

/// `mma` of 16 x 16 and 16 x 8.
pub(crate) fn multiply(warp: &mut Warp, list: &[Register]) {
    let a = rows::<16>(warp, &list[4..8], dense);
    let b = columns::<16>(warp, &list[8..10]);
    product(warp, &a, &b, &list[..4], Some(&list[10..14]));
}

/// `mma` of 16 x 32 of which each four columns have two numbers, and 32 x 8. The places of a row's
/// numbers are two bits each, of four pairs in each of two threads, which a selector names; the
/// rows from 8 on have the upper halves.
pub(crate) fn multiply_sparse(
    warp: &mut Warp,
    list: &[Register],
    places: Register,
    selector: usize,
) {
    let places = warp.registers[places as usize];
    let a = rows::<32>(warp, &list[4..8], |values, row, four, [first, second]| {
        let word = places.low[4 * (row % 8) + 2 * selector + four / 4] >> (row / 8 * 16);
        let bits = (word >> (four % 4 * 4)) as usize;
        values[4 * four + bits % 4] = first;
        values[4 * four + bits / 4 % 4] = second;
    });
    let b = columns::<32>(warp, &list[8..12]);
    product(warp, &a, &b, &list[..4], Some(&list[12..16]));
}

/// A warp's 16 rows of `wgmma`: the first factor from registers, the other from shared memory, in
/// rows of 128 bytes whose 16-byte places are changed by their number.
pub(crate) fn multiply_group(
    warp: &mut Warp,
    list: &[Register],
    count: usize,
    descriptor: u64,
    adds: bool,
    block: &mut Block,
) -> Result<(), Fault> {
    if descriptor >> 62 != 1 {
        return Err(Fault(format!("expected rows of 128 bytes, found descriptor {descriptor:#x}")));
    }
    let field = |shift: u32| (descriptor >> shift & 0x3fff) << 4;
    let (start, eight_rows) = (field(0), field(32));
    let (sums, registers) = list.split_at(count / 2);
    let a = rows::<16>(warp, registers, dense);
    for (eight, sums) in (0..).zip(sums.chunks(4)) {
        let mut b = [[0.0; 8]; 16];
        for (k, b) in (0..).zip(&mut b) {
            for (column, b) in (0..).zip(b) {
                let at = start + eight * eight_rows + 128 * column + 2 * k;
                let half = block.shared(at ^ (at >> 7 & 7) << 4, 2, 2)?;
                let half = u16::from_le_bytes([half[0], half[1]]);
                *b = f64::from(halves()[usize::from(half)]);
            }
        }
        product(warp, &a, &b, sums, adds.then_some(sums));
    }
    Ok(())
}

/// Four matrices of 8 x 8 halves from their rows.
pub(crate) fn load(warp: &mut Warp, to: &[Register], rows: &[[u8; 16]; 32], transposed: bool) {
    for (&to, rows) in to.iter().zip(rows.chunks(8)) {
        let half = |row: usize, column: usize| {
            u32::from(u16::from_le_bytes([rows[row][2 * column], rows[row][2 * column + 1]]))
        };
        let values = std::array::from_fn(|thread| {
            let (g, c) = (thread / 4, 2 * (thread % 4));
            match transposed {
                false => half(g, c) | half(g, c + 1) << 16,
                true => half(c, g) | half(c + 1, g) << 16,
            }
        });
        warp.put(to, ALL, values);
    }
}
