//! A kernel as the warps run it.

use crate::lanes::Lanes;

/// The number of a register, or of a predicate.
pub(crate) type Register = u32;

/// Computes registers from others, in the threads of a mask: those of [`Instruction::args`].
pub(crate) type Map = fn(&mut [Lanes], &[Register; 6], u32);
/// Compares registers, in all threads.
pub(crate) type Test = fn(&[Lanes], &[Register; 6]) -> u32;

/// Where an address lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Space {
    /// Anywhere: what the address says.
    Generic,
    Global,
    Shared,
    Local,
    Parameters,
}

/// What is read or written at an address: so many values of so many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) bytes: u8,
    pub(crate) count: u8,
}

/// Which thread's value a thread takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shuffle {
    Xor,
    From,
    Up,
    Down,
}

/// What threads of a warp say together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Ballot,
}

/// What an instruction does. Its operands are in [`Instruction::args`], a result first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// A register of one to four others.
    Map(Map),
    /// A predicate of two registers.
    Test(Test),
    /// A predicate of two predicates.
    Logic(fn(u32, u32) -> u32),
    /// One of two registers by a predicate.
    Select,
    /// Registers of so many bits put into one, and taken out of one.
    Join(u32),
    Split(u32),
    /// To or from the registers of the list.
    Load(Access),
    Store(Access),
    /// Adds, and gives what was there if it has a result.
    Add(Access),
    Branch,
    Return,
    Shuffle(Shuffle),
    Vote(Vote),
    /// The sum over the threads of a warp.
    Total,
    /// Threads of a warp meet.
    Meet,
    /// Warps of a block meet; some only say that they were there.
    Barrier {
        waits: bool,
    },
    /// A copy to shared memory by a thread, which waits for groups of them.
    Copy,
    Commit,
    WaitGroups,
    WaitCopies,
    /// Of barriers in shared memory.
    Init,
    Expect,
    Arrive,
    HasPassed {
        waits: bool,
    },
    /// A copy to shared memory that runs by itself and tells a barrier.
    Bulk,
    LoadMatrix {
        transposed: bool,
    },
    Multiply,
    MultiplySparse,
    /// Of 64 rows of four warps, and so many columns.
    MultiplyGroup {
        columns: usize,
    },
    /// Others may run.
    Yield,
    Nothing,
}

/// An instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    /// The predicate on which it runs, and what that has to be.
    pub(crate) guard: Option<(Register, bool)>,
    /// Registers and predicates in the order of operands, [`NONE`] where there are fewer.
    pub(crate) args: [Register; 6],
    /// Those of vectors, and what is read or written at an address.
    pub(crate) list: Box<[Register]>,
    /// What is added to the address, or where a branch goes.
    pub(crate) offset: i64,
    pub(crate) line: u32,
}

/// No register.
pub(crate) const NONE: Register = Register::MAX;

impl Instruction {
    pub(crate) fn of(op: Op) -> Instruction {
        let list = Box::default();
        Instruction { op, guard: None, args: [NONE; 6], list, offset: 0, line: 0 }
    }
}

/// Registers that say where a thread is, in this order, before all others.
pub(crate) const SPECIALS: [&str; 11] = [
    "%tid.x",
    "%ntid.x",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%dynamic_smem_size",
    // Where memory that is sized at launch begins: no name of PTX.
    "%dynamic",
];

/// A kernel.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) registers: u32,
    pub(crate) predicates: u32,
    /// Registers and predicates that always hold the same.
    pub(crate) constants: Vec<(Register, u64)>,
    pub(crate) truths: Vec<(Register, bool)>,
    pub(crate) parameter_bytes: usize,
    pub(crate) shared_bytes: usize,
    pub(crate) local_bytes: usize,
}
