//! Tensor parallelism: a model on several devices, which run the same stages, each with its shard
//! of the rows of sharded weights. After a sharded matmul an all-gather copies each device's
//! columns to the others, between two event barriers. The host launches stages one by one.

use bodkin_backend as backend;
use bodkin_backend::{
    Batch, HostSampler, Limits, Model, ModelStats, Observer, Result, Sink, Transfer,
};
use bodkin_model::Plan;

use crate::driver::{Columns, Event};
use crate::lower::{Gather, Stage, Work};
use crate::model::CudaModel;
use crate::observe;
use crate::step::{Size, Step};

/// A plan on several devices. Properties that all share are read from the first.
pub(crate) struct TensorParallel {
    parts: Vec<CudaModel>,
    /// One event a device, for barriers.
    arrivals: Vec<Event>,
    host: HostSampler,
}

impl TensorParallel {
    pub(crate) fn new(parts: Vec<CudaModel>) -> Result<TensorParallel> {
        let arrivals = parts.iter().map(|part| Event::new(&part.device));
        let host = HostSampler::new(parts[0].plan(), parts[0].limits());
        Ok(TensorParallel { arrivals: arrivals.collect::<Result<_>>()?, parts, host })
    }

    /// Runs a step, and shows the inputs of matmuls to the observer, if there is one.
    fn run(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let sent = self.send(batch, observer);
        // Launched kernels still read memory that the next step writes; the first error is
        // returned.
        let finished: Vec<Result<()>> = self.parts.iter().map(finish).collect();
        sent?;
        finished.into_iter().collect::<Result<()>>()?;
        let first = &mut self.parts[0];
        first.device.enter()?;
        first.receive(batch, logits)
    }

    /// Launches all stages on all devices.
    fn send(&mut self, batch: &Batch, mut observer: Option<&mut dyn Observer>) -> Result<()> {
        for part in &mut self.parts {
            part.begin(batch)?;
        }
        let (is_observed, size) = (observer.is_some(), Size::of(batch));
        let step = |part| Step { is_observed, ..CudaModel::sized_step(part, size) };
        let steps: Vec<Step<'_>> = self.parts.iter().map(step).collect();
        let first = &self.parts[0];
        let mut marks = Vec::new();
        let mut mark = || {
            if first.is_profiled() {
                first.device.enter()?;
                marks.push(first.device.mark()?);
            }
            Ok(())
        };
        mark()?;
        for stage in &first.program.stages {
            if let Some(observer) = &mut observer {
                first.device.enter()?;
                observe::show_inputs(&steps[0], stage, batch, &mut **observer)?;
            }
            self.send_stage(&steps, stage)?;
            mark()?;
        }
        drop(steps);
        if self.parts[0].is_profiled() {
            finish(&self.parts[0])?;
            self.parts[0].add_times(batch, &marks)?;
        }
        Ok(())
    }

    fn send_stage(&self, steps: &[Step<'_>], stage: &Stage) -> Result<()> {
        for step in steps {
            step.device.enter()?;
            step.run(stage)?;
        }
        let rows = steps[0].rows(stage.rows);
        match &stage.work {
            Work::Gather(gather) if rows > 0 => self.gather(steps, gather, rows),
            _ => Ok(()),
        }
    }

    /// Every device copies the other devices' columns of `rows` rows.
    fn gather(
        &self,
        steps: &[Step<'_>],
        Gather { results, used }: &Gather,
        rows: usize,
    ) -> Result<()> {
        self.barrier()?;
        for (i, to) in steps.iter().enumerate() {
            for (_, from) in steps.iter().enumerate().filter(|(j, _)| *j != i) {
                for &(value, weight) in results {
                    let shape = &from.weights[weight.0].shape;
                    let element = from.content(value).element_bytes();
                    let (address, stride) = from.result_place(value, shape, *used);
                    let columns = Columns {
                        from: address,
                        to: to.result_place(value, shape, *used).0,
                        bytes: element * shape.rows,
                        stride: element * stride as usize,
                        rows: rows * used,
                    };
                    // SAFETY: the value holds the step's rows on both devices. The first barrier
                    // orders the copy behind the source's matmul, the second before its next write.
                    unsafe { to.device.pull(from.device, &columns) }?;
                }
            }
        }
        self.barrier()
    }

    /// An event barrier: every device waits for the work that was launched on all others.
    fn barrier(&self) -> Result<()> {
        self.arrivals.iter().try_for_each(Event::record)?;
        for (i, part) in self.parts.iter().enumerate() {
            let mut others = self.arrivals.iter().enumerate().filter(|(j, _)| *j != i);
            others.try_for_each(|(_, other)| part.device.wait_for(other))?;
        }
        Ok(())
    }
}

/// Waits for all that was sent to a part's device.
fn finish(part: &CudaModel) -> Result<()> {
    part.device.enter()?;
    part.device.finish()
}

impl Model for TensorParallel {
    fn plan(&self) -> &Plan {
        self.parts[0].plan()
    }

    fn limits(&self) -> &Limits {
        self.parts[0].limits()
    }

    fn step(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        let mut host = std::mem::take(&mut self.host);
        let result =
            host.run(step, sink, &mut |batch, logits, observer| self.run(batch, logits, observer));
        self.host = host;
        result
    }

    /// Every device has the whole state.
    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        let parts = match transfer {
            Transfer::Read { .. } => &mut self.parts[..1],
            _ => &mut self.parts,
        };
        let mut bytes = 0;
        for part in parts {
            bytes = part.transfer(transfer.map(|block| block))?;
        }
        Ok(bytes)
    }

    /// Stage times are those of the first device.
    fn stats(&self) -> ModelStats {
        let mut stats = self.parts[0].stats();
        // A device that is lost says so in the next step.
        let others = self.parts[1..].iter().map(|part| part.device.timeline().unwrap_or_default());
        others.for_each(|timeline| stats.timeline.extend(timeline));
        stats
    }

    fn set_profiling(&mut self, on: bool) {
        self.parts[0].set_profiling(on);
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.parts.iter_mut().try_for_each(|part| part.set_tracing(on))
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        self.parts[0].set_activation_thresholds(thresholds)
    }
}
