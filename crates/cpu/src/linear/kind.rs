//! Kinds of packed weight. A kind is one file: how a panel of 16 rows lies in memory, how it is
//! packed from a GGUF format, and how its codes and scales come out again; plus one row in the
//! table below. It knows formats and lanes; tiles, threads and activations are others' business.
//!
//! Each file states, per block of 32 columns and 16 rows, the bytes that a product moves and the
//! vector operations that unpack them. The product itself adds, for each token, 8 dot steps, one
//! conversion, one multiplication and one or two fused multiply-adds. With one token all kinds are
//! bound by memory; with 16 by the dot steps, which with AVX2 alone read what `tile/unpacked.rs`
//! has made of a block.
//!
//! A block's codes are eight steps of four columns. Step `s` is a vector with, in lane `r`, the
//! codes of columns `4s..4s+4` of row `r`: what one dot instruction takes.

use bodkin_gguf::Format;

use super::activations::Form;
use super::level::{Lanes, PANEL_ROWS};
use crate::simd::Simd;

mod bits;
mod float;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_k;
mod q5_0;
mod q5_k;
mod q6_k;
mod q8_0;

pub(crate) use float::{Bf16, F16, F32};
pub(crate) use q4_0::Q4_0;
pub(crate) use q8_0::Q8_0;

/// The codes of an integer kind.
#[derive(Copy, Clone)]
pub(crate) enum Codes {
    /// From 0 to `2^bits - 1`, `bits <= 6`.
    Unsigned {
        /// Width of a code.
        bits: u32,
    },
    /// The value is `code - offset`: unsigned codes as above around `offset`, a power of two; or,
    /// of 8 bits, i8 with offset 0.
    Centred {
        /// Width of a code.
        bits: u32,
        /// What stands for zero.
        offset: i32,
    },
}

/// A kind whose products are formed in integers. A *span* is the number of columns that the format
/// packs into one block: 32 or 256.
///
/// # Safety
/// The functions on a `span` want a pointer to [`IntegerKind::BYTES`] readable bytes that `pack`
/// wrote, a `block` below `COLS / 32`, and a group below `GROUPS`; and the instructions of `L`.
pub(crate) trait IntegerKind {
    /// Columns of a span.
    const COLS: usize;
    /// Bytes of one row of a span in the GGUF format.
    const SOURCE_BYTES: usize;
    /// Bytes of a packed span of 16 rows.
    const BYTES: usize;
    /// Scales (and minimums) per row and block of 32 columns: 1, or 2 for 16 columns each.
    const GROUPS: usize = 1;
    /// What the codes are.
    const CODES: Codes;
    /// Whether a minimum is subtracted: value = scale * code - min.
    const MINS: bool = false;

    /// What a whole span shares.
    type Head<L: Lanes>: Copy;

    /// Writes one row's span into lane `row` of the packed span, which is zero before.
    fn pack(source: &[u8], row: usize, span: &mut [u8]);

    /// Reads what the span shares.
    unsafe fn head<L: Lanes>(span: *const u8) -> Self::Head<L>;
    /// The eight steps of a block.
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8];
    /// The scale of a group.
    unsafe fn scale<L: Lanes>(
        span: *const u8,
        head: &Self::Head<L>,
        block: usize,
        group: usize,
    ) -> L::Floats;
    /// The minimum of a group.
    #[inline(always)]
    unsafe fn min<L: Lanes>(_: *const u8, _: &Self::Head<L>, _: usize, _: usize) -> L::Floats {
        // SAFETY: the caller vouches for the instructions.
        unsafe { L::float(0.0) }
    }
}

/// A kind whose products are formed in f32; a panel is `[cols][16 rows]` of the stored type.
pub(crate) trait FloatKind {
    /// Bytes of one weight.
    const BYTES: usize;

    /// Loads the weights of one column.
    ///
    /// # Safety
    /// `at` has 16 weights to read, and the instructions of `L` exist.
    unsafe fn load<L: Lanes>(at: *const u8) -> L::Floats;

    /// Stores a value that comes from no format of this kind, rounded to nearest.
    fn store(value: f32, to: &mut [u8]);
}

/// What is done with a kind once it is known: see [`Kind::visit`].
pub(crate) trait Visit {
    /// The result.
    type Output;
    /// The kind is an integer one.
    fn integer<K: IntegerKind>(self) -> Self::Output;
    /// The kind is a float one.
    fn float<K: FloatKind>(self) -> Self::Output;
}

/// The table of kinds: name, GGUF format packed without change of value, form, type.
macro_rules! kinds {
    ($($kind:ident $format:ident $visit:ident $type:path;)*) => {
        /// How a packed weight is stored.
        #[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each is named after the format that it packs")]
        #[allow(non_camel_case_types, reason = "Format's names are kept")]
        pub enum Kind { $($kind,)* }

        impl Kind {
            /// All kinds.
            pub const ALL: &[Kind] = &[$(Kind::$kind,)*];

            /// The kind made for `format`, or for the base of a sparse one; `None` if it is
            /// repacked through [`Kind::F16`] or [`Kind::F32`].
            pub fn native(format: Format) -> Option<Kind> {
                match format.base().unwrap_or(format) {
                    $(Format::$format => Some(Kind::$kind),)*
                    _ => None,
                }
            }

            /// The format that this kind packs.
            pub fn format(self) -> Format {
                match self { $(Kind::$kind => Format::$format,)* }
            }

            /// Calls the visitor with the kind's type.
            pub(crate) fn visit<V: Visit>(self, visitor: V) -> V::Output {
                match self { $(Kind::$kind => visitor.$visit::<$type>(),)* }
            }
        }
    };
}

kinds! {
    F32 F32 float float::F32;
    F16 F16 float float::F16;
    BF16 BF16 float float::Bf16;
    Q4_0 Q4_0 integer q4_0::Q4_0;
    Q4_1 Q4_1 integer q4_0::Q4_1;
    Q5_0 Q5_0 integer q5_0::Q5_0;
    Q5_1 Q5_1 integer q5_0::Q5_1;
    Q8_0 Q8_0 integer q8_0::Q8_0;
    Q2_K Q2_K integer q2_k::Q2K;
    Q3_K Q3_K integer q3_k::Q3K;
    Q4_K Q4_K integer q4_k::Q4K;
    Q5_K Q5_K integer q5_k::Q5K;
    Q6_K Q6_K integer q6_k::Q6K;
    IQ4_NL IQ4_NL integer iq4_nl::Iq4Nl;
    IQ4_XS IQ4_XS integer iq4_xs::Iq4Xs;
    MXFP4 MXFP4 integer mxfp4::Mxfp4;
}

impl Kind {
    /// The form of activations that the kind multiplies with on a level.
    pub fn form(self, simd: Simd) -> Form {
        struct Ask;
        impl Visit for Ask {
            type Output = Form;
            fn integer<K: IntegerKind>(self) -> Form {
                Form::Blocks
            }
            fn float<K: FloatKind>(self) -> Form {
                Form::Floats
            }
        }
        if self == Kind::BF16 && simd.pairs_bf16() { Form::Pairs } else { self.visit(Ask) }
    }

    /// Columns must be a multiple of this.
    pub fn cols_multiple(self) -> usize {
        struct Ask;
        impl Visit for Ask {
            type Output = usize;
            fn integer<K: IntegerKind>(self) -> usize {
                K::COLS
            }
            fn float<K: FloatKind>(self) -> usize {
                1
            }
        }
        self.visit(Ask)
    }

    /// Bytes of a packed panel of 16 rows and `cols` columns; `None` if that overflows or if `cols`
    /// is no multiple of [`Kind::cols_multiple`].
    pub fn panel_bytes(self, cols: usize) -> Option<usize> {
        struct Ask(usize);
        impl Visit for Ask {
            type Output = Option<usize>;
            fn integer<K: IntegerKind>(self) -> Option<usize> {
                let whole = self.0.is_multiple_of(K::COLS);
                whole.then(|| (self.0 / K::COLS).checked_mul(K::BYTES)).flatten()
            }
            fn float<K: FloatKind>(self) -> Option<usize> {
                self.0.checked_mul(K::BYTES * PANEL_ROWS)
            }
        }
        self.visit(Ask(cols))
    }
}
