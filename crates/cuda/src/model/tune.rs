//! Measures the launch shapes of a loaded model's matmuls, before its first step.

use std::time::Instant;

use bodkin_backend::Result;
use bodkin_backend::tuning::{MEASURED_BYTES, RUNS, TIME_LIMIT, fastest};

use super::CudaModel;
use crate::driver::Graph;
use crate::lower::{Stage, Work};
use crate::persistent::Persistent;
use crate::step::{Size, Step};
use crate::tuning::{LaunchShape, MatmulShape, Tuning, measured_rows};

/// The most matmuls of a measurement: small weights may come from a cache.
const MEASURED_MATMULS: usize = 32;

/// Stages with matmuls of one shape, and the launch shapes to measure, the built-in one first.
struct Candidates<'a> {
    shape: MatmulShape,
    launches: Vec<LaunchShape>,
    stages: Vec<&'a Stage>,
}

impl CudaModel {
    /// Measures the launch shapes that are missing. Matmuls write only values of a step, so there
    /// must have been none yet, and other devices must not be connected.
    pub(crate) fn tune(&self, tuning: &mut Tuning) -> Result<()> {
        self.device.make_current()?;
        let end = Instant::now() + TIME_LIMIT;
        // The persistent kernel divides matmuls of one row itself.
        let blocks = self.device.processors as usize;
        let fits = |persistent: &Persistent| persistent.fits(blocks, &self.plan, &self.program);
        let has_persistent =
            self.kernels.persistent.is_some() && self.sizes.persistent.as_ref().is_some_and(fits);
        let first = if has_persistent { 2 } else { 1 };
        for rows in measured_rows(self.limits.tokens).filter(|&rows| rows >= first) {
            for candidates in self.candidates(rows, tuning) {
                if Instant::now() > end {
                    return Ok(());
                }
                tuning.insert(candidates.shape, self.fastest(rows, &candidates, end)?);
            }
        }
        Ok(())
    }

    /// What to measure for steps of this many rows.
    fn candidates(&self, rows: usize, tuning: &Tuning) -> Vec<Candidates<'_>> {
        let step = self.decode_step(rows, &self.tuning);
        let mut all: Vec<Candidates<'_>> = Vec::new();
        for stage in &self.program.stages {
            // Fewer rows of outputs would be taken for this number.
            if step.rows(stage.rows) != rows {
                continue;
            }
            let Some((shape, launches)) = step.launch_shapes(stage) else { continue };
            match all.iter_mut().find(|candidates| candidates.shape == shape) {
                Some(candidates) => candidates.stages.push(stage),
                None if tuning.has(&shape, launches[0]) => {}
                None => all.push(Candidates { shape, launches, stages: vec![stage] }),
            }
        }
        all
    }

    fn decode_step<'a>(&'a self, rows: usize, tuning: &'a Tuning) -> Step<'a> {
        let outputs = rows.min(self.limits.outputs);
        let of_one = Size::of_one();
        let size = Size { tokens: rows, outputs, spans: rows, decode_rows: rows, ..of_one };
        Step { tuning, ..self.sized_step(size) }
    }

    /// The fastest launch shape, of those that have run once until `end`.
    fn fastest(
        &self,
        rows: usize,
        candidates: &Candidates<'_>,
        end: Instant,
    ) -> Result<LaunchShape> {
        let Candidates { shape, launches, stages } = candidates;
        if launches.len() == 1 {
            return Ok(launches[0]);
        }
        let stages = self.measured(stages);
        let mut graphs = Vec::new();
        for &launch in launches {
            let tuning = Tuning::of(*shape, launch);
            let step = self.decode_step(rows, &tuning);
            let run = || stages.iter().try_for_each(|stage| step.run(stage));
            // The host launches single kernels more slowly than a device runs short ones.
            let graph = self.device.record(run)?;
            graph.launch()?;
            self.device.synchronize()?;
            graphs.push(graph);
            if Instant::now() > end {
                break;
            }
        }
        Ok(launches[fastest(&self.seconds(&graphs)?)])
    }

    /// The stages to run, the same ones again where they have few weights.
    fn measured<'a>(&self, stages: &[&'a Stage]) -> Vec<&'a Stage> {
        let bytes = |stage: &Stage| match &stage.work {
            Work::Matmul(matmul) => {
                let weights = matmul.operands.iter().map(|operand| operand.weight.0);
                weights.map(|weight| self.weights.placed[weight].shape.packed_bytes()).sum()
            }
            _ => 0,
        };
        let mut sum = 0;
        let is_needed = |stage: &&Stage| {
            let is_needed = sum < MEASURED_BYTES;
            sum += bytes(stage);
            is_needed
        };
        stages.iter().copied().cycle().take(MEASURED_MATMULS).take_while(is_needed).collect()
    }

    /// The least seconds of some runs of each graph.
    fn seconds(&self, graphs: &[Graph]) -> Result<Vec<f64>> {
        let mut marks = Vec::new();
        // Keeps the device busy while the host sends the first runs.
        graphs.iter().try_for_each(Graph::launch)?;
        for _ in 0..RUNS {
            for graph in graphs {
                let start = self.device.mark()?;
                graph.launch()?;
                marks.push([start, self.device.mark()?]);
            }
        }
        self.device.synchronize()?;
        let mut least = vec![f64::MAX; graphs.len()];
        for (i, [start, end]) in marks.iter().enumerate() {
            let least = &mut least[i % graphs.len()];
            *least = least.min(end.seconds_since(start)?);
        }
        Ok(least)
    }
}
