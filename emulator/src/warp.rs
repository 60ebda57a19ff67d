//! A warp: 32 threads that run the same instructions as long as their branches agree.

mod access;

use crate::Fault;
use crate::block::Block;
use crate::grid::Run;
use crate::kernel::{Instruction, Kernel, NONE, Op, Register, SPECIALS, Shuffle, Vote};
use crate::lanes::{self, Lanes, Value};
use crate::matrix;

/// All threads of a warp.
pub(crate) const ALL: u32 = u32::MAX;

/// Threads that are at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    at: usize,
    threads: u32,
    /// For others of the warp, which have to come here.
    waits: bool,
}

/// Why a warp stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stop {
    /// It can go on.
    Paused,
    /// It waits at a barrier.
    Waits,
    Done,
}

#[derive(Default)]
pub(crate) struct Warp {
    pub(crate) registers: Vec<Lanes>,
    pub(crate) predicates: Vec<u32>,
    groups: Vec<Group>,
    /// What each thread has to itself, one behind the other.
    local: Vec<u8>,
    copies: Vec<access::Copy>,
    /// Groups of copies of each thread.
    committed: [u32; 32],
}

/// The numbers of the threads of a mask.
pub(crate) fn threads_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let thread = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (thread < 32).then_some(thread as usize)
    })
}

impl Warp {
    /// Makes it the warp of a block with some first thread, at a kernel's beginning.
    pub(crate) fn begin(&mut self, kernel: &Kernel, first: u32, specials: &[u64; SPECIALS.len()]) {
        let count = self.registers.len().max(kernel.registers as usize);
        self.registers.resize(count, Lanes::all(u64::MAX));
        self.predicates.resize(kernel.predicates as usize, ALL);
        self.local.resize(kernel.local_bytes * 32, 0xff);
        for (register, &value) in self.registers.iter_mut().zip(specials) {
            *register = Lanes::all(value);
        }
        self.registers[0].low = std::array::from_fn(|i| first + i as u32);
        let lane = SPECIALS.iter().position(|&name| name == "%laneid").expect("one of them");
        self.registers[lane].low = std::array::from_fn(|i| i as u32);
        for &(register, value) in &kernel.constants {
            self.registers[register as usize] = Lanes::all(value);
        }
        for &(predicate, holds) in &kernel.truths {
            self.predicates[predicate as usize] = if holds { ALL } else { 0 };
        }
        self.groups = vec![Group { at: 0, threads: ALL, waits: false }];
        self.copies.clear();
        self.committed = [0; 32];
    }

    /// The lines where its threads are.
    pub(crate) fn lines(&self, kernel: &Kernel) -> Vec<u32> {
        self.groups.iter().map(|group| kernel.code[group.at].line).collect()
    }

    /// Runs so many instructions at most.
    pub(crate) fn run(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        number: usize,
        most: u32,
    ) -> Result<Stop, Fault> {
        let mut done = 0;
        loop {
            let Some(current) = self.next_group() else {
                if self.groups.is_empty() {
                    return Ok(Stop::Done);
                }
                let (name, lines) = (&run.kernel.name, self.lines(run.kernel));
                return Err(Fault(format!(
                    "{name}, block {:?}, warp {number}: its threads, at lines {lines:?}, wait for \
                     each other for ever",
                    block.index
                )));
            };
            loop {
                let at = self.groups[current].at;
                let instruction = &run.kernel.code[at];
                let stop = self.step(run, block, number, current, instruction);
                let stop = stop.map_err(|Fault(text)| {
                    let (name, line) = (&run.kernel.name, instruction.line);
                    let [x, y, z] = block.index;
                    Fault(format!("{name}, block {x},{y},{z}, warp {number}, line {line}: {text}"))
                })?;
                done += 1;
                match stop {
                    After::Next => {}
                    After::Look => break,
                    After::Pause => return Ok(Stop::Paused),
                    After::Wait => return Ok(Stop::Waits),
                }
                // Threads that are behind come first, so that all meet again.
                if self.groups.len() > 1 || done >= most {
                    break;
                }
            }
            if done >= most {
                return Ok(if self.groups.is_empty() { Stop::Done } else { Stop::Paused });
            }
        }
    }

    /// Joins groups that have met, and gives the one that is farthest behind of those that can run.
    fn next_group(&mut self) -> Option<usize> {
        if self.groups.len() > 1 {
            self.groups.sort_by_key(|group| group.at);
            self.groups.dedup_by(|group, kept| {
                let meets = group.at == kept.at;
                if meets {
                    kept.threads |= group.threads;
                    kept.waits = false;
                }
                meets
            });
        }
        self.groups.iter().position(|group| !group.waits)
    }

    fn live(&self) -> u32 {
        self.groups.iter().fold(0, |mask, group| mask | group.threads)
    }

    fn lanes(&self, register: Register) -> &Lanes {
        &self.registers[register as usize]
    }

    /// An operand's value in a thread.
    fn get(&self, register: Register, thread: usize) -> u64 {
        self.lanes(register).get(thread)
    }

    /// An operand's value in the first of all threads.
    fn first(&self, register: Register) -> u64 {
        self.get(register, 0)
    }

    pub(crate) fn put<T: Value>(&mut self, register: Register, threads: u32, values: [T; 32]) {
        lanes::put(&mut self.registers[register as usize], threads, values);
    }

    fn put_predicate(&mut self, predicate: Register, threads: u32, values: u32) {
        let predicate = &mut self.predicates[predicate as usize];
        *predicate = *predicate & !threads | values & threads;
    }

    /// Runs an instruction for a group of threads.
    fn step(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        number: usize,
        current: usize,
        i: &Instruction,
    ) -> Result<After, Fault> {
        let all = self.groups[current].threads;
        let threads = match i.guard {
            None => all,
            Some((predicate, true)) => all & self.predicates[predicate as usize],
            Some((predicate, false)) => all & !self.predicates[predicate as usize],
        };
        if threads == 0 {
            self.groups[current].at += 1;
            return Ok(After::Next);
        }
        if let Some(members) = self.members(i, threads)
            && members & self.live() & !threads != 0
        {
            self.groups[current].waits = true;
            return Ok(After::Look);
        }
        let mut after = After::Next;
        match i.op {
            Op::Map(_) | Op::Test(_) | Op::Logic(_) | Op::Select | Op::Join(_) | Op::Split(_) => {
                self.compute(i, threads)
            }
            Op::Load(access) => self.load(run, block, i, access, threads)?,
            Op::Store(access) => self.store(run, block, i, access, threads)?,
            Op::Add(access) => self.add(run, block, i, access, threads)?,
            Op::Branch | Op::Return => {
                if let Some(after) = self.leave(i, current, threads) {
                    return Ok(after);
                }
            }
            Op::Shuffle(_) | Op::Vote(_) | Op::Total => self.exchange(i, threads),
            Op::Meet | Op::Nothing => {}
            Op::Yield => after = After::Pause,
            Op::Barrier { waits } => {
                let [id, of, ..] = i.args;
                let of = (of != NONE).then(|| self.first(of) as u32);
                let id = self.first(id) as u32 as usize;
                if !block.arrive(id, of, waits.then_some(number))? {
                    after = After::Wait;
                }
            }
            Op::Copy | Op::Commit | Op::WaitGroups | Op::WaitCopies => {
                self.copies(run, block, i, threads)?;
            }
            Op::Init | Op::Expect | Op::Arrive => self.tell(block, i, threads)?,
            Op::HasPassed { waits } => {
                if !self.has_passed(block, i, threads)? && waits {
                    after = After::Pause;
                }
            }
            Op::Bulk => self.send(run, block, i, threads)?,
            Op::LoadMatrix { .. }
            | Op::Multiply
            | Op::MultiplySparse
            | Op::MultiplyGroup { .. } => self.multiply(block, i)?,
        }
        if let Some(group) = self.groups.get_mut(current) {
            group.at += 1;
        }
        Ok(after)
    }

    /// Registers and predicates of others.
    fn compute(&mut self, i: &Instruction, threads: u32) {
        let [a, b, c, d, ..] = i.args;
        match i.op {
            Op::Map(f) => f(&mut self.registers, &i.args, threads),
            Op::Test(f) => {
                let holds = f(&self.registers, &i.args);
                self.put_predicate(a, threads, holds);
            }
            Op::Logic(f) => {
                let [b, c] = [b, c].map(|p| self.predicates[p as usize]);
                self.put_predicate(a, threads, f(b, c));
            }
            Op::Select => {
                let first = self.predicates[d as usize];
                let values = std::array::from_fn(|thread| {
                    self.get(if first >> thread & 1 == 1 { b } else { c }, thread)
                });
                self.put(a, threads, values);
            }
            Op::Join(bits) => {
                let values = std::array::from_fn(|thread| {
                    (0..).zip(&i.list).fold(0, |whole, (n, &part)| {
                        whole | (self.get(part, thread) & ((1 << bits) - 1)) << (n * bits)
                    })
                });
                self.put(a, threads, values);
            }
            Op::Split(bits) => {
                let whole = *self.lanes(a);
                for (n, &part) in (0..).zip(&i.list) {
                    let value = |thread| whole.get(thread) >> (n * bits) & ((1 << bits) - 1);
                    self.put(part, threads, std::array::from_fn(value));
                }
            }
            _ => unreachable!("`step` knows better"),
        }
    }

    /// A branch, or a thread's end: what follows if it is not the next instruction of all.
    fn leave(&mut self, i: &Instruction, current: usize, threads: u32) -> Option<After> {
        let group = &mut self.groups[current];
        let stays = group.threads & !threads;
        match i.op {
            Op::Branch if stays == 0 => {
                group.at = i.offset as usize;
                return Some(After::Next);
            }
            Op::Branch => {
                self.groups.push(Group { at: i.offset as usize, threads, waits: false });
            }
            // Others need not wait for what has ended.
            _ => self.groups.iter_mut().for_each(|group| group.waits = false),
        }
        if stays == 0 {
            self.groups.remove(current);
            return Some(After::Look);
        }
        self.groups[current].threads = stays;
        None
    }

    /// What threads learn of each other.
    fn exchange(&mut self, i: &Instruction, threads: u32) {
        let [a, b, ..] = i.args;
        match i.op {
            Op::Shuffle(kind) => self.shuffle(i, kind, threads),
            Op::Vote(kind) => {
                let members = self.members(i, threads).unwrap_or(0);
                let holds = self.predicates[b as usize];
                match kind {
                    Vote::All => {
                        self.put_predicate(
                            a,
                            threads,
                            if holds & members == members { ALL } else { 0 },
                        );
                    }
                    Vote::Any => {
                        self.put_predicate(a, threads, if holds & members != 0 { ALL } else { 0 });
                    }
                    Vote::Ballot => self.put(a, threads, [holds & members; 32]),
                }
            }
            Op::Total => {
                let sum =
                    threads_of(threads).fold(0u32, |sum, i| sum.wrapping_add(self.lanes(b).low[i]));
                self.put(a, threads, [sum; 32]);
            }
            _ => unreachable!("`step` knows better"),
        }
    }

    /// Tells barriers in shared memory.
    fn tell(&mut self, block: &mut Block, i: &Instruction, threads: u32) -> Result<(), Fault> {
        let [address, value, ..] = i.args;
        for thread in threads_of(threads) {
            let value = if value == NONE { 0 } else { self.get(value, thread) };
            block.phases(self.get(address, thread), |phases| match i.op {
                Op::Init => phases.init(value as u32),
                Op::Expect => phases.expect(value as i32),
                _ => phases.arrive(),
            })?;
            block.effects += 1;
        }
        Ok(())
    }

    /// Asks barriers in shared memory whether a phase is over; whether it is in all threads.
    fn has_passed(
        &mut self,
        block: &mut Block,
        i: &Instruction,
        threads: u32,
    ) -> Result<bool, Fault> {
        let [to, address, parity, ..] = i.args;
        let mut passed = 0;
        for thread in threads_of(threads) {
            let parity = self.get(parity, thread) & 1;
            block.phases(self.get(address, thread), |phases| {
                passed |= u32::from(phases.parity() != parity) << thread;
            })?;
        }
        self.put_predicate(to, threads, passed);
        Ok(passed == threads)
    }

    /// Begins copies that run by themselves.
    fn send(
        &self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        threads: u32,
    ) -> Result<(), Fault> {
        threads_of(threads).try_for_each(|thread| {
            let [to, from, bytes, barrier] = [0, 1, 2, 3].map(|n| self.get(i.args[n], thread));
            block.send(run, to, from, bytes as u32 as usize, barrier)
        })
    }

    /// Products of matrices, and what they read.
    fn multiply(&mut self, block: &mut Block, i: &Instruction) -> Result<(), Fault> {
        let [a, b, ..] = i.args;
        match i.op {
            Op::LoadMatrix { transposed } => {
                let addresses = *self.lanes(a);
                let mut rows = [[0; 16]; 32];
                for (thread, row) in rows.iter_mut().enumerate() {
                    let address = addresses.get(thread).wrapping_add_signed(i.offset);
                    row.copy_from_slice(block.shared(address, 16, 16)?);
                }
                matrix::load(self, &i.list, &rows, transposed);
            }
            Op::Multiply => matrix::multiply(self, &i.list),
            Op::MultiplySparse => {
                let selector = self.first(b) as usize;
                matrix::multiply_sparse(self, &i.list, a, selector);
            }
            Op::MultiplyGroup { columns } => {
                let descriptor = self.first(a);
                let adds = self.predicates[b as usize] & 1 == 1;
                matrix::multiply_group(self, &i.list, columns, descriptor, adds, block)?;
            }
            _ => unreachable!("`step` knows better"),
        }
        Ok(())
    }

    /// The threads that have to run an instruction at the same time.
    fn members(&self, i: &Instruction, threads: u32) -> Option<u32> {
        let mask = |register: Register| {
            let first = threads.trailing_zeros() as usize % 32;
            Some(self.lanes(register).low[first])
        };
        match i.op {
            Op::Meet => mask(i.args[0]),
            Op::Vote(_) | Op::Total => mask(i.args[2]),
            Op::Shuffle(_) => mask(if i.args[5] == NONE { i.args[4] } else { i.args[5] }),
            Op::Barrier { .. }
            | Op::LoadMatrix { .. }
            | Op::Multiply
            | Op::MultiplySparse
            | Op::MultiplyGroup { .. } => Some(ALL),
            _ => None,
        }
    }

    fn shuffle(&mut self, i: &Instruction, kind: Shuffle, threads: u32) {
        let [to, .., last] = i.args;
        let (found, from) = if last == NONE { (None, 1) } else { (Some(i.args[1]), 2) };
        let [values, by, clamp] = [0, 1, 2].map(|n| &self.lanes(i.args[from + n]).low);
        let mut in_range = 0;
        let out: [u32; 32] = std::array::from_fn(|thread| {
            let (lane, by, segment) = (thread as u32, by[thread] & 31, clamp[thread] >> 8 & 31);
            let clamp = clamp[thread] & 31;
            let least = lane & segment;
            let most = least | clamp & !segment;
            let (other, is_there) = match kind {
                Shuffle::Xor => (lane ^ by, lane ^ by <= most),
                Shuffle::From => (least | by & !segment, least | by & !segment <= most),
                Shuffle::Up => (lane.wrapping_sub(by), lane >= by && lane - by >= most),
                Shuffle::Down => (lane + by, lane + by <= most),
            };
            in_range |= u32::from(is_there) << thread;
            values[if is_there { other as usize % 32 } else { thread }]
        });
        self.put(to, threads, out);
        if let Some(found) = found {
            self.put_predicate(found, threads, in_range);
        }
    }
}

/// What follows an instruction.
enum After {
    Next,
    /// Another group may have to run.
    Look,
    Pause,
    Wait,
}
