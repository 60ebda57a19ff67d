//! The lanes in plain Rust: loops over 16 elements, which compilers turn into whatever vectors a
//! target has.

#![allow(unsafe_op_in_unsafe_fn, reason = "the trait states the one condition of all functions")]

use half::{bf16, f16};

use crate::linear::lanes::{Lanes, TWO_FOUR_COLUMNS};
use crate::vector::portable;

/// 16 lanes as arrays.
#[derive(Copy, Clone)]
pub(crate) struct Portable;

/// Builds a lane array from a function of the lane.
#[inline]
fn lanes<T>(f: impl FnMut(usize) -> T) -> [T; 16] {
    std::array::from_fn(f)
}

impl Lanes for Portable {
    type Bytes = [u8; 64];
    type Ints = [i32; 16];
    type Floats = [f32; 16];

    const FIRST: usize = 0;
    const COUNT: usize = 16;

    #[inline]
    unsafe fn bytes(at: *const u8) -> [u8; 64] {
        at.cast::<[u8; 64]>().read()
    }

    #[inline]
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(v: [u8; 64]) -> [u8; 64] {
        v.map(|b| ((b >> RIGHT) << LEFT) & MASK)
    }

    #[inline]
    unsafe fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline]
    unsafe fn lookup(table: &[i8; 16], nibbles: [u8; 64]) -> [u8; 64] {
        nibbles.map(|b| table[usize::from(b & 15)] as u8)
    }

    #[inline]
    unsafe fn int(value: i32) -> [i32; 16] {
        [value; 16]
    }

    #[inline]
    unsafe fn dot(start: [i32; 16], codes: &[[u8; 64]], _: u32, x: *const i8) -> [i32; 16] {
        let mut sum = start;
        for (step, codes) in codes.iter().enumerate() {
            let x = x.add(4 * step).cast::<[i8; 4]>().read().map(i32::from);
            for (lane, sum) in sum.iter_mut().enumerate() {
                for column in 0..4 {
                    *sum += i32::from(codes[4 * lane + column]) * x[column];
                }
            }
        }
        sum
    }

    #[inline]
    unsafe fn centre(codes: [u8; 64], _: u32, offset: i32) -> [u8; 64] {
        codes.map(|code| code.wrapping_add((128 - offset) as u8))
    }

    #[inline]
    unsafe fn centred_dot(
        start: i32,
        codes: &[[u8; 64]],
        _: u32,
        _: i32,
        x: *const i8,
    ) -> [i32; 16] {
        Self::dot(Self::int(start), codes, 8, x)
    }

    #[inline]
    unsafe fn centred_start(start: i32, _: u32, _: i32) -> [i32; 16] {
        Self::int(start)
    }

    #[inline]
    unsafe fn centred_step(sum: [i32; 16], codes: [u8; 64], _: u32, x: *const i8) -> [i32; 16] {
        Self::dot(sum, &[codes], 8, x)
    }

    #[inline]
    unsafe fn sixteenth(v: [i32; 16]) -> [i32; 16] {
        v.map(|v| v / 16)
    }

    #[inline]
    unsafe fn to_floats(v: [i32; 16]) -> [f32; 16] {
        v.map(|v| v as f32)
    }

    #[inline]
    unsafe fn from_u8(at: *const u8) -> [f32; 16] {
        at.cast::<[u8; 16]>().read().map(f32::from)
    }

    #[inline]
    unsafe fn from_i8(at: *const u8) -> [f32; 16] {
        at.cast::<[i8; 16]>().read().map(f32::from)
    }

    #[inline]
    unsafe fn from_exponents(at: *const u8) -> [f32; 16] {
        at.cast::<[u8; 16]>().read().map(|e| f32::from_bits(u32::from(e) << 23))
    }

    #[inline]
    unsafe fn from_f16(at: *const u8) -> [f32; 16] {
        let bytes = at.cast::<[[u8; 2]; 16]>().read();
        portable::from_f16(bytes.map(u16::from_le_bytes))
    }

    #[inline]
    unsafe fn from_bf16(at: *const u8) -> [f32; 16] {
        let bytes = at.cast::<[[u8; 2]; 16]>().read();
        lanes(|i| bf16::from_le_bytes(bytes[i]).to_f32_const())
    }

    #[inline]
    unsafe fn from_f32(at: *const u8) -> [f32; 16] {
        at.cast::<[[u8; 4]; 16]>().read().map(f32::from_le_bytes)
    }

    #[inline]
    unsafe fn float(value: f32) -> [f32; 16] {
        [value; 16]
    }

    #[inline]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes(|i| a[i] + b[i])
    }

    #[inline]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes(|i| a[i] * b[i])
    }

    #[inline]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        portable::fma(a, b, c)
    }

    #[inline]
    unsafe fn store(v: [f32; 16], at: *mut f32) {
        at.cast::<[f32; 16]>().write(v);
    }

    #[inline]
    unsafe fn prefetch(_: *const u8) {}

    #[inline]
    unsafe fn prefetch_l2(_: *const u8) {}

    #[inline]
    unsafe fn flip<const BITS: u8>(v: [u8; 64]) -> [u8; 64] {
        v.map(|b| b ^ BITS)
    }

    #[inline]
    unsafe fn store_bytes(v: [u8; 64], at: *mut u8) {
        at.cast::<[u8; 64]>().write(v);
    }

    #[inline]
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> [u8; 64] {
        let (mut bytes, mut mask, mut next) = ([GAP; 64], mask, 0);
        while mask != 0 {
            bytes[mask.trailing_zeros() as usize] = *at.add(next);
            mask &= mask - 1;
            next += 1;
        }
        bytes
    }

    #[inline]
    unsafe fn select_two_four(masks: *const u8, x: *const i8) -> [[u8; 64]; 2] {
        let mut pairs = [[0; 64]; 2];
        for step in 0..4 {
            let three = u64::from_le(masks.add(6 * step).cast::<u64>().read_unaligned());
            for row in 0..16 {
                let places = TWO_FOUR_COLUMNS[(three >> (3 * row) & 7) as usize];
                for (i, place) in places.into_iter().enumerate() {
                    let code = *x.add(4 * step + usize::from(place));
                    pairs[step / 2][4 * row + step % 2 * 2 + i] = code as u8;
                }
            }
        }
        pairs
    }

    #[inline]
    unsafe fn signed_dot<const ZERO: u8>(codes: [[u8; 64]; 2], x: [[u8; 64]; 2]) -> [i32; 16] {
        let product = |code: u8, x: u8| (i32::from(code) - i32::from(ZERO)) * i32::from(x as i8);
        lanes(|lane| {
            let bytes = 4 * lane..4 * lane + 4;
            bytes.map(|i| product(codes[0][i], x[0][i]) + product(codes[1][i], x[1][i])).sum()
        })
    }

    #[inline]
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [[f32; 16]; 2] {
        let mut next = at.cast::<u16>();
        [mask, mask >> 16].map(|mask| {
            lanes(|i| {
                if mask >> i & 1 == 0 {
                    return 0.0;
                }
                let value = Self::f16_to_f32(next.read_unaligned());
                next = next.add(1);
                value
            })
        })
    }

    #[inline]
    unsafe fn interleave(columns: [*const u8; 4]) -> [[u8; 64]; 4] {
        let mut steps = [[0; 64]; 4];
        for (panel, step) in steps.iter_mut().enumerate() {
            for (i, byte) in step.iter_mut().enumerate() {
                let (row, column) = (i / 4, i % 4);
                *byte = *columns[column].add(row / 4 * 16 + panel * 4 + row % 4);
            }
        }
        steps
    }

    #[inline]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32_const()
    }
}
