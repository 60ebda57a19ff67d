//! The kernels of AMX's tile registers, for prefill rows. A block of columns of one or two panels
//! is widened to bfloat16 in scratch, in the order of the second operand, with scales and minimums
//! applied; it stays in L1 while all tokens are multiplied with it, up to 32 at a time.
//!
//! ```text
//! widened     [panel][cols / 32, rounded up][parts][16 pairs of columns][16 rows] of two bfloat16
//! integers    weight = fma(code, scale, minus the minimum), rounded to nearest
//! floats      BF16 as it is; others in two parts, the second what rounding took off the first
//! ```
//!
//! The sum of each (row, token) pair is formed in this order, for each 32 columns: the second part
//! of the activations times the weights, the first part times the weights, the first part times the
//! second part of the weights, as far as there are such parts. `crate::amx` has the order in a
//! tile. Parts make the sums of float weights about as exact as those of f32.
//!
//! The tile unit takes 16 cycles for 32 columns of 16 rows and 16 tokens. Two by two tiles take
//! four loads for each four multiplications. Widening takes as long however few the tokens are, so
//! short prompts are slower than without tiles.

use std::arch::x86_64::*;
use std::ops::Range;

use super::bf16::INTERLEAVED;
use super::dense::Weights;
use crate::amx::{TILE_BYTES, TILE_COLS, TILE_ROW_BYTES, TILE_ROWS, TileUnit};
use crate::linear::activations::BLOCK_COLS;
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::layout::{Codes, FloatLayout, IntegerLayout};
use crate::linear::simd::Avx512;
use crate::unroll::unrolled;

/// The operands of up to two by two tiles.
#[derive(Clone, Copy)]
pub(crate) struct TileBlock {
    /// The first columns of the first tile of tokens.
    pub(crate) x: *const u8,
    /// Bytes between two tiles of tokens.
    pub(crate) x_stride: usize,
    /// The first panel, widened.
    pub(crate) weights: *const u8,
    /// Bytes between two panels.
    pub(crate) weights_stride: usize,
    /// Steps of 32 columns.
    pub(crate) steps: usize,
    /// Whether these are the first columns: sums start at zero, not at `sums`.
    pub(crate) is_first: bool,
    /// `[tiles of tokens][panels]` of 16 tokens with 16 sums each.
    pub(crate) sums: *mut u8,
}

/// Adds the products of `P` panels with `T` tiles of tokens to their sums.
///
/// # Safety
/// The pointers of `block` are valid: `x` for `T` tiles in `X` parts, `weights` for `P` panels in
/// `W` parts, `sums` for both.
#[inline(always)]
pub(crate) unsafe fn multiply<
    U: TileUnit,
    const P: usize,
    const T: usize,
    const X: usize,
    const W: usize,
>(
    unit: &mut U,
    block: &TileBlock,
) {
    const { assert!(P <= 2 && T <= 2 && X <= 2 && W <= X) };
    // SAFETY: the loop walks exactly the steps of both operands, as the caller vouches.
    unsafe {
        let sum = |token: usize, panel: usize| block.sums.add((token * P + panel) * TILE_BYTES);
        if block.is_first {
            unit.zero::<0>();
            unit.zero::<1>();
            unit.zero::<2>();
            unit.zero::<3>();
        } else {
            unit.load::<0>(sum(0, 0));
            if P == 2 {
                unit.load::<1>(sum(0, 1));
            }
            if T == 2 {
                unit.load::<2>(sum(1, 0));
            }
            if P == 2 && T == 2 {
                unit.load::<3>(sum(1, 1));
            }
        }
        let (mut x, mut weights) = (block.x, block.weights);
        for _ in 0..block.steps {
            load_weights::<U, P>(unit, weights, block.weights_stride);
            if X == 2 {
                load_tokens::<U, T>(unit, x.add(TILE_BYTES), block.x_stride);
                add_products::<U, P, T>(unit);
            }
            load_tokens::<U, T>(unit, x, block.x_stride);
            add_products::<U, P, T>(unit);
            if W == 2 {
                load_weights::<U, P>(unit, weights.add(TILE_BYTES), block.weights_stride);
                add_products::<U, P, T>(unit);
            }
            (x, weights) = (x.add(X * TILE_BYTES), weights.add(W * TILE_BYTES));
        }
        unit.store::<0>(sum(0, 0));
        if P == 2 {
            unit.store::<1>(sum(0, 1));
        }
        if T == 2 {
            unit.store::<2>(sum(1, 0));
        }
        if P == 2 && T == 2 {
            unit.store::<3>(sum(1, 1));
        }
    }
}

#[inline(always)]
unsafe fn load_tokens<U: TileUnit, const T: usize>(unit: &mut U, x: *const u8, stride: usize) {
    // SAFETY: passed on.
    unsafe {
        unit.load::<4>(x);
        if T == 2 {
            unit.load::<5>(x.add(stride));
        }
    }
}

#[inline(always)]
unsafe fn load_weights<U: TileUnit, const P: usize>(unit: &mut U, at: *const u8, stride: usize) {
    // SAFETY: passed on.
    unsafe {
        unit.load::<6>(at);
        if P == 2 {
            unit.load::<7>(at.add(stride));
        }
    }
}

#[inline(always)]
fn add_products<U: TileUnit, const P: usize, const T: usize>(unit: &mut U) {
    unit.add_products::<0, 4, 6>();
    if P == 2 {
        unit.add_products::<1, 4, 7>();
    }
    if T == 2 {
        unit.add_products::<2, 5, 6>();
    }
    if P == 2 && T == 2 {
        unit.add_products::<3, 5, 7>();
    }
}

/// Writes the sums of one panel, with the bias if there is one, to the output of some tokens of a
/// tile.
///
/// # Safety
/// `sums` has a tile, `bias` and the rows that `out` returns for `tokens` have `rows` elements, at
/// most 16. The instructions exist.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn finish(
    sums: *const u8,
    tokens: Range<usize>,
    rows: usize,
    bias: Option<*const f32>,
    out: impl Fn(usize) -> *mut f32,
) {
    let present = (u32::from(u16::MAX) >> (PANEL_ROWS - rows)) as u16;
    // SAFETY: the mask excludes rows that are not there; the caller vouches for the others.
    unsafe {
        let bias = bias.map(|bias| _mm512_maskz_loadu_ps(present, bias));
        for token in tokens {
            let sums = _mm512_loadu_ps(sums.add(token * TILE_ROW_BYTES).cast());
            let sums = bias.map_or(sums, |bias| _mm512_add_ps(sums, bias));
            _mm512_mask_storeu_ps(out(token), present, sums);
        }
    }
}

/// Two columns as pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pairs(columns: [__m512; 2]) -> __m512i {
    // SAFETY: the types have the same bits, and the table is a vector.
    unsafe {
        let both = _mm512_cvtne2ps_pbh(columns[1], columns[0]);
        let both = std::mem::transmute::<__m512bh, __m512i>(both);
        _mm512_permutexvar_epi16(_mm512_loadu_si512(INTERLEAVED.as_ptr().cast()), both)
    }
}

/// Widens `cols`, whole spans of a panel.
///
/// # Safety
/// The panel has the columns, `to` has space for a tile for each 32, and the instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,fma,f16c")]
pub(crate) unsafe fn widen_integers<K: IntegerLayout>(
    panel: *const u8,
    cols: Range<usize>,
    mut to: *mut u8,
) {
    const { assert!(BLOCK_COLS == TILE_COLS) };
    // SAFETY: the loop walks exactly the spans, as the caller vouches.
    unsafe {
        for span in cols.start / K::COLS..cols.end / K::COLS {
            let span = panel.add(span * K::BYTES);
            let factors = K::factors::<Avx512>(span);
            for block in 0..K::COLS / BLOCK_COLS {
                let weights = Weights::<Avx512>::of::<K>(span, &factors, block);
                let mut offsets = [_mm512_setzero_ps(); 2];
                unrolled!(2, i => {
                    offsets[i] = match K::CODES {
                        // Kernels add 128 to these codes.
                        Codes::Centred { .. } => {
                            _mm512_mul_ps(weights.scales[i], _mm512_set1_ps(-128.0))
                        }
                        Codes::Unsigned { .. } => _mm512_sub_ps(offsets[i], weights.mins[i]),
                    };
                });
                unrolled!(8, step => {
                    let (scale, offset) = (weights.scales[step / 4], offsets[step / 4]);
                    let columns = columns(weights.codes[step], scale, offset);
                    let at = to.add(2 * step * TILE_ROW_BYTES);
                    _mm512_storeu_si512(at.cast(), pairs([columns[0], columns[1]]));
                    let at = at.add(TILE_ROW_BYTES);
                    _mm512_storeu_si512(at.cast(), pairs([columns[2], columns[3]]));
                });
                to = to.add(TILE_BYTES);
            }
        }
    }
}

/// The four columns of a step, scaled.
#[inline]
#[target_feature(enable = "avx512f")]
fn columns(codes: __m512i, scale: __m512, offset: __m512) -> [__m512; 4] {
    let byte = _mm512_set1_epi32(0xff);
    let codes = [
        _mm512_and_si512(codes, byte),
        _mm512_and_si512(_mm512_srli_epi32::<8>(codes), byte),
        _mm512_and_si512(_mm512_srli_epi32::<16>(codes), byte),
        _mm512_srli_epi32::<24>(codes),
    ];
    let mut columns = [offset; 4];
    for (column, codes) in columns.iter_mut().zip(codes) {
        *column = _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), scale, offset);
    }
    columns
}

/// Widens `cols` of a panel in one or two parts. What is missing of the last 32 columns becomes
/// zero.
///
/// # Safety
/// The panel has the columns, `to` has space for the tiles of each 32, rounded up, and the
/// instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,fma,f16c")]
pub(crate) unsafe fn widen_floats<K: FloatLayout>(
    panel: *const u8,
    cols: Range<usize>,
    to: *mut u8,
) {
    let last = cols.end.next_multiple_of(TILE_COLS);
    // SAFETY: only columns of the panel are read, as the caller vouches.
    unsafe {
        let column = |col: usize| {
            if col < cols.end {
                K::load::<Avx512>(panel.add(col * PANEL_ROWS * K::BYTES))
            } else {
                _mm512_setzero_ps()
            }
        };
        for (pair, col) in (cols.start..last).step_by(2).enumerate() {
            let columns = [column(col), column(col + 1)];
            let tile = pair / TILE_ROWS * K::BF16_PARTS;
            let at = to.add(tile * TILE_BYTES + pair % TILE_ROWS * TILE_ROW_BYTES);
            let rounded = pairs(columns);
            _mm512_storeu_si512(at.cast(), rounded);
            if K::BF16_PARTS == 2 {
                let rest = pairs(rest(columns, rounded));
                _mm512_storeu_si512(at.add(TILE_BYTES).cast(), rest);
            }
        }
    }
}

/// What rounding took off two columns, exactly.
#[inline]
#[target_feature(enable = "avx512f")]
fn rest(columns: [__m512; 2], rounded: __m512i) -> [__m512; 2] {
    let second = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    let rounded = [_mm512_slli_epi32::<16>(rounded), second].map(|bits| _mm512_castsi512_ps(bits));
    [_mm512_sub_ps(columns[0], rounded[0]), _mm512_sub_ps(columns[1], rounded[1])]
}
