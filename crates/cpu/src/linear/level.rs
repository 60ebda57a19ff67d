//! What a kernel needs from a processor: vectors with one lane per row of a panel, and a handful of
//! operations on them. Kinds of weight and tiles are written once over [`Lanes`]; a level of
//! instructions implements it in one file. It knows no kind of weight.

use super::activations::Kept;
use super::columns::{self as by_columns, ColumnInteger, Group};
use super::kind::{FloatKind, IntegerKind};
use super::sparse::{SparseFloat, SparseInteger, SparseKind};
use super::tile::{self, Tile, columns, sparse};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Rows of a panel.
pub(crate) const PANEL_ROWS: usize = 16;

/// Which two of four columns are kept, by the bits of the first three: the fourth is kept where one
/// of these is.
pub(crate) const PLACES: [[u8; 2]; 8] =
    [[0, 0], [0, 3], [1, 3], [0, 1], [2, 3], [0, 2], [1, 2], [0, 0]];

/// Vector operations over all rows of a panel, or over a part of them where registers are narrow.
///
/// A pointer parameter names the place of all 16 rows; an implementation with fewer lanes takes its
/// own from there. Nothing need be aligned.
///
/// # Safety
/// Every function may only run where its level's instructions exist, with pointers to as many
/// bytes as stated.
pub(crate) trait Lanes: Copy {
    /// Four bytes (columns) per lane.
    type Bytes: Copy;
    /// One i32 per lane.
    type Ints: Copy;
    /// One f32 per lane.
    type Floats: Copy;

    /// The first row of a panel that these lanes stand for.
    const FIRST: usize;
    /// The number of lanes.
    const COUNT: usize;

    /// Loads 64 bytes.
    unsafe fn bytes(at: *const u8) -> Self::Bytes;
    /// `((v >> RIGHT) << LEFT) & MASK` in each byte; the mask must clear what a shift brings in
    /// from the byte's neighbour.
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(
        v: Self::Bytes,
    ) -> Self::Bytes;
    /// Bitwise or.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `table[nibble]` for each byte, all of which are below 16.
    unsafe fn lookup(table: &[i8; 16], nibbles: Self::Bytes) -> Self::Bytes;

    /// The same value in all lanes.
    unsafe fn int(value: i32) -> Self::Ints;
    /// `start` plus, for each vector of `codes`, the products of its unsigned codes below
    /// `2^bits`, `bits <= 6`, with the next four of the `4 * codes.len()` activation codes at `x`.
    unsafe fn dot(start: Self::Ints, codes: &[Self::Bytes], bits: u32, x: *const i8) -> Self::Ints;
    /// Turns centred codes, see [`Codes`](super::kind::Codes), into what `centred_dot` takes.
    unsafe fn centre(codes: Self::Bytes, bits: u32, offset: i32) -> Self::Bytes;
    /// The sum of `(code - offset) * x` for prepared codes; `start` is minus 128 times the sum of
    /// the activation codes.
    unsafe fn centred_dot(
        start: i32,
        codes: &[Self::Bytes],
        bits: u32,
        offset: i32,
        x: *const i8,
    ) -> Self::Ints;

    /// What `centred_dot` starts with.
    unsafe fn centred_start(start: i32, bits: u32, offset: i32) -> Self::Ints;
    /// What `centred_dot` adds for one vector of prepared codes.
    unsafe fn centred_step(
        sum: Self::Ints,
        codes: Self::Bytes,
        bits: u32,
        x: *const i8,
    ) -> Self::Ints;

    /// A sixteenth of multiples of 16.
    unsafe fn sixteenth(v: Self::Ints) -> Self::Ints;
    /// Integers to floats, rounding to nearest.
    unsafe fn to_floats(v: Self::Ints) -> Self::Floats;
    /// Loads 16 unsigned bytes as floats.
    unsafe fn from_u8(at: *const u8) -> Self::Floats;
    /// Loads 16 signed bytes as floats.
    unsafe fn from_i8(at: *const u8) -> Self::Floats;
    /// Loads 16 bytes as the exponent fields of floats: byte `e` gives `2^(e - 127)`, 0 gives 0.
    unsafe fn from_exponents(at: *const u8) -> Self::Floats;
    /// Loads 16 f16.
    unsafe fn from_f16(at: *const u8) -> Self::Floats;
    /// Loads 16 bfloat16.
    unsafe fn from_bf16(at: *const u8) -> Self::Floats;
    /// Loads 16 f32.
    unsafe fn from_f32(at: *const u8) -> Self::Floats;
    /// The same value in all lanes.
    unsafe fn float(value: f32) -> Self::Floats;
    /// `a + b`.
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b`.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once where the processor can.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Stores these lanes' part of 16 f32.
    unsafe fn store(v: Self::Floats, at: *mut f32);
    /// Asks for the cache line at `at`, which need not exist.
    unsafe fn prefetch(at: *const u8);
    /// The same, only as far as the second-level cache.
    unsafe fn prefetch_far(at: *const u8);

    /// `v ^ BITS` in each byte.
    unsafe fn flip<const BITS: u8>(v: Self::Bytes) -> Self::Bytes;
    /// Stores these lanes' part of 64 bytes.
    unsafe fn store_bytes(v: Self::Bytes, at: *mut u8);
    /// Of 64 bytes, those whose bit is set come from `at`, one after the other; the others are
    /// `GAP`. 64 bytes are read.
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> Self::Bytes;
    /// Of the 16 activation codes at `x`, those that two pairs of steps in 2:4 meet: in each lane
    /// two for the first step of a pair and two for the second. `masks` are those of the four
    /// steps, with three bits for each row. 64 bytes are read there.
    unsafe fn kept(masks: *const u8, x: *const i8) -> [Self::Bytes; 2];
    /// The sum of `(code - ZERO) * x` over the bytes of each lane of both vectors, for unsigned
    /// codes and activation codes.
    unsafe fn signed_dot<const ZERO: u8>(
        codes: [Self::Bytes; 2],
        x: [Self::Bytes; 2],
    ) -> Self::Ints;
    /// Of two columns of 16 floats, those whose bit is set come from the f16 at `at`, one after the
    /// other; the others are zero. 64 bytes are read.
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [Self::Floats; 2];
    /// The 64 bytes of each of four columns as steps of four panels: the four bytes of a row side
    /// by side. In a column, each 16 bytes are four rows of all four panels.
    unsafe fn interleave(columns: [*const u8; 4]) -> [Self::Bytes; 4];
    /// One f16 as f32.
    unsafe fn widen(bits: u16) -> f32;
    /// `a * b + c` of one value, rounded as [`Lanes::fma`] does.
    unsafe fn fma_one(a: f32, b: f32, c: f32) -> f32;
    /// The low 48 bits in groups of three that begin at multiples of four.
    #[inline(always)]
    unsafe fn spread(bits: u64) -> u64 {
        let bits = (bits << 8) & 0x00ff_ffff_0000_0000 | bits & 0xff_ffff;
        let bits = (bits << 4) & 0x0fff_0000_0fff_0000 | bits & 0x0000_0fff_0000_0fff;
        let bits = (bits << 2) & 0x3f00_3f00_3f00_3f00 | bits & 0x003f_003f_003f_003f;
        (bits << 1) & 0x7070_7070_7070_7070 | bits & 0x0707_0707_0707_0707
    }
}

/// The tiles of a level, compiled with its instructions.
pub(crate) trait Level {
    /// Tokens of the widest tile of integers whose sums stay in registers.
    const TOKENS: usize;
    /// Panels of a tile of floats with this many tokens, the widest of which is the last: so many
    /// sums hide the latency of the additions, and stay in registers.
    const FLOAT_PANELS: &[(usize, usize)];
    /// The same for weights that were widened to f32: as loads of these are cheap, the widest has
    /// more panels and fewer tokens, each of which takes a load. Empty where that is no faster: 16
    /// registers hold too few sums.
    const WIDE_PANELS: &[(usize, usize)];

    /// Runs [`tile::integer`] over all rows of a panel.
    ///
    /// # Safety
    /// As [`tile::integer`], where the level's instructions exist.
    unsafe fn integer<K: IntegerKind, const T: usize>(tile: &Tile);

    /// Runs [`tile::widen`] over all rows of a panel.
    ///
    /// # Safety
    /// As [`tile::widen`], where the level's instructions exist.
    unsafe fn widen<K: FloatKind>(panel: *const u8, cols: usize, to: *mut u8);

    /// Runs [`tile::float`] over all rows of `P` panels.
    ///
    /// # Safety
    /// As [`tile::float`], where the level's instructions exist.
    unsafe fn float<K: FloatKind, const P: usize, const T: usize>(tile: &Tile);

    /// Runs [`sparse::integer`] over all rows of a panel.
    ///
    /// # Safety
    /// As [`sparse::integer`], where the level's instructions exist with those that expand.
    unsafe fn sparse_integer<K: SparseInteger>(tile: &Tile);

    /// Runs [`sparse::float`] over all rows of `P` panels.
    ///
    /// # Safety
    /// As [`sparse::float`], where the level's instructions exist with those that expand.
    unsafe fn sparse_float<K: SparseFloat, const P: usize>(
        tile: &Tile,
        panels: [*const u8; P],
        next: [*const u8; P],
    );

    /// Runs [`sparse::csr`] for all rows of a panel.
    ///
    /// # Safety
    /// As [`sparse::csr`], where the level's instructions exist.
    unsafe fn csr(tile: &Tile);

    /// Runs [`sparse::expand`] for all rows of a panel.
    ///
    /// # Safety
    /// As [`sparse::expand`], where the level's instructions exist with those that expand.
    unsafe fn expand<K: SparseKind>(panel: *const u8, cols: usize, dense: *mut u8);

    /// Runs [`columns::integer`] over all rows of the panels.
    ///
    /// # Safety
    /// As [`columns::integer`], where the level's instructions exist with those that expand.
    unsafe fn columns_integer<K: ColumnInteger>(tile: &Tile, group: &Group, kept: Kept);

    /// Runs [`columns::float`] over all rows of `P` panels.
    ///
    /// # Safety
    /// As [`columns::float`], where the level's instructions exist.
    unsafe fn columns_float<K: FloatKind, const P: usize>(tile: &Tile, group: &Group, kept: Kept);

    /// Runs [`by_columns::expand`] for all rows of the panels.
    ///
    /// # Safety
    /// As [`by_columns::expand`], where the level's instructions exist with those that expand.
    unsafe fn expand_columns<K: ColumnInteger>(
        group: &Group,
        cols: usize,
        dense: *mut u8,
        dense_bytes: usize,
    );
}

/// Implements a level: its widest tiles, its instructions, and the lanes that make up a panel.
macro_rules! level {
    ($level:ty, $tokens:literal, $float_panels:expr, $wide_panels:expr, [$($lanes:ty),+]
        $(, #[$features:meta], #[$expanding:meta])?) => {
        impl Level for $level {
            const TOKENS: usize = $tokens;
            const FLOAT_PANELS: &[(usize, usize)] = &$float_panels;
            const WIDE_PANELS: &[(usize, usize)] = &$wide_panels;

            $(#[$features])?
            unsafe fn integer<K: IntegerKind, const T: usize>(tile: &Tile) {
                // SAFETY: passed on.
                unsafe { $(tile::integer::<$lanes, K, T>(tile);)+ }
            }

            $(#[$features])?
            unsafe fn widen<K: FloatKind>(panel: *const u8, cols: usize, to: *mut u8) {
                // SAFETY: passed on.
                unsafe { $(tile::widen::<$lanes, K>(panel, cols, to);)+ }
            }

            $(#[$features])?
            unsafe fn float<K: FloatKind, const P: usize, const T: usize>(tile: &Tile) {
                // SAFETY: passed on.
                unsafe { $(tile::float::<$lanes, K, P, T>(tile);)+ }
            }

            $(#[$expanding])?
            unsafe fn sparse_integer<K: SparseInteger>(tile: &Tile) {
                // SAFETY: passed on.
                unsafe { $(sparse::integer::<$lanes, K>(tile);)+ }
            }

            $(#[$expanding])?
            unsafe fn sparse_float<K: SparseFloat, const P: usize>(
                tile: &Tile,
                panels: [*const u8; P],
                next: [*const u8; P],
            ) {
                // SAFETY: passed on.
                unsafe { $(sparse::float::<$lanes, K, P>(tile, panels, next);)+ }
            }

            $(#[$features])?
            unsafe fn csr(tile: &Tile) {
                // SAFETY: passed on.
                unsafe { $(sparse::csr::<$lanes>(tile);)+ }
            }

            $(#[$expanding])?
            unsafe fn expand<K: SparseKind>(panel: *const u8, cols: usize, dense: *mut u8) {
                // SAFETY: passed on.
                unsafe { $(sparse::expand::<$lanes, K>(panel, cols, dense);)+ }
            }

            $(#[$expanding])?
            unsafe fn columns_integer<K: ColumnInteger>(tile: &Tile, group: &Group, kept: Kept) {
                // SAFETY: passed on.
                unsafe { $(columns::integer::<$lanes, K>(tile, group, kept);)+ }
            }

            $(#[$features])?
            unsafe fn columns_float<K: FloatKind, const P: usize>(
                tile: &Tile,
                group: &Group,
                kept: Kept,
            ) {
                // SAFETY: passed on.
                unsafe { $(columns::float::<$lanes, K, P>(tile, group, kept);)+ }
            }

            $(#[$expanding])?
            unsafe fn expand_columns<K: ColumnInteger>(
                group: &Group,
                cols: usize,
                dense: *mut u8,
                dense_bytes: usize,
            ) {
                // SAFETY: passed on.
                unsafe { $(by_columns::expand::<$lanes, K>(group, cols, dense, dense_bytes);)+ }
            }
        }
    };
}

level!(Portable, 4, [(1, 1), (2, 1), (4, 1)], [], [Portable]);
#[cfg(target_arch = "x86_64")]
level!(
    Avx512,
    16,
    [(1, 4), (2, 4), (4, 4), (8, 1), (16, 1)],
    [(1, 4), (2, 4), (4, 4), (8, 3)],
    [Avx512],
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")],
    #[target_feature(
        enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,bmi2,fma,f16c,popcnt"
    )]
);
// Half a panel at a time: the sums of four tokens and what they are made of fill 16 registers.
#[cfg(target_arch = "x86_64")]
level!(
    Avx2<0, false>,
    4,
    [(1, 4), (2, 4), (4, 2)],
    [],
    [Avx2<0, false>, Avx2<1, false>],
    #[target_feature(enable = "avx2,fma,f16c")],
    #[target_feature(enable = "avx2,fma,f16c,popcnt")]
);
#[cfg(target_arch = "x86_64")]
level!(
    Avx2<0, true>,
    4,
    [(1, 4), (2, 4), (4, 2)],
    [],
    [Avx2<0, true>, Avx2<1, true>],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni,popcnt")]
);
