//! The Plan on NVIDIA GPUs. A plan is lowered to stages, each a kernel; a step that generates is
//! recorded once as a graph and then sent whole. Only the driver is needed, and it is opened when
//! a device is asked for. This crate must not know architectures, text, or who asks.

mod arena;
mod codes;
mod driver;
mod feed;
mod generate;
mod kept;
mod kernels;
mod lower;
mod model;
mod observe;
mod parameters;
mod persistent;
mod planes;
mod sizes;
mod staging;
mod step;
mod weights;

use std::sync::Arc;

use bodkin_backend::{Backend, Error, KvType, Limits, Memory, Model, Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, StateSlot};

use driver::Device;
use kept::Kept;
use kernels::Kernels;
use lower::Program;
use model::CudaModel;
use sizes::Sizes;

/// The widest row of state of a scan that the kernel holds.
const MOST_STATE: usize = 256;
/// The most pairs of rows and experts in a step: the height of a grid.
const MOST_PAIRS: usize = 65_535;
/// Bytes that are read to find the bandwidth, and how often.
const BANDWIDTH_BYTES: usize = 2 << 30;
const BANDWIDTH_PASSES: usize = 8;

/// An NVIDIA GPU.
pub struct Cuda {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    fuse: bool,
    kv_type: KvType,
}

impl Cuda {
    /// Whether there is a driver on this machine.
    pub fn is_installed() -> bool {
        driver::is_installed()
    }

    /// Opens the device of this number.
    ///
    /// # Errors
    /// One line that says why there is none: no driver, one that is too old, no such device.
    pub fn open(ordinal: usize) -> Result<Cuda> {
        let device = Arc::new(Device::open(ordinal)?);
        let kernels = Arc::new(Kernels::load(&device)?);
        Ok(Cuda { device, kernels, fuse: true, kv_type: KvType::Auto })
    }

    /// The same with every operation as a stage of its own, or not: no bit may differ.
    #[must_use]
    pub fn fusing(self, fuse: bool) -> Cuda {
        Cuda { fuse, ..self }
    }

    /// The same with keys and values of all models kept so.
    #[must_use]
    pub fn keeping(self, kv_type: KvType) -> Cuda {
        Cuda { kv_type, ..self }
    }

    fn sizes(&self, plan: &Plan, program: &Program, limits: &Limits) -> Sizes {
        Sizes::new(plan, program, limits, Kept::of(self.kv_type, plan))
    }

    /// What this backend cannot run of a plan.
    fn unsupported(&self, plan: &Plan, limits: &Limits) -> Option<String> {
        let state = plan.states.iter().find_map(|state| match state {
            StateSlot::Scan(scan) if scan.state > MOST_STATE => Some(scan.state),
            _ => None,
        });
        if let Some(state) = state {
            return Some(format!("a scan with {state} elements a row (at most {MOST_STATE})"));
        }
        let program = lower::lower(plan, self.fuse);
        let kept = Kept::of(self.kv_type, plan);
        let mut stages = program.stages.iter();
        let too_wide = stages.find_map(|stage| step::too_wide(plan, kept, stage));
        if too_wide.is_some() {
            return too_wide;
        }
        let pairs = plan.ops.iter().filter_map(|op| match op {
            Op::ExpertLinear { route, experts, .. } => {
                Some(limits.tokens * route.map_or(*experts, |route| plan.width(route) / 2))
            }
            _ => None,
        });
        let pairs = pairs.max().filter(|&pairs| pairs > MOST_PAIRS);
        pairs.map(|pairs| format!("{pairs} pairs of tokens and experts (at most {MOST_PAIRS})"))
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        self.device.enter()?;
        let free = self.device.free_memory()? as usize / 2;
        let bytes = BANDWIDTH_BYTES.min(free) >> 20 << 20;
        let memory = driver::Memory::zeroed(&self.device, bytes, "the test of bandwidth")?;
        let read = parameters::Read {
            from: memory.address,
            sums: memory.address,
            count: bytes as u64 / 16,
        };
        let mut best = f64::MAX;
        for _ in 0..BANDWIDTH_PASSES {
            let start = self.device.mark()?;
            let grid = [8 * self.device.processors as usize, 1, 1];
            // SAFETY: the memory holds as much.
            unsafe { self.device.launch(self.kernels.read_all, grid, 256, 0, &read) }?;
            let end = self.device.mark()?;
            self.device.finish()?;
            best = best.min(end.seconds_since(&start)?);
        }
        Ok(bytes as f64 / best)
    }
}

impl Backend for Cuda {
    fn name(&self) -> String {
        format!("cuda:{} ({})", self.device.ordinal(), self.device.name)
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn bandwidth(&self) -> Result<f64> {
        self.measure_bandwidth()
    }

    fn available_memory(&self) -> Option<u64> {
        self.device.free_memory().ok()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        let program = lower::lower(plan, self.fuse);
        let sizes = self.sizes(plan, &program, limits);
        Memory {
            weight_bytes: weights::bytes(plan),
            state_bytes: sizes.state(),
            scratch_bytes: sizes.scratch(),
        }
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        if let Some(what) = self.unsupported(&plan, limits) {
            return Err(Error::Unsupported { backend: self.name(), what });
        }
        let program = lower::lower(&plan, self.fuse);
        let sizes = self.sizes(&plan, &program, limits);
        let made = (program, sizes, Arc::clone(&self.kernels));
        Ok(Box::new(CudaModel::load(&self.device, plan, file, limits, made, progress)?))
    }
}
