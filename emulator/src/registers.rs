//! Register allocation. PTX is in SSA form with thousands of virtual registers; those with disjoint
//! live ranges share one, so that the registers of a warp fit in the CPU's cache.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::kernel::{Compute, Exchange, Instruction, Kernel, Matrix, NONE, Op, Register, Vote};

/// The first and the last instruction of a register's live range.
#[derive(Clone, Copy)]
struct LiveRange {
    first: usize,
    last: usize,
}

/// Allocates registers by linear scan. Special registers and constants, which are set before a
/// kernel starts, are not shared.
pub(crate) fn allocate_registers(kernel: &mut Kernel, specials: u32) {
    let mut writes: HashMap<Register, u32> = HashMap::new();
    for register in kernel.code.iter().flat_map(Instruction::written) {
        *writes.entry(*register).or_default() += 1;
    }
    let mut ranges: HashMap<Register, LiveRange> = HashMap::new();
    for (at, instruction) in kernel.code.iter_mut().enumerate() {
        let (written, is_guarded) = (instruction.written().to_vec(), instruction.guard.is_some());
        for register in instruction.registers() {
            // A single unguarded write precedes all reads. Otherwise the value may come from any
            // earlier instruction.
            let is_first = written.contains(register) && writes[register] == 1 && !is_guarded;
            let first = if is_first { at } else { 0 };
            ranges.entry(*register).or_insert(LiveRange { first, last: at }).last = at;
        }
    }
    let branches = kernel.code.iter().enumerate().filter(|(_, i)| matches!(i.op, Op::Branch));
    let loops: Vec<(usize, usize)> =
        branches.map(|(at, i)| (i.offset as usize, at)).filter(|(to, at)| to <= at).collect();
    for range in ranges.values_mut() {
        // A value that is live at the start of a loop is live until its end.
        while let Some(&(_, end)) = loops
            .iter()
            .find(|&&(start, end)| range.first < start && (start..end).contains(&range.last))
        {
            range.last = end;
        }
    }
    let constants = kernel.constants.iter().map(|&(register, _)| register);
    let fixed = (0..specials).chain(constants);
    let mut assigned: HashMap<Register, Register> = fixed.zip(0..).collect();
    let mut count = assigned.len() as Register;
    let mut order: Vec<(Register, LiveRange)> =
        ranges.into_iter().filter(|(register, _)| !assigned.contains_key(register)).collect();
    order.sort_by_key(|&(register, range)| (range.first, register));
    let mut ends: BinaryHeap<Reverse<(usize, Register)>> = BinaryHeap::new();
    for (register, range) in order {
        let physical = match ends.peek() {
            Some(&Reverse((last, physical))) if last < range.first => {
                ends.pop();
                physical
            }
            _ => {
                count += 1;
                count - 1
            }
        };
        ends.push(Reverse((range.last, physical)));
        assigned.insert(register, physical);
    }
    kernel.code.iter_mut().flat_map(Instruction::registers).for_each(|r| *r = assigned[r]);
    kernel.constants.iter_mut().for_each(|(register, _)| *register = assigned[register]);
    kernel.registers = count;
}

impl Instruction {
    /// The operands that are registers and not predicates.
    fn registers(&mut self) -> impl Iterator<Item = &mut Register> {
        let predicates: &[usize] = match self.op {
            Op::Compute(Compute::Logic(_)) => &[0, 1, 2],
            Op::Compute(Compute::Compare(_)) | Op::MbarrierTest { .. } => &[0],
            Op::Compute(Compute::Select) => &[3],
            Op::Exchange(Exchange::Shuffle(_)) if self.args[5] != NONE => &[1],
            // Behind two descriptors, unless the first matrix is in registers.
            Op::Matrix(Matrix::Wgmma { columns }) if self.list.len() == columns / 2 => &[2],
            Op::Exchange(Exchange::Vote(Vote::Ballot)) | Op::Matrix(Matrix::Wgmma { .. }) => &[1],
            Op::Exchange(Exchange::Vote(_)) => &[0, 1],
            _ => &[],
        };
        let args = self.args.iter_mut().enumerate();
        let args = args.filter(|(n, register)| !predicates.contains(n) && **register != NONE);
        args.map(|(_, register)| register).chain(&mut self.list)
    }

    /// The registers that the instruction writes.
    fn written(&self) -> &[Register] {
        match self.op {
            Op::Load(_) | Op::Compute(Compute::Unpack(_)) | Op::Matrix(Matrix::Load { .. }) => {
                &self.list
            }
            Op::Matrix(Matrix::Mma | Matrix::MmaSparse) => &self.list[..4],
            Op::Matrix(Matrix::Wgmma { columns }) => &self.list[..columns / 2],
            Op::Compute(Compute::Map(_) | Compute::Select | Compute::Pack(_))
            | Op::Exchange(
                Exchange::Shuffle(_) | Exchange::Vote(Vote::Ballot) | Exchange::ReduceAdd,
            ) => &self.args[..1],
            Op::AtomicAdd(_) if self.args[2] != NONE => &self.args[..1],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::parse::Module;

    #[test]
    fn loop_carried_registers_are_not_shared() {
        // %r3 is written after its first read; %r4, %r5 and %r6 are live within an iteration.
        let text = ".visible .entry test(\n\t.param .u64 test_param_0\n)\n{\n\t.reg .b32 %r<7>;\n\
                    .reg .pred %p<2>;\nbra set;\nagain: mov.u32 %r4, 1;\nmov.u32 %r5, %r4;\n\
                    add.s32 %r3, %r3, %r5;\nmov.u32 %r6, %r3;\nsetp.lt.u32 %p1, %r6, 9;\n\
                    @%p1 bra again;\nret;\nset: mov.u32 %r3, 0;\nbra again;\n}\n";
        let kernel = Module::new(text).kernel("test").unwrap();
        let to = |i: usize| kernel.code[i].args[0];
        let carried = to(3);
        assert_eq!(kernel.code[8].args[0], carried);
        assert!(![1, 2, 4].map(to).contains(&carried), "{:?}", kernel.code);
        assert_eq!(to(4), to(1), "others share a register");
    }
}
