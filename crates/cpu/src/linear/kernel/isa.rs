//! The micro-kernels of each instruction set, compiled with its instructions: wrappers with
//! `#[target_feature]` around the generic functions of this folder, which inline into them. Half a
//! panel fills a register on AVX2, so its kernels run twice per panel.

use super::columns;
use super::dense;
use super::sparse;
use super::tile::Tile;
use crate::linear::activations::NonZeros;
use crate::linear::columns::layout::{ColumnInteger, Group};
use crate::linear::layout::{FloatLayout, IntegerLayout};
#[cfg(target_arch = "aarch64")]
use crate::linear::simd::Neon;
use crate::linear::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::linear::simd::{Avx2, Avx512};
use crate::linear::sparse::layout::{SparseFloat, SparseInteger, SparseLayout};

/// The micro-kernels of one instruction set.
///
/// # Safety
/// Each function has the contract of the generic function of the same name (in `dense`, `sparse` or
/// `columns`), on a processor that has the instructions. The sparse and column-major integer
/// kernels and both expansions also need the byte-expanding instructions, see `Isa::for_expansion`.
pub(crate) trait MicroKernels {
    /// The set whose kernels multiply floats: its instructions are among these. Sets that differ in
    /// dot products of bytes alone have one, compiled once.
    type Floats: MicroKernels;

    /// Tokens of the widest integer tile whose accumulators stay in registers.
    const TOKENS: usize;
    /// Shapes of float tiles, `(tokens, panels)`, the widest last: enough accumulators to hide the
    /// latency of the additions, few enough to stay in registers.
    const FLOAT_PANELS: &[(usize, usize)];
    /// The same for weights that were converted to f32 in scratch. A load of these is cheap, so the
    /// widest tile has more panels and fewer tokens. Empty where conversion does not pay: 16
    /// registers hold too few accumulators.
    const STAGED_PANELS: &[(usize, usize)];

    /// [`dense::integer`] for all rows of a panel.
    unsafe fn integer<K: IntegerLayout, const T: usize>(tile: &Tile);

    /// [`dense::to_f32`] for all rows of a panel.
    unsafe fn to_f32<K: FloatLayout>(panel: *const u8, cols: usize, to: *mut u8);

    /// [`dense::float`] for all rows of `P` panels.
    unsafe fn float<K: FloatLayout, const P: usize, const T: usize>(tile: &Tile);

    /// [`sparse::integer`] for all rows of a panel.
    unsafe fn sparse_integer<K: SparseInteger>(tile: &Tile);

    /// [`sparse::float`] for all rows of `P` panels.
    unsafe fn sparse_float<K: SparseFloat, const P: usize>(
        tile: &Tile,
        panels: [*const u8; P],
        next: [*const u8; P],
    );

    /// [`sparse::csr`] for all rows of a panel.
    unsafe fn csr(tile: &Tile);

    /// [`sparse::expand`] for all rows of a panel.
    unsafe fn expand<K: SparseLayout>(panel: *const u8, cols: usize, dense: *mut u8);

    /// [`columns::integer`] for all rows of the panels.
    unsafe fn columns_integer<K: ColumnInteger>(tile: &Tile, group: &Group, nonzeros: NonZeros);

    /// [`columns::float`] for all rows of `P` panels.
    unsafe fn columns_float<K: FloatLayout, const P: usize>(
        tile: &Tile,
        group: &Group,
        nonzeros: NonZeros,
    );

    /// [`columns::expand`] for all rows of the panels.
    unsafe fn expand_columns<K: ColumnInteger>(
        group: &Group,
        cols: usize,
        dense: *mut u8,
        dense_bytes: usize,
    );
}

/// Implements the kernels of an instruction set from the set of its float kernels, its tile shapes,
/// the lanes that make up a panel, those of integer tiles of several tokens if they differ, and its
/// target features, without and with byte expansion.
macro_rules! micro_kernels {
    ($isa:ty, floats: $floats:ty, $tokens:literal, $float_panels:expr, $staged_panels:expr,
        [$($lanes:ty),+]
        $(, several: [$($several:ty),+])? $(, #[$features:meta], #[$expanding:meta])?) => {
        impl MicroKernels for $isa {
            type Floats = $floats;

            const TOKENS: usize = $tokens;
            const FLOAT_PANELS: &[(usize, usize)] = &$float_panels;
            const STAGED_PANELS: &[(usize, usize)] = &$staged_panels;

            $(#[$features])?
            unsafe fn integer<K: IntegerLayout, const T: usize>(tile: &Tile) {
                // SAFETY: passed on.
                unsafe {
                    $(if T > 1 {
                        $(dense::integer::<$several, K, T>(tile);)+
                        return;
                    })?
                    $(dense::integer::<$lanes, K, T>(tile);)+
                }
            }

            $(#[$features])?
            unsafe fn to_f32<K: FloatLayout>(panel: *const u8, cols: usize, to: *mut u8) {
                // SAFETY: passed on.
                unsafe { $(dense::to_f32::<$lanes, K>(panel, cols, to);)+ }
            }

            $(#[$features])?
            unsafe fn float<K: FloatLayout, const P: usize, const T: usize>(tile: &Tile) {
                // SAFETY: passed on.
                unsafe { $(dense::float::<$lanes, K, P, T>(tile);)+ }
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
            unsafe fn expand<K: SparseLayout>(panel: *const u8, cols: usize, dense: *mut u8) {
                // SAFETY: passed on.
                unsafe { $(sparse::expand::<$lanes, K>(panel, cols, dense);)+ }
            }

            $(#[$expanding])?
            unsafe fn columns_integer<K: ColumnInteger>(
                tile: &Tile,
                group: &Group,
                nonzeros: NonZeros,
            ) {
                // SAFETY: passed on.
                unsafe { $(columns::integer::<$lanes, K>(tile, group, nonzeros);)+ }
            }

            $(#[$features])?
            unsafe fn columns_float<K: FloatLayout, const P: usize>(
                tile: &Tile,
                group: &Group,
                nonzeros: NonZeros,
            ) {
                // SAFETY: passed on.
                unsafe { $(columns::float::<$lanes, K, P>(tile, group, nonzeros);)+ }
            }

            $(#[$expanding])?
            unsafe fn expand_columns<K: ColumnInteger>(
                group: &Group,
                cols: usize,
                dense: *mut u8,
                dense_bytes: usize,
            ) {
                // SAFETY: passed on.
                unsafe { $(columns::expand::<$lanes, K>(group, cols, dense, dense_bytes);)+ }
            }
        }
    };
}

micro_kernels!(Portable, floats: Portable, 4, [(1, 1), (2, 1), (4, 1)], [], [Portable]);
#[cfg(target_arch = "x86_64")]
micro_kernels!(
    Avx512,
    floats: Avx512,
    16,
    [(1, 4), (2, 4), (4, 4), (8, 1), (16, 1)],
    [(1, 4), (2, 4), (4, 4), (8, 3)],
    [Avx512],
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")],
    #[target_feature(
        enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,bmi2,fma,f16c,popcnt"
    )]
);
// Half a panel at a time: the accumulators and operands of four tokens fill 16 registers.
#[cfg(target_arch = "x86_64")]
micro_kernels!(
    Avx2<0, false>,
    floats: Avx2<0, false>,
    4,
    [(1, 4), (2, 4), (4, 2)],
    [],
    [Avx2<0, false>, Avx2<1, false>],
    #[target_feature(enable = "avx2,fma,f16c")],
    #[target_feature(enable = "avx2,fma,f16c,popcnt")]
);
#[cfg(target_arch = "x86_64")]
micro_kernels!(
    Avx2<0, true>,
    floats: Avx2<0, false>,
    4,
    [(1, 4), (2, 4), (4, 2)],
    [],
    [Avx2<0, true>, Avx2<1, true>],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")],
    #[target_feature(enable = "avx2,fma,f16c,avxvnni,popcnt")]
);
/// A quarter of a panel, whose kernels have the codes of a block in registers.
#[cfg(target_arch = "aarch64")]
type Quarter<const Q: usize, const SDOT: bool> = Neon<Q, 1, SDOT>;
#[cfg(target_arch = "aarch64")]
micro_kernels!(
    Neon<0, 4, false>,
    floats: Neon<0, 4, false>,
    4,
    [(1, 4), (2, 2), (4, 1)],
    [],
    [Neon<0, 4, false>],
    several: [Quarter<0, false>, Quarter<1, false>, Quarter<2, false>, Quarter<3, false>]
);
#[cfg(target_arch = "aarch64")]
micro_kernels!(
    Neon<0, 4, true>,
    floats: Neon<0, 4, false>,
    8,
    [(1, 4), (2, 2), (4, 1)],
    [],
    [Neon<0, 4, true>],
    several: [Quarter<0, true>, Quarter<1, true>, Quarter<2, true>, Quarter<3, true>],
    #[target_feature(enable = "neon,dotprod")],
    #[target_feature(enable = "neon,dotprod")]
);
