//! The grid of a launch in execution: its blocks, with warps in random order.

use crate::Fault;
use crate::block::Block;
use crate::kernel::SPECIAL_REGISTERS;
use crate::launch::{Launch, Run, RunState};
use crate::memory::Memory;
use crate::warp::{Stop, Warp};

/// Resident blocks of a launch that is not cooperative.
const RESIDENT_BLOCKS: usize = 2;
/// The most instructions that a warp runs before another is scheduled.
const MAX_SLICE: usize = 400;

/// Blocks and their warps, reused by later launches.
pub(crate) type Blocks = Vec<(Block, Vec<Warp>)>;

/// A launch in execution. It stops after each slice: some instructions of one warp.
pub(crate) struct Grid {
    launch: Launch,
    state: RunState,
    /// The resident blocks come first; the others are of earlier launches.
    blocks: Blocks,
    /// The warps that can run: their blocks among the resident ones, and their numbers there.
    runnable: Vec<(usize, usize)>,
    /// Blocks that were started.
    started: usize,
}

impl Grid {
    /// Starts a launch, with the blocks of an earlier one.
    pub(crate) fn start(
        launch: Launch,
        state: RunState,
        mut blocks: Blocks,
    ) -> Result<Grid, Fault> {
        let (name, threads) = (&launch.kernel.name, launch.threads);
        if !threads.is_multiple_of(32) {
            return Err(Fault(format!("{name}: {threads} threads are not a multiple of a warp")));
        }
        let count = launch.blocks();
        let resident = if launch.cooperative { count } else { count.min(RESIDENT_BLOCKS) };
        blocks.resize_with(resident.max(blocks.len()), Default::default);
        let mut grid = Grid { launch, state, blocks, runnable: Vec::new(), started: 0 };
        (0..resident).for_each(|slot| grid.start_next(slot));
        Ok(grid)
    }

    /// Lets a random warp run some instructions, at a time of `%globaltimer`. Returns whether they
    /// had an effect that other threads can see.
    pub(crate) fn run_slice(&mut self, memory: &Memory, clock: u64) -> Result<bool, Fault> {
        let run = Run::new(&self.launch, memory, &self.state);
        let chosen = run.random(self.runnable.len());
        let (slot, number) = self.runnable[chosen];
        let (block, warps) = &mut self.blocks[slot];
        let effects_before = block.effects;
        if run.random(4) == 0 {
            block.complete_bulk_copy(&run)?;
        }
        let limit = 1 + run.random(MAX_SLICE) as u32;
        warps[number].set_clock(clock);
        match warps[number].run(&run, block, number, limit)? {
            Stop::Yielded => {}
            Stop::Blocked => drop(self.runnable.swap_remove(chosen)),
            Stop::Trapped => return Err(self.waiting("trap")),
            Stop::Exited => {
                self.runnable.swap_remove(chosen);
                block.exit_warp();
            }
        }
        self.runnable.extend(block.woken.drain(..).map(|warp| (slot, warp)));
        let has_effect = block.effects != effects_before;
        if block.live_warps == 0 {
            let name = &self.launch.kernel.name;
            block.check_exit().map_err(|Fault(text)| Fault(format!("{name}: {text}")))?;
            self.start_next(slot);
        }
        // No other launch can wake warps that wait at a barrier.
        match self.runnable.is_empty() && self.blocks.iter().any(|(block, _)| block.live_warps > 0)
        {
            false => Ok(has_effect),
            true => Err(self.waiting("deadlock")),
        }
    }

    /// Warps that can run: none once the launch has ended.
    pub(crate) fn runnable(&self) -> usize {
        self.runnable.len()
    }

    pub(crate) fn into_blocks(self) -> Blocks {
        self.blocks
    }

    /// Starts the next block, if there is one, and its warps in the place of one that has ended.
    fn start_next(&mut self, slot: usize) {
        if self.started == self.launch.blocks() {
            return;
        }
        let (launch, started) = (&self.launch, self.started);
        let [x, y, _] = launch.grid.map(|n| n as usize);
        let index = [started % x, started / x % y, started / x / y].map(|n| n as u32);
        let (block, warps) = &mut self.blocks[slot];
        block.start(launch, index);
        let [x, y, z] = index.map(u64::from);
        let [grid_x, grid_y, grid_z] = launch.grid.map(u64::from);
        let dynamic = [launch.dynamic_shared as u64, launch.kernel.shared_bytes as u64];
        // In the order of `SPECIAL_REGISTERS`; warps set `%tid.x` and `%laneid` themselves.
        let threads = launch.threads.into();
        let specials: [u64; SPECIAL_REGISTERS.len()] =
            [0, threads, x, y, z, grid_x, grid_y, grid_z, 0, dynamic[0], dynamic[1], 0];
        warps.resize_with(block.live_warps, Warp::default);
        for (first_thread, warp) in (0..).step_by(32).zip(&mut *warps) {
            warp.start(&launch.kernel, first_thread, &specials);
        }
        self.runnable.extend((0..warps.len()).map(|warp| (slot, warp)));
        self.started += 1;
    }

    /// The error of a deadlock or trap, with the lines where warps wait.
    pub(crate) fn waiting(&self, what: &str) -> Fault {
        let kernel = &self.launch.kernel;
        let mut text = format!("{}: {what}", kernel.name);
        for (block, warps) in self.blocks.iter().filter(|(block, _)| block.live_warps > 0).take(4) {
            for (number, warp) in warps.iter().enumerate() {
                let lines = warp.lines(kernel);
                text += &format!("\n  block {:?}, warp {number}: at lines {lines:?}", block.index);
            }
        }
        Fault(text)
    }
}
