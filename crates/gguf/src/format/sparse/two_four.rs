//! 2:4: two of every four neighbours are stored. A block of 32 elements has 16 codes, and for each
//! of them a 2-bit index among its four neighbours, the order of NVIDIA's sparse tensor cores.
//!
//! ```text
//! block of 32: scale | u32, bits 2i and 2i + 1 for code i | 16 codes
//! ```
//!
//! Code `i` is one of the elements `i / 2 * 4` to `i / 2 * 4 + 3`. The two indices of four elements
//! ascend; if both name one element, the later code counts.

use bytemuck::{Pod, Zeroable};

use super::base::{BLOCK, Base, F16, Q4_0, Q8_0, clear, packed, put_packed};

use crate::format::block::{Block, dequantize_blocks, quantize_blocks};

/// Codes of a block.
const CODES: usize = BLOCK / 2;
/// Bytes of the indices of a block.
const INDICES: usize = size_of::<u32>();

/// Makes a block type of its base: bytes of the scale, bytes of the codes.
macro_rules! two_four {
    ($($name:ident $base:ident $scale:literal $codes:literal, $doc:literal;)*) => {$(
        #[doc = $doc]
        #[repr(C)]
        #[derive(Copy, Clone, Debug, Pod, Zeroable)]
        #[allow(non_camel_case_types)]
        pub struct $name {
            /// Scale, as the base has it.
            pub d: [u8; $scale],
            /// The index of each code among its four neighbours, two bits each.
            pub indices: [u8; INDICES],
            /// Codes.
            pub qs: [u8; $codes],
        }

        const _: () = assert!(size_of::<$name>() == block_bytes::<$base>());

        impl Block for $name {
            const ELEMENTS: usize = BLOCK;

            fn dequantize(&self, out: &mut [f32]) {
                let mut dense = [0; <$base as Base>::BYTES];
                densify_block::<$base>(bytemuck::bytes_of(self), &mut dense);
                dequantize_blocks::<<$base as Base>::Scalar>(&dense, out);
            }

            fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
                let mut dense = [0; <$base as Base>::BYTES];
                let pruned = larger_two(values);
                quantize_blocks::<<$base as Base>::Scalar>(&pruned, Some(weights), &mut dense)?;
                let mut block = Self::zeroed();
                sparsify_block::<$base>(&dense, bytemuck::bytes_of_mut(&mut block))?;
                Some(block)
            }
        }
    )*};
}

two_four! {
    S24_F16 F16 0 32, "2:4 over F16.";
    S24_Q8_0 Q8_0 2 16, "2:4 over Q8_0.";
    S24_Q4_0 Q4_0 2 8, "2:4 over Q4_0.";
}

const fn block_bytes<B: Base>() -> usize {
    B::SCALE + INDICES + CODES * B::BITS / 8
}

/// Writes the row in the base format.
pub(in crate::format) fn densify<B: Base>(row: &[u8], dense: &mut [u8]) {
    assert_eq!(row.len() / block_bytes::<B>(), dense.len() / B::BYTES, "blocks of a row");
    let blocks = row.chunks_exact(block_bytes::<B>());
    blocks.zip(dense.chunks_exact_mut(B::BYTES)).for_each(|(b, d)| densify_block::<B>(b, d));
}

/// Converts a row of the base format; None if more than two of four neighbours are not zero.
pub(in crate::format) fn sparsify<B: Base>(dense: &[u8]) -> Option<Vec<u8>> {
    assert!(dense.len().is_multiple_of(B::BYTES), "{} bytes of a row", dense.len());
    let mut row = vec![0; dense.len() / B::BYTES * block_bytes::<B>()];
    for (block, dense) in row.chunks_exact_mut(block_bytes::<B>()).zip(dense.chunks_exact(B::BYTES))
    {
        sparsify_block::<B>(dense, block)?;
    }
    Some(row)
}

fn densify_block<B: Base>(block: &[u8], dense: &mut [u8]) {
    let (scale, rest) = block.split_at(B::SCALE);
    let (indices, codes) = rest.split_at(INDICES);
    let indices = u32::from_le_bytes([indices[0], indices[1], indices[2], indices[3]]);
    let (dense_scale, out) = dense.split_at_mut(B::SCALE);
    dense_scale.copy_from_slice(scale);
    clear::<B>(out);
    for i in 0..CODES {
        let index = (indices >> (2 * i) & 3) as usize;
        B::put(out, i / 2 * 4 + index, packed::<B>(codes, i));
    }
}

fn sparsify_block<B: Base>(dense: &[u8], block: &mut [u8]) -> Option<()> {
    let (scale, codes) = dense.split_at(B::SCALE);
    let (out_scale, rest) = block.split_at_mut(B::SCALE);
    let (out_indices, out) = rest.split_at_mut(INDICES);
    out_scale.copy_from_slice(scale);
    let mut indices = 0u32;
    for four in 0..BLOCK / 4 {
        let code = |i: usize| B::code(codes, 4 * four + i);
        let [first, second] = two_of(|i| !B::is_zero(code(i)))?;
        for (i, index) in [(2 * four, first), (2 * four + 1, second)] {
            indices |= (index as u32) << (2 * i);
            put_packed::<B>(out, i, code(index));
        }
    }
    out_indices.copy_from_slice(&indices.to_le_bytes());
    Some(())
}

/// Two ascending indices below 4 that include all non-zero elements; None if more than two are not
/// zero.
fn two_of(is_nonzero: impl Fn(usize) -> bool) -> Option<[usize; 2]> {
    let mut nonzero = (0..4).filter(|&i| is_nonzero(i));
    match (nonzero.next(), nonzero.next(), nonzero.next()) {
        (None | Some(0), None, _) => Some([0, 1]),
        (Some(one), None, _) => Some([0, one]),
        (Some(first), Some(second), None) => Some([first, second]),
        _ => None,
    }
}

/// The values, with the two of smallest magnitude of every four set to zero.
fn larger_two(values: &[f32]) -> [f32; BLOCK] {
    let mut kept = [0.0; BLOCK];
    for (values, kept) in values.chunks_exact(4).zip(kept.chunks_exact_mut(4)) {
        let mut order = [0, 1, 2, 3];
        order.sort_by(|&a: &usize, &b| values[b].abs().total_cmp(&values[a].abs()));
        order[..2].iter().for_each(|&i| kept[i] = values[i]);
    }
    kept
}
