//! A decoded kernel: instructions over numbered registers.

use crate::lanes::Lanes;

/// The number of a register, or of a predicate.
pub(crate) type Register = u32;

/// Computes a register from others, in the lanes of a mask. Operands are [`Instruction::args`].
pub(crate) type Map = fn(&mut [Lanes], &[Register; OPERANDS], u32);
/// Compares registers in all lanes, and returns a mask.
pub(crate) type Compare = fn(&[Lanes], &[Register; OPERANDS]) -> u32;

/// A state space of PTX.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Space {
    /// Determined by the window of the address.
    Generic,
    Global,
    Shared,
    Local,
    Parameters,
}

/// A load or store of `count` values of `bytes` bytes each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) bytes: u8,
    pub(crate) count: u8,
    /// Whether it is atomic, and other threads may poll it.
    pub(crate) is_relaxed: bool,
}

/// The source lane of a shuffle: `bfly`, `idx`, `up`, `down`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shuffle {
    Butterfly,
    Index,
    Up,
    Down,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Ballot,
}

/// Arithmetic on the registers and predicates of each lane.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Compute {
    /// A register from one to four others.
    Map(Map),
    /// A predicate from two registers.
    Compare(Compare),
    /// A predicate from two predicates.
    Logic(fn(u32, u32) -> u32),
    /// One of two registers, by a predicate.
    Select,
    /// Packs registers of this number of bits into one.
    Pack(u32),
    /// Unpacks one register into registers of this number of bits.
    Unpack(u32),
}

/// Communication between the lanes of a warp.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Exchange {
    Shuffle(Shuffle),
    Vote(Vote),
    ReduceAdd,
}

/// Asynchronous copies to shared memory (`cp.async`).
#[derive(Clone, Copy, Debug)]
pub(crate) enum AsyncCopy {
    Start,
    CommitGroup,
    WaitGroup,
    WaitAll,
}

/// Updates of an mbarrier.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MbarrierUpdate {
    Init,
    Arrive,
    ArriveExpectTx,
}

/// Tensor core instructions and `ldmatrix`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Matrix {
    Load {
        transposed: bool,
    },
    Mma,
    MmaSparse,
    /// `wgmma` of 64 rows, in four warps, and this number of columns.
    Wgmma {
        columns: usize,
    },
    WgmmaCommit,
    WgmmaWait,
}

/// An operation. Its operands are [`Instruction::args`], the result first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Compute(Compute),
    /// To or from the registers of [`Instruction::list`].
    Load(Access),
    Store(Access),
    /// Returns the old value if it has a result.
    AtomicAdd(Access),
    Branch,
    Return,
    Exchange(Exchange),
    /// `bar.warp.sync`.
    SyncWarp,
    /// `bar.sync`, or `bar.arrive`, which does not wait.
    Barrier {
        waits: bool,
    },
    AsyncCopy(AsyncCopy),
    Mbarrier(MbarrierUpdate),
    /// `mbarrier.try_wait`, which yields, or `test_wait`.
    MbarrierTest {
        yields: bool,
    },
    /// A bulk copy to shared memory that completes an mbarrier.
    BulkCopy,
    Matrix(Matrix),
    /// `nanosleep`.
    Sleep,
    /// Ends the launch with an error.
    Trap,
    Nop,
}

/// An instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    /// The predicate of the guard, and its value in the lanes that run the instruction.
    pub(crate) guard: Option<(Register, bool)>,
    /// Registers and predicates in the order of operands, padded with [`NONE`].
    pub(crate) args: [Register; OPERANDS],
    /// The registers of vector operands, and of loads and stores.
    pub(crate) list: Box<[Register]>,
    /// The offset of the address, or the target of a branch.
    pub(crate) offset: i64,
    pub(crate) line: u32,
}

/// The most operands of an instruction beside vectors: those of `wgmma` with two descriptors.
pub(crate) const OPERANDS: usize = 7;

/// No register.
pub(crate) const NONE: Register = Register::MAX;

impl Instruction {
    pub(crate) fn new(op: Op) -> Instruction {
        let list = Box::default();
        Instruction { op, guard: None, args: [NONE; OPERANDS], list, offset: 0, line: 0 }
    }
}

/// The special register `%tid.x`.
pub(crate) const THREAD: Register = 0;

/// Special registers, which have the lowest numbers, in this order.
pub(crate) const SPECIAL_REGISTERS: [&str; 12] = [
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
    // The offset of dynamic shared memory: not a name of PTX.
    "%dynamic",
    // Set before each slice.
    "%globaltimer",
];

/// A kernel.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) registers: u32,
    pub(crate) predicates: u32,
    /// Registers and predicates with a constant value.
    pub(crate) constants: Vec<(Register, u64)>,
    pub(crate) constant_predicates: Vec<(Register, bool)>,
    pub(crate) parameter_bytes: usize,
    pub(crate) shared_bytes: usize,
    pub(crate) local_bytes: usize,
}
