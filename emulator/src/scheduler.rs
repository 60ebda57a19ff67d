//! The scheduler: executes the operations of streams, those of one stream in order and those of
//! different streams in random turns, launches slice by slice.

use std::collections::{BTreeMap, VecDeque};

use crate::Fault;
use crate::grid::{Blocks, Grid};
use crate::launch::RunState;
use crate::memory::Memory;
use crate::random::Random;
use crate::stream_op::StreamOp;

/// Slices without an effect that other threads can see, for each runnable warp, after which the
/// launches in execution are deadlocked.
const DEADLOCK_SLICES: u64 = 2000;

/// Likewise after which they are idle, and the time that passes then for each of them.
const IDLE_SLICES: u64 = 100;
const IDLE_NANOSECONDS: u64 = 10_000_000;

/// A stream.
#[derive(Default)]
struct Stream {
    /// The operations that have not started.
    queue: VecDeque<StreamOp>,
    /// The launch in execution.
    grid: Option<Grid>,
}

impl Stream {
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.grid.is_none()
    }

    /// Whether it can go on now.
    fn is_ready(&self) -> bool {
        self.grid.is_some() || self.queue.front().is_some_and(StreamOp::is_ready)
    }
}

/// All streams. Operations are executed inside of [`Scheduler::run`] only.
pub(crate) struct Scheduler {
    streams: BTreeMap<usize, Stream>,
    random: Random,
    seed: u64,
    lost_store: u64,
    /// Launches that were started.
    launches: u64,
    /// What `%globaltimer` reads, in nanoseconds.
    clock: u64,
    /// Slices since the latest effect of any stream.
    idle_slices: u64,
    /// Blocks of launches that have ended.
    spare: Vec<Blocks>,
}

impl Scheduler {
    /// A scheduler whose choices depend on `seed` alone. If `lost_store` is not 0, each cooperative
    /// launch loses the relaxed store of this number.
    pub(crate) fn new(seed: u64, lost_store: u64) -> Scheduler {
        Scheduler {
            streams: BTreeMap::new(),
            random: Random::new(seed),
            seed,
            lost_store,
            launches: 0,
            clock: 0,
            idle_slices: 0,
            spare: Vec::new(),
        }
    }

    /// Puts an operation at the end of a stream.
    pub(crate) fn enqueue(&mut self, stream: usize, op: StreamOp) {
        self.streams.entry(stream).or_default().queue.push_back(op);
    }

    /// Whether a stream has done everything.
    pub(crate) fn is_empty(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(Stream::is_empty)
    }

    /// Drops everything that has not been done.
    pub(crate) fn clear(&mut self) {
        self.streams.clear();
    }

    /// Executes operations of all streams until a condition holds or nothing is left.
    pub(crate) fn run(
        &mut self,
        memory: &Memory,
        is_done: impl Fn(&Scheduler) -> bool,
    ) -> Result<(), Fault> {
        while !is_done(self) {
            let streams = self.streams.iter().filter(|(_, stream)| stream.is_ready());
            let ready: Vec<usize> = streams.map(|(&handle, _)| handle).collect();
            if ready.is_empty() {
                // A wait comes after its record was enqueued, so streams never wait in a circle.
                assert!(self.streams.values().all(Stream::is_empty), "a record that never comes");
                break;
            }
            // Until an operation ends, the same streams can go on.
            while !self.advance(memory, ready[self.random.below(ready.len())])? {}
        }
        self.streams.retain(|_, stream| !stream.is_empty());
        Ok(())
    }

    /// Executes the next operation of a stream, or one slice of a launch. Returns whether the
    /// operation has ended.
    fn advance(&mut self, memory: &Memory, handle: usize) -> Result<bool, Fault> {
        let stream = self.streams.get_mut(&handle).expect("a stream that is ready");
        if stream.grid.is_none() {
            let op = stream.queue.pop_front().expect("an operation that is ready");
            self.idle_slices = 0;
            let Some(launch) = op.execute(memory)? else { return Ok(true) };
            self.launches += 1;
            let seed = self.seed.wrapping_mul(0x10001) + self.launches;
            let lost_store = if launch.cooperative { self.lost_store } else { 0 };
            let blocks = self.spare.pop().unwrap_or_default();
            stream.grid = Some(Grid::start(launch, RunState::new(seed, lost_store), blocks)?);
        }
        // Time passes fast once all warps are idle, so that timeouts come before the deadlock.
        let is_idle = self.is_idle(IDLE_SLICES);
        self.clock += if is_idle { IDLE_NANOSECONDS / self.round() } else { 1 };
        let stream = self.streams.get_mut(&handle).expect("as above");
        let grid = stream.grid.as_mut().expect("started");
        let has_effect = grid.run_slice(memory, self.clock)?;
        self.idle_slices = if has_effect { 0 } else { self.idle_slices + 1 };
        if grid.runnable() == 0 {
            self.spare.extend(stream.grid.take().map(Grid::into_blocks));
            return Ok(true);
        }
        match self.is_idle(DEADLOCK_SLICES) {
            false => Ok(false),
            true => Err(self.deadlock()),
        }
    }

    /// Whether no stream has had an effect in this number of slices of each runnable warp.
    fn is_idle(&self, slices: u64) -> bool {
        // Mostly the first condition says so at once.
        self.idle_slices > slices && self.idle_slices > slices * self.round()
    }

    /// Slices in which each runnable warp has run about once: streams take turns, whatever the
    /// number of their warps.
    fn round(&self) -> u64 {
        let runnable = self.grids().map(|(grid, _)| grid.runnable());
        let (grids, most) = runnable.fold((0, 0), |(n, most), warps| (n + 1, most.max(warps)));
        grids * most as u64
    }

    /// The launches in execution, with the number of operations behind them in their streams.
    fn grids(&self) -> impl Iterator<Item = (&Grid, usize)> {
        self.streams.values().filter_map(|stream| Some((stream.grid.as_ref()?, stream.queue.len())))
    }

    /// The error of launches that wait for something that none of them does.
    fn deadlock(&self) -> Fault {
        let texts = self.grids().map(|(grid, behind)| {
            let Fault(text) = grid.waiting(&match behind {
                0 => "deadlock".to_owned(),
                n => format!("deadlock; operations behind it in its stream: {n}"),
            });
            text
        });
        Fault(texts.collect::<Vec<String>>().join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::launch::Launch;
    use crate::parse::Module;
    use crate::stream_op::Moment;

    /// A launch of one block of a kernel whose only parameter is an address.
    fn launch(name: &str, body: &str, threads: u32, address: u64) -> Result<StreamOp, Fault> {
        let text = format!(
            ".visible .entry {name}(\n\t.param .u64 {name}_param_0\n)\n{{\n\t.reg .pred %p<4>;\n\t\
             .reg .b32 %r<8>;\n\t.reg .b64 %rd<4>;\n\t.shared .align 8 .b8 buffer[64];\n\t\
             ld.param.u64 %rd1, [{name}_param_0];\n\tmov.u32 %r1, %tid.x;\n\t\
             mul.wide.u32 %rd2, %r1, 4;\n\tadd.s64 %rd2, %rd1, %rd2;\n{body}\n\tret;\n}}\n"
        );
        Ok(StreamOp::Launch(Launch {
            kernel: Arc::new(Module::new(&text).kernel(name)?),
            parameters: address.to_le_bytes().to_vec(),
            grid: [1; 3],
            threads,
            dynamic_shared: 0,
            cooperative: false,
        }))
    }

    /// Executes what `enqueue` enqueues, given the address of zeros, and returns these.
    fn execute(
        numbers: usize,
        seed: u64,
        enqueue: impl FnOnce(&mut Scheduler, u64) -> Result<(), Fault>,
    ) -> Result<Vec<u32>, Fault> {
        let mut memory = Memory::default();
        let start = memory.allocate(4 * numbers, 1 << 20).expect("below the capacity");
        // SAFETY: just allocated.
        let values = unsafe { std::slice::from_raw_parts_mut(start as *mut u32, numbers) };
        values.fill(0);
        let mut scheduler = Scheduler::new(seed, 0);
        enqueue(&mut scheduler, start)?;
        scheduler.run(&memory, |_| false).map(|()| values.to_vec())
    }

    /// Runs one block of a kernel whose only parameter is the address of zeros, and returns them.
    fn run(body: &str, threads: u32, numbers: usize, seed: u64) -> Result<Vec<u32>, Fault> {
        execute(numbers, seed, |scheduler, start| {
            scheduler.enqueue(0, launch("test", body, threads, start)?);
            Ok(())
        })
    }

    /// Runs one warp of each kernel, in the stream of this number.
    fn run_kernels(
        kernels: &[(usize, &str, &str)],
        numbers: usize,
        seed: u64,
    ) -> Result<Vec<u32>, Fault> {
        execute(numbers, seed, |scheduler, start| {
            for &(stream, name, body) in kernels {
                scheduler.enqueue(stream, launch(name, body, 32, start)?);
            }
            Ok(())
        })
    }

    /// Stores the first number, and waits for the second one, or the other way round.
    const STORES_FIRST: &str = "st.relaxed.gpu.global.u32 [%rd1], 7;\n\
        again: ld.relaxed.gpu.global.u32 %r2, [%rd1+4];\nsetp.eq.u32 %p1, %r2, 0;\n\
        @%p1 bra again;\nst.global.u32 [%rd1+8], %r2;";
    const STORES_SECOND: &str = "again: ld.relaxed.gpu.global.u32 %r2, [%rd1];\n\
        setp.eq.u32 %p1, %r2, 0;\n@%p1 bra again;\nadd.u32 %r2, %r2, 1;\n\
        st.relaxed.gpu.global.u32 [%rd1+4], %r2;";

    #[test]
    fn launches_of_two_streams_wait_for_each_other() {
        for seed in 0..20 {
            let kernels = [(1, "first", STORES_FIRST), (2, "second", STORES_SECOND)];
            assert_eq!(run_kernels(&kernels, 3, seed).unwrap(), [7, 8, 8]);
        }
    }

    #[test]
    fn launches_that_wait_for_each_other_in_one_stream_are_deadlocked() {
        let kernels = [(1, "first", STORES_FIRST), (1, "second", STORES_SECOND)];
        let fault = run_kernels(&kernels, 3, 0).unwrap_err().0;
        let expected = "first: deadlock; operations behind it in its stream: 1\n  block [0, 0, 0]";
        assert!(fault.starts_with(expected) && !fault.contains("second"), "{fault}");
    }

    #[test]
    fn a_deadlock_of_two_streams_lists_both_launches() {
        let kernels = [(1, "first", STORES_SECOND), (2, "second", STORES_SECOND)];
        let fault = run_kernels(&kernels, 3, 0).unwrap_err().0;
        assert!(fault.contains("first: deadlock\n"), "{fault}");
        assert!(fault.contains("second: deadlock\n"), "{fault}");
    }

    #[test]
    fn time_does_not_pass_fast_while_one_of_two_launches_has_effects() {
        // One stores a hundred thousand numbers, and the other would give up after a second.
        let stores = "mov.u32 %r2, 0;\nagain: add.u32 %r2, %r2, 1;\nst.global.u32 [%rd1+4], %r2;\n\
                      setp.lt.u32 %p1, %r2, 100000;\n@%p1 bra again;\n\
                      st.relaxed.gpu.global.u32 [%rd1], 7;";
        let waits = "again: mov.u64 %rd3, %globaltimer;\nsetp.gt.u64 %p1, %rd3, 1000000000;\n\
                     @%p1 bra late;\nld.relaxed.gpu.global.u32 %r2, [%rd1];\n\
                     setp.eq.u32 %p1, %r2, 0;\n@%p1 bra again;\nst.global.u32 [%rd1+8], %r2;\n\
                     bra end;\nlate: trap;\nend:";
        let kernels = [(1, "stores", stores), (2, "waits", waits)];
        assert_eq!(run_kernels(&kernels, 3, 0).unwrap(), [7, 100_000, 7]);
        let trap = run_kernels(&kernels[1..], 3, 0).unwrap_err().0;
        assert!(trap.starts_with("waits: trap"), "{trap}");
    }

    #[test]
    fn a_wait_orders_launches_of_two_streams() {
        let stores = "mov.u32 %r2, 0;\nagain: add.u32 %r2, %r2, 1;\nst.global.u32 [%rd1], %r2;\n\
                      setp.lt.u32 %p1, %r2, 1000;\n@%p1 bra again;";
        let copies = "ld.global.u32 %r2, [%rd1];\nst.global.u32 [%rd1+4], %r2;";
        let copied = |seed, waits: bool| {
            let run = execute(2, seed, |scheduler, start| {
                let moment = Moment::default();
                if waits {
                    scheduler.enqueue(2, StreamOp::Wait(Arc::clone(&moment)));
                }
                scheduler.enqueue(2, launch("copies", copies, 32, start)?);
                scheduler.enqueue(1, launch("stores", stores, 32, start)?);
                scheduler.enqueue(1, StreamOp::Record(moment));
                Ok(())
            });
            run.unwrap()[1]
        };
        assert!((0..20).all(|seed| copied(seed, true) == 1000));
        assert!((0..20).any(|seed| copied(seed, false) < 1000));
    }

    #[test]
    fn the_order_of_slices_depends_on_the_seed_alone() {
        // Both launches take places in a list, and write their numbers there.
        let takes = |who: u32| {
            format!(
                "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra end;\nmov.u32 %r3, 0;\n\
                 again: atom.global.add.u32 %r2, [%rd1], 1;\nmul.wide.u32 %rd2, %r2, 4;\n\
                 add.s64 %rd2, %rd1, %rd2;\nst.global.u32 [%rd2+4], {who};\n\
                 add.u32 %r3, %r3, 1;\nsetp.lt.u32 %p2, %r3, 500;\n@%p2 bra again;\nend:"
            )
        };
        let [first, second] = [1, 2].map(takes);
        let kernels = [(1, "first", first.as_str()), (2, "second", second.as_str())];
        let order = |seed| run_kernels(&kernels, 1001, seed).unwrap();
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
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
