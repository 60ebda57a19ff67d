//! Random weights, fast: a few megabytes of a format are made once, and tensors are filled from
//! them, starting at another block each time. Equal stretches do not matter to speed.

use std::io::{self, Write};

use bodkin_gguf::Format;

use crate::random::Random;

/// Elements that are made; a multiple of every format's block.
const ELEMENTS: usize = 1 << 20;

/// Values that are pruned together, about a row.
const PRUNED: usize = 2048;

/// The deviation of the weights, as models are initialised with.
pub(super) const DEVIATION: f32 = 0.02;

/// Whether files hold matrices in it. The others are integers, or blocks of activations.
pub(super) fn holds_weights(format: Format) -> bool {
    use Format::{I8, I16, I32, I64, Q8_1, Q8_K};
    !matches!(format, I8 | I16 | I32 | I64 | Q8_1 | Q8_K)
}

/// A stretch of blocks of one format.
pub(super) struct Blocks {
    pub(super) format: Format,
    block_bytes: usize,
    seed: u64,
    data: Vec<u8>,
}

impl Blocks {
    /// Blocks of values of which a share of `sparsity` is zero, where there is a quantiser.
    pub(super) fn new(format: Format, sparsity: f64, seed: u64) -> Blocks {
        let mut random = Random::new(seed);
        let block_bytes = format.block_bytes().expect("blocks of one size");
        let mut data = vec![0; ELEMENTS / format.block_elements() * block_bytes];
        let mut values: Vec<f32> = (0..ELEMENTS).map(|_| DEVIATION * random.normal()).collect();
        values.chunks_exact_mut(PRUNED).for_each(|values| prune(values, sparsity));
        if format.quantize(&values, None, &mut data).is_err() {
            data.chunks_exact_mut(block_bytes)
                .for_each(|block| random_block(&mut random, format, block));
        }
        Blocks { format, block_bytes, seed, data }
    }

    /// Whether rows of `cols` are whole blocks.
    pub(super) fn fill(&self, cols: u32) -> bool {
        cols.is_multiple_of(self.format.block_elements() as u32)
    }

    /// The bytes of `elements` elements, which are whole blocks.
    pub(super) fn bytes(&self, elements: u64) -> u64 {
        elements / self.format.block_elements() as u64 * self.block_bytes as u64
    }

    /// Writes `bytes` bytes of blocks, others for each `tensor`.
    pub(super) fn write(&self, tensor: u64, bytes: u64, out: &mut dyn Write) -> io::Result<()> {
        let size = self.block_bytes;
        let blocks = (self.data.len() / size) as u64;
        let mut random = Random::new(self.seed ^ tensor.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let mut left = bytes;
        while left > 0 {
            let start = (random.bits() % blocks) as usize * size;
            let stretch = &self.data[start..];
            let len = left.min(stretch.len() as u64) as usize;
            out.write_all(&stretch[..len])?;
            left -= len as u64;
        }
        Ok(())
    }
}

/// Random bits, drawn again until all values are finite and of the wanted size: for formats
/// that cannot be quantised to.
fn random_block(random: &mut Random, format: Format, block: &mut [u8]) {
    let mut values = vec![0.0; format.block_elements()];
    loop {
        block.fill_with(|| random.bits() as u8);
        format.dequantize(block, &mut values);
        let largest = values.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
        let is_finite = values.iter().all(|x| x.is_finite());
        if is_finite && (0.5 * DEVIATION..=4.0 * DEVIATION).contains(&largest) {
            return;
        }
    }
}

/// Makes the smallest values zero, a share of `sparsity` of them.
pub(super) fn prune(values: &mut [f32], sparsity: f64) {
    let count = (values.len() as f64 * sparsity).round() as usize;
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs()));
    order[..count.min(values.len())].iter().for_each(|&i| values[i] = 0.0);
}
