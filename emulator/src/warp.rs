//! A warp: 32 lanes that execute the same instructions until a branch diverges.

mod access;

use std::thread;
use std::time::Duration;

use crate::Fault;
use crate::async_copy::PendingCopy;
use crate::block::Block;
use crate::kernel::{
    Compute, Exchange, Instruction, Kernel, Matrix, MbarrierUpdate, NONE, Op, Register,
    SPECIAL_REGISTERS, Shuffle, THREAD, Vote,
};
use crate::lanes::{self, ALL, Lanes, Value, lanes_of};
use crate::launch::Run;
use crate::matrix::{self, Piece, Wgmma};

/// Nanoseconds of the naps of kernels that wait for a thread of the host.
const HOST_NAP: u32 = 1000;

/// The lanes of a diverged warp with the same program counter.
#[derive(Clone, Copy, Debug)]
struct Path {
    pc: usize,
    mask: u32,
    /// Whether it waits for other lanes of the warp to reconverge here.
    waits: bool,
}

/// Why a warp stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stop {
    /// It is ready to run.
    Yielded,
    /// It waits at a barrier.
    Blocked,
    Exited,
    /// It ends the launch with an error.
    Trapped,
}

#[derive(Default)]
pub(crate) struct Warp {
    registers: Vec<Lanes>,
    predicates: Vec<u32>,
    paths: Vec<Path>,
    /// The local memory of each lane, one after the other.
    local: Vec<u8>,
    pending_copies: Vec<PendingCopy>,
    /// Committed groups of asynchronous copies of each lane.
    committed_groups: [u32; 32],
    /// What each `wgmma` reads of shared memory that was not waited for, with its group.
    pending_products: Vec<(u32, Vec<Piece>)>,
    /// Committed groups of `wgmma`.
    committed_products: u32,
}

impl Warp {
    /// Resets the warp to the start of a kernel. `specials` are the special registers of its first
    /// thread, whose `%tid.x` is `first_thread`.
    pub(crate) fn start(
        &mut self,
        kernel: &Kernel,
        first_thread: u32,
        specials: &[u64; SPECIAL_REGISTERS.len()],
    ) {
        let count = self.registers.len().max(kernel.registers as usize);
        self.registers.resize(count, Lanes::all(u64::MAX));
        self.predicates.resize(kernel.predicates as usize, ALL);
        self.local.resize(kernel.local_bytes * 32, 0xff);
        for (register, &value) in self.registers.iter_mut().zip(specials) {
            *register = Lanes::all(value);
        }
        self.registers[0].low = std::array::from_fn(|lane| first_thread + lane as u32);
        let lane_id = SPECIAL_REGISTERS.iter().position(|&name| name == "%laneid");
        self.registers[lane_id.expect("one of them")].low = std::array::from_fn(|lane| lane as u32);
        for &(register, value) in &kernel.constants {
            self.registers[register as usize] = Lanes::all(value);
        }
        for &(predicate, value) in &kernel.constant_predicates {
            self.predicates[predicate as usize] = if value { ALL } else { 0 };
        }
        self.paths = vec![Path { pc: 0, mask: ALL, waits: false }];
        self.pending_copies.clear();
        self.committed_groups = [0; 32];
        self.pending_products.clear();
        self.committed_products = 0;
    }

    /// Sets `%globaltimer`, the last special register.
    pub(crate) fn set_clock(&mut self, nanoseconds: u64) {
        self.registers[SPECIAL_REGISTERS.len() - 1] = Lanes::all(nanoseconds);
    }

    /// The PTX lines of its paths.
    pub(crate) fn lines(&self, kernel: &Kernel) -> Vec<u32> {
        self.paths.iter().map(|path| kernel.code[path.pc].line).collect()
    }

    /// Runs at most `limit` instructions of warp `number` of a block.
    pub(crate) fn run(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        number: usize,
        limit: u32,
    ) -> Result<Stop, Fault> {
        let mut executed = 0;
        loop {
            let Some(current) = self.next_path() else {
                if self.paths.is_empty() {
                    return Ok(Stop::Exited);
                }
                let (name, lines) = (&run.kernel.name, self.lines(run.kernel));
                return Err(Fault(format!(
                    "{name}, block {:?}, warp {number}: deadlock of its lanes, at lines {lines:?}",
                    block.index
                )));
            };
            loop {
                let instruction = &run.kernel.code[self.paths[current].pc];
                let next = self.step(run, block, number, current, instruction);
                let next = next.map_err(|Fault(text)| {
                    let (name, line) = (&run.kernel.name, instruction.line);
                    let [x, y, z] = block.index;
                    Fault(format!("{name}, block {x},{y},{z}, warp {number}, line {line}: {text}"))
                })?;
                executed += 1;
                match next {
                    Next::Continue => {}
                    Next::Reschedule => break,
                    Next::Yield => return Ok(Stop::Yielded),
                    Next::Block => return Ok(Stop::Blocked),
                    Next::Trap => return Ok(Stop::Trapped),
                }
                // The path with the lowest pc runs first, so that diverged paths reconverge.
                if self.paths.len() > 1 || executed >= limit {
                    break;
                }
            }
            if executed >= limit {
                return Ok(if self.paths.is_empty() { Stop::Exited } else { Stop::Yielded });
            }
        }
    }

    /// Reconverges paths with the same pc, and returns the runnable path with the lowest pc.
    fn next_path(&mut self) -> Option<usize> {
        if self.paths.len() > 1 {
            self.paths.sort_by_key(|path| path.pc);
            self.paths.dedup_by(|path, kept| {
                let reconverges = path.pc == kept.pc;
                if reconverges {
                    kept.mask |= path.mask;
                    kept.waits = false;
                }
                reconverges
            });
        }
        self.paths.iter().position(|path| !path.waits)
    }

    /// The lanes that have not exited.
    fn live(&self) -> u32 {
        self.paths.iter().fold(0, |mask, path| mask | path.mask)
    }

    fn lanes(&self, register: Register) -> &Lanes {
        &self.registers[register as usize]
    }

    /// The value of an operand in a lane.
    fn get(&self, register: Register, lane: usize) -> u64 {
        self.lanes(register).get(lane)
    }

    /// The value of a warp-uniform operand.
    fn uniform(&self, register: Register) -> u64 {
        self.get(register, 0)
    }

    fn put<T: Value>(&mut self, register: Register, mask: u32, values: [T; 32]) {
        lanes::put(&mut self.registers[register as usize], mask, values);
    }

    fn put_predicate(&mut self, predicate: Register, mask: u32, values: u32) {
        let predicate = &mut self.predicates[predicate as usize];
        *predicate = *predicate & !mask | values & mask;
    }

    /// Executes an instruction of the path `current`.
    fn step(
        &mut self,
        run: &Run<'_>,
        block: &mut Block,
        number: usize,
        current: usize,
        i: &Instruction,
    ) -> Result<Next, Fault> {
        let path_mask = self.paths[current].mask;
        let mask = match i.guard {
            None => path_mask,
            Some((predicate, true)) => path_mask & self.predicates[predicate as usize],
            Some((predicate, false)) => path_mask & !self.predicates[predicate as usize],
        };
        if mask == 0 {
            self.paths[current].pc += 1;
            return Ok(Next::Continue);
        }
        if let Some(members) = self.members(i, mask)
            && members & self.live() & !mask != 0
        {
            self.paths[current].waits = true;
            return Ok(Next::Reschedule);
        }
        let mut next = Next::Continue;
        match i.op {
            Op::Compute(compute) => self.compute(i, compute, mask),
            Op::Load(access) => self.transfer(run, block, i, access, mask, false)?,
            Op::Store(access) => self.transfer(run, block, i, access, mask, true)?,
            Op::AtomicAdd(access) => self.atomic_add(run, block, i, access, mask)?,
            Op::Branch | Op::Return => {
                if let Some(next) = self.diverge(i, current, mask) {
                    return Ok(next);
                }
            }
            Op::Exchange(exchange) => self.exchange(i, exchange, mask),
            Op::SyncWarp | Op::Nop => {}
            Op::Sleep => {
                let nanoseconds = self.get(i.args[0], mask.trailing_zeros() as usize % 32) as u32;
                if nanoseconds >= HOST_NAP {
                    // What it waits for comes from another thread, in that thread's own time.
                    block.effects += 1;
                    thread::sleep(Duration::from_nanos(nanoseconds.into()));
                }
                next = Next::Yield;
            }
            Op::Trap => next = Next::Trap,
            Op::Barrier { waits } => {
                let [id, expected, ..] = i.args;
                let expected = (expected != NONE).then(|| self.uniform(expected) as u32);
                let id = self.uniform(id) as u32 as usize;
                if !block.arrive(id, expected, waits.then_some(number))? {
                    next = Next::Block;
                }
            }
            Op::AsyncCopy(copy) => self.async_copy(run, block, i, copy, mask)?,
            Op::Mbarrier(update) => self.update_mbarrier(block, i, update, mask)?,
            Op::MbarrierTest { yields } => {
                if !self.test_mbarrier(block, i, mask)? && yields {
                    next = Next::Yield;
                }
            }
            Op::BulkCopy => self.start_bulk_copies(run, block, i, mask)?,
            Op::Matrix(op) => self.matrix(block, i, op)?,
        }
        if let Some(path) = self.paths.get_mut(current) {
            path.pc += 1;
        }
        Ok(next)
    }

    fn compute(&mut self, i: &Instruction, compute: Compute, mask: u32) {
        let [a, b, c, d, ..] = i.args;
        match compute {
            Compute::Map(f) => f(&mut self.registers, &i.args, mask),
            Compute::Compare(f) => {
                let values = f(&self.registers, &i.args);
                self.put_predicate(a, mask, values);
            }
            Compute::Logic(f) => {
                let [b, c] = [b, c].map(|p| self.predicates[p as usize]);
                self.put_predicate(a, mask, f(b, c));
            }
            Compute::Select => {
                let first = self.predicates[d as usize];
                let values = std::array::from_fn(|lane| {
                    self.get(if first >> lane & 1 == 1 { b } else { c }, lane)
                });
                self.put(a, mask, values);
            }
            Compute::Pack(bits) => {
                let values = std::array::from_fn(|lane| {
                    (0..).zip(&i.list).fold(0, |packed, (n, &part)| {
                        packed | (self.get(part, lane) & ((1 << bits) - 1)) << (n * bits)
                    })
                });
                self.put(a, mask, values);
            }
            Compute::Unpack(bits) => {
                let packed = *self.lanes(a);
                for (n, &part) in (0..).zip(&i.list) {
                    let value = |lane| packed.get(lane) >> (n * bits) & ((1 << bits) - 1);
                    self.put(part, mask, std::array::from_fn(value));
                }
            }
        }
    }

    /// A branch or return of some lanes of a path. Returns None if other lanes continue.
    fn diverge(&mut self, i: &Instruction, current: usize, mask: u32) -> Option<Next> {
        let path = &mut self.paths[current];
        let rest = path.mask & !mask;
        match i.op {
            Op::Branch if rest == 0 => {
                path.pc = i.offset as usize;
                return Some(Next::Continue);
            }
            Op::Branch => self.paths.push(Path { pc: i.offset as usize, mask, waits: false }),
            // Paths no longer wait for lanes that have exited.
            _ => self.paths.iter_mut().for_each(|path| path.waits = false),
        }
        if rest == 0 {
            self.paths.remove(current);
            return Some(Next::Reschedule);
        }
        self.paths[current].mask = rest;
        None
    }

    fn exchange(&mut self, i: &Instruction, exchange: Exchange, mask: u32) {
        let [a, b, ..] = i.args;
        match exchange {
            Exchange::Shuffle(kind) => self.shuffle(i, kind, mask),
            Exchange::Vote(kind) => {
                let members = self.members(i, mask).unwrap_or(0);
                let votes = self.predicates[b as usize] & members;
                let all_lanes = |value: bool| if value { ALL } else { 0 };
                match kind {
                    Vote::All => self.put_predicate(a, mask, all_lanes(votes == members)),
                    Vote::Any => self.put_predicate(a, mask, all_lanes(votes != 0)),
                    Vote::Ballot => self.put(a, mask, [votes; 32]),
                }
            }
            Exchange::ReduceAdd => {
                let values = &self.lanes(b).low;
                let sum = lanes_of(mask).fold(0u32, |sum, lane| sum.wrapping_add(values[lane]));
                self.put(a, mask, [sum; 32]);
            }
        }
    }

    fn update_mbarrier(
        &mut self,
        block: &mut Block,
        i: &Instruction,
        update: MbarrierUpdate,
        mask: u32,
    ) -> Result<(), Fault> {
        let [address, value, ..] = i.args;
        for lane in lanes_of(mask) {
            let value = if value == NONE { 0 } else { self.get(value, lane) };
            block.mbarrier(self.get(address, lane), |mbarrier| match update {
                MbarrierUpdate::Init => mbarrier.init(value as u32),
                MbarrierUpdate::Arrive => mbarrier.arrive(),
                MbarrierUpdate::ArriveExpectTx => mbarrier.arrive_expect_tx(value as i32),
            })?;
            block.effects += 1;
        }
        Ok(())
    }

    /// Tests whether the phase of an mbarrier has completed. Returns whether it has in all lanes.
    fn test_mbarrier(
        &mut self,
        block: &mut Block,
        i: &Instruction,
        mask: u32,
    ) -> Result<bool, Fault> {
        let [to, address, parity, ..] = i.args;
        let mut completed = 0;
        for lane in lanes_of(mask) {
            let parity = self.get(parity, lane) & 1;
            block.mbarrier(self.get(address, lane), |mbarrier| {
                completed |= u32::from(mbarrier.parity() != parity) << lane;
            })?;
        }
        self.put_predicate(to, mask, completed);
        Ok(completed == mask)
    }

    fn start_bulk_copies(
        &self,
        run: &Run<'_>,
        block: &mut Block,
        i: &Instruction,
        mask: u32,
    ) -> Result<(), Fault> {
        lanes_of(mask).try_for_each(|lane| {
            let [to, from, bytes, mbarrier] = [0, 1, 2, 3].map(|n| self.get(i.args[n], lane));
            block.start_bulk_copy(run, to, from, bytes as u32 as usize, mbarrier)
        })
    }

    fn matrix(&mut self, block: &mut Block, i: &Instruction, op: Matrix) -> Result<(), Fault> {
        let [a, b, ..] = i.args;
        match op {
            Matrix::Load { transposed } => {
                let addresses = *self.lanes(a);
                let mut rows = [[0; 16]; 32];
                for (lane, row) in rows.iter_mut().enumerate() {
                    let address = addresses.get(lane).wrapping_add_signed(i.offset);
                    row.copy_from_slice(block.shared(address, 16, 16)?);
                }
                matrix::load(&mut self.registers, &i.list, &rows, transposed);
            }
            Matrix::Mma => matrix::mma(&mut self.registers, &i.list),
            Matrix::MmaSparse => {
                let selector = self.uniform(b) as usize;
                matrix::mma_sparse(&mut self.registers, &i.list, a, selector);
            }
            Matrix::Wgmma { columns } => {
                // Descriptors, whether it adds, two signs, and of matrices in shared memory whether
                // they are MN-major.
                let has_a = i.list.len() > columns / 2;
                let (behind, b_is_mn_major) = if has_a { (1, 4) } else { (2, 6) };
                let constant = |n: usize| self.uniform(i.args[n]);
                let expected = [constant(behind + 1), constant(behind + 2)] == [1, 1];
                if !expected || !has_a && constant(5) != 0 {
                    return Err(Fault("expected a K-major A and no negation".to_owned()));
                }
                let product = Wgmma {
                    columns,
                    a: (!has_a).then(|| (self.uniform(a), self.uniform(THREAD) / 32 % 4)),
                    b: self.uniform(if has_a { a } else { b }),
                    is_mn_major: constant(b_is_mn_major) != 0,
                    accumulates: self.predicates[i.args[behind] as usize] & 1 == 1,
                };
                let pieces = product.multiply(&mut self.registers, &i.list, block)?;
                self.pending_products.push((self.committed_products, pieces));
            }
            Matrix::WgmmaCommit => self.committed_products += 1,
            Matrix::WgmmaWait => {
                let in_flight = self.uniform(i.args[0]) as u32;
                let committed = self.committed_products;
                let ended = |(group, _): &mut (u32, _)| *group + in_flight < committed;
                for (_, pieces) in self.pending_products.extract_if(.., ended) {
                    matrix::check(block, &pieces)?;
                }
            }
        }
        Ok(())
    }

    /// The lanes that must execute an instruction together.
    fn members(&self, i: &Instruction, mask: u32) -> Option<u32> {
        let member_mask = |register: Register| {
            let first = mask.trailing_zeros() as usize % 32;
            Some(self.lanes(register).low[first])
        };
        match i.op {
            Op::SyncWarp => member_mask(i.args[0]),
            Op::Exchange(Exchange::Shuffle(_)) => {
                member_mask(if i.args[5] == NONE { i.args[4] } else { i.args[5] })
            }
            Op::Exchange(Exchange::Vote(_) | Exchange::ReduceAdd) => member_mask(i.args[2]),
            Op::Barrier { .. } | Op::Matrix(_) => Some(ALL),
            _ => None,
        }
    }

    fn shuffle(&mut self, i: &Instruction, kind: Shuffle, mask: u32) {
        let (to, last) = (i.args[0], i.args[5]);
        let (in_range_to, from) = if last == NONE { (None, 1) } else { (Some(i.args[1]), 2) };
        let [values, by, clamp] = [0, 1, 2].map(|n| &self.lanes(i.args[from + n]).low);
        let mut in_range = 0;
        let out: [u32; 32] = std::array::from_fn(|index| {
            let (lane, by, segment) = (index as u32, by[index] & 31, clamp[index] >> 8 & 31);
            let clamp = clamp[index] & 31;
            let min_lane = lane & segment;
            let max_lane = min_lane | clamp & !segment;
            let (source, is_in_range) = match kind {
                Shuffle::Butterfly => (lane ^ by, lane ^ by <= max_lane),
                Shuffle::Index => (min_lane | by & !segment, min_lane | by & !segment <= max_lane),
                Shuffle::Up => (lane.wrapping_sub(by), lane >= by && lane - by >= max_lane),
                Shuffle::Down => (lane + by, lane + by <= max_lane),
            };
            in_range |= u32::from(is_in_range) << index;
            values[if is_in_range { source as usize % 32 } else { index }]
        });
        self.put(to, mask, out);
        if let Some(predicate) = in_range_to {
            self.put_predicate(predicate, mask, in_range);
        }
    }
}

/// What a warp does after an instruction.
enum Next {
    Continue,
    /// Selects a path again.
    Reschedule,
    Yield,
    Block,
    Trap,
}
