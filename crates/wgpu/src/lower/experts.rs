//! Matmuls of experts: a GEMV for each row of generated text and each of its experts, a grouped
//! GEMM for prompts.

use bodkin_backend::Result;
use bodkin_model::{Act, Op, Plan, Value, WeightId};

use super::matmul::{SMALL_TILE, weight_tile};
use super::rows::activation;
use super::stages::Stage;
use super::{Lowering, MAX_ROWS, THREADS, at_most, vector};
use crate::expert_cache::ExpertCache;
use crate::program::{
    BufferId, Depth, Epilogue, ExpertGemv, ExpertTiles, Kernel, List, MAX_EXPERTS, Matmul,
};
use crate::weights::{Matrix, Part};

/// Where the parameters of `cached_experts.wgsl` begin.
const CACHE_PARAMS_AT: usize = 25;

/// Rows of an expert's matrix that a workgroup multiplies with one row of the step.
pub(crate) const EXPERT_ROWS: usize = 4;

/// The tiles of a prompt's rows for an operation, if it has experts.
fn tiles(plan: &Plan, op: &Op) -> Option<ExpertTiles> {
    let Op::ExpertLinear { route, experts, .. } = *op else { return None };
    let used = route.map_or(experts, |route| plan.width(route) / 2);
    Some(ExpertTiles { experts, used, rows: SMALL_TILE })
}

/// Words of the tiles of a step of `rows` rows.
pub(crate) fn tile_words(plan: &Plan, rows: usize) -> usize {
    let words = |tiles: ExpertTiles| tiles.pairs_at(rows) + rows * tiles.used;
    plan.ops.iter().filter_map(|op| tiles(plan, op)).map(words).max().unwrap_or(0)
}

/// A matmul of experts.
struct Experts {
    matrix: Matrix,
    input: Value,
    /// Input rows of a token.
    token_rows: usize,
    route: Option<Value>,
    /// The weight, or the first of two that are stacked.
    weight: WeightId,
    bias: BufferId,
    /// The function of a gate.
    gate: Option<Act>,
    /// Results of an expert.
    rows: usize,
    tiles: ExpertTiles,
    /// Of their layer, if they are not all on the device.
    cache: Option<ExpertCache>,
}

/// A buffer with some of the experts.
struct Place {
    weight: BufferId,
    part: Part,
    is_of_slots: bool,
}

impl Experts {
    fn act(&self) -> [u32; 5] {
        self.gate.map_or([0; 5], activation)
    }

    /// Where the experts are. There is a dispatch for each place.
    fn places(&self) -> Vec<Place> {
        let slots = self.matrix.slots.iter().enumerate().map(|(i, &part)| Place {
            weight: BufferId::Slots(self.weight, i),
            part,
            is_of_slots: true,
        });
        let parts = self.matrix.parts.iter().enumerate().map(|(i, &part)| Place {
            weight: BufferId::Matrix(self.weight, i),
            part,
            is_of_slots: false,
        });
        slots.chain(parts).collect()
    }

    /// Adds what kernels of cached experts need to know of a place.
    fn add_cache(&self, place: &Place, buffers: &mut Vec<BufferId>, params: &mut Vec<u32>) {
        let Some(cache) = self.cache else { return };
        buffers.push(BufferId::ExpertCaches);
        params.resize(CACHE_PARAMS_AT, 0);
        let all_rows = cache.experts * self.rows;
        params.extend([cache.at, usize::from(place.is_of_slots), all_rows].map(|x| x as u32));
    }
}

/// Rows of the weights for a result.
pub(crate) fn result_rows(is_gated: bool) -> usize {
    if is_gated { 2 } else { 1 }
}

impl Lowering<'_> {
    /// A matmul of experts of its own.
    pub(super) fn expert_matmul(&mut self) -> Result<()> {
        let Op::ExpertLinear { weight, bias, .. } = self.plan.ops[self.op] else {
            unreachable!("only experts are lowered here")
        };
        self.experts((weight, vector(bias)), None)
    }

    /// Gates of experts and what they are multiplied with, as one matmul.
    pub(super) fn gated_experts(&mut self, stage: &Stage, act: Act) -> Result<()> {
        let weights = stage.stacked(self.plan);
        let bias = self.stacked_bias(stage, &weights);
        self.experts((weights[0], bias), Some(act))
    }

    fn experts(&mut self, (weight, bias): (WeightId, BufferId), gate: Option<Act>) -> Result<()> {
        let op = &self.plan.ops[self.first];
        let &Op::ExpertLinear { input, route, experts, .. } = op else {
            unreachable!("only experts are lowered here")
        };
        let tiles = tiles(self.plan, op).expect("it has experts");
        at_most("experts", experts, MAX_EXPERTS)?;
        at_most("tiles of experts", tiles.most(self.limits.tokens), MAX_ROWS)?;
        let (width, cols) = (self.plan.width(input), self.plan.weight(weight).cols);
        let experts = Experts {
            matrix: self.matrix(weight),
            input,
            // A token has an input row for all of its experts, or one for each.
            token_rows: width / cols,
            route,
            weight,
            bias,
            gate,
            rows: self.plan.weight(weight).rows / experts,
            tiles,
            cache: self.program.caches.of_weight(weight),
        };
        self.decode_experts(&experts);
        self.prompt_experts(&experts);
        Ok(())
    }

    /// Generated text: a row has workgroups for each of its experts.
    fn decode_experts(&mut self, e: &Experts) {
        let list = List::Decode;
        let rows = self.rows_input(e.input, self.plan.width(e.input), &e.matrix);
        let flags = [e.route.is_some(), e.bias != BufferId::None].map(u32::from);
        let route = e.route.map_or(BufferId::None, |route| self.value(route));
        let is_gated = e.gate.is_some();
        let groups = e.tiles.used * (result_rows(is_gated) * e.rows).div_ceil(EXPERT_ROWS);
        let gemv = ExpertGemv { layout: e.matrix.layout, inputs: rows.inputs, is_gated };
        let kernel = e.cache.map_or(Kernel::Experts(gemv), |_| Kernel::CachedExperts(gemv));
        for place in e.places() {
            let own = [rows.stride, e.rows, e.tiles.used].map(|x| x as u32);
            let params = [&e.matrix.params(place.part)[..], &own, &flags, &[list as u32], &e.act()];
            let (weight, mut params) = (place.weight.clone(), params.concat());
            let mut buffers =
                vec![weight, rows.buffer.clone(), e.bias.clone(), self.out(), route.clone()];
            e.add_cache(&place, &mut buffers, &mut params);
            self.push(kernel, buffers, params, groups, Depth::List(list, 1));
        }
    }

    /// Prompts: a grouped GEMM, over tiles of rows that share an expert.
    fn prompt_experts(&mut self, e: &Experts) {
        let list = List::Prefill;
        self.permute(e.route, e.tiles);
        let rows = self.rows_input(e.input, self.plan.weight(e.weight).cols, &e.matrix);
        let rows = self.prompt_input((e.input, &rows, e.token_rows), &e.matrix, list);
        let epilogue = if e.gate.is_some() { Epilogue::ExpertGate } else { Epilogue::Experts };
        let matmul = Matmul { layout: e.matrix.layout, inputs: rows.inputs, epilogue };
        let tile_rows = result_rows(e.gate.is_some()) * e.rows;
        let groups = tile_rows.div_ceil(weight_tile(matmul, e.tiles.rows));
        let kernel = match e.cache {
            None => Kernel::Gemm(matmul, e.tiles.rows),
            Some(_) => Kernel::CachedGemm(matmul, e.tiles.rows),
        };
        for place in e.places() {
            let has_bias = u32::from(e.bias != BufferId::None);
            let own = [rows.stride as u32, list as u32, has_bias, 0];
            let of_tiles = [e.rows, e.tiles.used, e.token_rows].map(|x| x as u32);
            let pairs_at = [e.tiles.pairs_at(self.limits.tokens) as u32];
            let params = [&e.matrix.params(place.part)[..], &own, &of_tiles, &e.act(), &pairs_at];
            let mut params = params.concat();
            let mut buffers = vec![
                place.weight.clone(),
                rows.buffer.clone(),
                e.bias.clone(),
                BufferId::None,
                self.out(),
                BufferId::ExpertTiles,
            ];
            e.add_cache(&place, &mut buffers, &mut params);
            self.push(kernel, buffers, params, groups, Depth::Experts(list, e.tiles));
        }
    }

    /// The sum of a token's experts, maybe added to a residual.
    pub(super) fn expert_sum(&mut self, to: Option<Value>) {
        let Op::ExpertSum { input, route } = self.plan.ops[self.first] else {
            unreachable!("only sums of experts are lowered here")
        };
        let (width, depth) = (self.width(), self.depth());
        let used = self.plan.width(route) / 2;
        let params = vec![width as u32, used as u32, u32::from(to.is_some())];
        let to = to.map_or(BufferId::None, |to| self.value(to));
        let buffers = vec![self.value(input), self.value(route), to, self.out()];
        self.push(Kernel::ExpertSum, buffers, params, width.div_ceil(THREADS), depth);
    }

    /// Sorts a prompt's pairs of rows and experts by expert, if the buffer does not have them.
    fn permute(&mut self, route: Option<Value>, tiles: ExpertTiles) {
        if self.permutation == Some((route, tiles)) {
            return;
        }
        self.permutation = Some((route, tiles));
        let pairs_at = tiles.pairs_at(self.limits.tokens);
        let [experts, used] = [tiles.experts, tiles.used].map(|x| x as u32);
        let is_routed = u32::from(route.is_some());
        let params = vec![
            experts,
            used,
            is_routed,
            List::Prefill as u32,
            pairs_at as u32,
            tiles.rows as u32,
        ];
        let route = route.map_or(BufferId::None, |route| self.value(route));
        // One workgroup, if there are rows.
        let depth = Depth::List(List::Prefill, usize::MAX);
        self.push(Kernel::ExpertPermutation, vec![route, BufferId::ExpertTiles], params, 1, depth);
    }
}
