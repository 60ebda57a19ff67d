//! Rounding of keys and values to bytes.

use super::*;

/// Scales and codes of a block.
#[inline(always)]
unsafe fn round<V: Vector>(x: &[f32]) -> ([i8; BLOCK], u16) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { round_block::<V, i8>(x) }
}

fn bytes(isa: Isa, x: &[f32]) -> Vec<u8> {
    let (codes, scale) = dispatch!(isa, round(x: &[f32]) -> ([i8; BLOCK], u16));
    scale.to_le_bytes().into_iter().chain(codes.map(|code| code as u8)).collect()
}

#[test]
fn bytes_are_those_of_q8_0() {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    for isa in Isa::available() {
        for exponent in -45..22 {
            let block: Vec<f32> = (0..BLOCK).map(|_| random() * 2f32.powi(exponent)).collect();
            let wanted = Format::Q8_0.encode(&block, BLOCK).expect("a quantiser");
            assert_eq!(bytes(isa, &block), wanted, "{isa} {block:?}");
            // The rest of a shorter block is zero.
            let mut shorter = block.clone();
            shorter[20..].fill(0.0);
            assert_eq!(bytes(isa, &block[..20]), bytes(isa, &shorter), "{isa}");
        }
        // Infinities are clamped to finite numbers.
        for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let kept = bytes(isa, &[1.0, odd]);
            let scale = f16::from_le_bytes([kept[0], kept[1]]).to_f32();
            assert!(scale == F16_MAX && kept[3] as i8 == 127 * odd.signum() as i8, "{isa}");
        }
    }
}
