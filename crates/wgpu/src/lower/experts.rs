//! Matmuls of experts: those of generated text one by one, those of prompts by expert.

use bodkin_backend::Result;
use bodkin_model::{Op, Plan, Value};

use super::matmul::{SMALL_TILE, weight_tile};
use super::{Lowering, MAX_EXPERTS, MAX_ROWS, at_most, vector};
use crate::program::{BufferId, Depth, Epilogue, ExpertTiles, Grid, Kernel, List, Matmul};

/// Rows of a weight that a workgroup computes with an expert.
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

impl Lowering<'_> {
    pub(super) fn expert_matmul(&mut self) -> Result<()> {
        let Op::ExpertLinear { input, route, weight, bias, experts } = self.plan.ops[self.op]
        else {
            unreachable!("only experts are lowered here")
        };
        let tiles = tiles(self.plan, &self.plan.ops[self.op]).expect("it has experts");
        at_most("experts", experts, MAX_EXPERTS)?;
        at_most("tiles of experts", tiles.most(self.limits.tokens), MAX_ROWS)?;
        let matrix = self.matrix(weight);
        let expert_rows = self.plan.weight(weight).rows / experts;
        let (width, cols) = (self.plan.width(input), self.plan.weight(weight).cols);
        let flags = [route.is_some(), bias.is_some()].map(u32::from);
        let route_buffer = route.map_or(BufferId::None, |route| self.value(route));

        let rows = self.rows_input(input, width, &matrix);
        let groups = tiles.used * expert_rows.div_ceil(EXPERT_ROWS);
        let kernel = Kernel::Experts(matrix.layout, rows.inputs);
        for part in 0..matrix.parts.len() {
            let own = [width, expert_rows, tiles.used].map(|x| x as u32);
            let list = [List::Decode as u32];
            let params = [&matrix.params(part)[..], &own, &flags, &list].concat();
            let weight = BufferId::Matrix(weight, part);
            let buffers =
                vec![weight, rows.buffer.clone(), vector(bias), self.out(), route_buffer.clone()];
            self.push(kernel, buffers, params, groups, Depth::List(List::Decode, 1));
        }

        self.group_experts(route, tiles);
        // A token has an input row for all of its experts, or one for each.
        let token_rows = width / cols;
        let rows = self.rows_input(input, cols, &matrix);
        let rows = self.prompt_input((input, &rows, token_rows), &matrix, List::Prefill);
        let matmul =
            Matmul { layout: matrix.layout, inputs: rows.inputs, epilogue: Epilogue::Experts };
        let pairs_at = tiles.pairs_at(self.limits.tokens);
        let groups = expert_rows.div_ceil(weight_tile(matmul, tiles.rows));
        for part in 0..matrix.parts.len() {
            let own = [rows.stride as u32, List::Prefill as u32, flags[1], 0];
            let of_tiles = [expert_rows, tiles.used, token_rows, pairs_at].map(|x| x as u32);
            let params = [&matrix.params(part)[..], &own, &of_tiles].concat();
            let buffers = vec![
                BufferId::Matrix(weight, part),
                rows.buffer.clone(),
                vector(bias),
                BufferId::None,
                self.out(),
                BufferId::ExpertTiles,
            ];
            let grid = Grid { groups, depth: Depth::Experts(List::Prefill, tiles) };
            self.push_for(0..=usize::MAX, Kernel::Gemm(matmul, tiles.rows), buffers, params, grid);
        }
        Ok(())
    }

    /// The experts of a prompt's rows, grouped by expert, if the buffer does not have them.
    fn group_experts(&mut self, route: Option<Value>, tiles: ExpertTiles) {
        if self.grouped == Some((route, tiles)) {
            return;
        }
        self.grouped = Some((route, tiles));
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
        self.push(Kernel::GroupExperts, vec![route, BufferId::ExpertTiles], params, 1, depth);
    }
}
