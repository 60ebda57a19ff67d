//! The Plan on CPU cores. A plan is lowered to stages; a pool of threads runs them with a barrier
//! after each. Weights are repacked at load for the processor's vector instructions, which are
//! detected at run time. This crate must not know architectures, text or the engine.

mod amx;
mod autotune;
mod config;
mod expert_cache;
mod expert_permutation;
mod host;
mod isa;
mod kv;
pub mod linear;
mod lower;
mod memory;
mod model;
mod observe;
mod ops;
mod profile;
mod program;
mod shared;
mod state;
mod step;
mod trace;
mod unroll;
mod vector;
mod weights;

use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, DeviceKind, Error, KvType, Limits, Memory, Model, Pool, Progress, Result,
};
use bodkin_gguf::File;
use bodkin_model::{Plan, RecurrentState};

pub use config::{Cpu, Fusions, MAX_THREADS, Sparse};
pub use host::available_memory;
pub use isa::Isa;
pub use memory::mapped_bytes;

/// What the names of threads begin with.
const THREAD_NAME: &str = "bodkin-cpu";

impl Backend for Cpu {
    fn name(&self) -> String {
        let plural = if self.threads == 1 { "" } else { "s" };
        format!("cpu ({}, {} thread{plural})", self.isa, self.threads)
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        vec![DeviceInfo {
            kind: DeviceKind::Cpu,
            name: format!("cpu ({})", self.isa),
            total_bytes: host::total_memory(),
            free_bytes: host::available_memory(),
        }]
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        let mut pool = Pool::new(THREAD_NAME, self.threads).expect("threads that have run before");
        Ok(host::measure_bandwidth(self.isa, &mut pool))
    }

    fn available_memory(&self) -> Option<u64> {
        self.free_memory()
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
            RecurrentState::Conv { kernel, .. } => Some(*kernel),
            RecurrentState::Scan(_)
            | RecurrentState::DeltaRule(_)
            | RecurrentState::Compression(_) => None,
        });
        if let Some(taps) = taps.max().filter(|&taps| taps > step::recurrent::MAX_TAPS) {
            let most = step::recurrent::MAX_TAPS;
            let what = format!("a convolution of {taps} taps (at most {most})");
            return Err(Error::Unsupported { backend: self.name(), what });
        }
        let failed = |e| Error::Config(format!("cannot start {} threads: {e}", self.threads));
        let mut pool = Pool::new(THREAD_NAME, self.threads).map_err(failed)?;
        let slots = model::expert_slots(self, &plan, limits);
        if let Some(weight) = expert_cache::derived_weight(&plan, file).filter(|_| slots.is_some())
        {
            let what = format!(
                "experts that stay in the file, as that has `{weight}` in another form (`bodkin \
                 quantize` writes the usual one)"
            );
            return Err(Error::Unsupported { backend: self.name(), what });
        }
        let weights = weights::load(self, &plan, file, slots, &mut pool, progress);
        let caches = expert_cache::ExpertCache::all(&plan, file, slots);
        Ok(Box::new(model::CpuModel::new(self, plan, file, limits, pool, weights, caches)))
    }
}
