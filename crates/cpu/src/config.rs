//! The configuration of the CPU backend.

use bodkin_backend::{Error, ExpertBudget, KvType, Result};

use crate::host::{available_memory, equal_cores};
use crate::isa::Isa;

/// How to use this machine's cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cpu {
    /// Threads that compute; the caller of a step is one of them.
    pub threads: usize,
    /// The vector instructions to use.
    pub isa: Isa,
    /// The fusions to apply.
    pub fusions: Fusions,
    /// Whether weights are repacked into memory at load. If not, they stay in the file's pages and
    /// each matmul packs them: slower, in less memory, with the same results.
    pub repack: bool,
    /// How weights of sparse formats are stored.
    pub sparse: Sparse,
    /// Whether models take input thresholds (activation sparsity): the weights of
    /// [`bodkin_model::Plan::sparse_input_matmuls`] are packed column-major where the format
    /// allows, and a GEMV skips the columns of zero inputs.
    pub skip_inputs: bool,
    /// The type of the KV cache.
    pub kv_type: KvType,
    /// How much memory the experts of a model may take. The others are read from the file when
    /// tokens choose them, with the same results.
    pub expert_budget: ExpertBudget,
    /// The most bytes that a model may take; what is free by default.
    pub memory_limit: Option<u64>,
}

/// Whether weights of sparse formats are stored without their zeros. The results are bit-identical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sparse {
    /// Whichever is faster for each weight, measured at load.
    Auto,
    /// Without zeros.
    Always,
    /// With zeros: weights are expanded to dense panels at load.
    Never,
}

/// The most threads of a backend.
pub const MAX_THREADS: usize = 1024;

impl Cpu {
    /// All cores of the fastest kind, or `threads` of them, with the detected instruction set or
    /// the one that the environment variable `BODKIN_CPU` names.
    pub fn new(threads: Option<usize>) -> Result<Cpu> {
        let threads = threads.unwrap_or_else(equal_cores);
        if threads == 0 || threads > MAX_THREADS {
            let message = format!("expected 1 to {MAX_THREADS} threads, found {threads}");
            return Err(Error::Config(message));
        }
        let isa = Isa::from_env().map_err(Error::Config)?;
        Ok(Cpu {
            threads,
            isa,
            fusions: Fusions::ALL,
            repack: true,
            sparse: Sparse::Auto,
            skip_inputs: false,
            kv_type: KvType::Auto,
            expert_budget: ExpertBudget::Auto,
            memory_limit: None,
        })
    }

    /// Bytes that a model can have, if the system says or a limit is set.
    pub(crate) fn free_memory(&self) -> Option<u64> {
        available_memory().into_iter().chain(self.memory_limit).min()
    }
}

/// The fusions of the lowering, each of which can be switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// Consecutive row-local operations run in one stage.
    pub rows: bool,
    /// Matmuls with the same input run in one stage.
    pub siblings: bool,
}

impl Fusions {
    /// All fusions.
    pub const ALL: Fusions = Fusions { rows: true, siblings: true };
    /// No fusions: the plan as it is.
    pub const NONE: Fusions = Fusions { rows: false, siblings: false };
}
