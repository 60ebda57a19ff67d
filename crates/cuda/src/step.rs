//! One step: every stage as the kernels that run it, with their parameters. Which kernels run and
//! the sizes of their grids follow from the step's `Size` alone, so that a step can be recorded
//! once and sent again for other tokens.

mod attention;
pub(crate) mod choice;
mod many;
mod product;
mod recurrent;
mod rows;

use std::cell::Cell;

use bodkin_backend::{Batch, Result};
use bodkin_model::{Plan, Rows, WeightId};

pub(crate) use attention::{ROOM_BYTES, meets};
pub(crate) use product::{route_places, route_shared_bytes};

use crate::arena::Arena;
use crate::driver::Device;
use crate::kept::Kept;
use crate::kernels::{DOT_MOST_BYTES, Kernels, dot_shared_bytes};
use crate::lower::{After, Content, Program, Stage, Value, Work};
use crate::planes::{CHUNK_COLS, Kind};
use crate::sizes::Sizes;
use crate::weights::Placed;
use many::{Grouping, Interleaving};

/// Threads of a block of most kernels.
const THREADS: usize = 256;
/// Rows of up to so many elements are normalised by a warp.
pub(crate) const SHORT_NORM: usize = 256;
/// Rows of input up to which products read every weight once; experts' once for each row.
pub(crate) const DOT_ROWS: usize = 16;

/// Addresses of what steps read and write besides weights.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) arena: u64,
    /// Values that never share memory.
    pub(crate) apart: u64,
    /// The list of stages of a step in one kernel.
    pub(crate) list: u64,
    pub(crate) feed: u64,
    pub(crate) partials: u64,
    /// Segments that a running kernel waits for, unwritten between steps.
    pub(crate) awaited: u64,
    /// A product's input in the order in which `wide` reads it.
    pub(crate) interleaved: u64,
    /// What columns of blocks take of the rows that meet experts, and these in order.
    pub(crate) groups: u64,
    pub(crate) members: u64,
    /// Counts of blocks of attention, zero between steps.
    pub(crate) arrivals: u64,
    /// Keys and values of each slot.
    pub(crate) kv: Vec<[u64; 2]>,
    /// The page table of each slot.
    pub(crate) tables: Vec<usize>,
    pub(crate) states: Vec<u64>,
    /// Half turns a position of each rotation, and the factor of sines and cosines.
    pub(crate) turns: Vec<(u64, f32)>,
    pub(crate) angles: Vec<u64>,
    /// The largest logits of parts of rows.
    pub(crate) peaks: u64,
    /// Counts of the choice of tokens, two of each row: zero before the first step.
    pub(crate) steps: u64,
    /// Tokens that were chosen, in memory of the host.
    pub(crate) chosen: u64,
    /// Counts of each routing.
    pub(crate) counts: Vec<u64>,
}

/// What the grids of a step follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    pub(crate) spans: usize,
    /// Whether there are rows of prompts.
    pub(crate) has_prompts: bool,
    /// Whether there are others.
    pub(crate) has_generated: bool,
}

impl Size {
    pub(crate) fn of(batch: &Batch) -> Size {
        Size {
            tokens: batch.tokens.len(),
            outputs: batch.outputs.len(),
            spans: batch.spans.len(),
            has_prompts: batch.spans.iter().any(|span| span.is_prefill),
            has_generated: batch.spans.iter().any(|span| !span.is_prefill),
        }
    }

    /// Of a step that generates a token of one sequence.
    pub(crate) fn of_one() -> Size {
        Size { tokens: 1, outputs: 1, spans: 1, has_prompts: false, has_generated: true }
    }
}

/// A step of some size on a loaded model.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a Device,
    pub(crate) kernels: &'a Kernels,
    pub(crate) plan: &'a Plan,
    pub(crate) program: &'a Program,
    pub(crate) sizes: &'a Sizes,
    /// Where values are, and the first of them.
    pub(crate) arena: (&'a Arena, u64),
    pub(crate) weights: &'a [Placed],
    pub(crate) at: &'a Addresses,
    pub(crate) size: Size,
    /// Whether inputs of products are read back: then no product makes its own.
    pub(crate) is_observed: bool,
    /// What is in [`Addresses::interleaved`].
    pub(crate) interleaved: Cell<Option<Interleaving>>,
    /// What is in [`Addresses::groups`] and [`Addresses::members`].
    pub(crate) grouped: Cell<Option<Grouping>>,
}

/// What a stage cannot do because a block has not the shared memory for it, or not the registers.
pub(crate) fn too_wide(plan: &Plan, kept: Kept, stage: &Stage) -> Option<String> {
    let (what, bytes, limit) = match &stage.work {
        Work::Product { factors, after, experts, .. } => {
            let weight = plan.weight(factors[0].weight);
            let kind = Kind::of(weight.format);
            if kind == Kind::F32 {
                return None;
            }
            let is_gated = matches!(after, After::Gate { .. });
            let cols = weight.cols.next_multiple_of(CHUNK_COLS);
            let held = if experts.is_none() { cols } else { 0 };
            let one = dot_shared_bytes(kind, is_gated, 1, held);
            let bytes = one.max(dot_shared_bytes(kind, is_gated, DOT_ROWS, 0));
            (format!("{cols} columns of {}", weight.name), bytes, DOT_MOST_BYTES)
        }
        Work::Attend { attention, slot, .. } => {
            return attention::too_wide(kept, attention, &plan.slots[*slot]);
        }
        Work::Route { routing, .. } => {
            let what = format!("a choice among {} experts", routing.experts);
            (what, product::route_shared_bytes(routing), 48 << 10)
        }
        _ => return None,
    };
    (bytes > limit).then(|| format!("{what}: {bytes} bytes of a block's {limit}"))
}

impl Step<'_> {
    pub(crate) fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Outputs => self.size.outputs,
        }
    }

    /// The address of a value.
    pub(crate) fn address(&self, value: Value) -> u64 {
        self.arena.1 + self.arena.0.offsets[value.0]
    }

    pub(crate) fn content(&self, value: Value) -> Content {
        self.program.values[value.0].content
    }

    /// The distance of a value's rows, in elements.
    fn stride(&self, value: Value) -> u32 {
        self.content(value).stride() as u32
    }

    /// Address and distance of rows of a value that may be none.
    fn place(&self, value: Option<Value>) -> (u64, u32) {
        value.map_or((0, 0), |value| (self.address(value), self.stride(value)))
    }

    fn vector(&self, id: Option<WeightId>) -> u64 {
        id.map_or(0, |id| self.weights[id.0].vector)
    }

    /// A grid of rows by columns, for kernels whose threads take single elements.
    fn elements(&self, rows: usize, width: usize) -> [usize; 3] {
        let per_thread = if rows > DOT_ROWS { 4 } else { 1 };
        [rows, width.div_ceil(per_thread * THREADS).clamp(1, 256), 1]
    }

    /// Whether products normalise their input themselves where they can.
    fn inlines_norms(&self) -> bool {
        self.size.tokens == 1 && !self.is_observed
    }

    /// Sends a stage.
    pub(crate) fn run(&self, stage: &Stage) -> Result<()> {
        let rows = self.rows(stage.rows);
        if rows == 0 {
            return Ok(());
        }
        match &stage.work {
            Work::Angles { rope } => self.angles(*rope),
            // It is there before the first stage.
            Work::Input { .. } => Ok(()),
            Work::Embed { table, by, out } => self.embed(rows, *table, *by, *out),
            Work::Norm { is_inlined: true, .. } if self.inlines_norms() => Ok(()),
            Work::Norm { .. } => self.norm(rows, &stage.work),
            Work::Prepare { input, out } => self.prepare(rows, *input, *out),
            Work::Product { .. } => self.product(rows, &stage.work),
            Work::Rotate { .. } => self.rotate(rows, &stage.work),
            Work::Attend { .. } => self.attend(rows, &stage.work),
            Work::Elementwise { function, a, b, out } => {
                self.elementwise(rows, *function, (*a, *b), *out)
            }
            Work::Slice { .. } | Work::Concat { .. } => self.arrange(rows, &stage.work),
            Work::Pool { input, kind, out } => self.pool(rows, *input, *kind, *out),
            Work::Route { .. } => self.route(rows, &stage.work),
            Work::ExpertSum { input, route, out } => self.expert_sum(rows, *input, *route, *out),
            Work::Conv { .. } => self.conv(&stage.work),
            Work::Scan(scan) => self.scan(scan),
            // Devices do it together: `several.rs`.
            Work::Gather { .. } => Ok(()),
        }
    }
}
