//! Weights as the shaders read them: rows of codes, then a word of scales for each 32 columns of a
//! row, then a factor for each row. `shaders/weights_*.wgsl` read what is packed here.

use bodkin_gguf::Format;
use bodkin_gguf::format::{Codes, GroupReader, Groups, groups};
use half::f16;

/// Columns that share a word of scales; rows are padded to a multiple of it.
pub(crate) const GROUP_COLS: usize = 32;
/// The largest scale of a row is stored as this, or up to twice as much.
pub(crate) const LARGEST_SCALE: usize = 1 << 10;

/// Chunks of `chunk_quads` vectors of four columns in a padded row of `cols`.
pub(crate) fn chunks(cols: usize, chunk_quads: usize) -> usize {
    cols.next_multiple_of(GROUP_COLS) / (4 * chunk_quads)
}

/// Vectors of four words with the bytes of a chunk of `chunk_quads` vectors of four columns.
pub(crate) fn word_vectors(chunk_quads: usize) -> usize {
    chunk_quads / 4
}

/// How the codes of a row are stored. Scales are pairs of halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// Single precision without scales.
    F32,
    /// Half precision without scales.
    F16,
    /// The upper halves of single precision, without scales.
    Bf16,
    /// Signed bytes with a scale for each 16 columns.
    Signed,
    /// Bytes with a scale and a minimum.
    Unsigned,
    /// Nibbles with a scale and a minimum. A word has four columns in the low halves of its bytes,
    /// and the next four in the high halves.
    Nibbles,
    /// Nibbles in the same places that are indices of a codebook, with a scale for each 16 columns.
    Indices,
}

/// How rows become codes.
enum Packer {
    Floats,
    /// As the file has them.
    Words,
    Halves,
    Groups(GroupReader),
}

/// One weight's layout, and how the rows of its format become it.
pub(crate) struct Packing {
    pub(crate) layout: Layout,
    /// The codebook of [`Layout::Indices`], four numbers in a word.
    pub(crate) codebook: [u32; 4],
    packer: Packer,
}

impl Layout {
    pub(crate) const ALL: [Layout; 7] = [
        Layout::F32,
        Layout::F16,
        Layout::Bf16,
        Layout::Signed,
        Layout::Unsigned,
        Layout::Nibbles,
        Layout::Indices,
    ];

    /// Words of the codes of 32 columns.
    pub(crate) fn group_words(self) -> usize {
        match self {
            Layout::F32 => 32,
            Layout::F16 | Layout::Bf16 => 16,
            Layout::Signed | Layout::Unsigned => 8,
            Layout::Nibbles | Layout::Indices => 4,
        }
    }

    /// A quarter of the columns of four words of codes.
    pub(crate) fn chunk_quads(self) -> usize {
        32 / self.group_words()
    }

    pub(crate) fn has_scales(self) -> bool {
        !matches!(self, Layout::F32 | Layout::F16 | Layout::Bf16)
    }

    /// Whether half precision holds its values, up to a scale.
    pub(crate) fn fits_halves(self) -> bool {
        !matches!(self, Layout::F32 | Layout::Bf16)
    }

    /// Words of a row of `groups` groups: codes, scales, factor.
    pub(crate) fn row_words(self, groups: usize) -> usize {
        groups * (self.group_words() + usize::from(self.has_scales())) + 1
    }

    /// Bytes of a matrix.
    pub(crate) fn bytes(self, rows: usize, cols: usize) -> u64 {
        4 * (rows * self.row_words(cols.div_ceil(GROUP_COLS))) as u64
    }
}

impl Packing {
    /// How a format is packed. Formats without a layout of their own become half precision, and
    /// sparse ones are packed as their dense base.
    pub(crate) fn of(format: Format) -> Packing {
        let packing = |layout, packer| Packing { layout, codebook: [0; 4], packer };
        if let Some(base) = format.base() {
            return Packing::of(base);
        }
        let in_halves = packing(Layout::F16, Packer::Halves);
        if let Some((codes, reader)) = groups(format) {
            let packer = Packer::Groups(reader);
            return match codes {
                // No layout has minima for 16 columns.
                Codes::TwoBits => in_halves,
                Codes::Signed => packing(Layout::Signed, packer),
                Codes::Unsigned => packing(Layout::Unsigned, packer),
                Codes::Nibbles => packing(Layout::Nibbles, packer),
                Codes::Indices(book) => {
                    let word = |i: usize| {
                        u32::from_le_bytes(std::array::from_fn(|j| book[4 * i + j] as u8))
                    };
                    let codebook = std::array::from_fn(word);
                    Packing { layout: Layout::Indices, codebook, packer }
                }
            };
        }
        match format {
            // Integers are numbers of experts.
            Format::F32 | Format::F64 | Format::I32 => packing(Layout::F32, Packer::Floats),
            Format::F16 => packing(Layout::F16, Packer::Words),
            Format::BF16 => packing(Layout::Bf16, Packer::Words),
            _ => in_halves,
        }
    }

    /// Packs `out.len()` rows of `cols` columns that begin at row `first` of all `rows`.
    pub(crate) fn pack(
        &self,
        format: Format,
        bytes: &[u8],
        (first, rows): (usize, usize),
        cols: usize,
        out: &mut Sections<'_>,
    ) {
        let groups = cols.div_ceil(GROUP_COLS);
        let base = format.base();
        let mut dense = vec![0; base.and_then(|base| base.row_bytes(cols)).unwrap_or(0)];
        let mut values = vec![0.0; cols];
        let mut parts = Groups::zeroed(cols);
        let codes = out.codes.chunks_exact_mut(groups * self.layout.group_words());
        for (i, (codes, factor)) in codes.zip(out.factors.iter_mut()).enumerate() {
            let mut row = format.row(bytes, rows, first + i);
            if base.is_some() {
                format.densify_row(row, &mut dense);
                row = &dense;
            }
            let format = base.unwrap_or(format);
            *factor = match self.packer {
                Packer::Words => {
                    bytemuck::cast_slice_mut(codes)[..row.len()].copy_from_slice(row);
                    1.0
                }
                Packer::Floats => {
                    format.dequantize(row, &mut values);
                    let values = values.iter().map(|x| x.to_bits());
                    codes.iter_mut().zip(values).for_each(|(code, value)| *code = value);
                    1.0
                }
                Packer::Halves => {
                    format.dequantize(row, &mut values);
                    pack_halves(&values, codes)
                }
                Packer::Groups(read) => {
                    read(row, &mut parts);
                    let scales = &mut out.scales[i * groups..][..groups];
                    self.pack_groups(&parts, codes, scales)
                }
            }
            .to_bits();
        }
    }

    /// Packs the groups of a row. Returns the row's factor.
    fn pack_groups(&self, groups: &Groups, codes: &mut [u32], scales: &mut [u32]) -> f32 {
        let has_min = matches!(self.layout, Layout::Unsigned | Layout::Nibbles);
        let numbers = |([a, b], [min, _]): ([f32; 2], [f32; 2])| [a, if has_min { min } else { b }];
        let numbers = groups.scales.iter().copied().zip(groups.mins.iter().copied()).map(numbers);
        let largest = numbers.clone().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
        let unit = power_of_two(largest) / LARGEST_SCALE as f32;
        for (scale, numbers) in scales.iter_mut().zip(numbers) {
            *scale = pair(numbers.map(|x| x / unit));
        }
        let bytes = groups.codes.as_flattened();
        match self.layout {
            Layout::Nibbles | Layout::Indices => {
                for (word, codes) in codes.iter_mut().zip(bytes.as_chunks().0) {
                    let codes = u64::from_le_bytes(*codes);
                    *word = (codes | codes >> 28) as u32;
                }
            }
            // The reader's are greater by 128.
            Layout::Signed => {
                let to: &mut [u8] = bytemuck::cast_slice_mut(codes);
                to.iter_mut().zip(bytes).for_each(|(to, code)| *to = code ^ 0x80);
            }
            _ => bytemuck::cast_slice_mut(codes).copy_from_slice(bytes),
        }
        unit
    }
}

/// The parts of a packed weight.
pub(crate) struct Sections<'a> {
    pub(crate) codes: &'a mut [u32],
    pub(crate) scales: &'a mut [u32],
    /// Bits of one float for each row.
    pub(crate) factors: &'a mut [u32],
}

impl<'a> Sections<'a> {
    /// Divides the words of `rows` packed rows.
    pub(crate) fn of(words: &'a mut [u32], layout: Layout, rows: usize, groups: usize) -> Self {
        let (codes, words) = words.split_at_mut(rows * groups * layout.group_words());
        let (scales, factors) = words.split_at_mut(words.len() - rows);
        Sections { codes, scales, factors }
    }
}

impl<'a> Sections<'a> {
    /// The first `rows` rows, and the others.
    pub(crate) fn split_at(
        self,
        rows: usize,
        groups: usize,
        layout: Layout,
    ) -> (Sections<'a>, Sections<'a>) {
        let scales = if layout.has_scales() { rows * groups } else { 0 };
        let codes = self.codes.split_at_mut(rows * groups * layout.group_words());
        let (scales, factors) = (self.scales.split_at_mut(scales), self.factors.split_at_mut(rows));
        let sections = |codes, scales, factors| Sections { codes, scales, factors };
        (sections(codes.0, scales.0, factors.0), sections(codes.1, scales.1, factors.1))
    }
}

/// Packs values as pairs of halves, divided by a power of two that is returned.
fn pack_halves(values: &[f32], codes: &mut [u32]) -> f32 {
    let unit = power_of_two(values.iter().fold(0.0, |max: f32, x| max.max(x.abs())));
    for (word, values) in codes.iter_mut().zip(values.chunks(2)) {
        *word = pair([values[0] / unit, values.get(1).map_or(0.0, |x| x / unit)]);
    }
    unit
}

fn pair(values: [f32; 2]) -> u32 {
    let [low, high] = values.map(|x| u32::from(f16::from_f32(x).to_bits()));
    low | high << 16
}

/// A power of two near `largest`, from which halves have room on both sides.
fn power_of_two(largest: f32) -> f32 {
    let exponent = (largest.to_bits() >> 23) as i32 & 255;
    if largest == 0.0 { 1.0 } else { 2f32.powi((exponent - 127).clamp(-100, 120)) }
}
