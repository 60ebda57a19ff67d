//! Fewer registers: names in PTX are written once, and a kernel has thousands. Those that are not
//! needed at the same time share one, so that what a warp needs stays in the processor's cache.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::kernel::{Instruction, Kernel, NONE, Op, Register, Vote};

/// The instructions from the first to the last that a register's value lives through.
#[derive(Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
}

/// Lets registers share, but for those that are set before a kernel begins: the first ones, and
/// constants.
pub(crate) fn allot(kernel: &mut Kernel, specials: u32) {
    let mut writes: HashMap<Register, u32> = HashMap::new();
    for register in kernel.code.iter().flat_map(Instruction::written) {
        *writes.entry(*register).or_default() += 1;
    }
    let mut lives: HashMap<Register, Life> = HashMap::new();
    for (at, instruction) in kernel.code.iter_mut().enumerate() {
        let (written, is_guarded) = (instruction.written().to_vec(), instruction.guard.is_some());
        for register in instruction.registers() {
            // Written in one place, which stands before all that read it: else it may come from
            // anywhere before.
            let is_first = written.contains(register) && writes[register] == 1 && !is_guarded;
            let first = if is_first { at } else { 0 };
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
            Op::Vote(Vote::Ballot) | Op::MultiplyGroup { .. } => &[1],
            Op::Vote(_) => &[0, 1],
            _ => &[],
        };
        let args = self.args.iter_mut().enumerate();
        let args = args.filter(|(n, register)| !predicates.contains(n) && **register != NONE);
        args.map(|(_, register)| register).chain(&mut self.list)
    }

    /// Those that it writes.
    fn written(&self) -> &[Register] {
        match self.op {
            Op::Load(_) | Op::Split(_) | Op::LoadMatrix { .. } => &self.list,
            Op::Multiply | Op::MultiplySparse => &self.list[..4],
            Op::MultiplyGroup { columns } => &self.list[..columns / 2],
            Op::Map(_) | Op::Select | Op::Join(_) | Op::Shuffle(_) | Op::Total => &self.args[..1],
            Op::Vote(Vote::Ballot) => &self.args[..1],
            Op::Add(_) if self.args[2] != NONE => &self.args[..1],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::parse::Module;

    #[test]
    fn what_a_loop_needs_is_not_shared() {
        // %r3 is set behind what reads it; %r4, %r5 and %r6 come and go between.
        let text = ".visible .entry test(\n\t.param .u64 test_param_0\n)\n{\n\t.reg .b32 %r<7>;\n\
                    .reg .pred %p<2>;\nbra set;\nagain: mov.u32 %r4, 1;\nmov.u32 %r5, %r4;\n\
                    add.s32 %r3, %r3, %r5;\nmov.u32 %r6, %r3;\nsetp.lt.u32 %p1, %r6, 9;\n\
                    @%p1 bra again;\nret;\nset: mov.u32 %r3, 0;\nbra again;\n}\n";
        let kernel = Module::new(text).kernel("test").unwrap();
        let to = |i: usize| kernel.code[i].args[0];
        let carried = to(3);
        assert_eq!(kernel.code[8].args[0], carried);
        assert!(![1, 2, 4].map(to).contains(&carried), "{:?}", kernel.code);
        assert_eq!(to(4), to(1), "others are shared");
    }
}
