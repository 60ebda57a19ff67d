//! Rows of small codes with scales: how they lie in the chunks of a tile. See the table in
//! `packed.rs`.

use bodkin_gguf::format::Groups;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::dense::{code_unit, max_abs_of_row};
use super::layout::MmaLayout;
use super::two_four;
use crate::constants::{CHUNK_COLS, CODE_UNIT, INPUT_DIVISOR};

/// What a code of a 4-bit float stands for, as a half, is its doubled value times this.
const FLOAT_CODE_UNIT: f32 = 1.0 / (1 << 15) as f32;
/// What is added to numbers of a codebook, so that none is negative, nor above 127.
const CODEBOOK_OFFSET: i8 = 64;
/// Minima up to this many times the scales do not shrink the range of these.
const USUAL_MIN: f32 = 16.0;

/// A row, and scratch for packing it.
pub(super) struct CodedRow {
    pub(super) groups: Groups,
    /// Of each eight codes what is written.
    words: Vec<u32>,
    /// What is written of scales and of minima.
    scales: Vec<[u16; 2]>,
    mins: Vec<[u16; 2]>,
}

impl CodedRow {
    pub(super) fn new(columns: usize) -> CodedRow {
        let groups = Groups::zeroed(columns);
        let halves = vec![[0; 2]; groups.scales.len()];
        CodedRow { groups, words: Vec::new(), scales: halves.clone(), mins: halves }
    }

    /// Packs the row, whose codes are indices of a codebook, as row `r` of a tile, and returns its
    /// scale: as the numbers of the codebook, if they are signed nibbles, or else as the indices.
    /// Then each chunk has the codebook, so that kernels read it with the codes.
    pub(super) fn pack_indices(
        &mut self,
        layout: MmaLayout,
        book: &[i8; 16],
        r: usize,
        tile: &mut [u8],
    ) -> f32 {
        if layout == MmaLayout::S4x16 {
            let codes = self.groups.codes.as_flattened_mut().iter_mut();
            codes.for_each(|code| *code = (book[usize::from(*code)] + 8) as u8);
        } else if r == 0 {
            for chunk in tile.chunks_exact_mut(layout.chunk_bytes()) {
                // Behind codes and scales; the rest of the chunk makes it a multiple of 32 bytes.
                let numbers = chunk[640..656].iter_mut().zip(book);
                numbers.for_each(|(to, &number)| *to = (number + CODEBOOK_OFFSET) as u8);
            }
        }
        self.pack(layout, r, tile)
    }

    /// Packs the row as row `r` of a tile, and returns its scale.
    pub(super) fn pack(&mut self, layout: MmaLayout, r: usize, tile: &mut [u8]) -> f32 {
        match layout {
            MmaLayout::S24S8 => return two_four::s8(&self.groups, r, tile),
            MmaLayout::S24S4 => return two_four::s4(&self.groups, r, tile),
            _ => {}
        }
        let Groups { scales, mins, .. } = &mut self.groups;
        let [largest, largest_min] = [&*scales, mins].map(|of| max_abs_of_row(of.as_flattened()));
        let one = if layout == MmaLayout::Fp4 { FLOAT_CODE_UNIT } else { CODE_UNIT };
        let unit = code_unit(largest.max(largest_min / USUAL_MIN), one);
        put_halves(scales, [unit, one], &mut self.scales);
        put_halves(mins, [unit, 1.0], &mut self.mins);
        self.put_scales(layout, r, tile);
        self.put_codes(layout, r, tile);
        unit * INPUT_DIVISOR
    }

    fn put_scales(&self, layout: MmaLayout, r: usize, tile: &mut [u8]) {
        let groups = self.scales.chunks(2).zip(self.mins.chunks(2));
        let chunks = tile.chunks_exact_mut(layout.chunk_bytes());
        let chunks = chunks.map(|chunk| &mut chunk[layout.code_bytes()..]).zip(groups);
        let place = 2 * (r % 8) + r / 8;
        let scale = |scale: u16, _| scale.to_le_bytes();
        let scale_and_min = |scale, min| (u32::from(scale) | u32::from(min) << 16).to_le_bytes();
        match layout {
            MmaLayout::U4 | MmaLayout::U5 => put_scales::<_, 1>(chunks, place, scale_and_min),
            MmaLayout::U2x16 => put_scales::<_, 2>(chunks, place, scale_and_min),
            MmaLayout::S4x16 | MmaLayout::Codebook | MmaLayout::S6x16 => {
                put_scales::<_, 2>(chunks, place, scale);
            }
            // Of a power of two, the lower byte is zero.
            MmaLayout::Fp4 => put_scales::<_, 1>(chunks, place, |s, _| [(s >> 8) as u8]),
            _ => put_scales::<_, 1>(chunks, place, scale),
        }
    }

    fn put_codes(&mut self, layout: MmaLayout, r: usize, tile: &mut [u8]) {
        let (eights, _) = self.groups.codes.as_flattened().as_chunks();
        let words = &mut self.words;
        let mut chunks = Chunks { tile, bytes: layout.chunk_bytes(), r };
        match layout {
            MmaLayout::U4 | MmaLayout::S4x16 => {
                chunks.put_words(convert(eights, words, nibble_pairs));
            }
            MmaLayout::Iq4 | MmaLayout::Codebook => {
                chunks.put_words(convert(eights, words, nibbles));
            }
            MmaLayout::Fp4 => chunks.put_words(convert(eights, words, floats)),
            MmaLayout::U2x16 => chunks.put_twos(0, convert(eights, words, twos)),
            MmaLayout::U5 => {
                chunks.put_words(convert(eights, words, nibble_pairs));
                chunks.add_fifth_bits(convert(eights, words, bits_above_nibbles));
            }
            MmaLayout::S6x16 => {
                chunks.put_words(convert(eights, words, |codes| nibble_pairs(sixes(codes))));
                let above = |codes| bits_above_nibbles(sixes(codes));
                chunks.put_twos(512, convert(eights, words, above));
            }
            _ => chunks.put_bytes(eights),
        }
    }
}

/// Divides numbers by powers of two, and stores them in half precision.
fn put_halves(numbers: &mut [[f32; 2]], units: [f32; 2], to: &mut [[u16; 2]]) {
    // The products are the quotients.
    let [a, b] = units.map(|unit| 1.0 / unit);
    let numbers = numbers.as_flattened_mut();
    numbers.iter_mut().for_each(|x| *x = *x * a * b);
    let to: &mut [f16] = to.as_flattened_mut().reinterpret_cast_mut();
    to.convert_from_f32_slice(numbers);
}

/// Writes scales of a row to those of chunks, each with the scales and the minima of its groups, at
/// `place` of the 16 rows: of each group one or both, as `bytes` has them.
fn put_scales<'a, const N: usize, const EACH: usize>(
    chunks: impl Iterator<Item = (&'a mut [u8], (&'a [[u16; 2]], &'a [[u16; 2]]))>,
    place: usize,
    bytes: impl Fn(u16, u16) -> [u8; N],
) {
    for (chunk, (scales, mins)) in chunks {
        let (to, _) = chunk.as_chunks_mut();
        for (group, (scales, mins)) in scales.iter().zip(mins).enumerate() {
            for i in 0..EACH {
                to[16 * (EACH * group + i) + place] = bytes(scales[i], mins[i]);
            }
        }
    }
}

/// Converts eight codes after the other, the first in the lowest byte.
fn convert<'a>(
    codes: &[[u8; 8]],
    words: &'a mut Vec<u32>,
    convert: impl Fn(u64) -> u32,
) -> &'a [u32] {
    words.resize(codes.len(), 0);
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        unsafe { convert_avx2(codes, words, convert) };
        return words;
    }
    convert_all(codes, words, convert);
    words
}

/// As [`convert_all`], compiled for more instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn convert_avx2(codes: &[[u8; 8]], words: &mut [u32], convert: impl Fn(u64) -> u32) {
    convert_all(codes, words, convert);
}

#[inline(always)]
fn convert_all(codes: &[[u8; 8]], words: &mut [u32], convert: impl Fn(u64) -> u32) {
    for (word, codes) in words.iter_mut().zip(codes) {
        *word = convert(u64::from_le_bytes(*codes));
    }
}

/// The chunks of a tile, to which row `r` is written. Lanes `4 (r % 8)` to `4 (r % 8) + 3` have it,
/// each a sixteenth of a chunk's codes.
struct Chunks<'a> {
    tile: &'a mut [u8],
    bytes: usize,
    r: usize,
}

impl Chunks<'_> {
    /// Each chunk with its part of what is written for each eight codes, two for a lane.
    fn with<'a, T>(
        &'a mut self,
        parts: &'a [T],
    ) -> impl Iterator<Item = (&'a mut [u8], &'a [[T; 2]])> {
        let parts = parts.chunks(CHUNK_COLS / 8).map(|parts| parts.as_chunks().0);
        self.tile.chunks_exact_mut(self.bytes).zip(parts)
    }

    /// Writes bytes, `[r / 8][lane][16]`.
    fn put_bytes(&mut self, codes: &[[u8; 8]]) {
        let first = 512 * (self.r / 8) + 64 * (self.r % 8);
        for (chunk, codes) in self.with(codes) {
            let codes = codes.as_flattened().as_flattened();
            chunk[first..][..codes.len()].copy_from_slice(codes);
        }
    }

    /// Writes words, `[lane][r / 8][2]`.
    fn put_words(&mut self, words: &[u32]) {
        let (g, high) = (self.r % 8, self.r / 8);
        for (chunk, words) in self.with(words) {
            let (lanes, _) = chunk[64 * g..][..64].as_chunks_mut::<16>();
            for (lane, [first, second]) in lanes.iter_mut().zip(words) {
                let words = u64::from(*first) | u64::from(*second) << 32;
                lane[8 * high..][..8].copy_from_slice(&words.to_le_bytes());
            }
        }
    }

    /// Writes 16 codes of two bits in a word, `[lane][r / 8]`, behind `start` bytes.
    fn put_twos(&mut self, start: usize, twos: &[u32]) {
        let (g, high) = (self.r % 8, self.r / 8);
        for (chunk, twos) in self.with(twos) {
            let (lanes, _) = chunk[start + 32 * g..][..32].as_chunks_mut::<8>();
            for (lane, [first, second]) in lanes.iter_mut().zip(twos) {
                lane[4 * high..][..4].copy_from_slice(&(first | second << 8).to_le_bytes());
            }
        }
    }

    /// Adds the fifth bits of codes to a word, `[lane]`: those of the four steps of `mma` and both
    /// rows are shifted above the nibbles together.
    fn add_fifth_bits(&mut self, bits: &[u32]) {
        let (g, high) = (self.r % 8, self.r / 8);
        for (chunk, bits) in self.with(bits) {
            let (lanes, _) = chunk[512 + 16 * g..][..16].as_chunks_mut::<4>();
            for (lane, [first, second]) in lanes.iter_mut().zip(bits) {
                let bits = (first | second << 8) << high;
                *lane = (u32::from_le_bytes(*lane) | bits).to_le_bytes();
            }
        }
    }
}

/// Eight nibbles in a word: those with even numbers in its lower half, the others in the upper one,
/// so that neighbours lie 16 bits apart, in the two halves of a register.
fn nibble_pairs(codes: u64) -> u32 {
    let codes = codes & 0x0f0f_0f0f_0f0f_0f0f;
    let bytes = (codes | codes >> 12) & 0x0000_ffff_0000_ffff;
    // Of even ones, of odd ones, and both again: the middle ones are swapped.
    let pairs = (bytes | bytes >> 16) as u32;
    let differences = (pairs ^ pairs >> 8) & 0xff00;
    pairs ^ differences ^ differences << 8
}

/// What eight codes have above their nibbles: a byte for even and one for odd ones, in which those
/// of the two pairs of a step of `mma` are four bits apart.
fn bits_above_nibbles(codes: u64) -> u32 {
    let pairs = nibble_pairs(codes >> 4);
    (pairs | pairs >> 6) & 0x00ff_00ff
}

/// Codes of six bits: the reader's are numbers from -32 to 31, plus 128.
fn sixes(codes: u64) -> u64 {
    codes.wrapping_sub(0x6060_6060_6060_6060)
}

/// Eight codes of two bits. Neighbours lie 16 bits apart, in one word with eight others.
fn twos(codes: u64) -> u32 {
    let pairs = nibble_pairs(codes);
    let fours = (pairs | pairs >> 2) & 0x0f0f_0f0f;
    (fours | fours >> 4) & 0x00ff_00ff
}

/// Eight nibbles in a word, in their order.
fn nibbles(codes: u64) -> u32 {
    let bytes = (codes | codes >> 4) & 0x00ff_00ff_00ff_00ff;
    let halves = (bytes | bytes >> 8) & 0x0000_ffff_0000_ffff;
    (halves | halves >> 16) as u32
}

/// Eight codes of 4-bit floats. Neighbours lie 16 bits apart; a half has four signs above four
/// magnitudes.
fn floats(codes: u64) -> u32 {
    let pairs = nibble_pairs(codes);
    let of = |bits: u32| pairs & (bits | bits << 16);
    let signs = of(0x8) << 12 | of(0x80) << 5 | of(0x800) << 3 | of(0x8000) >> 2;
    let magnitudes = of(0x7) << 9 | of(0x70) << 2 | of(0x700) >> 5 | of(0x7000) >> 12;
    signs | magnitudes
}
