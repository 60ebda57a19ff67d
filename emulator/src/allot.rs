//! Fewer registers: names in PTX are written once, and a kernel has thousands. Those that are not
//! needed at the same time share one, so that what a warp needs stays in the processor's cache.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::kernel::{Instruction, Kernel, NONE, Op, Register};

/// The instructions from the first to the last that a register's value lives through.
#[derive(Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
}

/// Lets registers share, but for those that are set before a kernel begins: the first ones, and
/// constants.
pub(crate) fn allot(kernel: &mut Kernel, specials: u32) {
    let mut lives: HashMap<Register, Life> = HashMap::new();
    for (at, instruction) in kernel.code.iter_mut().enumerate() {
        let written = instruction.written();
        for register in instruction.registers() {
            // What is read first comes from before, if it is anything.
            let first = if written.contains(register) { at } else { 0 };
            lives.entry(*register).or_insert(Life { first, last: at }).last = at;
        }
    }
    let branches = kernel.code.iter().enumerate().filter(|(_, i)| matches!(i.op, Op::Branch));
    let loops: Vec<(usize, usize)> =
        branches.map(|(at, i)| (i.offset as usize, at)).filter(|(to, at)| to <= at).collect();
    for life in lives.values_mut() {
        // What enters a loop is there until its end, in every round.
        while let Some(&(_, end)) = loops
            .iter()
            .find(|&&(start, end)| life.first < start && (start..end).contains(&life.last))
        {
            life.last = end;
        }
    }
    let constants = kernel.constants.iter().map(|&(register, _)| register);
    let fixed = (0..specials).chain(constants);
    let mut places: HashMap<Register, Register> = fixed.zip(0..).collect();
    let mut count = places.len() as Register;
    let mut order: Vec<(Register, Life)> =
        lives.into_iter().filter(|(register, _)| !places.contains_key(register)).collect();
    order.sort_by_key(|&(register, life)| (life.first, register));
    let mut ends: BinaryHeap<Reverse<(usize, Register)>> = BinaryHeap::new();
    for (register, life) in order {
        let place = match ends.peek() {
            Some(&Reverse((last, place))) if last < life.first => {
                ends.pop();
                place
            }
            _ => {
                count += 1;
                count - 1
            }
        };
        ends.push(Reverse((life.last, place)));
        places.insert(register, place);
    }
    kernel.code.iter_mut().flat_map(Instruction::registers).for_each(|r| *r = places[r]);
    kernel.constants.iter_mut().for_each(|(register, _)| *register = places[register]);
    kernel.registers = count;
}

impl Instruction {
    /// Its operands that are registers.
    fn registers(&mut self) -> impl Iterator<Item = &mut Register> {
        let predicates: &[usize] = match self.op {
            Op::Logic(_) => &[0, 1, 2],
            Op::Test(_) | Op::HasPassed { .. } => &[0],
            Op::Select => &[3],
            Op::Shuffle(_) if self.args[5] != NONE => &[1],
            Op::Vote(crate::kernel::Vote::Ballot) | Op::MultiplyGroup { .. } => &[1],
            Op::Vote(_) => &[0, 1],
            _ => &[],
        };
        let args = self.args.iter_mut().enumerate();
        let args = args.filter(|(n, register)| !predicates.contains(n) && **register != NONE);
        args.map(|(_, register)| register).chain(&mut self.list)
    }

    /// Those that it writes without reading them.
    fn written(&self) -> Vec<Register> {
        match self.op {
            Op::Load(_) | Op::Split(_) | Op::LoadMatrix { .. } => self.list.to_vec(),
            Op::Multiply | Op::MultiplySparse => self.list[..4].to_vec(),
            Op::Map(_) | Op::Select | Op::Join(_) | Op::Shuffle(_) | Op::Total | Op::Vote(_) => {
                vec![self.args[0]]
            }
            Op::Add(_) if self.args[2] != NONE => vec![self.args[0]],
            _ => Vec::new(),
        }
    }
}
