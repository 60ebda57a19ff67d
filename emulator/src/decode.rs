//! Decodes instructions by their opcode.

use half::f16;

use crate::Fault;
use crate::kernel::{
    Access, AsyncCopy, Compute, Exchange, Instruction, Matrix, MbarrierUpdate, NONE, Op, Register,
    Shuffle, Space, Vote,
};
use crate::lanes::{
    Value, add_to_zero, flush, half_multiply_add, insert_bits, multiply_add_down, permute, put,
};
use crate::memory::{LOCAL, PARAMETERS, SHARED, WINDOW};

/// An operand.
#[derive(Debug)]
pub(crate) enum Arg {
    Register(Register),
    Predicate(Register),
    Vector(Vec<Register>),
    /// A base register and an offset.
    Address(Register, i64),
    /// An ignored result, `_`.
    Ignored,
}

/// Computes a result in every lane from operands of the given types.
macro_rules! map {
    (|$($x:ident: $t:ty),*| $e:expr) => {
        Op::Compute(Compute::Map(|registers, args, mask| {
            let [to, operands @ ..] = args;
            let mut operands = operands.iter().map(|&register| register as usize);
            $(let $x = operands.next().expect("five operands");)*
            let values = std::array::from_fn(|i| {
                $(let $x = <$t>::read(&registers[$x], i);)*
                $e
            });
            put(&mut registers[*to as usize], mask, values);
        }))
    };
}

/// An operation on the type of a name, out of a list of types.
macro_rules! by_type {
    ($ty:expr, $T:ident => $op:expr; $($name:pat => $t:ty,)*) => {
        match $ty {
            $($name => {
                type $T = $t;
                Some($op)
            })*
            _ => None,
        }
    };
}

/// An operation on each integer type.
macro_rules! integers {
    ($ty:expr, $T:ident => $op:expr) => {
        by_type! { $ty, $T => $op;
            "u8" | "b8" => u8,
            "u16" | "b16" => u16,
            "u32" | "b32" => u32,
            "u64" | "b64" => u64,
            "s16" => i16,
            "s32" => i32,
            "s64" => i64,
        }
    };
}

/// An operation on each float type.
macro_rules! floats {
    ($ty:expr, $T:ident => $op:expr) => {
        by_type! { $ty, $T => $op; "f32" => f32, "f64" => f64, }
    };
}

/// Compares two operands in all lanes.
macro_rules! compare {
    (|$a:ident: $t:ty, $b:ident| $e:expr) => {
        Op::Compute(Compute::Compare(|registers, args| {
            let (a, b) = (&registers[args[1] as usize], &registers[args[2] as usize]);
            (0..32).fold(0, |bits, i| {
                let ($a, $b) = (<$t>::read(a, i), <$t>::read(b, i));
                bits | u32::from($e) << i
            })
        }))
    };
}

fn arithmetic(name: &str, ty: &str) -> Option<Op> {
    match name {
        "add" => integers!(ty, T => map!(|a: T, b: T| a.wrapping_add(b))),
        "sub" => integers!(ty, T => map!(|a: T, b: T| a.wrapping_sub(b))),
        "mul.lo" => integers!(ty, T => map!(|a: T, b: T| a.wrapping_mul(b))),
        "mad.lo" => {
            integers!(ty, T => map!(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c)))
        }
        // Division by zero sets all bits.
        "div" => integers!(ty, T => map!(|a: T, b: T| a.checked_div(b).unwrap_or(!0))),
        "rem" => integers!(ty, T => map!(|a: T, b: T| a.checked_rem(b).unwrap_or(a))),
        "min" => integers!(ty, T => map!(|a: T, b: T| a.min(b))),
        "max" => integers!(ty, T => map!(|a: T, b: T| a.max(b))),
        "neg" => integers!(ty, T => map!(|a: T| (0 as T).wrapping_sub(a))),
        "abs" => {
            integers!(ty, T => map!(|a: T| if a < 0 as T { (0 as T).wrapping_sub(a) } else { a }))
        }
        "and" => integers!(ty, T => map!(|a: T, b: T| a & b)),
        "or" => integers!(ty, T => map!(|a: T, b: T| a | b)),
        "xor" => integers!(ty, T => map!(|a: T, b: T| a ^ b)),
        "not" => integers!(ty, T => map!(|a: T| !a)),
        "mov" | "cvta.to.global" => integers!(ty, T => map!(|a: T| a)),
        "popc" => integers!(ty, T => map!(|a: T| a.count_ones())),
        "clz" => integers!(ty, T => map!(|a: T| a.leading_zeros())),
        "brev" => integers!(ty, T => map!(|a: T| a.reverse_bits())),
        // How far the highest bit is from the top; of zero, all bits are set.
        "bfind.shiftamt" => by_type! { ty, T =>
            map!(|a: T| if a == 0 { u32::MAX } else { a.leading_zeros() });
            "u32" => u32, "u64" => u64,
        },
        // Shifts by the width or more leave zeros, or the sign.
        "shl" => integers!(ty, T => map!(|a: T, n: u32| a.checked_shl(n).unwrap_or(0))),
        "shr" => integers!(ty, T => map!(|a: T, n: u32| {
            a.checked_shr(n).unwrap_or(if a < 0 as T { !0 } else { 0 })
        })),
        _ => None,
    }
    .or_else(|| match name {
        "add.rn" | "add" => floats!(ty, T => map!(|a: T, b: T| a + b)),
        "sub.rn" | "sub" => floats!(ty, T => map!(|a: T, b: T| a - b)),
        "mul.rn" | "mul" => floats!(ty, T => map!(|a: T, b: T| a * b)),
        "div.rn" => floats!(ty, T => map!(|a: T, b: T| a / b)),
        "fma.rn" => floats!(ty, T => map!(|a: T, b: T, c: T| a.mul_add(b, c))),
        "sqrt.rn" => floats!(ty, T => map!(|a: T| a.sqrt())),
        "rcp.rn" => floats!(ty, T => map!(|a: T| a.recip())),
        "min" => floats!(ty, T => map!(|a: T, b: T| a.min(b))),
        "max" => floats!(ty, T => map!(|a: T, b: T| a.max(b))),
        "neg" => floats!(ty, T => map!(|a: T| -a)),
        "abs" => floats!(ty, T => map!(|a: T| a.abs())),
        "mov" => floats!(ty, T => map!(|a: T| a)),
        _ => None,
    })
}

/// Instructions with operands of different types, or of one type only.
fn mixed_types(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "mul.wide.u16" => map!(|a: u16, b: u16| u32::from(a) * u32::from(b)),
        "mul.wide.u32" => map!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
        "mul.wide.s32" => map!(|a: i32, b: i32| i64::from(a) * i64::from(b)),
        "mul.hi.u32" => map!(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "prmt.b32" => map!(|a: u32, b: u32, c: u32| permute(a, b, c)),
        "bfi.b32" => map!(|from: u32, into: u32, start: u32, len: u32| {
            insert_bits(from.into(), into.into(), start, len, 32) as u32
        }),
        "bfi.b64" => map!(|from: u64, into: u64, start: u32, len: u32| {
            insert_bits(from, into, start, len, 64)
        }),
        "fma.rm.f32" => map!(|a: f32, b: f32, c: f32| multiply_add_down(a, b, c)),
        "add.rz.f32" => map!(|a: f32, b: f32| add_to_zero(a, b)),
        "ex2.approx.f32" => map!(|a: f32| f64::from(a).exp2() as f32),
        "ex2.approx.ftz.f32" => map!(|a: f32| flush(f64::from(a).exp2() as f32)),
        "rcp.approx.ftz.f32" => map!(|a: f32| flush(flush(a).recip())),
        "rsqrt.approx.f32" => map!(|a: f32| f64::from(a).sqrt().recip() as f32),
        "mul.rn.f16x2" => map!(|a: [f16; 2], b: [f16; 2]| [a[0] * b[0], a[1] * b[1]]),
        "fma.rn.f16x2" => map!(|a: [f16; 2], b: [f16; 2], c: [f16; 2]| {
            [half_multiply_add(a[0], b[0], c[0]), half_multiply_add(a[1], b[1], c[1])]
        }),
        "cvt.rn.f16x2.f32" => {
            map!(|a: f32, b: f32| [f16::from_f32(b), f16::from_f32(a)])
        }
        "cvt.rn.f16.f32" => map!(|a: f32| f16::from_f32(a)),
        "cvt.f32.f16" => map!(|a: f16| a.to_f32()),
        "cvt.f64.f32" => map!(|a: f32| f64::from(a)),
        "cvt.rn.f32.f64" => map!(|a: f64| a as f32),
        "cvt.rn.f32.s32" => map!(|a: i32| a as f32),
        "cvt.rn.f32.u16" => map!(|a: u16| f32::from(a)),
        "cvt.rn.f32.u32" => map!(|a: u32| a as f32),
        "cvt.rn.f64.u32" => map!(|a: u32| f64::from(a)),
        "cvt.rni.f32.f32" => map!(|a: f32| a.round_ties_even()),
        "cvt.rni.f64.f64" => map!(|a: f64| a.round_ties_even()),
        "cvt.rzi.f32.f32" => map!(|a: f32| a.trunc()),
        "cvt.rzi.s32.f32" => map!(|a: f32| a as i32),
        "cvt.rzi.u32.f32" => map!(|a: f32| a as u32),
        "cvt.sat.f32.f32" => map!(|a: f32| if a.is_nan() { 0.0 } else { a.clamp(0.0, 1.0) }),
        "cvt.s64.s32" => map!(|a: i32| i64::from(a)),
        "cvt.u16.u32" => map!(|a: u32| a as u16),
        "cvt.u16.u64" => map!(|a: u64| a as u16),
        "cvt.u32.u16" => map!(|a: u16| u32::from(a)),
        "cvt.u32.u64" => map!(|a: u64| a as u32),
        "cvt.u64.u16" => map!(|a: u16| u64::from(a)),
        "cvt.u64.u32" => map!(|a: u32| u64::from(a)),
        "cvta.shared.u64" => map!(|a: u64| a | SHARED),
        "cvta.local.u64" => map!(|a: u64| a | LOCAL),
        "cvta.param.u64" => map!(|a: u64| a | PARAMETERS),
        "cvta.to.shared.u64" | "cvta.to.local.u64" => map!(|a: u64| a & !WINDOW),
        _ => return None,
    })
}

fn comparison(name: &str, ty: &str) -> Option<Op> {
    match name {
        "eq" => integers!(ty, T => compare!(|a: T, b| a == b)),
        "ne" => integers!(ty, T => compare!(|a: T, b| a != b)),
        "lt" => integers!(ty, T => compare!(|a: T, b| a < b)),
        "le" => integers!(ty, T => compare!(|a: T, b| a <= b)),
        "gt" => integers!(ty, T => compare!(|a: T, b| a > b)),
        "ge" => integers!(ty, T => compare!(|a: T, b| a >= b)),
        _ => None,
    }
    .or_else(|| match name {
        "eq" => floats!(ty, T => compare!(|a: T, b| a == b)),
        "lt" => floats!(ty, T => compare!(|a: T, b| a < b)),
        "le" => floats!(ty, T => compare!(|a: T, b| a <= b)),
        "gt" => floats!(ty, T => compare!(|a: T, b| a > b)),
        "ge" => floats!(ty, T => compare!(|a: T, b| a >= b)),
        "num" => floats!(ty, T => compare!(|a: T, b| !a.is_nan() && !b.is_nan())),
        "nan" => floats!(ty, T => compare!(|a: T, b| a.is_nan() || b.is_nan())),
        // Unordered comparisons, which are true for NaN.
        "equ" => floats!(ty, T => compare!(|a: T, b| a == b || a.is_nan() || b.is_nan())),
        "neu" => floats!(ty, T => compare!(|a: T, b| a != b)),
        "ltu" => floats!(ty, T => compare!(|a: T, b| a < b || a.is_nan() || b.is_nan())),
        "leu" => floats!(ty, T => compare!(|a: T, b| a <= b || a.is_nan() || b.is_nan())),
        "gtu" => floats!(ty, T => compare!(|a: T, b| a > b || a.is_nan() || b.is_nan())),
        "geu" => floats!(ty, T => compare!(|a: T, b| a >= b || a.is_nan() || b.is_nan())),
        _ => None,
    })
}

fn logic(name: &str) -> Option<Op> {
    Some(Op::Compute(Compute::Logic(match name {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        "xor" => |a, b| a ^ b,
        "not" => |a, _| !a,
        "mov" => |a, _| a,
        _ => return None,
    })))
}

/// `wgmma` of this number of columns.
fn wgmma(columns: usize) -> Op {
    Op::Matrix(Matrix::Wgmma { columns })
}

/// The state space and type of `ld`, `st`, `atom` and `red`.
fn access(words: &[&str], count: usize) -> Option<Access> {
    let space = |word: &&str| match *word {
        "global" => Some(Space::Global),
        "shared" => Some(Space::Shared),
        "local" => Some(Space::Local),
        "param" => Some(Space::Parameters),
        _ => None,
    };
    let space = words.iter().find_map(space).unwrap_or(Space::Generic);
    let bytes = match *words.last()? {
        "u8" | "b8" => 1,
        "u16" | "b16" => 2,
        "u32" | "s32" | "b32" | "f32" => 4,
        "u64" | "s64" | "b64" | "f64" => 8,
        _ => return None,
    };
    Some(Access { space, bytes, count: count as u8, is_relaxed: words.contains(&"relaxed") })
}

/// Instructions that order accesses or give hints: lanes here see every store at once.
const NO_EFFECT: [&str; 11] = [
    "membar.gl",
    "membar.sys",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "createpolicy.fractional.L2::evict_first.b64",
    "prefetch.global.L2",
    "wgmma.fence.sync.aligned",
];

/// All instructions but arithmetic ones.
fn other(opcode: &str, words: &[&str], args: &[Arg]) -> Option<Op> {
    let vector = args.iter().find_map(|arg| match arg {
        Arg::Vector(registers) => Some(registers.len()),
        _ => None,
    });
    Some(match opcode {
        "bar.sync" => Op::Barrier { waits: true },
        "bar.arrive" => Op::Barrier { waits: false },
        "bar.warp.sync" => Op::SyncWarp,
        "vote.sync.all.pred" => Op::Exchange(Exchange::Vote(Vote::All)),
        "vote.sync.any.pred" => Op::Exchange(Exchange::Vote(Vote::Any)),
        "vote.sync.ballot.b32" => Op::Exchange(Exchange::Vote(Vote::Ballot)),
        "redux.sync.add.u32" => Op::Exchange(Exchange::ReduceAdd),
        "shfl.sync.bfly.b32" => Op::Exchange(Exchange::Shuffle(Shuffle::Butterfly)),
        "shfl.sync.idx.b32" => Op::Exchange(Exchange::Shuffle(Shuffle::Index)),
        "shfl.sync.up.b32" => Op::Exchange(Exchange::Shuffle(Shuffle::Up)),
        "shfl.sync.down.b32" => Op::Exchange(Exchange::Shuffle(Shuffle::Down)),
        "cp.async.ca.shared.global" | "cp.async.cg.shared.global" => {
            Op::AsyncCopy(AsyncCopy::Start)
        }
        "cp.async.commit_group" => Op::AsyncCopy(AsyncCopy::CommitGroup),
        "cp.async.wait_group" => Op::AsyncCopy(AsyncCopy::WaitGroup),
        "cp.async.wait_all" => Op::AsyncCopy(AsyncCopy::WaitAll),
        "mbarrier.init.shared.b64" => Op::Mbarrier(MbarrierUpdate::Init),
        "mbarrier.arrive.expect_tx.shared.b64" => Op::Mbarrier(MbarrierUpdate::ArriveExpectTx),
        "mbarrier.arrive.shared.b64" => Op::Mbarrier(MbarrierUpdate::Arrive),
        "mbarrier.try_wait.parity.shared.b64" => Op::MbarrierTest { yields: true },
        "mbarrier.test_wait.parity.shared.b64" => Op::MbarrierTest { yields: false },
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        | "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint" => {
            Op::BulkCopy
        }
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16" => {
            Op::Matrix(Matrix::Load { transposed: false })
        }
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" => {
            Op::Matrix(Matrix::Load { transposed: true })
        }
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => Op::Matrix(Matrix::Mma),
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32" => Op::Matrix(Matrix::MmaSparse),
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16" => wgmma(16),
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16" => wgmma(32),
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" => wgmma(64),
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16" => wgmma(128),
        "wgmma.commit_group.sync.aligned" => Op::Matrix(Matrix::WgmmaCommit),
        "wgmma.wait_group.sync.aligned" => Op::Matrix(Matrix::WgmmaWait),
        "nanosleep.u32" => Op::Sleep,
        "trap" => Op::Trap,
        _ if NO_EFFECT.contains(&opcode) => Op::Nop,
        _ => match (words[0], vector) {
            // The parameters of a function are registers.
            ("ld" | "st", None) if words[1] == "param" && are_registers(args) => map!(|a: u64| a),
            ("ld", count) => Op::Load(access(words, count.unwrap_or(1))?),
            ("st", count) => Op::Store(access(words, count.unwrap_or(1))?),
            ("atom" | "red", None) if words.ends_with(&["add", "u32"]) => {
                Op::AtomicAdd(access(words, 1)?)
            }
            ("mov", Some(count)) => {
                let bits = opcode.strip_prefix("mov.b")?.parse::<u32>().ok()? / count as u32;
                let is_unpack = matches!(args[0], Arg::Vector(_));
                Op::Compute(if is_unpack { Compute::Unpack(bits) } else { Compute::Pack(bits) })
            }
            ("selp", None) => Op::Compute(Compute::Select),
            ("setp", None) => comparison(words[1], words.last()?)?,
            (name, None) if words.last() == Some(&"pred") => logic(name)?,
            _ => return None,
        },
    })
}

/// Whether all operands are registers.
fn are_registers(args: &[Arg]) -> bool {
    args.iter().all(|arg| matches!(arg, Arg::Register(_)))
}

/// Decodes an instruction.
pub(crate) fn decode(opcode: &str, args: &[Arg]) -> Result<Instruction, Fault> {
    let words: Vec<&str> = opcode.split('.').collect();
    let (name, ty) = opcode.rsplit_once('.').unwrap_or((opcode, ""));
    let op = if are_registers(args) {
        arithmetic(name, ty).or_else(|| mixed_types(opcode))
    } else {
        None
    };
    let op = op.or_else(|| other(opcode, &words, args));
    let op = op.ok_or_else(|| Fault(format!("unknown instruction {opcode}")))?;
    let mut instruction = Instruction::new(op);
    let mut list = Vec::new();
    let mut slots = instruction.args.iter_mut();
    // Loads and stores list their registers, even a single one.
    let is_listed = matches!(op, Op::Load(_) | Op::Store(_));
    for arg in args {
        match arg {
            Arg::Register(register) if is_listed => list.push(*register),
            Arg::Vector(registers) => list.extend(registers),
            Arg::Ignored => {}
            Arg::Register(register) | Arg::Predicate(register) | Arg::Address(register, _) => {
                let slot = slots.next();
                *slot.ok_or_else(|| Fault(format!("too many operands of {opcode}")))? = *register;
            }
        }
        if let Arg::Address(_, offset @ (..=-1 | 1..)) = arg {
            if instruction.offset != 0 {
                return Err(Fault(format!("two addresses with offsets of {opcode}")));
            }
            instruction.offset = *offset;
        }
    }
    instruction.list = list.into();
    // A unary operation reads its operand twice.
    if let (Op::Compute(Compute::Logic(_)), [_, a, NONE, ..]) = (op, instruction.args) {
        instruction.args[2] = a;
    }
    Ok(instruction)
}
