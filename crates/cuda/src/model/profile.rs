//! What a loaded model counts: the time of its stages, and the choices of its experts.

use bodkin_backend::{Batch, ExpertPart, ExpertStats, Result, StageProfile};
use bodkin_model::Rows;

use super::{CudaModel, Times};
use crate::driver::Mark;
use crate::lower::{Matmul, Sparse, Stage, Work};
use crate::packed::Shape;
use crate::step::Size;

impl Times {
    pub(super) fn new(stages: usize) -> Times {
        Times { seconds: vec![0.0; stages], steps: 0, tokens: 0, outputs: 0 }
    }
}

impl CudaModel {
    /// Launches all stages with a mark behind each.
    pub(super) fn launch_profiled(&mut self, batch: &Batch) -> Result<()> {
        let step = self.sized_step(Size::of(batch));
        let mut marks = vec![self.device.mark()?];
        for stage in &self.program.stages {
            step.run(stage)?;
            marks.push(self.device.mark()?);
        }
        self.device.synchronize()?;
        self.add_times(batch, &marks)
    }

    /// Whether stages are timed.
    pub(crate) fn is_profiled(&self) -> bool {
        self.profile.is_some()
    }

    /// Adds the times of a step that is over, with a mark before each stage and behind the last.
    pub(crate) fn add_times(&mut self, batch: &Batch, marks: &[Mark]) -> Result<()> {
        let times = self.profile.as_mut().expect("profiling is on");
        for (seconds, marks) in times.seconds.iter_mut().zip(marks.windows(2)) {
            *seconds += marks[1].seconds_since(&marks[0])?;
        }
        times.steps += 1;
        times.tokens += batch.tokens.len() as u64;
        times.outputs += batch.outputs.len() as u64;
        Ok(())
    }

    /// The time and work of each stage since profiling was set on.
    pub(super) fn stage_profiles(&self) -> Vec<StageProfile> {
        let Some(times) = &self.profile else { return Vec::new() };
        let profile = |(stage, &seconds): (&Stage, &f64)| {
            let (bytes, operations) = self.work(stage, times);
            let expert_part = self.expert_part(stage);
            StageProfile { name: stage.name.clone(), seconds, bytes, operations, expert_part }
        };
        self.program.stages.iter().zip(&times.seconds).map(profile).collect()
    }

    /// The part of a stage in a layer with experts. Experts without a route are not chosen.
    fn expert_part(&self, stage: &Stage) -> ExpertPart {
        let has_router =
            |m: &Matmul| m.operands.iter().any(|operand| self.plan.is_router(operand.weight));
        match &stage.work {
            Work::Route(_) | Work::Sparse(Sparse::Route(_)) => ExpertPart::Routing,
            Work::Matmul(matmul) if has_router(matmul) => ExpertPart::Routing,
            Work::Matmul(matmul) if matmul.experts.is_some_and(|e| e.route.is_some()) => {
                ExpertPart::Experts
            }
            Work::ExpertSum { .. } => ExpertPart::Experts,
            _ => ExpertPart::None,
        }
    }

    /// Bytes of weights that a stage reads at least, and its multiplications and additions, on all
    /// devices together.
    fn work(&self, stage: &Stage, times: &Times) -> (u64, u64) {
        let Work::Matmul(matmul) = &stage.work else { return (0, 0) };
        let rows = match (stage.rows, matmul.gathers_outputs) {
            (Rows::Tokens, false) => times.tokens,
            _ => times.outputs,
        };
        let (mut bytes, mut operations) = (0, 0);
        for operand in &matmul.operands {
            let own = self.weights.placed[operand.weight.0].shape;
            let shape = Shape { rows: own.full_rows, ..own };
            let matrix = (shape.packed_bytes() / shape.matrices) as u64;
            let used = matmul.used() as u64;
            bytes += times.steps * matrix * used;
            operations += 2 * rows * used * (shape.rows * shape.cols) as u64;
        }
        (bytes, operations)
    }

    /// How often each expert was chosen.
    pub(super) fn expert_stats(&self) -> Result<Vec<ExpertStats>> {
        let counts = self.program.routings.iter().zip(&self.addresses.expert_counts);
        let read = |((routing, layer), (&experts, &address)): ((usize, usize), (&usize, &u64))| {
            let mut counts = vec![0u32; experts];
            self.device.make_current()?;
            // SAFETY: there is a count for each expert; the copy is waited for.
            unsafe { self.device.copy_to_host(&mut counts, address) }?;
            self.device.synchronize()?;
            let counts = counts.into_iter().map(u64::from).collect();
            let cache = self.expert_cache.as_ref();
            let cache = cache.map(|cache| cache.stats(&self.device, routing)).transpose()?;
            let cache = cache.flatten();
            Ok(ExpertStats { layer, counts, seconds: Vec::new(), cache })
        };
        self.plan.routed_layers().into_iter().enumerate().zip(counts).map(read).collect()
    }
}
