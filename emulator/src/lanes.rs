//! The values of a register in the 32 lanes of a warp, and arithmetic on them. Registers hold bits:
//! values narrower than 64 bits are in the low bits, and the bits above them are arbitrary.

use half::f16;

/// All lanes of a warp, as a mask.
pub(crate) const ALL: u32 = u32::MAX;

/// The lanes of a mask.
pub(crate) fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// The value of a register in each lane: low halves, and high halves, which only 64-bit types use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    pub(crate) low: [u32; 32],
    high: [u32; 32],
}

impl Lanes {
    /// The same value in every lane.
    pub(crate) fn all(bits: u64) -> Lanes {
        Lanes { low: [bits as u32; 32], high: [(bits >> 32) as u32; 32] }
    }

    /// The value in a lane.
    pub(crate) fn get(&self, lane: usize) -> u64 {
        u64::read(self, lane)
    }

    pub(crate) fn set(&mut self, lane: usize, bits: u64) {
        bits.write(self, lane);
    }
}

/// A value type of PTX.
pub(crate) trait Value: Copy {
    fn read(lanes: &Lanes, lane: usize) -> Self;
    fn write(self, lanes: &mut Lanes, lane: usize);
}

macro_rules! narrow {
    ($($t:ty, $bits:ident => $of:expr, $value:ident => $into:expr;)*) => {$(
        impl Value for $t {
            #[inline(always)]
            fn read(lanes: &Lanes, lane: usize) -> $t {
                let $bits = lanes.low[lane];
                $of
            }
            #[inline(always)]
            fn write(self, lanes: &mut Lanes, lane: usize) {
                let $value = self;
                lanes.low[lane] = $into;
            }
        }
    )*};
}
narrow! {
    u8, bits => bits as u8, x => x.into();
    u16, bits => bits as u16, x => x.into();
    i16, bits => bits as i16, x => (x as u16).into();
    u32, bits => bits, x => x;
    i32, bits => bits as i32, x => x as u32;
    f32, bits => f32::from_bits(bits), x => x.to_bits();
    f16, bits => f16::from_bits(bits as u16), x => x.to_bits().into();
    // The first is in the low bits.
    [f16; 2], bits => [f16::from_bits(bits as u16), f16::from_bits((bits >> 16) as u16)],
        x => u32::from(x[0].to_bits()) | u32::from(x[1].to_bits()) << 16;
}

macro_rules! wide {
    ($($t:ty, $bits:ident => $of:expr, $value:ident => $into:expr;)*) => {$(
        impl Value for $t {
            #[inline(always)]
            fn read(lanes: &Lanes, lane: usize) -> $t {
                let $bits = u64::from(lanes.low[lane]) | u64::from(lanes.high[lane]) << 32;
                $of
            }
            #[inline(always)]
            fn write(self, lanes: &mut Lanes, lane: usize) {
                let $value = self;
                let bits: u64 = $into;
                (lanes.low[lane], lanes.high[lane]) = (bits as u32, (bits >> 32) as u32);
            }
        }
    )*};
}
wide! {
    u64, bits => bits, x => x;
    i64, bits => bits as i64, x => x as u64;
    f64, bits => f64::from_bits(bits), x => x.to_bits();
}

/// Writes a result to the lanes of a mask.
#[inline(always)]
pub(crate) fn put<T: Value>(to: &mut Lanes, mask: u32, values: [T; 32]) {
    if mask == ALL {
        (0..32).for_each(|i| values[i].write(to, i));
    } else {
        (0..32).filter(|i| mask >> i & 1 == 1).for_each(|i| values[i].write(to, i));
    }
}

/// `a * b + c` of f32 or f16 operands, rounded to odd, so that a second rounding to at most 24 bits
/// is correct. The product is exact in f64.
fn multiply_add(a: f64, b: f64, c: f64) -> f64 {
    let product = a * b;
    let sum = product + c;
    let of_c = sum - product;
    let error = (product - (sum - of_c)) + (c - of_c);
    let is_exact = error == 0.0 || !error.is_finite() || sum.to_bits() & 1 == 1;
    match (is_exact, (error > 0.0) == (sum > 0.0)) {
        (true, _) => sum,
        (false, true) => f64::from_bits(sum.to_bits() + 1),
        (false, false) => f64::from_bits(sum.to_bits() - 1),
    }
}

/// `a * b + c` in f16.
pub(crate) fn half_multiply_add(a: f16, b: f16, c: f16) -> f16 {
    to_half(multiply_add(a.to_f64(), b.to_f64(), c.to_f64()))
}

/// Rounds to the nearest f16, by way of f32 rounded to odd: `f16::from_f64` is not always correctly
/// rounded.
fn to_half(exact: f64) -> f16 {
    let near = exact as f32;
    let past = u32::from(f64::from(near).abs() > exact.abs());
    let is_exact = f64::from(near) == exact || !near.is_finite();
    let odd = if is_exact { near } else { f32::from_bits((near.to_bits() - past) | 1) };
    f16::from_f32(odd)
}

/// `a * b + c`, rounded down.
pub(crate) fn multiply_add_down(a: f32, b: f32, c: f32) -> f32 {
    let exact = multiply_add(a.into(), b.into(), c.into());
    let near = exact as f32;
    if f64::from(near) > exact { near.next_down() } else { near }
}

/// `a + b`, rounded towards zero.
pub(crate) fn add_to_zero(a: f32, b: f32) -> f32 {
    let exact = multiply_add(a.into(), 1.0, b.into());
    let near = exact as f32;
    match f64::from(near).abs() > exact.abs() {
        true if near > 0.0 => near.next_down(),
        true => near.next_up(),
        false => near,
    }
}

/// Flushes subnormals to zero.
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `prmt`: each result byte is a byte of `a` or `b`, selected by four bits of `selectors`.
pub(crate) fn permute(a: u32, b: u32, selectors: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    (0..4).fold(0, |word, i| {
        let selector = selectors >> (4 * i);
        let byte = (bytes >> (8 * (selector & 7))) as u8;
        // Bit 3 replicates the sign of the byte.
        let byte = if selector & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        word | u32::from(byte) << (8 * i)
    })
}

/// `bfi`: inserts the low `len` bits of `from` at bit `start` of `into`, of `width` bits.
pub(crate) fn insert_bits(from: u64, into: u64, start: u32, len: u32, width: u32) -> u64 {
    let (start, len) = (start & 255, len & 255);
    let below = |bits: u32| 1u64.checked_shl(bits).map_or(u64::MAX, |end| end - 1);
    if start >= width {
        return into;
    }
    let mask = below(len) << start & below(width);
    into & !mask | from << start & mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_once_and_in_the_direction_asked_for() {
        let tiny = 2f32.powi(-60);
        assert_eq!(multiply_add_down(1.0, 1.0, tiny), 1.0);
        assert_eq!(multiply_add_down(1.0, 1.0, -tiny), 1f32.next_down());
        assert_eq!(multiply_add_down(-1.0, 1.0, -tiny), (-1f32).next_down());
        assert_eq!(add_to_zero(-1.0, -tiny), -1.0);
        assert_eq!(add_to_zero(1.0, -tiny), 1f32.next_down());
        // Halfway between two halves, and a little more than f64 sees beside it.
        let [one, step] = [1.0, 2f64.powi(-11)].map(f16::from_f64);
        let least = f16::from_bits(1);
        assert_eq!(half_multiply_add(one, step, one), one);
        assert_eq!(half_multiply_add(least, least, one), one);
        let product = multiply_add(2f64.powi(-24), 2f64.powi(-24), 1.0 + 2f64.powi(-11));
        assert_eq!(to_half(product).to_bits(), one.to_bits() + 1);
    }

    #[test]
    fn bytes_and_bits_are_put_where_they_belong() {
        assert_eq!(permute(0x0302_0180, 0x0706_0504, 0x7418), 0x0704_01ff);
        assert_eq!(insert_bits(0xff, 0, 4, 4, 32), 0xf0);
        assert_eq!(insert_bits(u64::MAX, 1, 32, 32, 64), 0xffff_ffff_0000_0001);
        assert_eq!(insert_bits(0xff, 7, 40, 4, 32), 7);
    }
}
