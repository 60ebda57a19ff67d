//! A kernel's run: its blocks, and whose turn it is.

use std::cell::Cell;

use crate::Fault;
use crate::block::Block;
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::warp::{Stop, Warp};

/// Blocks that run at the same time if they do not have to.
const AT_ONCE: usize = 2;
/// The most instructions of a turn.
const TURN: usize = 400;
/// After so many turns for each warp in which nobody changes anything, nobody will.
const PATIENCE: u64 = 2000;

/// Blocks and their warps, kept from one kernel to the next.
pub(crate) type Blocks = Vec<(Block, Vec<Warp>)>;

/// What all threads of a kernel's run share.
pub(crate) struct Run<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) parameters: &'a [u8],
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    /// Shared memory beyond the kernel's own.
    pub(crate) shared_bytes: usize,
    /// Whether blocks wait for each other, so that all have to run at the same time.
    pub(crate) meets: bool,
    memory: &'a Memory,
    /// The range where an address was found last.
    latest: Cell<[u64; 2]>,
    state: Cell<u64>,
}

impl<'a> Run<'a> {
    /// Of a kernel, with turns that follow from a number.
    pub(crate) fn new(
        kernel: &'a Kernel,
        parameters: &'a [u8],
        memory: &'a Memory,
        seed: u64,
    ) -> Run<'a> {
        Run {
            kernel,
            parameters,
            grid: [1; 3],
            threads: 32,
            shared_bytes: 0,
            meets: false,
            memory,
            latest: Cell::new([0; 2]),
            state: Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
        }
    }

    /// A number below another.
    pub(crate) fn random(&self, below: usize) -> usize {
        let mut x = self.state.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state.set(x);
        (x >> 16) as usize % below
    }

    /// True once in so many times.
    pub(crate) fn toss(&self, times: usize) -> bool {
        self.random(times) == 0
    }

    /// Whether so many bytes lie in the range where an address was found last.
    #[inline(always)]
    fn is_latest(&self, address: u64, bytes: usize) -> bool {
        let [start, end] = self.latest.get();
        address >= start && bytes as u64 <= end.saturating_sub(address)
    }

    /// Where so many bytes are, if they lie where others were found, at a multiple of their number.
    #[inline(always)]
    pub(crate) fn near(&self, address: u64, bytes: usize) -> Option<*mut u8> {
        let is_there = self.is_latest(address, bytes) && address.is_multiple_of(bytes as u64);
        is_there.then_some(address as *mut u8)
    }

    /// Where so many bytes of the device's memory are, at a multiple of some number.
    pub(crate) fn global(
        &self,
        address: u64,
        bytes: usize,
        alignment: usize,
    ) -> Result<*mut u8, Fault> {
        if !self.is_latest(address, bytes) {
            self.latest.set(self.memory.range(address, bytes)?);
        }
        if !address.is_multiple_of(alignment as u64) {
            return Err(Fault(format!(
                "memory at {address:#x}, which is no multiple of {alignment}"
            )));
        }
        Ok(address as *mut u8)
    }

    /// Runs all blocks.
    pub(crate) fn all(&self, blocks: &mut Blocks) -> Result<(), Fault> {
        if !self.threads.is_multiple_of(32) {
            let (name, threads) = (&self.kernel.name, self.threads);
            return Err(Fault(format!("{name}: {threads} threads are no whole warps")));
        }
        let [x, y, z] = self.grid.map(|n| n as usize);
        let count = x * y * z;
        let at_once = if self.meets { count } else { count.min(AT_ONCE) };
        blocks.resize_with(at_once.max(blocks.len()), Default::default);
        let blocks = &mut blocks[..at_once];
        let mut ready = Vec::new();
        let mut begun = 0;
        let mut begin =
            |slot: usize, (block, warps): &mut (Block, Vec<Warp>), ready: &mut Vec<_>| {
                if begun < count {
                    let index = [begun % x, begun / x % y, begun / x / y].map(|n| n as u32);
                    block.begin(self, index, warps);
                    ready.extend((0..warps.len()).map(|warp| (slot, warp)));
                    begun += 1;
                }
            };
        for (slot, block) in blocks.iter_mut().enumerate() {
            begin(slot, block, &mut ready);
        }
        let mut quiet = 0;
        while !ready.is_empty() {
            let turn = self.random(ready.len());
            let (slot, number) = ready[turn];
            let (block, warps) = &mut blocks[slot];
            let before = block.effects;
            if self.toss(4) {
                block.end_copy(self)?;
            }
            let most = 1 + self.random(TURN) as u32;
            match warps[number].run(self, block, number, most)? {
                Stop::Paused => {}
                Stop::Waits => drop(ready.swap_remove(turn)),
                Stop::Done => {
                    ready.swap_remove(turn);
                    block.end_warp();
                }
            }
            ready.extend(block.woken.drain(..).map(|warp| (slot, warp)));
            quiet = if block.effects == before { quiet + 1 } else { 0 };
            if quiet > PATIENCE * ready.len() as u64 {
                break;
            }
            if block.live == 0 {
                block
                    .end()
                    .map_err(|Fault(text)| Fault(format!("{}: {text}", self.kernel.name)))?;
                begin(slot, &mut blocks[slot], &mut ready);
            }
        }
        if blocks.iter().all(|(block, _)| block.live == 0) {
            return Ok(());
        }
        Err(self.stuck(blocks))
    }

    /// Says where everybody waits.
    fn stuck(&self, blocks: &[(Block, Vec<Warp>)]) -> Fault {
        let mut text = format!("{}: threads wait for each other for ever", self.kernel.name);
        for (block, warps) in blocks.iter().filter(|(block, _)| block.live > 0).take(4) {
            for (number, warp) in warps.iter().enumerate() {
                let lines = warp.lines(self.kernel);
                text += &format!("\n  block {:?}, warp {number}: at lines {lines:?}", block.index);
            }
        }
        Fault(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::Module;

    /// Runs a kernel of so many threads, whose only parameter is the address of numbers, on zeros.
    fn run(body: &str, threads: u32, numbers: usize, seed: u64) -> Result<Vec<u32>, Fault> {
        let text = format!(
            ".visible .entry test(\n\t.param .u64 test_param_0\n)\n{{\n\t.reg .pred %p<4>;\n\t\
             .reg .b32 %r<8>;\n\t.reg .b64 %rd<4>;\n\t.shared .align 8 .b8 room[64];\n\t\
             ld.param.u64 %rd1, [test_param_0];\n\tmov.u32 %r1, %tid.x;\n\t\
             mul.wide.u32 %rd2, %r1, 4;\n\tadd.s64 %rd2, %rd1, %rd2;\n{body}\n\tret;\n}}\n"
        );
        let kernel = Module::new(&text).kernel("test")?;
        let mut memory = Memory::default();
        let start = memory.take(4 * numbers, 1 << 20).expect("there is room");
        // SAFETY: taken just now.
        let values = unsafe { std::slice::from_raw_parts_mut(start as *mut u32, numbers) };
        values.fill(0);
        let parameters = start.to_le_bytes();
        let mut run = Run::new(&kernel, &parameters, &memory, seed);
        run.threads = threads;
        run.all(&mut Blocks::default()).map(|()| values.to_vec())
    }

    #[test]
    fn threads_part_and_meet_again() {
        // Each thread counts to its number, then all of a warp add up what they counted.
        let body = "mov.u32 %r2, 0;\nagain: setp.ge.u32 %p1, %r2, %r1;\n@%p1 bra done;\n\
                    add.s32 %r2, %r2, 1;\nbra again;\ndone: redux.sync.add.u32 %r3, %r2, -1;\n\
                    st.global.u32 [%rd2], %r3;";
        assert_eq!(run(body, 32, 32, 1).unwrap(), [496; 32]);
    }

    #[test]
    fn warps_meet_at_barriers_whoever_comes_first() {
        // Thread 0 writes, and the others read behind a barrier.
        let body = "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra wait;\nst.shared.u32 [room], 7;\n\
                    wait: bar.sync 0;\nld.shared.u32 %r2, [room];\nst.global.u32 [%rd2], %r2;";
        for seed in 0..20 {
            assert_eq!(run(body, 128, 128, seed).unwrap(), [7; 128]);
        }
    }

    #[test]
    fn nobody_waits_for_threads_that_have_ended() {
        let body = "setp.gt.u32 %p1, %r1, 15;\n@%p1 bra end;\nbar.warp.sync -1;\n\
                    st.global.u32 [%rd2], 1;\nend:";
        assert_eq!(run(body, 32, 32, 1).unwrap()[..17], [[1; 16].as_slice(), &[0]].concat());
    }

    #[test]
    fn what_a_card_would_not_say_is_said() {
        let say = |body: &str| run(body, 64, 32, 0).unwrap_err().0;
        let beyond = say("st.global.u32 [%rd2], 1;");
        assert!(beyond.contains("4 bytes 128 behind the start of 128"), "{beyond}");
        let odd = say("st.global.u32 [%rd1+2], 1;");
        assert!(odd.contains("no multiple of 4"), "{odd}");
        let shared = say("ld.shared.u32 %r2, [room+1024];");
        assert!(shared.contains("of shared memory at 1024"), "{shared}");
        let alone = say("setp.gt.u32 %p1, %r1, 31;\n@%p1 bra end;\nbar.sync 1, 64;\nend:");
        assert!(alone.contains("wait for each other for ever"), "{alone}");
        let parted =
            say("setp.gt.u32 %p1, %r1, 15;\n@%p1 bra some;\nbar.warp.sync -1;\nbra end;\n\
             some: bar.warp.sync -1;\nend:");
        assert!(parted.contains("its threads, at lines [15, 17]"), "{parted}");
        let spins = say("again: ld.shared.u32 %r2, [room];\nsetp.ne.u32 %p1, %r2, 1;\n\
                         @%p1 bra again;");
        assert!(spins.contains("wait for each other for ever"), "{spins}");
        let parted = run("", 40, 64, 0).unwrap_err().0;
        assert!(parted.contains("test: 40 threads are no whole warps"), "{parted}");
        let late = say("setp.ne.u32 %p1, %r1, 0;\n@%p1 bra end;\nmov.u32 %r2, room;\n\
                        mbarrier.init.shared.b64 [%r2], 1;\nadd.u32 %r4, %r2, 16;\n\
                        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                        [%r4], [%rd1], 16, [%r2];\nend:");
        assert!(late.contains("ended before 1 copies"), "{late}");
        let unknown = say("tanh.approx.f32 %r1, %r2;");
        assert!(unknown.contains("line 13 of its PTX: unknown instruction tanh"), "{unknown}");
    }
}
