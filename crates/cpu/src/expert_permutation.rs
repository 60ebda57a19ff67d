//! The tables of an expert permutation: (token, expert) pairs sorted by expert, and statistics.

use crate::program::ExpertPermutation;
use crate::shared::Shared;

/// The tables of one permutation, sized for the largest step.
pub(crate) struct PermutationTables {
    /// `[experts + 1]`: the offsets of each expert's pairs.
    starts: Vec<u32>,
    /// `[experts]`: the experts that have pairs, in the order in which threads take them.
    order: Vec<u32>,
    /// `[tokens * used]`: the pairs sorted by expert; pair `p` belongs to token `p / used`.
    pairs: Vec<u32>,
    /// `[tokens * used]`: the inverse, the sorted position of each pair.
    places: Vec<u32>,
    /// `[experts]`: how many tokens chose each expert since the model was loaded.
    total_pairs: Vec<u64>,
    /// Expert matrices read by all steps: one per expert that a step's tokens chose.
    total_reads: Vec<u64>,
    /// `[threads, experts]`: the seconds that each thread spent in each expert's GEMMs.
    seconds: Vec<f64>,
}

/// Access to the tables for the threads of a step.
#[derive(Clone, Copy)]
pub(crate) struct PermutationView {
    pub(crate) starts: Shared<u32>,
    pub(crate) order: Shared<u32>,
    pub(crate) pairs: Shared<u32>,
    pub(crate) places: Shared<u32>,
    pub(crate) total_pairs: Shared<u64>,
    pub(crate) total_reads: Shared<u64>,
    pub(crate) seconds: Shared<f64>,
}

impl PermutationTables {
    pub(crate) fn new(
        permutation: &ExpertPermutation,
        tokens: usize,
        threads: usize,
    ) -> PermutationTables {
        let pairs = tokens * permutation.used;
        PermutationTables {
            starts: vec![0; permutation.experts + 1],
            order: vec![0; permutation.experts],
            pairs: vec![0; pairs],
            places: vec![0; pairs],
            total_pairs: vec![0; permutation.experts],
            total_reads: vec![0],
            seconds: vec![0.0; threads * permutation.experts],
        }
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(permutation: &ExpertPermutation, tokens: usize, threads: usize) -> usize {
        8 * tokens * permutation.used + (16 + 8 * threads) * permutation.experts + 12
    }

    pub(crate) fn view(&mut self) -> PermutationView {
        PermutationView {
            starts: Shared::new(&mut self.starts),
            order: Shared::new(&mut self.order),
            pairs: Shared::new(&mut self.pairs),
            places: Shared::new(&mut self.places),
            total_pairs: Shared::new(&mut self.total_pairs),
            total_reads: Shared::new(&mut self.total_reads),
            seconds: Shared::new(&mut self.seconds),
        }
    }
}

impl PermutationView {
    /// The number of tokens that chose each expert.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn counts<'a>(self) -> &'a [u64] {
        // SAFETY: the caller's promise.
        unsafe { self.total_pairs.part(0..self.total_pairs.len()) }
    }

    /// Expert matrices read by all steps.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn reads(self) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { self.total_reads.part(0..1)[0] }
    }

    /// The seconds that all threads together spent in each expert's GEMMs.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn seconds(self) -> Vec<f64> {
        let experts = self.total_pairs.len();
        // SAFETY: the caller's promise.
        let all = unsafe { self.seconds.part(0..self.seconds.len()) };
        let of = |expert: usize| all[expert..].iter().step_by(experts).sum();
        (0..experts).map(of).collect()
    }

    /// The experts that have pairs, in the order in which threads take them.
    pub(crate) fn order<'a>(self) -> &'a [u32] {
        let chosen = self.starts().windows(2).filter(|w| w[0] < w[1]).count();
        // SAFETY: only the permute stage writes them, before a barrier.
        unsafe { self.order.part(0..chosen) }
    }

    /// The offsets of each expert's pairs.
    pub(crate) fn starts<'a>(self) -> &'a [u32] {
        // SAFETY: only the permute stage writes them, before a barrier.
        unsafe { self.starts.part(0..self.starts.len()) }
    }
}
