//! A small random generator of our own, so that a seed means the same tokens on every machine and
//! with every version of every library: PCG-XSH-RR 64/32 (O'Neill 2014).

use std::hash::{BuildHasher, Hasher};

const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
/// The generator's stream that the engine uses.
const STREAM: u64 = 54;

/// The generator's state.
#[derive(Clone, Debug)]
pub(super) struct Random {
    state: u64,
    increment: u64,
}

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        let mut random = Random { state: 0, increment: STREAM << 1 | 1 };
        random.next();
        random.state = random.state.wrapping_add(seed);
        random.next();
        random
    }

    /// All numbers are equally likely.
    pub(super) fn next(&mut self) -> u32 {
        let state = self.state;
        self.state = state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
        let shifted = ((state >> 18 ^ state) >> 27) as u32;
        shifted.rotate_right((state >> 59) as u32)
    }

    /// A number from 0 to below 1.
    pub(super) fn unit(&mut self) -> f64 {
        f64::from(self.next()) / 4_294_967_296.0
    }
}

/// An unpredictable seed: the standard library's hasher starts with one.
pub(super) fn any_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_published_ones() {
        // The demo of the reference implementation has seed 42 and this stream.
        let mut random = Random::new(42);
        let found: Vec<u32> = (0..3).map(|_| random.next()).collect();
        assert_eq!(found, [0xa15c_02b7, 0x7b47_f409, 0xba1d_3330]);
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let mut random = Random::new(3);
        let numbers: Vec<f64> = (0..10_000).map(|_| random.unit()).collect();
        let mean = numbers.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
    }
}
