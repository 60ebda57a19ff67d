//! Packed weight layouts. A layout is one file (the bytes of a panel of 16 rows, how they are
//! packed from a GGUF format, how codes and scales are read) and one row of the table below.
//!
//! Each file states, per block of 32 columns and 16 rows, the bytes that a kernel reads and the
//! vector operations that unpack them. The kernel adds per token 8 dot steps, one conversion, one
//! multiplication and one or two fused multiply-adds. With one token all layouts are bound by
//! memory, with 16 by the dot steps; on AVX2 without VNNI, these read the output of
//! `kernel/unpacked.rs`.
//!
//! A block's codes are eight steps of four columns. Lane `r` of step `s` holds the codes of columns
//! `4s..4s+4` of row `r`: the operand of one dot instruction.

use bodkin_gguf::Format;
use bodkin_gguf::format::coded_blocks;

use super::activations::ActivationFormat;
use super::lanes::PANEL_ROWS;
use crate::isa::Isa;

mod bits;
mod codebook;
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
mod traits;

pub(crate) use codebook::{Codebook, put_source};
pub(crate) use float::{Bf16, F16, F32};
pub(crate) use q4_0::Q4_0;
pub(crate) use q8_0::Q8_0;
pub(crate) use traits::{Codes, FloatLayout, IntegerLayout, VisitLayout};

/// The table of layouts: name, GGUF format that it stores exactly (or one of those), arithmetic,
/// type.
macro_rules! layouts {
    ($($layout:ident $format:ident $visit:ident $type:path;)*) => {
        /// The layout of a packed weight.
        #[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each is named after the format that it packs")]
        #[allow(non_camel_case_types, reason = "Format's names are kept")]
        pub enum PackedLayout { $($layout,)* }

        impl PackedLayout {
            /// All layouts.
            pub const ALL: &[PackedLayout] = &[$(PackedLayout::$layout,)*];

            /// The layout of `format`, or of the base of a sparse one; `None` if the format is
            /// converted to [`PackedLayout::F16`] or [`PackedLayout::F32`].
            pub fn native(format: Format) -> Option<PackedLayout> {
                match format.base().unwrap_or(format) {
                    $(Format::$format => Some(PackedLayout::$layout),)*
                    format => coded_blocks(format).map(|_| PackedLayout::Codebook),
                }
            }

            /// The format that this layout stores, or one of those.
            pub fn format(self) -> Format {
                match self { $(PackedLayout::$layout => Format::$format,)* }
            }

            /// Calls the visitor with the layout's type.
            pub(crate) fn visit<V: VisitLayout>(self, visitor: V) -> V::Output {
                match self { $(PackedLayout::$layout => visitor.$visit::<$type>(),)* }
            }
        }
    };
}

layouts! {
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
    Codebook IQ3_S integer codebook::Codebook;
}

impl PackedLayout {
    /// The layout that a plan counts with: the native one, or F16. Whether a format without a
    /// native layout fits F16 depends on its values, see `weight::float_layout`.
    pub(crate) fn planned(format: Format) -> PackedLayout {
        PackedLayout::native(format).unwrap_or(PackedLayout::F16)
    }

    /// The formats of decode rows and of prefill rows.
    pub(crate) fn activation_formats(self, isa: Isa) -> [ActivationFormat; 2] {
        [self.activation_format(isa), self.prefill_format(isa)]
    }

    /// The layouts that a weight of `format` may get: one, unless its values decide.
    pub(crate) fn possible(format: Format) -> impl Iterator<Item = PackedLayout> {
        let other = PackedLayout::native(format).is_none().then_some(PackedLayout::F32);
        std::iter::once(PackedLayout::planned(format)).chain(other)
    }

    /// The format of prefill rows: that of decode rows, unless the instruction set has tiles. F32
    /// weights stay exact: they are those of routers, and of models that are to be exact.
    pub fn prefill_format(self, isa: Isa) -> ActivationFormat {
        match self.activation_format(isa) {
            ActivationFormat::Int8 if isa.has_tiles() => ActivationFormat::Bf16Tiles,
            _ if isa.has_tiles() && self != PackedLayout::F32 => ActivationFormat::SplitBf16Tiles,
            format => format,
        }
    }

    /// The format of the activations that the layout's kernels read, for decode rows.
    pub fn activation_format(self, isa: Isa) -> ActivationFormat {
        struct Query;
        impl VisitLayout for Query {
            type Output = ActivationFormat;
            fn integer<K: IntegerLayout>(self) -> ActivationFormat {
                ActivationFormat::Int8
            }
            fn float<K: FloatLayout>(self) -> ActivationFormat {
                ActivationFormat::F32
            }
        }
        if self == PackedLayout::BF16 && isa.has_bf16_dot() {
            ActivationFormat::Bf16
        } else {
            self.visit(Query)
        }
    }

    /// Columns must be a multiple of this.
    pub fn cols_multiple(self) -> usize {
        struct Query;
        impl VisitLayout for Query {
            type Output = usize;
            fn integer<K: IntegerLayout>(self) -> usize {
                K::COLS
            }
            fn float<K: FloatLayout>(self) -> usize {
                1
            }
        }
        self.visit(Query)
    }

    /// Bytes of a packed panel of 16 rows and `cols` columns; `None` if that overflows or if `cols`
    /// is no multiple of [`PackedLayout::cols_multiple`].
    pub fn panel_bytes(self, cols: usize) -> Option<usize> {
        struct Query(usize);
        impl VisitLayout for Query {
            type Output = Option<usize>;
            fn integer<K: IntegerLayout>(self) -> Option<usize> {
                let whole = self.0.is_multiple_of(K::COLS);
                whole.then(|| (self.0 / K::COLS).checked_mul(K::BYTES)).flatten()
            }
            fn float<K: FloatLayout>(self) -> Option<usize> {
                self.0.checked_mul(K::BYTES * PANEL_ROWS)
            }
        }
        self.visit(Query(cols))
    }
}
