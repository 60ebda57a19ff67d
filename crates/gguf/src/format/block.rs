//! One block of a storage format, and the loops over many. It must not know which formats exist.

use bytemuck::Pod;

/// One block of a format: the smallest part of a row that can be stored. Blocks are bytes without
/// alignment, little-endian inside.
pub trait Block: Pod {
    /// The number of elements of a block.
    const ELEMENTS: usize;

    /// Writes the values of the block to `out`, `[ELEMENTS]`.
    fn dequantize(&self, out: &mut [f32]);

    /// Writes the values of blocks to `out`, `[blocks, ELEMENTS]`.
    fn dequantize_all(blocks: &[Self], out: &mut [f32]) {
        for (block, out) in blocks.iter().zip(out.chunks_exact_mut(Self::ELEMENTS)) {
            block.dequantize(out);
        }
    }

    /// Quantises `[ELEMENTS]` values to a small weighted squared error; None if this crate has no
    /// quantiser for the format. The result for non-finite values is unspecified.
    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let _ = (values, weights);
        None
    }
}

/// Writes the values of whole blocks, `dst.len() / B::ELEMENTS` of them.
pub(super) fn dequantize_blocks<B: Block>(src: &[u8], dst: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(src);
    assert_eq!(blocks.len() * B::ELEMENTS, dst.len(), "elements of {} blocks", blocks.len());
    B::dequantize_all(blocks, dst);
}

/// Quantises whole blocks; None if this crate cannot write the format.
pub(super) fn quantize_blocks<B: Block>(
    src: &[f32],
    weights: Option<&[f32]>,
    dst: &mut [u8],
) -> Option<()> {
    const UNIFORM: [f32; 256] = [1.0; 256];
    let blocks: &mut [B] = bytemuck::cast_slice_mut(dst);
    assert_eq!(blocks.len() * B::ELEMENTS, src.len(), "elements of {} blocks", blocks.len());
    let weights_of = |block: usize| match weights {
        Some(weights) => &weights[block * B::ELEMENTS..][..B::ELEMENTS],
        None => &UNIFORM[..B::ELEMENTS],
    };
    for (i, (block, values)) in blocks.iter_mut().zip(src.chunks_exact(B::ELEMENTS)).enumerate() {
        *block = B::quantize(values, weights_of(i))?;
    }
    Some(())
}

/// Reads a scale from a little-endian f16.
pub(super) fn scale(bytes: [u8; 2]) -> f32 {
    half::f16::from_le_bytes(bytes).to_f32()
}

/// Rounds a scale to a little-endian f16.
pub(super) fn stored_scale(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}
