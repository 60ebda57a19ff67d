//! Random numbers from a seed, the same on all machines.

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal, with mean 0 and deviation 1: the sum of four uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: f32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }
}
