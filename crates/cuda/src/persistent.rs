//! Steps of one row in one kernel (`kernels/persistent.cu`): which stages it can run, and the list
//! of them that it goes through. What stands before and after those stages runs as ever.

use std::ops::Range;

use bodkin_backend::Result;
use bodkin_gguf::Format;
use bodkin_model::{NormKind, Plan, Weight};

use crate::driver::Device;
use crate::kept::Kept;
use crate::kernels::number_of;
use crate::lower::{After, Content, Joined, Program, Value, Work};
use crate::parameters as p;
use crate::planes::{CHUNK_COLS, Kind, TILE_ROWS};
use crate::sizes::slot_tables;
use crate::step::{ROOM_BYTES, SHORT_NORM, Step, meets, route_places, route_shared_bytes};

/// Warps that compute, and threads with those that fetch.
pub(crate) const WARPS: usize = 16;
const THREADS: usize = 32 * WARPS + 128;
/// Teams of a block's warps in attention: `TEAMS` in `kernels/persistent.cuh`.
const ATTENTION_TEAMS: usize = 2;
/// Page tables that attention may have.
const TABLES: usize = 4;
/// Rows of the last product, at least: a tile of 16 for every block, also of larger devices.
const LEAST_ROWS: usize = 4096;
/// Shared memory of a block beside a stage's area: slots for what is fetched with their barriers,
/// sums of parts, six stages, page tables, the position and sums of warps.
const FIXED_BYTES: usize = WARPS * 4 * (2560 + 16) + 2 * WARPS * 2 * 16 * 4 + 6 * 336 + 112;
/// What kernels keep for themselves of a block's shared memory.
const STATIC_BYTES: usize = 2 << 10;
/// The most that a stage's area takes, on the devices that have the kernel.
const AREA_BYTES: usize = (227 << 10) - STATIC_BYTES - FIXED_BYTES;
/// Kinds of a stage's work beside plain products, as in `kernels/persistent.cuh`.
const GATED: u32 = 16;
const ATTENTION: u32 = 32;
const NORM: u32 = 33;
const EXACT: u32 = 34;
const ROUTE: u32 = 35;
/// The most experts that a row may meet, and what a stage's area has for them beside its input.
const MOST_CHOSEN: usize = 16;
const CHOSEN_BYTES: usize = 8 * MOST_CHOSEN + MOST_RESULTS * 4 * TILE_ROWS;
/// Results of tiles of experts that a block keeps until it sums them, with those that other blocks
/// make of its last tile.
const MOST_RESULTS: usize = 64;

/// A kernel, and what it can run.
pub(crate) struct Runner {
    /// Its name, and that of its file.
    pub(crate) name: &'static str,
    kinds: &'static [Kind],
    /// Whether norms may be stages, and experts met; it has no attention with softcaps then.
    has_experts: bool,
}

/// All of them; the first that can do a run does it.
pub(crate) const RUNNERS: [Runner; 3] = [
    Runner { name: "persistent", kinds: &PLAIN, has_experts: false },
    Runner {
        name: "persistent_s24",
        kinds: &[Kind::F16, Kind::S8, Kind::S24F16, Kind::S24S8, Kind::S24S4],
        has_experts: false,
    },
    Runner { name: "persistent_experts", kinds: &PLAIN, has_experts: true },
];
const PLAIN: [Kind; 5] = [Kind::F16, Kind::S8, Kind::S8x16, Kind::U8, Kind::U4];

/// The most shared memory that the kernel asks for.
pub(crate) fn most_bytes(device: &Device) -> usize {
    device.shared_bytes - STATIC_BYTES
}

/// The stages that one kernel can do, from the first one behind which it can do all, if that is
/// most of a step. The last one, a wide product whose results nobody in the run reads, is where all
/// blocks make values unwritten again.
pub(crate) fn run_of(plan: &Plan, program: &Program) -> Option<Range<usize>> {
    let stages = &program.stages;
    let start_for = |runner: &Runner| {
        let cannot =
            |i: &usize| runner.area(plan, program, *i).is_none_or(|area| area > AREA_BYTES);
        (0..stages.len()).rev().find(cannot).map_or(0, |last| last + 1)
    };
    let start = RUNNERS.iter().map(start_for).min()?;
    let ends_well = stages.last().is_some_and(|stage| match &stage.work {
        Work::Product { factors, after: After::Nothing, .. } => {
            factors.iter().map(|f| plan.weight(f.weight).rows).sum::<usize>() >= LEAST_ROWS
        }
        _ => false,
    });
    let is_awaitable = stages[..start].iter().all(|stage| is_awaitable(plan, &stage.work));
    (ends_well && is_awaitable && 2 * start < stages.len()).then_some(start..stages.len())
}

/// Whether so many blocks can do the stages of a run. One block chooses experts and leaves their
/// first products to others, and there is no room for more than some results of those that are
/// summed.
pub(crate) fn fits(most_blocks: usize, plan: &Plan, program: &Program, run: &Range<usize>) -> bool {
    run.clone().all(|i| match &program.stages[i].work {
        Work::Product { factors, experts: Some(experts), .. } => {
            let weight = plan.weight(factors[0].weight);
            let tiles = experts.used * (weight.rows / experts.count).div_ceil(TILE_ROWS);
            let is_summed = matches!(program.joined[i], Joined::Sum { .. });
            let has_room = tiles.div_ceil(most_blocks) + MOST_CHOSEN <= MOST_RESULTS;
            most_blocks > 1 && (has_room || !is_summed)
        }
        _ => true,
    })
}

/// Whether what a stage before the run makes can be waited for: never a number whose bits are all
/// ones, as floats that come from outside may be.
fn is_awaitable(plan: &Plan, work: &Work) -> bool {
    match work {
        Work::Input { .. } => false,
        Work::Embed { table, .. } => plan.weight(*table).format != Format::F32,
        _ => true,
    }
}

impl Runner {
    /// The bytes of shared memory that stage `i` needs for its input; none if this kernel cannot
    /// run it.
    fn area(&self, plan: &Plan, program: &Program, i: usize) -> Option<usize> {
        let joined = program.joined[i];
        match &program.stages[i].work {
            Work::Norm { .. } if joined == Joined::Elsewhere => Some(0),
            // What a product does too needs as much as it, or a run might begin behind the product.
            Work::ExpertSum { .. } | Work::Elementwise { .. } if joined == Joined::Elsewhere => {
                self.area(plan, program, i - 1)
            }
            Work::Norm { input, kind: NormKind::Rms, bias: None, groups, .. } => {
                let n = program.values[input.0].content.stride() / groups;
                // Elements and weights: of a row, or of the group of each warp.
                let bytes = if n > SHORT_NORM { 8 * n } else { WARPS * 8 * SHORT_NORM };
                (self.has_experts && n.is_multiple_of(4)).then_some(bytes)
            }
            work @ Work::Product { factors, experts: None, .. } => {
                let weight = plan.weight(factors[0].weight);
                match Kind::of(weight.format) {
                    // A row of weights, the input, and the weights of its norm.
                    Kind::F32 => {
                        let rows = if matches!(joined, Joined::Norm(_)) { 3 } else { 2 };
                        let can = self.has_experts && is_exact(plan, work);
                        can.then_some(4 * rows * weight.cols)
                    }
                    _ => self.product_area(weight, work, joined),
                }
            }
            Work::Product { factors, after, experts: Some(experts), .. } => {
                let weight = plan.weight(factors[0].weight);
                let is_half =
                    |out: Value| matches!(program.values[out.0].content, Content::Halves { .. });
                let inputs = match after {
                    After::Gate { out, .. } => (experts.is_shared && is_half(*out)).then_some(1),
                    _ => matches!(joined, Joined::Sum { .. }).then_some(experts.used),
                };
                let can = self.has_experts
                    && self.kinds.contains(&Kind::of(weight.format))
                    && experts.route.is_some()
                    && experts.used <= MOST_CHOSEN;
                let cols = weight.cols.next_multiple_of(CHUNK_COLS);
                let norm = if matches!(joined, Joined::Norm(_)) { 4 * cols } else { 0 };
                let bytes = inputs? * 2 * cols + CHOSEN_BYTES + norm;
                can.then_some(bytes)
            }
            Work::Route { routing, .. } => {
                let bytes = 4 * route_places(routing) + route_shared_bytes(routing);
                self.has_experts.then_some(bytes)
            }
            Work::Attend { slot, attention, .. } => {
                let table = slot_tables(plan)[*slot];
                let slot = &plan.slots[*slot];
                let can = meets(Kept::F16, slot) && attention.causal && table < TABLES;
                let can = can && (attention.softcap.is_none() || !self.has_experts);
                can.then_some(ATTENTION_TEAMS * ROOM_BYTES)
            }
            _ => None,
        }
    }

    /// The same of a product of all rows.
    fn product_area(&self, weight: &Weight, work: &Work, joined: Joined) -> Option<usize> {
        let Work::Product { norm, .. } = work else { return None };
        let is_normed = norm.is_some() || matches!(joined, Joined::Norm(_));
        let cols = weight.cols.next_multiple_of(CHUNK_COLS);
        // Chosen experts have their place before the norm's weights.
        let chosen = if self.has_experts { CHOSEN_BYTES } else { 0 };
        let weights = if is_normed { chosen + 4 * cols } else { 0 };
        let is_usual = weight.cols.is_multiple_of(4);
        ((!is_normed || is_usual) && self.kinds.contains(&Kind::of(weight.format)))
            .then_some(2 * cols + weights)
    }
}

/// Whether a product with weights in f32 is one that the kernel can do.
fn is_exact(plan: &Plan, work: &Work) -> bool {
    let Work::Product { is_outputs, norm, factors, after, .. } = work else { return false };
    let is_plain = !is_outputs && norm.is_none() && *after == After::Nothing;
    is_plain && factors.len() == 1 && plan.weight(factors[0].weight).cols.is_multiple_of(4)
}

impl Step<'_> {
    /// The stages of a run, as the kernel reads them.
    pub(crate) fn list(&self, run: Range<usize>) -> Vec<p::Stage> {
        let listed = run.filter(|&i| self.program.joined[i] != Joined::Elsewhere);
        listed.map(|i| self.listed(i)).collect()
    }

    fn listed(&self, i: usize) -> p::Stage {
        let work = &self.program.stages[i].work;
        match work {
            Work::Product { factors, after, .. } => {
                let kind = self.weights[factors[0].weight.0].shape.kind;
                let mut product = self.product_parameters(1, work);
                match self.program.joined[i] {
                    Joined::Alone => {}
                    Joined::Norm(norm) => self.normalize_input(&mut product, &norm),
                    Joined::Sum { added, out } => {
                        product.residual = self.address(added);
                        // What blocks make of tiles that others sum.
                        product.matrices[1].out = product.matrices[0].out;
                        product.matrices[0].out = self.address(out);
                    }
                    Joined::Elsewhere => unreachable!("is not listed"),
                }
                if kind == Kind::F32 {
                    return p::Stage::new(EXACT, &product);
                }
                let is_gated = matches!(after, After::Gate { .. });
                let number = number_of(kind) as u32 + if is_gated { GATED } else { 0 };
                p::Stage::new(number, &product)
            }
            Work::Attend { .. } => {
                let mut parameters = self.attend_parameters(1, work, true);
                parameters.partials = self.at.awaited;
                p::Stage::new(ATTENTION, &parameters)
            }
            Work::Norm { .. } => p::Stage::new(NORM, &self.norm_parameters(work)),
            Work::Route { .. } => p::Stage::new(ROUTE, &self.route_parameters(work)),
            _ => unreachable!("no kernel can run it"),
        }
    }

    /// Sends the kernel that runs the listed stages.
    pub(crate) fn run_listed(&self, run: Range<usize>) -> Result<()> {
        let stages = &self.program.stages[run.clone()];
        let areas = RUNNERS.map(|runner| {
            let areas = run.clone().map(|i| runner.area(self.plan, self.program, i));
            areas
                .collect::<Option<Vec<usize>>>()?
                .into_iter()
                .max()
                .filter(|&most| most <= AREA_BYTES)
        });
        let number = areas.iter().position(Option::is_some).expect("a kernel can do the run");
        let kernel = self.kernels.persistent.expect("there is a list")[number];
        let area = areas[number].unwrap_or(0).next_multiple_of(16);
        let joined = &self.program.joined[run.clone()];
        let count = joined.iter().filter(|joined| **joined != Joined::Elsewhere).count();
        let Some(Work::Product { input, norm, .. }) = stages.last().map(|stage| &stage.work) else {
            unreachable!("a run ends with a product");
        };
        let last = norm.map_or(*input, |norm| norm.input);
        let parameters = p::PersistentStep {
            stages: self.at.list,
            metadata: self.at.feed,
            values: self.at.apart,
            last_input: self.address(last),
            stage_count: count as u32,
            workspace_bytes: area as u32,
            values_len: (self.sizes.early_bytes / 16) as u32,
            last_input_len: self.program.values[last.0].bytes(1, 1).div_ceil(16) as u32,
        };
        let grid = [self.device.processors as usize, 1, 1];
        let shared = FIXED_BYTES + area;
        // SAFETY: the list has as many stages, whose values have memory of their own, which ends
        // at multiples of 16 bytes.
        unsafe { self.device.launch(kernel, grid, THREADS, shared, &parameters) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::lower;

    fn lowered(model: &str) -> (Plan, Program) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_model::open(format!("{folder}/{model}.gguf")).unwrap();
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        let program = lower(&plan, true, 1);
        (plan, program)
    }

    #[test]
    fn experts_run_in_the_kernel_for_them_alone() {
        let (plan, program) = lowered("qwen3moe-q4_k_m");
        let [plain, _, experts] = &RUNNERS;
        let first = program.stages.iter().position(|stage| matches!(stage.work, Work::Norm { .. }));
        let run = first.unwrap()..program.stages.len();
        for i in run.clone() {
            let name = &program.stages[i].name;
            assert!(experts.area(&plan, &program, i).is_some(), "{name}");
        }
        assert!(run.clone().any(|i| plain.area(&plan, &program, i).is_none()));
        // The weighted sum and what it is added to are part of the product before them.
        let joined = &program.joined;
        let is_sum = |i: &usize| matches!(joined[*i], Joined::Sum { .. });
        let of_sums: Vec<usize> = run.clone().filter(is_sum).collect();
        for &i in &of_sums {
            let areas = [i, i + 1, i + 2].map(|i| experts.area(&plan, &program, i));
            assert!(
                areas.iter().all(|area| *area == areas[0]),
                "no run begins in a sum: {areas:?}"
            );
        }
        let sums = of_sums.len();
        let is_norm = |i: &usize| matches!(program.stages[*i].work, Work::Norm { .. });
        let unlisted = run.filter(|&i| joined[i] == Joined::Elsewhere);
        assert!(sums > 0);
        assert_eq!(unlisted.filter(|i| !is_norm(i)).count(), 2 * sums);
    }

    #[test]
    fn a_block_has_room_for_the_results_that_it_sums() {
        let (mut plan, program) = lowered("qwen3moe-q4_k_m");
        let all = 0..program.stages.len();
        let of_experts = |i: usize| match &program.stages[i].work {
            Work::Product { factors, experts: Some(experts), .. } => {
                Some((factors[0].weight, *experts))
            }
            _ => None,
        };
        let is_summed = |i: &usize| matches!(program.joined[*i], Joined::Sum { .. });
        let (gated, _) = all.clone().find_map(of_experts).unwrap();
        let (weight, experts) = all.clone().filter(is_summed).find_map(of_experts).unwrap();
        let blocks = 100;
        assert!(fits(blocks, &plan, &program, &all));
        assert!(!fits(1, &plan, &program, &all), "another block has to choose");
        let most = (MOST_RESULTS - MOST_CHOSEN) * blocks / experts.used;
        plan.weights[weight.0].rows = experts.count * TILE_ROWS * most;
        assert!(fits(blocks, &plan, &program, &all));
        plan.weights[weight.0].rows += experts.count * TILE_ROWS * blocks;
        assert!(!fits(blocks, &plan, &program, &all));
        plan.weights[gated.0].rows = std::mem::replace(&mut plan.weights[weight.0].rows, 0);
        assert!(fits(blocks, &plan, &program, &all), "results that are not summed need no room");
    }
}
