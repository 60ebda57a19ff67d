//! Pseudo-random numbers that are the same everywhere, and blocks of formats filled with them.

use bodkin_gguf::Format;

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(super) struct Random(u64);

impl Random {
    /// A stream for a name: FNV-1a of its bytes is the seed.
    pub(super) fn of(name: &str) -> Random {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Random(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `n - 1`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Nearly normal, with mean 0 and deviation 1: the sum of four uniform numbers.
    pub(super) fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: f32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    pub(super) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Blocks of random bits whose values are finite and of ordinary size. They reach codes that a
    /// quantiser never writes, and need no quantiser.
    pub(super) fn blocks(&mut self, format: Format, elements: usize) -> Vec<u8> {
        let mut values = vec![0.0; format.block_elements()];
        let mut out = Vec::new();
        let mut block = vec![0; format.block_bytes().expect("blocks of one size")];
        for _ in 0..elements / values.len() {
            loop {
                block.fill_with(|| self.bits() as u8);
                format.dequantize(&block, &mut values);
                let largest = values.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
                let finite = values.iter().all(|x| x.is_finite());
                if finite && (0.25..=4.0).contains(&largest) {
                    break;
                }
            }
            out.extend_from_slice(&block);
        }
        out
    }
}
