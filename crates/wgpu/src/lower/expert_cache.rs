//! What updates the cache of a layer's experts behind its routing.

use bodkin_backend::EXPERT_SCORE_DECAY;
use bodkin_model::{Op, WeightId};

use super::Lowering;
use crate::expert_cache::ExpertCache;
use crate::program::{BufferId, Depth, Kernel};
use crate::weights::Part;

/// Words of an expert that a thread copies at once.
pub(crate) const FILL_WORDS: usize = 4;
/// Threads of a workgroup that copies.
const FILL_THREADS: usize = 256;

impl Lowering<'_> {
    /// Gives slots to experts that the operation, a routing, has chosen, and copies them there.
    /// `counts_at` is the first of the routing's counts.
    pub(super) fn update_cache(&mut self, counts_at: usize) {
        let is_route = |op: &&Op| matches!(op, Op::Route { .. });
        let routing = self.plan.ops[..self.op].iter().filter(is_route).count();
        let Some(cache) = self.program.caches.of_routing(routing) else { return };
        let numbers = [cache.experts, cache.slots, counts_at, cache.at].map(|x| x as u32);
        let params = [&numbers[..], &[EXPERT_SCORE_DECAY.to_bits()]].concat();
        let buffers = vec![BufferId::Counts, BufferId::ExpertCaches];
        self.push(Kernel::ExpertCache, buffers, params, 1, Depth::Step);
        for weight in self.plan.routed_weights().swap_remove(routing) {
            self.fill_slots(weight, cache);
        }
    }

    /// Copies the experts that got a slot, from each part of all experts to each part of the slots.
    fn fill_slots(&mut self, weight: WeightId, cache: ExpertCache) {
        // One that is stacked below another is copied with it.
        let Some(matrix) = self.matrices[weight.0].as_ref() else { return };
        let rows = self.plan.weight(weight).rows / cache.experts;
        let codes = rows * matrix.groups() * matrix.layout.group_words();
        let all = rows * matrix.layout.row_words(matrix.groups());
        let count = matrix.stacked_count();
        let own = [codes, all - codes - rows, rows, count, cache.fills_at() - 1];
        let place = |part: Part| {
            let [scales_at, factors_at] = matrix.sections_at(part);
            [scales_at, factors_at, part.first_row / rows, part.rows / rows / count]
        };
        let groups = (count * all).div_ceil(FILL_THREADS * FILL_WORDS);
        for (h, &host) in matrix.parts.iter().enumerate() {
            for (s, &slots) in matrix.slots.iter().enumerate() {
                let params = [&own[..], &place(host), &place(slots)].concat();
                let params = params.into_iter().map(|x| x as u32).collect();
                let [from, to] = [BufferId::Matrix(weight, h), BufferId::Slots(weight, s)];
                let buffers = vec![from, to, BufferId::ExpertCaches];
                self.push(Kernel::ExpertFill, buffers, params, groups, Depth::Step);
            }
        }
    }
}
