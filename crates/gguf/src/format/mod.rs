//! The storage formats of tensors. One table gives every format its id, name, block size and the
//! type that defines its block; that type's scalar code is what the format means, and every faster
//! kernel is held against it. This module must not know files.

use bytemuck::Pod;

use crate::{Error, Result};

mod fit;
pub mod fp4;
pub mod iq;
pub mod iq4;
pub mod k;
pub mod low_bit;
pub mod plain;
pub mod q;
pub mod sparse;

/// One block of a format: the smallest run of a row that can be stored. Blocks are plain bytes
/// without alignment, little-endian inside.
pub trait Block: Pod {
    /// How many elements one block holds.
    const ELEMENTS: usize;

    /// Writes the values of the block to `out`, which holds [`Block::ELEMENTS`] of them.
    fn dequantize(&self, out: &mut [f32]);

    /// Stores [`Block::ELEMENTS`] values so that the sum of their squared errors, each times its
    /// weight, is small; None if this crate cannot write the format. Non-finite values are not
    /// expected and are stored as something finite or not, as the format has it.
    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let _ = (values, weights);
        None
    }
}

/// Makes [`Format`] and everything that is said once per format.
macro_rules! formats {
    (
        $($name:ident $id:literal $elements:literal $bytes:literal $module:ident;)*
        [indexed] $($indexed:ident $indexed_id:literal $group:literal;)*
    ) => {
        /// How the elements of a tensor are stored: all types that GGML stores in files or
        /// exchanges between kernels, and the sparse formats of this project.
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

            /// How many elements one block holds: rows have a multiple of it.
            pub fn block_elements(self) -> usize {
                match self {
                    $(Format::$name => $elements,)*
                    $(Format::$indexed => $group,)*
                }
            }

            /// How many bytes one block takes; none where that depends on its content.
            pub fn block_bytes(self) -> Option<usize> {
                match self {
                    $(Format::$name => Some($bytes),)*
                    $(Format::$indexed => None,)*
                }
            }

            /// Turns stored blocks into values: the definition of the format. `src` may be any
            /// number of blocks, but all data of a tensor where these begin with an index.
            ///
            /// # Panics
            /// If `src` is no whole number of blocks or `dst` has another number of elements; or if
            /// an index was not checked by whoever opened the data.
            pub fn dequantize(self, src: &[u8], dst: &mut [f32]) {
                match self {
                    $(Format::$name => dequantize_blocks::<$module::$name>(src, dst),)*
                    $(Format::$indexed)|* => self.dequantize_indexed(src, dst),
                }
            }

            /// Stores values, block by block, so that their squared errors, each times the value's
            /// weight, are small; without weights all count alike. Weights are finite and not
            /// negative. Fails if this crate has no quantiser for the format, and for those whose
            /// rows differ in length: see [`Format::encode`].
            ///
            /// # Panics
            /// If `src` is no whole number of blocks, if `dst` has another number of bytes, or
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
    // Formats of this project, under ids that nobody else uses.
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

    /// How many bytes a row takes; None if it is no whole number of blocks or too large to address,
    /// or if rows differ.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elements()) {
            return None;
        }
        (cols / self.block_elements()).checked_mul(self.block_bytes()?)
    }
}

fn dequantize_blocks<B: Block>(src: &[u8], dst: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(src);
    assert_eq!(blocks.len() * B::ELEMENTS, dst.len(), "elements of {} blocks", blocks.len());
    for (block, out) in blocks.iter().zip(dst.chunks_exact_mut(B::ELEMENTS)) {
        block.dequantize(out);
    }
}

fn quantize_blocks<B: Block>(src: &[f32], weights: Option<&[f32]>, dst: &mut [u8]) -> Option<()> {
    const ALIKE: [f32; 256] = [1.0; 256];
    let blocks: &mut [B] = bytemuck::cast_slice_mut(dst);
    assert_eq!(blocks.len() * B::ELEMENTS, src.len(), "elements of {} blocks", blocks.len());
    let weights_of = |block: usize| match weights {
        Some(weights) => &weights[block * B::ELEMENTS..][..B::ELEMENTS],
        None => &ALIKE[..B::ELEMENTS],
    };
    for (i, (block, values)) in blocks.iter_mut().zip(src.chunks_exact(B::ELEMENTS)).enumerate() {
        *block = B::quantize(values, weights_of(i))?;
    }
    Some(())
}

/// Reads a scale that is stored as a little-endian f16.
fn scale(bytes: [u8; 2]) -> f32 {
    half::f16::from_le_bytes(bytes).to_f32()
}

/// Stores a scale as a little-endian f16.
fn stored_scale(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}
