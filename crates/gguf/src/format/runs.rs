//! Blocks whose values are a scale times small numbers of a codebook, in runs of eight elements.

use bytemuck::Pod;

use super::block::Block;
use super::group::{Group, GroupReader, Groups};

/// Elements of a run.
pub(super) const RUN: usize = 8;

/// A block of runs of eight elements.
pub(super) trait Runs: Pod {
    /// The number of elements of a block, a multiple of 32.
    const ELEMENTS: usize;
    /// The numbers, from -63 to 63.
    const CODEBOOK: [i8; 16];

    /// The scale of the block.
    fn block_scale(&self) -> f32;

    /// Run `i`: an integer that multiplies the block's scale, up to 31, the same in two
    /// neighbouring runs, and the indices of the numbers.
    fn run(&self, i: usize) -> (u8, [u8; RUN]);
}

impl<B: Runs> Block for B {
    const ELEMENTS: usize = B::ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let numbers = const { floats(&B::CODEBOOK) };
        let block_scale = self.block_scale();
        for (i, out) in out.chunks_exact_mut(RUN).enumerate() {
            let (scale, indices) = self.run(i);
            let scale = block_scale * f32::from(scale);
            for (value, index) in out.iter_mut().zip(indices) {
                *value = scale * numbers[usize::from(index & 15)];
            }
        }
    }
}

const fn floats(codebook: &[i8; 16]) -> [f32; 16] {
    let (mut numbers, mut i) = ([0.0; 16], 0);
    while i < 16 {
        numbers[i] = codebook[i] as f32;
        i += 1;
    }
    numbers
}

/// Reads a row of such blocks.
fn read_groups<B: Runs>(row: &[u8], groups: &mut Groups) {
    groups.read(row, |block: &B| {
        let block_scale = block.block_scale();
        move |group| {
            let runs: [_; 32 / RUN] = std::array::from_fn(|i| block.run(32 / RUN * group + i));
            let scales = [0, 2].map(|i| block_scale * f32::from(runs[i].0));
            let codes = std::array::from_fn(|i| runs[i / RUN].1[i % RUN]);
            Group { scales, mins: [0.0; 2], codes }
        }
    });
}

/// 256 columns of a row: `scale * scales[i / 16] * codebook[codes[i]]`.
#[derive(Clone, Copy, Debug)]
pub struct CodedBlock {
    /// Of all columns.
    pub scale: f32,
    /// Integers up to 31, for each 16 columns.
    pub scales: [u8; 16],
    /// Indices of the codebook.
    pub codes: [u8; 256],
}

/// Gives block `i` of a row.
pub type CodedBlockReader = fn(row: &[u8], i: usize) -> CodedBlock;

/// How a format of runs is read.
pub(super) struct Readers {
    pub(super) codebook: &'static [i8; 16],
    pub(super) groups: GroupReader,
    /// Where blocks have 256 elements.
    pub(super) block: Option<CodedBlockReader>,
}

impl Readers {
    pub(super) fn of<B: Runs>() -> Readers {
        let has_256 = <B as Runs>::ELEMENTS == 256;
        let block: Option<CodedBlockReader> = if has_256 { Some(coded_block::<B>) } else { None };
        Readers { codebook: &B::CODEBOOK, groups: read_groups::<B>, block }
    }
}

fn coded_block<B: Runs>(row: &[u8], i: usize) -> CodedBlock {
    let block: &B = bytemuck::from_bytes(&row[i * size_of::<B>()..][..size_of::<B>()]);
    let mut coded = CodedBlock { scale: block.block_scale(), scales: [0; 16], codes: [0; 256] };
    for (i, codes) in coded.codes.chunks_exact_mut(RUN).enumerate() {
        let (scale, indices) = block.run(i);
        coded.scales[i / 2] = scale;
        codes.copy_from_slice(&indices);
    }
    coded
}
