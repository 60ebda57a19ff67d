//! The int8 activation block and its scalar definition, which compilers vectorise. Per block it
//! reads 128 bytes and is bound by arithmetic.
//!
//! A block holds 32 columns in two halves, each with `scale = max |x| / 127` and
//! `code = round(x * (127 / max |x|))`, ties to even. A half below 2^-118 becomes zero (its
//! reciprocal would overflow); a half with NaN or infinity gets the scale NaN, which reaches every
//! result.

/// Columns of an int8 block.
pub(crate) const BLOCK_COLS: usize = 32;

/// Columns that share a scale. Activations have outliers, each of which costs its neighbours
/// precision: with 16 per scale, the error of the logits is a third smaller than with 32.
pub(super) const HALF: usize = BLOCK_COLS / 2;

/// A half whose values are all below this becomes zero.
pub(super) const SMALLEST: f32 = f32::from_bits(0x0480_0000);

/// Adding this rounds a small f32 to an integer, ties to even, in its low mantissa bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// 32 columns of one row as int8, with a scale per half and the sums that kernels need.
#[derive(Copy, Clone)]
#[repr(C)]
pub(crate) struct Block {
    pub(crate) codes: [i8; BLOCK_COLS],
    pub(crate) scales: [f32; 2],
    /// Minus the sum of all codes times their scales, for weights with minimums.
    pub(crate) minus_scaled_sum: f32,
    /// Minus 128 times the sum of the codes of each half: the initial accumulator of a dot product
    /// with weight codes offset by 128.
    pub(crate) starts: [i32; 2],
}

/// # Safety
/// As [`quantize_row`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn quantize_row_avx2(start: *mut u8, stride: usize, x: &[f32]) {
    // SAFETY: passed on.
    unsafe { quantize_row(start, stride, x) }
}

/// # Safety
/// `start` has `x.len() / 32` steps of `stride` bytes to write to.
#[inline(always)]
pub(super) unsafe fn quantize_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (index, block) in x.as_chunks::<BLOCK_COLS>().0.iter().enumerate() {
        // SAFETY: the caller provides the memory; steps are multiples of 52 bytes, so Block is
        // aligned.
        unsafe { start.add(index * stride).cast::<Block>().write(quantize_block(block)) }
    }
}

#[inline(always)]
pub(super) fn quantize_block(x: &[f32; BLOCK_COLS]) -> Block {
    let mut block =
        Block { codes: [0; BLOCK_COLS], scales: [0.0; 2], minus_scaled_sum: 0.0, starts: [0; 2] };
    for (half, x) in x.as_chunks::<HALF>().0.iter().enumerate() {
        let (codes, scale, sum) = quantize_half(x);
        block.codes[half * HALF..][..HALF].copy_from_slice(&codes);
        block.scales[half] = scale;
        block.minus_scaled_sum -= scale * sum as f32;
        block.starts[half] = -128 * sum;
    }
    block
}

/// The definition of the int8 format: an integer maximum, one multiplication and one addition per
/// value. No order of evaluation changes a bit, so the compiler is free to vectorise it.
#[inline(always)]
fn quantize_half(x: &[f32; HALF]) -> ([i8; HALF], f32, i32) {
    // The bits of |x| order as the values do, with infinity and NaN on top.
    let bits = x.iter().fold(0, |max, v| (v.to_bits() & 0x7fff_ffff).max(max));
    let largest = f32::from_bits(bits);
    let (scale, inverse) = if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    };
    let mut codes = [0; HALF];
    let mut sum = 0;
    for i in 0..HALF {
        let value = if inverse == 0.0 { 0.0 } else { x[i] * inverse };
        let code = (value + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
        codes[i] = code as i8;
        sum += code;
    }
    (codes, scale, sum)
}
