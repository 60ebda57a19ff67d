//! The table of storage formats, and [`Format`], which is made from it.

use super::block::{Block, dequantize_blocks, quantize_blocks};
use super::{fp4, iq, iq4, k, low_bit, plain, q, sparse};
use crate::error::{Error, Result};

/// Defines [`Format`] and the methods that read the table.
macro_rules! formats {
    (
        $($name:ident $id:literal $elements:literal $bytes:literal $module:ident;)*
        [indexed] $($indexed:ident $indexed_id:literal $group:literal;)*
    ) => {
        /// How the elements of a tensor are stored: all types of GGML, those for activations
        /// included, and the sparse formats of this project.
        #[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
        #[allow(non_camel_case_types, missing_docs)]
        pub enum Format {
            $($name,)*
            $($indexed,)*
        }

        $(const _: () = {
            assert!(size_of::<$module::$name>() == $bytes);
            assert!(align_of::<$module::$name>() == 1);
            assert!(<$module::$name as Block>::ELEMENTS == $elements);
        };)*

        impl Format {
            /// Every format, in the order of the ids.
            pub fn all() -> &'static [Format] {
                &[$(Format::$name,)* $(Format::$indexed,)*]
            }

            /// The format with this id in GGUF files.
            pub fn from_id(id: u32) -> Option<Format> {
                match id {
                    $($id => Some(Format::$name),)*
                    $($indexed_id => Some(Format::$indexed),)*
                    _ => None,
                }
            }

            /// The id that GGUF files use.
            pub fn id(self) -> u32 {
                match self {
                    $(Format::$name => $id,)*
                    $(Format::$indexed => $indexed_id,)*
                }
            }

            /// The name in GGML's spelling, such as "Q4_K".
            pub fn name(self) -> &'static str {
                match self {
                    $(Format::$name => stringify!($name),)*
                    $(Format::$indexed => stringify!($indexed),)*
                }
            }

            /// The number of elements of a block, which divides the columns of a row.
            pub fn block_elements(self) -> usize {
                match self {
                    $(Format::$name => $elements,)*
                    $(Format::$indexed => $group,)*
                }
            }

            /// The bytes of a block; none if they depend on its content.
            pub fn block_bytes(self) -> Option<usize> {
                match self {
                    $(Format::$name => Some($bytes),)*
                    $(Format::$indexed => None,)*
                }
            }

            /// Dequantises blocks: the definition of the format. `src` is any number of blocks,
            /// or the whole data of a tensor with an index.
            ///
            /// # Panics
            /// If `src` is not a whole number of blocks, if `dst` has another number of elements,
            /// or if the data have an index that was not checked.
            pub fn dequantize(self, src: &[u8], dst: &mut [f32]) {
                match self {
                    $(Format::$name => dequantize_blocks::<$module::$name>(src, dst),)*
                    $(Format::$indexed)|* => self.dequantize_indexed(src, dst),
                }
            }

            /// Quantises values, block by block, to a small weighted squared error; without
            /// weights, all weights are 1. Weights are finite and not negative. Fails if this
            /// crate has no quantiser for the format, or if its rows differ in length: see
            /// [`Format::encode`].
            ///
            /// # Panics
            /// If `src` is not a whole number of blocks, if `dst` has another number of bytes, or
            /// `weights` another number of elements.
            pub fn quantize(
                self,
                src: &[f32],
                weights: Option<&[f32]>,
                dst: &mut [u8],
            ) -> Result<()> {
                let done = match self {
                    $(Format::$name => quantize_blocks::<$module::$name>(src, weights, dst),)*
                    $(Format::$indexed)|* => None,
                };
                done.ok_or(Error::NoQuantizer { format: self.name() })
            }
        }
    };
}

formats! {
    // name  id elements bytes module
    F32       0    1    4  plain;
    F16       1    1    2  plain;
    Q4_0      2   32   18  q;
    Q4_1      3   32   20  q;
    Q5_0      6   32   22  q;
    Q5_1      7   32   24  q;
    Q8_0      8   32   34  q;
    Q8_1      9   32   36  q;
    Q2_K     10  256   84  k;
    Q3_K     11  256  110  k;
    Q4_K     12  256  144  k;
    Q5_K     13  256  176  k;
    Q6_K     14  256  210  k;
    Q8_K     15  256  292  k;
    IQ2_XXS  16  256   66  iq;
    IQ2_XS   17  256   74  iq;
    IQ3_XXS  18  256   98  iq;
    IQ1_S    19  256   50  iq;
    IQ4_NL   20   32   18  iq4;
    IQ3_S    21  256  110  iq;
    IQ2_S    22  256   82  iq;
    IQ4_XS   23  256  136  iq4;
    I8       24    1    1  plain;
    I16      25    1    2  plain;
    I32      26    1    4  plain;
    I64      27    1    8  plain;
    F64      28    1    8  plain;
    IQ1_M    29  256   56  iq;
    BF16     30    1    2  plain;
    TQ1_0    34  256   54  low_bit;
    TQ2_0    35  256   66  low_bit;
    MXFP4    39   32   17  fp4;
    NVFP4    40   64   36  fp4;
    Q1_0     41  128   18  low_bit;
    Q2_0     42   64   18  low_bit;
    // Formats of this project, under private ids.
    S24_F16     0x0b0d_0010  32  36  sparse;
    S24_Q8_0    0x0b0d_0011  32  22  sparse;
    S24_Q4_0    0x0b0d_0012  32  14  sparse;
    [indexed]
    // name     id           columns are a multiple of
    CSR_F16     0x0b0d_0020   1;
    BITMAP_F16  0x0b0d_0030  32;
    BITMAP_Q8_0 0x0b0d_0031  32;
    BITMAP_Q4_0 0x0b0d_0032  32;
}

impl Format {
    /// The format of a name, in GGML's spelling; case does not matter.
    pub fn from_name(name: &str) -> Option<Format> {
        Self::all().iter().copied().find(|format| format.name().eq_ignore_ascii_case(name))
    }

    /// The bytes of a row; None if `cols` is not a whole number of blocks, if the row is too large
    /// to address, or if rows differ in length.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elements()) {
            return None;
        }
        (cols / self.block_elements()).checked_mul(self.block_bytes()?)
    }
}
