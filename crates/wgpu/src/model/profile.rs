//! The time and work of each stage.

use bodkin_backend::{Batch, ExpertPart, Result, StageProfile};
use bodkin_model::{Op, Rows, Value};

use super::WgpuModel;
use crate::timestamps::Timestamps;

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
    fn work(&self, first: usize, profile: &Timestamps) -> (u64, u64, ExpertPart) {
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
