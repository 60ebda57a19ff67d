//! The time of each stage, which the device writes down between dispatches.

use bodkin_backend::{Batch, ExpertPart, Result, StageProfile};
use bodkin_model::{Op, Rows, Value};

use super::WgpuModel;
use crate::gpu::Gpu;

/// Where the device writes times, and the times of all steps since profiling began.
pub(super) struct Profile {
    /// One before the first dispatch, and one behind each.
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    /// Of each dispatch.
    seconds: Vec<f64>,
    steps: u64,
    tokens: u64,
    outputs: u64,
}

impl Profile {
    /// None if the device measures no times, or not as many.
    pub(super) fn new(gpu: &Gpu, dispatches: usize) -> Option<Profile> {
        let count = u32::try_from(dispatches + 1).ok()?;
        if !gpu.has_timestamps || count > wgpu::QUERY_SET_MAX_QUERIES {
            return None;
        }
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("profile"),
            ty: wgpu::QueryType::Timestamp,
            count,
        });
        let resolved = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("profile"),
            size: 8 * u64::from(count),
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let seconds = vec![0.0; dispatches];
        Some(Profile { queries, resolved, seconds, steps: 0, tokens: 0, outputs: 0 })
    }

    /// Notes the time behind `dispatches` of them.
    pub(super) fn mark(&self, pass: &mut wgpu::ComputePass<'_>, dispatches: usize) {
        pass.write_timestamp(&self.queries, dispatches as u32);
    }

    /// Puts the times where they can be read.
    pub(super) fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let all = 0..self.seconds.len() as u32 + 1;
        encoder.resolve_query_set(&self.queries, all, &self.resolved, 0);
    }
}

impl WgpuModel {
    /// Adds the times of a step that is over.
    pub(super) fn add_times(&mut self, batch: &Batch) -> Result<()> {
        let Some(profile) = &self.profile else { return Ok(()) };
        let bytes = self.read_buffer(&profile.resolved, 0, profile.resolved.size())?;
        let times: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
        let second = f64::from(self.gpu.queue.get_timestamp_period()) / 1e9;
        let profile = self.profile.as_mut().expect("it is on");
        for (seconds, times) in profile.seconds.iter_mut().zip(times.windows(2)) {
            *seconds += times[1].saturating_sub(times[0]) as f64 * second;
        }
        profile.steps += 1;
        profile.tokens += batch.tokens.len() as u64;
        profile.outputs += batch.outputs.len() as u64;
        Ok(())
    }

    /// The time and work of each stage since profiling was set on.
    pub(super) fn stage_profiles(&self) -> Vec<StageProfile> {
        let Some(profile) = &self.profile else { return Vec::new() };
        let mut stages: Vec<StageProfile> = Vec::new();
        let mut last = None;
        // Shorter by the last dispatches, which are not profiled.
        for (dispatch, seconds) in self.program.dispatches.iter().zip(&profile.seconds) {
            let name = self.stage_name(dispatch.op, dispatch.kernel.name());
            match stages.last_mut() {
                // A matmul of decode rows and one of prefill rows are a stage.
                Some(stage) if last == Some(dispatch.op) && stage.name == name => {
                    stage.seconds += seconds;
                }
                _ => {
                    let (bytes, operations, expert_part) = match dispatch.kernel.is_matmul() {
                        true => self.work(dispatch.op, profile),
                        false => (0, 0, self.expert_part(dispatch.op)),
                    };
                    let seconds = *seconds;
                    stages.push(StageProfile { name, seconds, bytes, operations, expert_part });
                }
            }
            last = Some(dispatch.op);
        }
        stages
    }

    /// The operations of the stage that begins with `first`.
    fn ops_from(&self, first: usize) -> &[Op] {
        let stage = self.stages.iter().find(|stage| stage.ops.start == first);
        &self.plan.ops[stage.expect("dispatches belong to stages").ops.clone()]
    }

    /// The weights of a matmul without their layer, or else the kernel's name.
    fn stage_name(&self, first: usize, kernel: &str) -> String {
        let role = |op: &Op| match *op {
            Op::Linear { weight, .. }
            | Op::Logits { weight, .. }
            | Op::ExpertLinear { weight, .. } => Some(self.plan.weight(weight).role()),
            _ => None,
        };
        let roles: Vec<&str> = self.ops_from(first).iter().filter_map(role).collect();
        if roles.is_empty() { kernel.to_owned() } else { roles.join(" + ") }
    }

    /// Bytes of weights that the matmuls of a stage read at least, their multiplications and
    /// additions, and their part in a layer with experts.
    fn work(&self, first: usize, profile: &Profile) -> (u64, u64, ExpertPart) {
        let (mut bytes, mut operations) = (0, 0);
        for (op, i) in self.ops_from(first).iter().zip(first..) {
            let (weight, experts, used) = match *op {
                Op::Linear { weight, .. } | Op::Logits { weight, .. } => (weight, 1, 1),
                Op::ExpertLinear { weight, route, experts, .. } => {
                    (weight, experts, route.map_or(experts, |route| self.plan.width(route) / 2))
                }
                _ => continue,
            };
            let rows = match self.plan.rows(Value(i)) {
                Rows::Tokens => profile.tokens,
                Rows::Outputs => profile.outputs,
            };
            let weight = self.plan.weight(weight);
            let layout = crate::layout::Packing::of(weight.format).layout;
            let whole = layout.bytes(weight.rows, weight.cols);
            bytes += profile.steps * whole * used as u64 / experts as u64;
            operations += 2 * rows * (used * weight.rows / experts * weight.cols) as u64;
        }
        (bytes, operations, self.expert_part(first))
    }

    /// The part of a stage in a layer with experts. Experts without a route are not chosen.
    fn expert_part(&self, first: usize) -> ExpertPart {
        let parts = self.ops_from(first).iter().map(|op| match *op {
            Op::Route { .. } => ExpertPart::Routing,
            Op::Linear { weight, .. } if self.plan.is_router(weight) => ExpertPart::Routing,
            Op::ExpertLinear { route: Some(_), .. } | Op::ExpertSum { .. } => ExpertPart::Experts,
            _ => ExpertPart::None,
        });
        parts.into_iter().find(|part| *part != ExpertPart::None).unwrap_or_default()
    }
}
