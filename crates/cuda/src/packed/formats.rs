//! Which packed layout each format of a file gets, and how its rows are packed.

use bodkin_gguf::Format;
use bodkin_gguf::format::{Codes, GroupReader, groups};

use super::layout::{MmaLayout, PackedLayout};
use super::{dense, two_four};

/// Packs row `r` of a tile into its chunks, and returns the row's scale, a power of two.
type RowPacker = fn(&[f32], r: usize, tile: &mut [u8]) -> f32;

/// How rows of a format are packed.
#[derive(Clone, Copy)]
pub(super) enum Packer {
    /// From the row's values.
    Values(RowPacker),
    /// From the row's codes and scales.
    Codes(MmaLayout, GroupReader),
    /// From the row's indices of a codebook, and scales.
    Indices(MmaLayout, GroupReader, &'static [i8; 16]),
}

/// The packed layout of a format, and how its rows are packed. Formats without a layout of their
/// own become half precision. Sparse formats without kernels get the layout of their dense base.
pub(super) fn packing(format: Format) -> (PackedLayout, Packer) {
    let codes = |layout, format| {
        let (_, reader) = groups(format).expect("a format of small integers");
        (PackedLayout::Mma(layout), Packer::Codes(layout, reader))
    };
    let own_codes = |layout| codes(layout, format);
    let values = |layout, packer: RowPacker| (PackedLayout::Mma(layout), Packer::Values(packer));
    match format {
        // Integers are numbers of experts.
        Format::F32 | Format::I32 => (PackedLayout::F32, Packer::Values(dense::pack_f32)),
        Format::Q8_0 => own_codes(MmaLayout::S8),
        Format::IQ4_NL | Format::IQ4_XS => own_codes(MmaLayout::Iq4),
        Format::MXFP4 => own_codes(MmaLayout::Fp4),
        Format::Q6_K => own_codes(MmaLayout::S6x16),
        Format::Q5_0 | Format::Q5_1 | Format::Q5_K => own_codes(MmaLayout::U5),
        Format::Q2_K => own_codes(MmaLayout::U2x16),
        Format::Q4_0 | Format::Q4_1 | Format::Q4_K => own_codes(MmaLayout::U4),
        Format::S24_F16 => values(MmaLayout::S24F16, two_four::f16),
        Format::S24_Q8_0 => codes(MmaLayout::S24S8, Format::Q8_0),
        Format::S24_Q4_0 => codes(MmaLayout::S24S4, Format::Q4_0),
        _ => match (format.base(), groups(format)) {
            (Some(base), _) => packing(base),
            (None, Some((Codes::Indices(codebook), reader))) => {
                let are_nibbles = codebook.iter().all(|number| (-8..8).contains(number));
                let layout = if are_nibbles { MmaLayout::S4x16 } else { MmaLayout::Codebook };
                (PackedLayout::Mma(layout), Packer::Indices(layout, reader, codebook))
            }
            (None, _) => values(MmaLayout::F16, dense::pack_f16),
        },
    }
}

impl PackedLayout {
    /// The layout that a format is packed in.
    pub(crate) fn of(format: Format) -> PackedLayout {
        packing(format).0
    }
}
