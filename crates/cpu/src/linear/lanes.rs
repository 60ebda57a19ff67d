//! The vector operations that micro-kernels are written over: one SIMD lane per row of a panel.
//! Each packed layout and each micro-kernel is written once, generic over [`Lanes`]; `simd` holds
//! one implementation per instruction set. This file knows no layout.

/// Rows of a panel.
pub(crate) const PANEL_ROWS: usize = 16;

/// The two columns of four that a 2:4 mask keeps, by the mask's first three bits. The fourth bit
/// follows from them: it is set if exactly one of them is.
pub(crate) const TWO_FOUR_COLUMNS: [[u8; 2]; 8] =
    [[0, 0], [0, 3], [1, 3], [0, 1], [2, 3], [0, 2], [1, 2], [0, 0]];

/// Vector operations over the 16 rows of a panel, or over half of them where registers are narrow.
///
/// A pointer parameter names the data of all 16 rows; an implementation with fewer lanes adds its
/// own offset. No alignment is required.
///
/// # Safety
/// Every function requires a processor with the implementation's instructions, and pointers to at
/// least the stated number of bytes.
pub(crate) trait Lanes: Copy {
    /// Four bytes (columns) per lane.
    type Bytes: Copy;
    /// One i32 per lane.
    type Ints: Copy;
    /// One f32 per lane.
    type Floats: Copy;

    /// The panel row of the first lane.
    const FIRST: usize;
    /// The number of lanes.
    const COUNT: usize;

    /// Loads 64 bytes.
    unsafe fn bytes(at: *const u8) -> Self::Bytes;
    /// `((v >> RIGHT) << LEFT) & MASK` in each byte. The mask must clear the bits that a shift
    /// brings in from the neighbouring byte.
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(
        v: Self::Bytes,
    ) -> Self::Bytes;
    /// Bitwise or.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `table[nibble]` for each byte; all bytes are below 16.
    unsafe fn lookup(table: &[i8; 16], nibbles: Self::Bytes) -> Self::Bytes;

    /// Broadcasts an integer.
    unsafe fn int(value: i32) -> Self::Ints;
    /// `start` plus the dot product of `codes` with the `4 * codes.len()` activation codes at `x`.
    /// Codes are unsigned and below `2^bits`, `bits <= 6`.
    unsafe fn dot(start: Self::Ints, codes: &[Self::Bytes], bits: u32, x: *const i8) -> Self::Ints;
    /// Prepares centred codes (value = code - offset) for `centred_dot`.
    unsafe fn centre(codes: Self::Bytes, bits: u32, offset: i32) -> Self::Bytes;
    /// The sum of `(code - offset) * x` for codes prepared by `centre`. `start` is minus 128 times
    /// the sum of the activation codes.
    unsafe fn centred_dot(
        start: i32,
        codes: &[Self::Bytes],
        bits: u32,
        offset: i32,
        x: *const i8,
    ) -> Self::Ints;

    /// The initial accumulator of `centred_dot`.
    unsafe fn centred_start(start: i32, bits: u32, offset: i32) -> Self::Ints;
    /// One accumulation of `centred_dot`: four columns.
    unsafe fn centred_step(
        sum: Self::Ints,
        codes: Self::Bytes,
        bits: u32,
        x: *const i8,
    ) -> Self::Ints;

    /// Divides multiples of 16 by 16.
    unsafe fn sixteenth(v: Self::Ints) -> Self::Ints;
    /// Integers to floats, rounded to nearest.
    unsafe fn to_floats(v: Self::Ints) -> Self::Floats;
    /// Loads 16 unsigned bytes as floats.
    unsafe fn from_u8(at: *const u8) -> Self::Floats;
    /// Loads 16 signed bytes as floats.
    unsafe fn from_i8(at: *const u8) -> Self::Floats;
    /// Loads 16 bytes as exponent fields of floats: byte `e` gives `2^(e - 127)`, 0 gives 0.
    unsafe fn from_exponents(at: *const u8) -> Self::Floats;
    /// Loads 16 f16.
    unsafe fn from_f16(at: *const u8) -> Self::Floats;
    /// Loads 16 bfloat16.
    unsafe fn from_bf16(at: *const u8) -> Self::Floats;
    /// Loads 16 f32.
    unsafe fn from_f32(at: *const u8) -> Self::Floats;
    /// Broadcasts a float.
    unsafe fn float(value: f32) -> Self::Floats;
    /// `a + b`.
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b`.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Stores these lanes' part of 16 f32.
    unsafe fn store(v: Self::Floats, at: *mut f32);
    /// Prefetches the cache line at `at`, which may be any address.
    unsafe fn prefetch(at: *const u8);
    /// Prefetches `lines` cache lines from `at + AHEAD` on. Any address is valid.
    #[inline(always)]
    unsafe fn prefetch_lines<const AHEAD: usize>(at: *const u8, lines: usize) {
        for line in 0..lines {
            // SAFETY: as of `prefetch`.
            unsafe { Self::prefetch(at.wrapping_add(AHEAD + 64 * line)) }
        }
    }
    /// Prefetches into L2 only.
    unsafe fn prefetch_l2(at: *const u8);

    /// `v ^ BITS` in each byte.
    unsafe fn flip<const BITS: u8>(v: Self::Bytes) -> Self::Bytes;
    /// Stores these lanes' part of 64 bytes.
    unsafe fn store_bytes(v: Self::Bytes, at: *mut u8);
    /// Expands packed bytes: each of 64 bytes whose mask bit is set is the next byte from `at`, the
    /// others are `GAP`. Reads 64 bytes.
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> Self::Bytes;
    /// Selects from the 16 activation codes at `x` those of the columns that two pairs of 2:4
    /// vectors store: two per row for the first vector of a pair and two for the second. `masks`
    /// holds the masks of the four vectors, three bits per row. Reads 64 bytes of masks.
    unsafe fn select_two_four(masks: *const u8, x: *const i8) -> [Self::Bytes; 2];
    /// The sum of `(code - ZERO) * x` over the four bytes of each lane of both vectors, for
    /// unsigned weight codes and signed activation codes.
    unsafe fn signed_dot<const ZERO: u8>(
        codes: [Self::Bytes; 2],
        x: [Self::Bytes; 2],
    ) -> Self::Ints;
    /// Expands packed f16 into two columns of 16 floats: each whose mask bit is set is the next
    /// f16 from `at`, the others are zero. Reads 64 bytes.
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [Self::Floats; 2];
    /// Transposes four columns of four panels into one dot operand per panel, with the four columns
    /// of a row side by side. Each 16 bytes of a column are four rows of all four panels.
    unsafe fn interleave(columns: [*const u8; 4]) -> [Self::Bytes; 4];
    /// Converts one f16 to f32.
    unsafe fn f16_to_f32(bits: u16) -> f32;
    /// Spreads the low 48 bits to groups of three, each at a multiple of four.
    #[inline(always)]
    unsafe fn spread(bits: u64) -> u64 {
        let bits = (bits << 8) & 0x00ff_ffff_0000_0000 | bits & 0xff_ffff;
        let bits = (bits << 4) & 0x0fff_0000_0fff_0000 | bits & 0x0000_0fff_0000_0fff;
        let bits = (bits << 2) & 0x3f00_3f00_3f00_3f00 | bits & 0x003f_003f_003f_003f;
        (bits << 1) & 0x7070_7070_7070_7070 | bits & 0x0707_0707_0707_0707
    }
}
