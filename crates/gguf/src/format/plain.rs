//! Formats of one number per block, which store no scale: floats and integers.

use bytemuck::{Pod, Zeroable};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::block::Block;

/// Defines a block type of one number by its read and, if it has a quantiser, its write function.
macro_rules! plain {
    ($($name:ident $bytes:literal, $doc:literal, $read:expr, $write:expr $(, $all:expr)?;)*) => {$(
        #[doc = $doc]
        #[repr(C)]
        #[derive(Copy, Clone, Debug, Pod, Zeroable)]
        pub struct $name(pub [u8; $bytes]);

        impl Block for $name {
            const ELEMENTS: usize = 1;

            fn dequantize(&self, out: &mut [f32]) {
                const READ: fn([u8; $bytes]) -> f32 = $read;
                out[0] = READ(self.0);
            }

            $(fn dequantize_all(blocks: &[Self], out: &mut [f32]) {
                const READ_ALL: fn(&[[u8; $bytes]], &mut [f32]) = $all;
                READ_ALL(bytemuck::cast_slice(blocks), out);
            })?

            fn quantize(values: &[f32], _: &[f32]) -> Option<Self> {
                const WRITE: Option<fn(f32) -> [u8; $bytes]> = $write;
                Some($name(WRITE?(values[0])))
            }
        }
    )*};
}

plain! {
    F32 4, "A 32-bit float.", f32::from_le_bytes, Some(f32::to_le_bytes);
    F16 2, "A 16-bit float.", super::block::scale, Some(super::block::stored_scale),
        read_halves;
    BF16 2, "The upper half of a 32-bit float.",
        |b| half::bf16::from_le_bytes(b).to_f32(),
        Some(|v| half::bf16::from_f32(v).to_le_bytes());
    F64 8, "A 64-bit float.",
        |b| f64::from_le_bytes(b) as f32,
        Some(|v| f64::from(v).to_le_bytes());
    I8 1, "An 8-bit integer.", |b| f32::from(i8::from_le_bytes(b)), None;
    I16 2, "A 16-bit integer.", |b| f32::from(i16::from_le_bytes(b)), None;
    I32 4, "A 32-bit integer.", |b| i32::from_le_bytes(b) as f32, None;
    I64 8, "A 64-bit integer.", |b| i64::from_le_bytes(b) as f32, None;
}

/// Reads many at once, which processors have instructions for.
fn read_halves(bytes: &[[u8; 2]], out: &mut [f32]) {
    let mut halves = [f16::ZERO; 64];
    for (bytes, out) in bytes.chunks(halves.len()).zip(out.chunks_mut(halves.len())) {
        let halves = &mut halves[..bytes.len()];
        halves.iter_mut().zip(bytes).for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
        halves.convert_to_f32_slice(out);
    }
}
