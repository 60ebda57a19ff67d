//! The Plan on CPU cores. A plan is lowered to stages; a pool of threads runs them, meeting at a
//! barrier after each. Weights are repacked at load for the processor's vector instructions, which
//! are chosen at run time. This crate must not know architectures, text, or who asks.

mod attend;
mod experts;
mod host;
mod isa;
mod kv;
pub mod linear;
mod lower;
mod memory;
mod model;
mod observe;
mod ops;
mod pieces;
mod pool;
mod profile;
mod recurrent;
mod shared;
mod step;
mod trial;
mod unroll;
mod vector;
mod weights;

use std::sync::Arc;

use bodkin_backend::{Backend, Error, KvType, Limits, Memory, Model, Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Plan, StateSlot};

pub use isa::Isa;
pub use lower::Fusions;

/// How to use this machine's cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Threads that compute; the caller of a step is one of them.
    pub threads: usize,
    /// Which vector instructions to use.
    pub isa: Isa,
    /// Which rewrites of the plan are on.
    pub fusions: Fusions,
    /// Whether weights are repacked into memory at load. If not, they stay in the file's pages and
    /// are packed whenever they are used: slower, with the same results, in less memory.
    pub repack: bool,
    /// How weights of sparse formats are kept.
    pub sparse: Sparse,
    /// Whether models take thresholds of inputs: the weights of such products are kept by columns
    /// where their format allows, so that a lone token reads those only whose input is not zero.
    pub skip_inputs: bool,
    /// What keys and values are kept as.
    pub kv_type: KvType,
}

/// Whether weights of sparse formats are read without their zeros. Results are the same, bit for
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sparse {
    /// As is faster for each of them, measured when it is loaded.
    Auto,
    /// Always without.
    Always,
    /// Never: they are made dense when they are loaded.
    Never,
}

impl Cpu {
    /// All cores, or `threads` of them, with the best instructions that there are, or those that
    /// the environment variable `BODKIN_CPU` names.
    pub fn new(threads: Option<usize>) -> Result<Cpu> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.unwrap_or_else(cores);
        if threads == 0 || threads > 1024 {
            return Err(Error::Config(format!("expected 1 to 1024 threads, found {threads}")));
        }
        let isa = Isa::from_env().map_err(Error::Config)?;
        let (fusions, sparse) = (Fusions::ALL, Sparse::Auto);
        let (repack, skip_inputs, kv_type) = (true, false, KvType::Auto);
        Ok(Cpu { threads, isa, fusions, repack, sparse, skip_inputs, kv_type })
    }
}

impl Backend for Cpu {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa, self.threads)
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn bandwidth(&self) -> Result<f64> {
        let mut pool = pool::Pool::new(self.threads).expect("threads that have run before");
        Ok(host::bandwidth(self.isa, &mut pool))
    }

    fn available_memory(&self) -> Option<u64> {
        host::available_memory()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        model::memory(self, plan, limits)
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let taps = plan.states.iter().filter_map(|state| match state {
            StateSlot::Conv { kernel, .. } => Some(*kernel),
            StateSlot::Scan(_) => None,
        });
        if let Some(taps) = taps.max().filter(|&taps| taps > recurrent::MOST_TAPS) {
            let most = recurrent::MOST_TAPS;
            let what = format!("a convolution of {taps} taps (at most {most})");
            return Err(Error::Unsupported { backend: self.name(), what });
        }
        let failed = |e| Error::Config(format!("cannot start {} threads: {e}", self.threads));
        let mut pool = pool::Pool::new(self.threads).map_err(failed)?;
        let weights = weights::prepare(self, &plan, file, &mut pool, progress);
        Ok(Box::new(model::CpuModel::new(self, plan, file, limits, pool, weights)))
    }
}
