//! Tensor parallelism: a model on several devices, which run the same stages, each with its shard
//! of the rows of sharded weights. Behind a sharded matmul each device gets the others' columns.
//! Devices that can reach each other store them there, and wait for each other in their kernels.
//! The others copy them between two event barriers; the host launches stages one by one.

use std::sync::{Mutex, PoisonError};

use bodkin_backend as backend;
use bodkin_backend::{
    Batch, HostSampler, Limits, Model, ModelStats, Observer, Result, Sink, Transfer,
};
use bodkin_model::Plan;

use crate::driver::{Columns, Event};
use crate::lower::{Gather, Stage, Work};
use crate::mapped_experts::{MappedExperts, StepGuard};
use crate::model::{CudaModel, StepEnd};
use crate::observe;
use crate::step::{Size, Step};

/// Held during a step: kernels of two models that wait for their other parts, launched in another
/// order on each device, would wait forever.
static STEPS: Mutex<()> = Mutex::new(());

/// A plan on several devices. Properties that all share are read from the first.
pub(crate) struct TensorParallel {
    parts: Vec<CudaModel>,
    exchange: Exchange,
    host: HostSampler,
}

/// How devices exchange the columns of values.
enum Exchange {
    /// Kernels store them on the other devices.
    Stores,
    /// They are copied between event barriers; each device has an event.
    Copies(Vec<Event>),
}

impl TensorParallel {
    /// A model of these parts, which can store into each other's memory or not.
    pub(crate) fn new(mut parts: Vec<CudaModel>, are_connected: bool) -> Result<TensorParallel> {
        let exchange = if are_connected {
            CudaModel::connect(&mut parts)?;
            CudaModel::list_all_persistent_stages(&mut parts)?;
            Exchange::Stores
        } else {
            let events = parts.iter().map(|part| Event::new(&part.device));
            Exchange::Copies(events.collect::<Result<_>>()?)
        };
        let host = HostSampler::new(parts[0].plan(), parts[0].limits());
        Ok(TensorParallel { exchange, parts, host })
    }

    /// Runs a step, and shows the inputs of matmuls to the observer, if there is one.
    fn run(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let is_observed = observer.is_some();
        self.parts.iter_mut().for_each(|part| part.runs_stages = is_observed);
        let begun = self.parts.iter_mut().try_for_each(|part| part.begin(batch));
        let end = StepEnd::Logits;
        let launched =
            begun.and_then(|()| self.exchange.launch(&mut self.parts, batch, end, observer));
        // Launched kernels still read memory that the next step writes; the first error is
        // returned.
        let finished: Vec<Result<()>> = self.parts.iter().map(CudaModel::synchronize).collect();
        let first = &mut self.parts[0];
        let received = launched
            .and(finished.into_iter().collect())
            .and_then(|()| first.device.make_current())
            .and_then(|()| first.receive_logits(batch, logits));
        self.parts.iter_mut().for_each(|part| part.runs_stages = false);
        received
    }
}

impl Exchange {
    /// Launches a step on all devices.
    fn launch(
        &self,
        parts: &mut [CudaModel],
        batch: &Batch,
        end_of_step: StepEnd,
        observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let is_plain = observer.is_none() && !parts[0].is_profiled();
        let size = Size::of(batch);
        if matches!(self, Exchange::Stores) && is_plain && size.is_recorded() {
            // What can fail comes first: a device waits for those that do not run.
            for part in parts.iter_mut() {
                part.device.make_current()?;
                part.record(size, end_of_step)?;
            }
            let launch = |part: &mut CudaModel| {
                part.device.make_current()?;
                part.launch_stages(batch, end_of_step)
            };
            return parts.iter_mut().try_for_each(launch);
        }
        self.launch_stages(parts, batch, end_of_step, observer)
    }

    /// Launches all stages, each on all devices.
    fn launch_stages(
        &self,
        parts: &mut [CudaModel],
        batch: &Batch,
        end_of_step: StepEnd,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let (is_observed, size) = (observer.is_some(), Size::of(batch));
        let step = |part| Step { is_observed, ..CudaModel::sized_step(part, size) };
        let steps: Vec<Step<'_>> = parts.iter().map(step).collect();
        let on_all = |launch: &dyn Fn(&Step<'_>) -> Result<()>| {
            steps.iter().try_for_each(|step| step.device.make_current().and_then(|()| launch(step)))
        };
        let first = &parts[0];
        let mut marks = Vec::new();
        let mut mark = || {
            if first.is_profiled() {
                first.device.make_current()?;
                marks.push(first.device.mark()?);
            }
            Ok(())
        };
        on_all(&|step| step.barrier())?;
        mark()?;
        for stage in &first.program.stages {
            if let Some(observer) = &mut observer {
                first.device.make_current()?;
                observe::show_inputs(&steps[0], stage, batch, &mut **observer)?;
            }
            on_all(&|step| step.run(stage))?;
            self.copy(&steps, stage)?;
            mark()?;
        }
        on_all(&|step| step.end(end_of_step))?;
        drop(steps);
        if parts[0].is_profiled() {
            parts[0].synchronize()?;
            parts[0].add_times(batch, &marks)?;
        }
        Ok(())
    }

    /// Copies the columns of an all-gather, if kernels do not store them.
    fn copy(&self, steps: &[Step<'_>], stage: &Stage) -> Result<()> {
        let rows = steps[0].rows(stage.rows);
        match (self, &stage.work) {
            (Exchange::Copies(events), Work::Gather(gather)) if rows > 0 => {
                event_barrier(steps, events)?;
                copy_columns(steps, gather, rows)?;
                event_barrier(steps, events)
            }
            _ => Ok(()),
        }
    }
}

/// Every device copies the other devices' columns of `rows` rows.
fn copy_columns(steps: &[Step<'_>], gather: &Gather, rows: usize) -> Result<()> {
    let Gather { results, used, .. } = gather;
    for (i, to) in steps.iter().enumerate() {
        for (_, from) in steps.iter().enumerate().filter(|(j, _)| *j != i) {
            for &(value, weight) in results {
                let shape = &from.weights[weight.0].shape;
                let element = from.content(value).element_bytes();
                let (address, stride) = from.result_address(value, shape, *used);
                let columns = Columns {
                    from: address,
                    to: to.result_address(value, shape, *used).0,
                    bytes: element * shape.rows,
                    stride: element * stride as usize,
                    rows: rows * used,
                };
                // SAFETY: the value holds the step's rows on both devices. A barrier before orders
                // the copy behind the source's matmul, one behind before its next write.
                unsafe { to.device.pull(from.device, &columns) }?;
            }
        }
    }
    Ok(())
}

/// An event barrier: every device waits for the work that was launched on all others.
fn event_barrier(steps: &[Step<'_>], events: &[Event]) -> Result<()> {
    events.iter().try_for_each(Event::record)?;
    for (i, step) in steps.iter().enumerate() {
        let mut others = events.iter().enumerate().filter(|(j, _)| *j != i);
        others.try_for_each(|(_, other)| step.device.wait_for(other))?;
    }
    Ok(())
}

impl Model for TensorParallel {
    fn plan(&self) -> &Plan {
        self.parts[0].plan()
    }

    fn limits(&self) -> &Limits {
        self.parts[0].limits()
    }

    fn step(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        // A poisoned lock guards nothing.
        let _alone = STEPS.lock().unwrap_or_else(PoisonError::into_inner);
        let mapped = self.parts.iter().filter_map(CudaModel::mapped_experts);
        let _steps: Vec<StepGuard> = mapped.map(MappedExperts::begin_step).collect();
        let are_connected = matches!(self.exchange, Exchange::Stores);
        let result = if are_connected && self.parts[0].needs_no_host_sampler(&step) {
            let TensorParallel { parts, exchange, .. } = self;
            let launch = &mut |parts: &mut [CudaModel], batch: &Batch, end_of_step| {
                exchange.launch(parts, batch, end_of_step, None)
            };
            CudaModel::step_on_device(parts, step, sink, launch)
        } else {
            let mut host = std::mem::take(&mut self.host);
            let result = host
                .run(step, sink, &mut |batch, logits, observer| self.run(batch, logits, observer));
            self.host = host;
            result
        };
        let stall = || self.parts.iter().find_map(CudaModel::stall);
        result.map_err(|error| stall().unwrap_or(error))
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
        self.parts.iter_mut().for_each(|part| part.set_profiling(on));
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.parts.iter_mut().try_for_each(|part| part.set_tracing(on))
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        self.parts[0].set_activation_thresholds(thresholds)
    }
}
