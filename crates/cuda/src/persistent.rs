//! Steps of one row in one kernel (`kernels/persistent.cu`): which stages it can run, and the list
//! of them that it goes through. What stands before and after those stages runs as ever.

use std::ops::Range;

use bodkin_backend::Result;
use bodkin_gguf::Format;
use bodkin_model::Plan;

use crate::driver::Device;
use crate::kept::Kept;
use crate::kernels::number_of;
use crate::lower::{After, Program, Stage, Work};
use crate::parameters as p;
use crate::planes::{CHUNK_COLS, Kind};
use crate::sizes::{SEGMENT, key_stride, slot_tables, value_stride};
use crate::step::{SHORT_NORM, Step, blocks, meets, met_bytes};

/// Warps that compute, and threads with those that fetch.
pub(crate) const WARPS: usize = 16;
const THREADS: usize = 32 * WARPS + 128;
/// Page tables that attention may have.
const TABLES: usize = 4;
/// Rows of the last product, at least: a tile of 16 for every block, also of larger devices.
const LEAST_ROWS: usize = 4096;
/// Shared memory of a block beside a stage's area: slots for weights with their barriers, sums of
/// parts, six stages, page tables, the position, maxima and sums of steps.
const FIXED_BYTES: usize = WARPS * 4 * (2560 + 16) + 2 * WARPS * 2 * 16 * 4 + 6 * 336 + 304;
/// What kernels keep for themselves of a block's shared memory.
const STATIC_BYTES: usize = 2 << 10;
/// The most that a stage's area takes, on the devices that have the kernel.
const AREA_BYTES: usize = (227 << 10) - STATIC_BYTES - FIXED_BYTES;
/// The numbers of a gated product's kernel and of attention among a stage's kinds of work.
const GATED: u32 = 16;
const ATTENTION: u32 = 32;

/// The kinds of weights that each of the kernels knows, in the order of [`KERNELS`].
const KINDS: [&[Kind]; 2] = [
    &[Kind::F16, Kind::S8, Kind::S8x16, Kind::U8, Kind::U4],
    &[Kind::F16, Kind::S8, Kind::S24F16, Kind::S24S8, Kind::S24S4],
];
/// The names of the kernels, and of their files.
pub(crate) const KERNELS: [&str; KINDS.len()] = ["persistent", "persistent_s24"];

/// The most shared memory that the kernel asks for.
pub(crate) fn most_bytes(device: &Device) -> usize {
    device.shared_bytes - STATIC_BYTES
}

/// The stages that one kernel can do, from the first one behind which it can do all, if that is
/// most of a step. The last one, a wide product whose results nobody in the run reads, is where all
/// blocks make values unwritten again.
pub(crate) fn run_of(plan: &Plan, program: &Program) -> Option<Range<usize>> {
    let stages = &program.stages;
    let start_for = |kinds| {
        let cannot =
            |stage: &Stage| area(plan, &stage.work, kinds).is_none_or(|area| area > AREA_BYTES);
        stages.iter().rposition(cannot).map_or(0, |last| last + 1)
    };
    let start = KINDS.into_iter().map(start_for).min()?;
    let ends_well = stages.last().is_some_and(|stage| match &stage.work {
        Work::Product { factors, after: After::Nothing, .. } => {
            factors.iter().map(|f| plan.weight(f.weight).rows).sum::<usize>() >= LEAST_ROWS
        }
        _ => false,
    });
    let is_awaitable = stages[..start].iter().all(|stage| is_awaitable(plan, &stage.work));
    (ends_well && is_awaitable && 2 * start < stages.len()).then_some(start..stages.len())
}

/// Whether so many blocks can do the stages of a run. In attention a block keeps the row's own
/// position with the first query heads that it takes: no block may take others of the last segment.
pub(crate) fn fits(most_blocks: usize, program: &Program, run: &Range<usize>) -> bool {
    program.stages[run.clone()].iter().all(|stage| match &stage.work {
        Work::Attend { attention, .. } => blocks(attention) <= most_blocks,
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

/// The bytes of shared memory that a stage needs for its input; none if a kernel for these kinds of
/// weights cannot run it.
fn area(plan: &Plan, work: &Work, kinds: &[Kind]) -> Option<usize> {
    match work {
        Work::Norm { is_inlined: true, .. } => Some(0),
        Work::Product { norm, factors, experts: None, .. } => {
            let weight = plan.weight(factors[0].weight);
            let cols = weight.cols.next_multiple_of(CHUNK_COLS);
            let weights = if norm.is_some() { 4 * cols } else { 0 };
            // Shorter rows have a sum of squares in another order.
            let is_usual = weight.cols.is_multiple_of(4) && weight.cols > SHORT_NORM;
            ((norm.is_none() || is_usual) && kinds.contains(&Kind::of(weight.format)))
                .then_some(2 * cols + weights)
        }
        Work::Attend { slot, attention, .. } => {
            let table = slot_tables(plan)[*slot];
            let slot = &plan.slots[*slot];
            // The row's own value, and the keys of a segment.
            let own = 2 * (value_stride(slot) + SEGMENT * key_stride(slot));
            let can = meets(Kept::F16, slot) && attention.causal && table < TABLES;
            can.then(|| met_bytes(slot) + own)
        }
        _ => None,
    }
}

impl Step<'_> {
    /// The stages of a run, as the kernel reads them.
    pub(crate) fn list(&self, run: Range<usize>) -> Vec<p::Stage> {
        let stages = self.program.stages[run].iter();
        stages.filter_map(|stage| self.listed(&stage.work)).collect()
    }

    fn listed(&self, work: &Work) -> Option<p::Stage> {
        match work {
            Work::Product { factors, after, .. } => {
                let kind = number_of(self.weights[factors[0].weight.0].shape.kind) as u32;
                let is_gated = matches!(after, After::Gate { .. });
                let work_number = kind + if is_gated { GATED } else { 0 };
                Some(p::Stage::new(work_number, &self.product_parameters(1, work)))
            }
            Work::Attend { .. } => {
                let mut parameters = self.attend_parameters(1, work, true);
                parameters.partials = self.at.awaited;
                Some(p::Stage::new(ATTENTION, &parameters))
            }
            _ => None,
        }
    }

    /// Sends the kernel that runs the listed stages.
    pub(crate) fn run_listed(&self, run: Range<usize>) -> Result<()> {
        let stages = &self.program.stages[run];
        let most = |kinds: &[Kind]| {
            let areas = stages.iter().map(|stage| area(self.plan, &stage.work, kinds));
            areas.collect::<Option<Vec<usize>>>()?.into_iter().max()
        };
        let areas = KINDS.map(most);
        let number = areas.iter().position(Option::is_some).expect("a kernel can do the run");
        let kernel = self.kernels.persistent.expect("there is a list")[number];
        let area = areas[number].unwrap_or(0).next_multiple_of(16);
        let count = stages.iter().filter(|stage| !matches!(stage.work, Work::Norm { .. })).count();
        let Some(Work::Product { input, norm, .. }) = stages.last().map(|stage| &stage.work) else {
            unreachable!("a run ends with a product");
        };
        let last = norm.map_or(*input, |norm| norm.input);
        let parameters = p::Persistent {
            stages: self.at.list,
            feed: self.at.feed,
            values: self.at.apart,
            last: self.address(last),
            count: count as u32,
            area: area as u32,
            values_len: (self.sizes.early_bytes / 16) as u32,
            last_len: self.program.values[last.0].bytes(1, 1).div_ceil(16) as u32,
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

    #[test]
    fn each_block_takes_query_heads_once_at_most() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_model::open(format!("{folder}/llama-q4_0.gguf")).unwrap();
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        let program = lower(&plan, true);
        let all = 0..program.stages.len();
        let needed = program.stages.iter().filter_map(|stage| match &stage.work {
            Work::Attend { attention, .. } => Some(blocks(attention)),
            _ => None,
        });
        let needed = needed.max().unwrap();
        assert!(fits(needed, &program, &all));
        assert!(!fits(needed - 1, &program, &all));
    }
}
