//! Which packed layout each format of a file gets, and how its rows are packed.

use bodkin_gguf::Format;

use super::groups::{self, Group, GroupReader};
use super::layout::{MmaLayout, PackedLayout};
use super::{dense, two_four};

/// Packs row `r` of a tile into its chunks, and returns the row's scale, a power of two.
type RowPacker<T> = fn(&[T], r: usize, tile: &mut [u8]) -> f32;

/// How rows of a format are packed.
#[derive(Clone, Copy)]
pub(super) enum Packer {
    /// From the row's values.
    Values(RowPacker<f32>),
    /// From the row's codes and scales.
    Codes(GroupReader, RowPacker<Group>),
}

/// The packed layout of a format, and how its rows are packed. Formats without a layout of their
/// own become half precision. Sparse formats without kernels get the layout of their dense base.
pub(super) fn packing(format: Format) -> (PackedLayout, Packer) {
    let codes = |layout, reader, packer| (PackedLayout::Mma(layout), Packer::Codes(reader, packer));
    let s8 = |reader| codes(MmaLayout::S8, reader, dense::pack_s8);
    let s8x16 = |reader| codes(MmaLayout::S8x16, reader, dense::pack_s8x16);
    let u8 = |reader| codes(MmaLayout::U8, reader, dense::pack_u8);
    let u4 = |reader| codes(MmaLayout::U4, reader, dense::pack_u4);
    let iq4 = |reader| codes(MmaLayout::Iq4, reader, dense::pack_iq4);
    let values = |layout, packer| (PackedLayout::Mma(layout), Packer::Values(packer));
    match format {
        // Integers are numbers of experts.
        Format::F32 | Format::I32 => (PackedLayout::F32, Packer::Values(dense::pack_f32)),
        Format::Q8_0 => s8(groups::q8_0),
        Format::Q5_0 => s8(groups::q5_0),
        Format::IQ4_NL => iq4(groups::iq4_nl),
        Format::IQ4_XS => iq4(groups::iq4_xs),
        Format::MXFP4 => codes(MmaLayout::Fp4, groups::mxfp4, dense::pack_fp4),
        Format::Q6_K => s8x16(groups::q6_k),
        Format::Q3_K => s8x16(groups::q3_k),
        Format::Q5_1 => u8(groups::q5_1),
        Format::Q5_K => u8(groups::q5_k),
        Format::Q4_0 => u4(groups::q4_0),
        Format::Q4_1 => u4(groups::q4_1),
        Format::Q4_K => u4(groups::q4_k),
        Format::S24_F16 => values(MmaLayout::S24F16, two_four::f16),
        Format::S24_Q8_0 => codes(MmaLayout::S24S8, groups::q8_0, two_four::s8),
        Format::S24_Q4_0 => codes(MmaLayout::S24S4, groups::q4_0, two_four::s4),
        _ => match format.base() {
            Some(base) => packing(base),
            None => values(MmaLayout::F16, dense::pack_f16),
        },
    }
}

impl PackedLayout {
    /// The layout that a format is packed in.
    pub(crate) fn of(format: Format) -> PackedLayout {
        packing(format).0
    }
}
