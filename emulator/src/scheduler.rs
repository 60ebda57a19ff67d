//! The warp scheduler: runs the blocks of a launch, with warps in random order.

use crate::Fault;
use crate::block::Block;
use crate::kernel::SPECIAL_REGISTERS;
use crate::launch::Run;
use crate::warp::{Stop, Warp};

/// Resident blocks of a launch that is not cooperative.
const RESIDENT_BLOCKS: usize = 2;
/// The most instructions that a warp runs before another is scheduled.
const MAX_SLICE: usize = 400;
/// Slices per runnable warp without a visible effect after which the launch is deadlocked.
const DEADLOCK_SLICES: u64 = 2000;

/// Likewise after which the launch is idle, and the time that passes then for each of them.
const IDLE_SLICES: u64 = 100;
const IDLE_NANOSECONDS: u64 = 10_000_000;

/// Blocks and their warps, reused by later launches.
pub(crate) type Blocks = Vec<(Block, Vec<Warp>)>;

/// Runs all blocks of a launch.
pub(crate) fn run_blocks(run: &Run<'_>, blocks: &mut Blocks) -> Result<(), Fault> {
    let (name, threads) = (&run.kernel.name, run.launch.threads);
    if !threads.is_multiple_of(32) {
        return Err(Fault(format!("{name}: {threads} threads are not a multiple of a warp")));
    }
    let [x, y, z] = run.launch.grid.map(|n| n as usize);
    let count = x * y * z;
    let resident = if run.launch.cooperative { count } else { count.min(RESIDENT_BLOCKS) };
    blocks.resize_with(resident.max(blocks.len()), Default::default);
    let blocks = &mut blocks[..resident];
    let mut runnable = Vec::new();
    let mut started = 0;
    let mut start_next = |slot: usize, block: &mut (Block, Vec<Warp>), runnable: &mut Vec<_>| {
        if started < count {
            let index = [started % x, started / x % y, started / x / y].map(|n| n as u32);
            start(run, index, block);
            runnable.extend((0..block.1.len()).map(|warp| (slot, warp)));
            started += 1;
        }
    };
    for (slot, block) in blocks.iter_mut().enumerate() {
        start_next(slot, block, &mut runnable);
    }
    let mut idle_slices = 0;
    while !runnable.is_empty() {
        let chosen = run.random(runnable.len());
        let (slot, number) = runnable[chosen];
        let (block, warps) = &mut blocks[slot];
        let effects_before = block.effects;
        if run.random(4) == 0 {
            block.complete_bulk_copy(run)?;
        }
        let limit = 1 + run.random(MAX_SLICE) as u32;
        // Time passes fast once all warps are idle, so that timeouts come before the deadlock.
        let is_idle = idle_slices > IDLE_SLICES * runnable.len() as u64;
        let passed = if is_idle { IDLE_NANOSECONDS / runnable.len() as u64 } else { 1 };
        run.clock.set(run.clock.get() + passed);
        warps[number].set_clock(run.clock.get());
        match warps[number].run(run, block, number, limit)? {
            Stop::Yielded => {}
            Stop::Blocked => drop(runnable.swap_remove(chosen)),
            Stop::Trapped => return Err(waiting(run, blocks, "trap")),
            Stop::Exited => {
                runnable.swap_remove(chosen);
                block.exit_warp();
            }
        }
        runnable.extend(block.woken.drain(..).map(|warp| (slot, warp)));
        idle_slices = if block.effects == effects_before { idle_slices + 1 } else { 0 };
        if idle_slices > DEADLOCK_SLICES * runnable.len() as u64 {
            break;
        }
        if block.live_warps == 0 {
            block.check_exit().map_err(|Fault(text)| Fault(format!("{name}: {text}")))?;
            start_next(slot, &mut blocks[slot], &mut runnable);
        }
    }
    match blocks.iter().all(|(block, _)| block.live_warps == 0) {
        true => Ok(()),
        false => Err(waiting(run, blocks, "deadlock")),
    }
}

/// Starts a block and its warps at an index of the grid.
fn start(run: &Run<'_>, index: [u32; 3], (block, warps): &mut (Block, Vec<Warp>)) {
    let (kernel, launch) = (run.kernel, run.launch);
    block.start(run, index);
    let [x, y, z] = index.map(u64::from);
    let [grid_x, grid_y, grid_z] = launch.grid.map(u64::from);
    // In the order of `SPECIAL_REGISTERS`; warps set `%tid.x` and `%laneid` themselves.
    let dynamic = [launch.dynamic_shared as u64, kernel.shared_bytes as u64];
    let specials: [u64; SPECIAL_REGISTERS.len()] =
        [0, launch.threads.into(), x, y, z, grid_x, grid_y, grid_z, 0, dynamic[0], dynamic[1], 0];
    warps.resize_with(block.live_warps, Warp::default);
    for (first_thread, warp) in (0..).step_by(32).zip(warps) {
        warp.start(kernel, first_thread, &specials);
    }
}

/// The error of a deadlock or trap, with the lines where warps wait.
fn waiting(run: &Run<'_>, blocks: &[(Block, Vec<Warp>)], what: &str) -> Fault {
    let mut text = format!("{}: {what}", run.kernel.name);
    for (block, warps) in blocks.iter().filter(|(block, _)| block.live_warps > 0).take(4) {
        for (number, warp) in warps.iter().enumerate() {
            let lines = warp.lines(run.kernel);
            text += &format!("\n  block {:?}, warp {number}: at lines {lines:?}", block.index);
        }
    }
    Fault(text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::launch::Launch;
    use crate::memory::Memory;
    use crate::parse::Module;

    /// Runs one block of a kernel whose only parameter is the address of zeros, and returns them.
    fn run(body: &str, threads: u32, numbers: usize, seed: u64) -> Result<Vec<u32>, Fault> {
        let text = format!(
            ".visible .entry test(\n\t.param .u64 test_param_0\n)\n{{\n\t.reg .pred %p<4>;\n\t\
             .reg .b32 %r<8>;\n\t.reg .b64 %rd<4>;\n\t.shared .align 8 .b8 buffer[64];\n\t\
             ld.param.u64 %rd1, [test_param_0];\n\tmov.u32 %r1, %tid.x;\n\t\
             mul.wide.u32 %rd2, %r1, 4;\n\tadd.s64 %rd2, %rd1, %rd2;\n{body}\n\tret;\n}}\n"
        );
        let kernel = Arc::new(Module::new(&text).kernel("test")?);
        let mut memory = Memory::default();
        let start = memory.allocate(4 * numbers, 1 << 20).expect("below the capacity");
        // SAFETY: just allocated.
        let values = unsafe { std::slice::from_raw_parts_mut(start as *mut u32, numbers) };
        values.fill(0);
        let launch = Launch {
            kernel,
            parameters: start.to_le_bytes().to_vec(),
            grid: [1; 3],
            threads,
            dynamic_shared: 0,
            cooperative: false,
        };
        let run = Run::new(&launch, &memory, seed, 0);
        run_blocks(&run, &mut Blocks::default()).map(|()| values.to_vec())
    }

    #[test]
    fn lanes_diverge_and_reconverge() {
        // Each lane counts to its number, then the warp sums the counts.
        let body = "mov.u32 %r2, 0;\nagain: setp.ge.u32 %p1, %r2, %r1;\n@%p1 bra done;\n\
                    add.s32 %r2, %r2, 1;\nbra again;\ndone: redux.sync.add.u32 %r3, %r2, -1;\n\
                    st.global.u32 [%rd2], %r3;";
        assert_eq!(run(body, 32, 32, 1).unwrap(), [496; 32]);
    }

    #[test]
    fn a_barrier_orders_shared_memory_for_every_schedule() {
        // Thread 0 writes, and the others read after a barrier.
        let body = "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra wait;\nst.shared.u32 [buffer], 7;\n\
                    wait: bar.sync 0;\nld.shared.u32 %r2, [buffer];\nst.global.u32 [%rd2], %r2;";
        for seed in 0..20 {
            assert_eq!(run(body, 128, 128, seed).unwrap(), [7; 128]);
        }
    }

    #[test]
    fn no_lane_waits_for_lanes_that_have_exited() {
        let body = "setp.gt.u32 %p1, %r1, 15;\n@%p1 bra end;\nbar.warp.sync -1;\n\
                    st.global.u32 [%rd2], 1;\nend:";
        assert_eq!(run(body, 32, 32, 1).unwrap()[..17], [[1; 16].as_slice(), &[0]].concat());
    }

    #[test]
    fn the_clock_of_waiting_warps_reaches_two_seconds_before_a_deadlock() {
        let body = "again: mov.u64 %rd3, %globaltimer;\nsetp.lt.u64 %p1, %rd3, 2000000000;\n\
                    @%p1 bra again;\nst.global.u32 [%rd2], 1;";
        assert_eq!(run(body, 64, 64, 0).unwrap(), [1; 64]);
        let trap = run(&format!("{body}\ntrap;"), 32, 32, 0).unwrap_err().0;
        assert!(trap.contains("test: trap\n  block [0, 0, 0], warp 0: at lines"), "{trap}");
    }

    #[test]
    fn faults_that_a_device_does_not_report() {
        let fault = |body: &str| run(body, 64, 32, 0).unwrap_err().0;
        let beyond = fault("st.global.u32 [%rd2], 1;");
        assert!(beyond.contains("out of bounds: 4 bytes at offset 128 of 128"), "{beyond}");
        let odd = fault("st.global.u32 [%rd1+2], 1;");
        assert!(odd.contains("not a multiple of 4"), "{odd}");
        let shared = fault("ld.shared.u32 %r2, [buffer+1024];");
        assert!(shared.contains("of shared memory at 1024"), "{shared}");
        let alone = fault("setp.gt.u32 %p1, %r1, 31;\n@%p1 bra end;\nbar.sync 1, 64;\nend:");
        assert!(alone.contains("test: deadlock"), "{alone}");
        let diverged = fault(
            "setp.gt.u32 %p1, %r1, 15;\n@%p1 bra some;\nbar.warp.sync -1;\nbra end;\n\
             some: bar.warp.sync -1;\nend:",
        );
        assert!(diverged.contains("deadlock of its lanes, at lines [15, 17]"), "{diverged}");
        let spins = fault(
            "again: ld.shared.u32 %r2, [buffer];\nsetp.ne.u32 %p1, %r2, 1;\n\
                         @%p1 bra again;",
        );
        assert!(spins.contains("test: deadlock"), "{spins}");
        let diverged = run("", 40, 64, 0).unwrap_err().0;
        assert!(diverged.contains("test: 40 threads are not a multiple of a warp"), "{diverged}");
        let late = fault(
            "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra end;\nmov.u32 %r2, buffer;\n\
                        mbarrier.init.shared.b64 [%r2], 1;\nadd.u32 %r4, %r2, 16;\n\
                        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                        [%r4], [%rd1], 16, [%r2];\nend:",
        );
        assert!(late.contains("exited with 1 bulk copies"), "{late}");
        let unknown = fault("tanh.approx.f32 %r1, %r2;");
        assert!(unknown.contains("line 13 of its PTX: unknown instruction tanh"), "{unknown}");
    }
}
