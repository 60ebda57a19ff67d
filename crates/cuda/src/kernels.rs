//! The kernels, made from `kernels/*.cu` by `cargo xtask kernels`: machine code for Hopper, PTX for
//! all other devices, which the driver compiles when a model is loaded for the first time.

use std::sync::Arc;

use bodkin_backend::Result;

use crate::driver::{Device, Kernel, Module};
use crate::kept::Kept;
use crate::persistent;
use crate::planes::{Kind, TILE_ROWS};

/// Files of kernels: PTX, machine code.
macro_rules! images {
    ($($name:literal)*) => {
        [$((
            concat!(include_str!(concat!("../kernels/built/", $name, ".ptx")), "\0").as_bytes(),
            include_bytes!(concat!("../kernels/built/", $name, ".cubin")).as_slice(),
        )),*]
    };
}

const IMAGES: [(&[u8], &[u8]); 15] = images![
    "rows" "state" "choose" "attend" "attend_f32" "attend_q8" "attend_meet" "attend_prompt" "dot"
    "mul" "order" "wide" "persistent" "persistent_s24"
    "persistent_experts"
];

/// Every kind of planes with kernels of its own, as numbered in `kernels/planes.cuh`.
const KINDS: [Kind; 8] =
    [Kind::F16, Kind::S8, Kind::S8x16, Kind::U8, Kind::U4, Kind::S24F16, Kind::S24S8, Kind::S24S4];

/// The number of a kind of planes, as kernels know it.
///
/// # Panics
/// If the kind is F32, which has kernels of other shapes.
pub(crate) fn number_of(kind: Kind) -> usize {
    KINDS.iter().position(|&other| other == kind).expect("a kind with `mma`")
}

/// Shared memory of a block of `mul`: its results, which are larger than its inputs.
pub(crate) const MUL_SHARED_BYTES: usize = 64 << 10;
/// Input rows that a block of `mul` takes.
pub(crate) const MUL_WIDTH: usize = 128;
/// Input rows that a block of `wide` can take, and how long it takes then: the longest is 1.
pub(crate) const WIDTHS: [(usize, f64); 2] = [(64, 0.6), (WIDEST, 1.0)];
/// The most rows that a block of `wide` takes.
pub(crate) const WIDEST: usize = 128;

/// Shared memory of a block of `wide`: chunks of its input and of eight tiles of weights, and their
/// barriers.
pub(crate) fn wide_shared_bytes(kind: Kind, width: usize) -> usize {
    3 * (2 * (128 * width + 8 * kind.chunk_bytes()) + 16)
}

/// The most shared memory that blocks of `dot` ask for.
pub(crate) const DOT_MOST_BYTES: usize = crate::driver::SHARED_BYTES;
/// Warps of a block of `dot`.
const DOT_WARPS: usize = 8;
/// The most shared memory that blocks of attention may ask for.
pub(crate) const ATTEND_SHARED_BYTES: usize = 112 << 10;

/// The most dimensions of heads that kernels of attention for prompts take.
pub(crate) const PROMPT_DIMS: [usize; 3] = [64, 128, 256];

/// Shared memory of a block of attention for prompts: queries, and keys and values twice.
pub(crate) const fn prompt_shared_bytes(dims: usize) -> usize {
    2 * 64 * dims * 5
}
const _: () = assert!(prompt_shared_bytes(PROMPT_DIMS[2]) <= crate::driver::SHARED_BYTES);

/// Shared memory of a block of `dot` for so many rows of input: weights under way with their
/// barriers, barriers of teams, the sums of parts of the columns, and a single row's `held`
/// columns.
pub(crate) fn dot_shared_bytes(kind: Kind, is_gated: bool, rows: usize, held: usize) -> usize {
    let tiles = if is_gated { 2 } else { 1 };
    let slot = tiles * (kind.slot_chunks() / tiles) * kind.chunk_bytes();
    let depth = match slot {
        2561.. => 10240 / slot,
        _ if is_gated && rows > 8 => 3,
        _ => 4,
    };
    let sums = 2 * DOT_WARPS * tiles * (rows * (TILE_ROWS + 1) + 3) / 4 * 4;
    DOT_WARPS * (depth * slot + 32 + 8) + 4 * sums + 2 * held
}

/// The kernels of one kind of planes.
#[derive(Clone, Copy)]
pub(crate) struct OfKind {
    embed: Kernel,
    /// For up to 8 and up to 16 rows; plain and gated.
    pub(crate) dot: [[Kernel; 2]; 2],
    /// For many rows; plain and gated.
    pub(crate) mul: [Kernel; 2],
    /// Likewise on Hopper, of each of [`WIDTHS`]; not of 2:4 weights.
    pub(crate) wide: Option<[[Kernel; 2]; 2]>,
}

impl OfKind {
    /// Those among the modules of rows, `dot`, `mul` and, if it has such a kernel, `wide`.
    fn of(kind: Kind, [rows, dot, mul]: [&Module; 3], wide: Option<&Module>) -> Result<OfKind> {
        let name = kind.name();
        let both = |module: &Module, name: &str, bytes: usize| -> Result<[Kernel; 2]> {
            Ok([module.kernel(name, bytes)?, module.kernel(&format!("{name}_gated"), bytes)?])
        };
        let dots = |rows: usize| both(dot, &format!("dot_{name}_{rows}"), DOT_MOST_BYTES);
        let wides = |module: &Module, width: usize| {
            both(module, &format!("wide_{name}_{width}"), wide_shared_bytes(kind, width))
        };
        Ok(OfKind {
            embed: rows.kernel(&format!("embed_{name}"), 0)?,
            dot: [dots(8)?, dots(16)?],
            mul: both(mul, &format!("mul_{name}"), MUL_SHARED_BYTES)?,
            wide: match wide {
                Some(module) => Some([wides(module, WIDTHS[0].0)?, wides(module, WIDTHS[1].0)?]),
                None => None,
            },
        })
    }
}

/// The kernels for keys and values that are kept in one way.
#[derive(Clone, Copy)]
pub(crate) struct Attention {
    /// For one, and for up to four query heads of a key head; for any rows, and for rows that are
    /// alone in their sequences.
    pub(crate) attend: [[Kernel; 2]; 2],
    pub(crate) store: Kernel,
}

impl Attention {
    fn of(module: &Module) -> Result<Attention> {
        let attends = |name: &str| -> Result<[Kernel; 2]> {
            let kernel = |name: &str| module.kernel(name, ATTEND_SHARED_BYTES);
            Ok([kernel(name)?, kernel(&format!("{name}_alone"))?])
        };
        let attend = [attends("attend_1")?, attends("attend_4")?];
        Ok(Attention { attend, store: module.kernel("store", 0)? })
    }
}

/// All kernels.
pub(crate) struct Kernels {
    kinds: [OfKind; KINDS.len()],
    embed_f32: Kernel,
    /// Products with weights in f32, for few rows and for many.
    pub(crate) exact: [Kernel; 2],
    pub(crate) angles: Kernel,
    pub(crate) normalize: Kernel,
    pub(crate) prepare: Kernel,
    /// Puts the input of `wide` in order.
    pub(crate) interleave: Kernel,
    /// Puts rows in order by the experts that they meet.
    pub(crate) group: Kernel,
    pub(crate) elementwise: Kernel,
    pub(crate) rotate: Kernel,
    pub(crate) arrange: Kernel,
    pub(crate) pool: Kernel,
    pub(crate) route: Kernel,
    pub(crate) expert_sum: Kernel,
    pub(crate) adjust: Kernel,
    pub(crate) choose: Kernel,
    pub(crate) conv: Kernel,
    pub(crate) scan: Kernel,
    pub(crate) read_all: Kernel,
    halves: Attention,
    floats: Attention,
    bytes: Attention,
    /// For keys and values in half precision and heads that tensor cores take, for any rows, and
    /// for rows that are alone in their sequences.
    pub(crate) attend_meet: [Kernel; 2],
    /// For rows of prompts, of each of [`PROMPT_DIMS`].
    pub(crate) attend_prompt: [Kernel; PROMPT_DIMS.len()],
    /// A step of one row, on devices that can run it so.
    pub(crate) persistent: Option<[Kernel; persistent::RUNNERS.len()]>,
    _modules: Vec<Module>,
}

impl Kernels {
    /// Loads all kernels.
    pub(crate) fn load(device: &Arc<Device>) -> Result<Kernels> {
        let is_hopper = device.capability == 90;
        let modules = IMAGES.map(|(ptx, cubin)| {
            let image = if is_hopper { cubin } else { ptx };
            Module::load(device, image, is_hopper)
        });
        let modules = modules.into_iter().collect::<Result<Vec<Module>>>()?;
        let [rows, state, choice, attends @ ..] = &modules[..] else {
            unreachable!("as many modules as images");
        };
        let [halves, floats, bytes, meet, prompts, dot, mul, order, wide, persistents @ ..] =
            attends
        else {
            unreachable!("as many modules as images");
        };
        let mut kinds = Vec::new();
        for kind in KINDS {
            let wide = (is_hopper && kind.has_wide()).then_some(wide);
            kinds.push(OfKind::of(kind, [rows, dot, mul], wide)?);
        }
        let persistent = is_hopper.then(|| {
            let mut kernels = Vec::new();
            for (module, runner) in persistents.iter().zip(persistent::RUNNERS) {
                kernels.push(module.kernel(runner.name, persistent::most_bytes(device))?.meeting());
            }
            let Ok(kernels) = kernels.try_into() else { unreachable!("a file for each kernel") };
            Ok(kernels)
        });
        let attend_prompt = PROMPT_DIMS.map(|dims| {
            prompts.kernel(&format!("attend_prompt_{dims}"), prompt_shared_bytes(dims))
        });
        let attend_prompt = attend_prompt.into_iter().collect::<Result<Vec<Kernel>>>()?;
        let Ok(attend_prompt) = attend_prompt.try_into() else { unreachable!("as many as dims") };
        let Ok(kinds) = kinds.try_into() else { unreachable!("as many as kinds") };
        Ok(Kernels {
            kinds,
            embed_f32: rows.kernel("embed_f32", 0)?,
            exact: [dot.kernel("exact_1", 0)?, dot.kernel("exact_4", 0)?],
            angles: rows.kernel("angles", 0)?,
            normalize: rows.kernel("normalize", 0)?,
            prepare: rows.kernel("prepare", 0)?,
            interleave: order.kernel("interleave", 0)?,
            group: order.kernel("group", 0)?,
            elementwise: rows.kernel("elementwise", 0)?,
            rotate: rows.kernel("rotate", 0)?,
            arrange: rows.kernel("arrange", 0)?,
            pool: rows.kernel("pool", 0)?,
            route: rows.kernel("route", 0)?,
            expert_sum: rows.kernel("expert_sum", 0)?,
            adjust: choice.kernel("adjust", 0)?,
            choose: choice.kernel("choose", 0)?,
            conv: state.kernel("conv", 0)?,
            scan: state.kernel("scan", 0)?,
            read_all: state.kernel("read_all", 0)?,
            halves: Attention::of(halves)?,
            floats: Attention::of(floats)?,
            bytes: Attention::of(bytes)?,
            attend_meet: [
                meet.kernel("attend_meet", ATTEND_SHARED_BYTES)?,
                meet.kernel("attend_meet_alone", ATTEND_SHARED_BYTES)?,
            ],
            attend_prompt,
            persistent: persistent.transpose()?,
            _modules: modules,
        })
    }

    /// The kernels for planes of a kind.
    ///
    /// # Panics
    /// As [`number_of`].
    pub(crate) fn of(&self, kind: Kind) -> &OfKind {
        &self.kinds[number_of(kind)]
    }

    /// The kernels for keys and values that are kept so.
    pub(crate) fn attention(&self, kept: Kept) -> &Attention {
        match kept {
            Kept::F16 => &self.halves,
            Kept::F32 => &self.floats,
            Kept::Q8 => &self.bytes,
        }
    }

    /// The kernel that reads rows of a table.
    pub(crate) fn embed(&self, kind: Kind) -> Kernel {
        if kind == Kind::F32 { self.embed_f32 } else { self.of(kind).embed }
    }
}
