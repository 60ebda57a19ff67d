//! Tensor core instructions (`mma`, `mma.sp`, `wgmma`) and `ldmatrix`, on fragments: matrices whose
//! elements are distributed over the lanes of a warp.

use std::sync::OnceLock;

use half::f16;

use crate::Fault;
use crate::block::Block;
use crate::kernel::Register;
use crate::lanes::{self, ALL, Lanes, Value};

/// The f32 value of every f16.
fn f16_table() -> &'static [f32] {
    static TABLE: OnceLock<Vec<f32>> = OnceLock::new();
    TABLE.get_or_init(|| (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).collect())
}

/// The two f16 values of a register in a lane.
fn pair(register: &Lanes, lane: usize) -> [f64; 2] {
    let bits = register.low[lane];
    [bits as u16, (bits >> 16) as u16].map(|half| f64::from(f16_table()[usize::from(half)]))
}

/// Matrix A of 16 rows, from its fragment: register `n` of a lane holds a pair of columns of row
/// `lane / 4 + n % 2 * 8`.
fn matrix_a<const COLUMNS: usize>(
    registers: &[Lanes],
    list: &[Register],
    mut put: impl FnMut(&mut [f64; COLUMNS], usize, usize, [f64; 2]),
) -> [[f64; COLUMNS]; 16] {
    let mut rows = [[0.0; COLUMNS]; 16];
    for (n, &register) in list.iter().enumerate() {
        for lane in 0..32 {
            let row = lane / 4 + n % 2 * 8;
            let values = pair(&registers[register as usize], lane);
            put(&mut rows[row], row, lane % 4 + n / 2 * 4, values);
        }
    }
    rows
}

/// Stores a pair of columns of dense A.
fn dense(row: &mut [f64; 16], _: usize, n: usize, values: [f64; 2]) {
    row[2 * n..][..2].copy_from_slice(&values);
}

/// Matrix B of 8 columns, from its fragment: register `n` of a lane holds a pair of rows of column
/// `lane / 4`.
fn matrix_b<const ROWS: usize>(registers: &[Lanes], list: &[Register]) -> [[f64; 8]; ROWS] {
    let mut columns = [[0.0; 8]; ROWS];
    for (n, &register) in list.iter().enumerate() {
        for lane in 0..32 {
            let row = 2 * (lane % 4 + 4 * n);
            let [first, second] = pair(&registers[register as usize], lane);
            (columns[row][lane / 4], columns[row + 1][lane / 4]) = (first, second);
        }
    }
    columns
}

/// `to = a * b + from` of 16 rows and 8 columns, in fragments of four registers.
fn multiply<const N: usize>(
    registers: &mut [Lanes],
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
        let values = std::array::from_fn(|lane| {
            let sum = sums[lane / 4 + n / 2 * 8][2 * (lane % 4) + n % 2];
            let before = from.map(|from| &registers[from[n] as usize]);
            (sum + before.map_or(0.0, |before| f64::from(f32::read(before, lane)))) as f32
        });
        lanes::put(&mut registers[to as usize], ALL, values);
    }
}

/// `mma.m16n8k16`.
pub(crate) fn mma(registers: &mut [Lanes], list: &[Register]) {
    let a = matrix_a::<16>(registers, &list[4..8], dense);
    let b = matrix_b::<16>(registers, &list[8..10]);
    multiply(registers, &a, &b, &list[..4], Some(&list[10..14]));
}

/// `mma.sp.m16n8k32`: A stores two of four columns. The metadata of a row are 2-bit indices, four
/// pairs in each of two lanes that `selector` determines; rows from 8 on use the high 16 bits.
pub(crate) fn mma_sparse(
    registers: &mut [Lanes],
    list: &[Register],
    metadata: Register,
    selector: usize,
) {
    let metadata = registers[metadata as usize];
    let a = matrix_a::<32>(registers, &list[4..8], |values, row, four, [first, second]| {
        let word = metadata.low[4 * (row % 8) + 2 * selector + four / 4] >> (row / 8 * 16);
        let bits = (word >> (four % 4 * 4)) as usize;
        values[4 * four + bits % 4] = first;
        values[4 * four + bits / 4 % 4] = second;
    });
    let b = matrix_b::<32>(registers, &list[8..12]);
    multiply(registers, &a, &b, &list[..4], Some(&list[12..16]));
}

/// A matrix in shared memory with the 128-byte or the 64-byte swizzle, by its descriptor.
struct Descriptor {
    start: u64,
    /// Bytes of the swizzle.
    line: u64,
    /// Of a K-major matrix from eight rows to the next, of an MN-major one from eight of K.
    stride: u64,
    /// Of an MN-major matrix from a line to the next rows.
    leading: u64,
}

impl Descriptor {
    fn new(bits: u64) -> Result<Descriptor, Fault> {
        let line = match bits >> 62 {
            1 => 128,
            2 => 64,
            _ => {
                let expected = "expected the 128-byte or the 64-byte swizzle";
                return Err(Fault(format!("{expected}, found descriptor {bits:#x}")));
            }
        };
        let field = |shift: u32| (bits >> shift & 0x3fff) << 4;
        Ok(Descriptor { start: field(0), line, stride: field(32), leading: field(16) })
    }

    /// The 16 elements of a row of a K-major matrix.
    fn k_major(&self, row: u64, reads: &mut Reads<'_>) -> Result<[f64; 16], Fault> {
        let at = row / 8 * self.stride + row % 8 * self.line;
        let halves = [self.piece(at, reads)?, self.piece(at + 16, reads)?];
        Ok(std::array::from_fn(|k| halves[k / 8][k % 8]))
    }

    /// Element `k` of each of the eight rows from `row` on of an MN-major matrix.
    fn mn_major(&self, row: u64, k: u64, reads: &mut Reads<'_>) -> Result<[f64; 8], Fault> {
        let rows = self.line / 2;
        let of_k = k / 8 * self.stride + k % 8 * self.line;
        self.piece(row / rows * self.leading + of_k + row % rows * 2, reads)
    }

    /// The eight neighbours from an offset on.
    fn piece(&self, offset: u64, reads: &mut Reads<'_>) -> Result<[f64; 8], Fault> {
        let at = self.start + offset;
        let bytes = reads.read(at ^ (at >> 7 & (self.line / 16 - 1)) << 4)?;
        let half = |i: usize| usize::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
        Ok(std::array::from_fn(|i| f64::from(f16_table()[half(i)])))
    }
}

/// 16 bytes of shared memory, at an address.
pub(crate) type Piece = (u64, [u8; 16]);

/// Shared memory, and what was read of it.
struct Reads<'a> {
    block: &'a mut Block,
    pieces: Vec<Piece>,
}

impl Reads<'_> {
    fn read(&mut self, address: u64) -> Result<[u8; 16], Fault> {
        let bytes = read(self.block, address)?;
        self.pieces.push((address, bytes));
        Ok(bytes)
    }
}

fn read(block: &mut Block, address: u64) -> Result<[u8; 16], Fault> {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(block.shared(address, 16, 16)?);
    Ok(bytes)
}

/// Whether shared memory still has what was read when a `wgmma` was issued. A device reads it at
/// any time until a wait says that the `wgmma` has ended.
pub(crate) fn check(block: &mut Block, pieces: &[Piece]) -> Result<(), Fault> {
    for &(address, bytes) in pieces {
        if read(block, address)? != bytes {
            let text = "changed before the wait for the wgmma that reads it";
            return Err(Fault(format!("shared memory at {address:#x} {text}")));
        }
    }
    Ok(())
}

/// A `wgmma` of one warp: 16 rows of A, and B from shared memory.
pub(crate) struct Wgmma {
    pub(crate) columns: usize,
    /// The descriptor of A and the warp's number in its group, where A is not in registers.
    pub(crate) a: Option<(u64, u64)>,
    /// The descriptor of B.
    pub(crate) b: u64,
    /// Whether B is MN-major instead of K-major.
    pub(crate) is_mn_major: bool,
    pub(crate) accumulates: bool,
}

impl Wgmma {
    /// `list` has the registers of the sums, then those of A. Returns what it reads of shared
    /// memory.
    pub(crate) fn multiply(
        &self,
        registers: &mut [Lanes],
        list: &[Register],
        block: &mut Block,
    ) -> Result<Vec<Piece>, Fault> {
        let mut reads = Reads { block, pieces: Vec::new() };
        let (sums, a_list) = list.split_at(self.columns / 2);
        let mut a = matrix_a::<16>(registers, a_list, dense);
        if let Some((descriptor, warp)) = self.a {
            let descriptor = Descriptor::new(descriptor)?;
            for (row, a) in (16 * warp..).zip(&mut a) {
                *a = descriptor.k_major(row, &mut reads)?;
            }
        }
        let descriptor = Descriptor::new(self.b)?;
        for (eight, sums) in (0..).zip(sums.chunks(4)) {
            let mut b = [[0.0; 8]; 16];
            if self.is_mn_major {
                for (k, b) in (0..).zip(&mut b) {
                    *b = descriptor.mn_major(8 * eight, k, &mut reads)?;
                }
            } else {
                for column in 0..8 {
                    let values = descriptor.k_major(8 * eight + column, &mut reads)?;
                    b.iter_mut().zip(values).for_each(|(b, x)| b[column as usize] = x);
                }
            }
            multiply(registers, &a, &b, sums, self.accumulates.then_some(sums));
        }
        Ok(reads.pieces)
    }
}

/// `ldmatrix`: the fragments of four 8 x 8 matrices of f16, from their rows.
pub(crate) fn load(
    registers: &mut [Lanes],
    to: &[Register],
    rows: &[[u8; 16]; 32],
    transposed: bool,
) {
    for (&to, rows) in to.iter().zip(rows.chunks(8)) {
        let half = |row: usize, column: usize| {
            u32::from(u16::from_le_bytes([rows[row][2 * column], rows[row][2 * column + 1]]))
        };
        let values = std::array::from_fn(|lane| {
            let (g, c) = (lane / 4, 2 * (lane % 4));
            match transposed {
                false => half(g, c) | half(g, c + 1) << 16,
                true => half(c, g) | half(c + 1, g) << 16,
            }
        });
        lanes::put(&mut registers[to as usize], ALL, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_changes_before_the_wait_is_found() {
        let mut block = Block::with_shared(8192);
        let mut registers = vec![Lanes::all(0); 32];
        let list: Vec<Register> = (0..16).collect();
        // A and B with the 128-byte swizzle, eight rows apart by 1024 bytes.
        let descriptor = |start: u64| 1 << 62 | (1024 >> 4) << 32 | start >> 4;
        let (a, b) = (Some((descriptor(0), 0)), descriptor(4096));
        let product = Wgmma { columns: 32, a, b, is_mn_major: false, accumulates: false };
        let pieces = product.multiply(&mut registers, &list, &mut block).unwrap();
        assert_eq!(pieces.len(), 2 * (16 + 32));
        assert!(check(&mut block, &pieces).is_ok());
        // What the product does not read may change.
        block.shared(64, 1, 1).unwrap()[0] = 1;
        assert!(check(&mut block, &pieces).is_ok());
        block.shared(4096 + 2048, 1, 1).unwrap()[0] = 1;
        assert!(check(&mut block, &pieces).unwrap_err().0.contains("changed before the wait"));
    }
}
