//! Observed steps: the inputs of matmuls are read back before each matmul runs.

use bodkin_backend::{Batch, InputRow, Matmul, Observer, Result};
use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::constants::INPUT_DIVISOR;
use crate::driver::Device;
use crate::lower::{Content, Experts, Stage, Value, Work};
use crate::step::Step;

/// Runs all stages of a step, and shows the inputs of their matmuls.
pub(crate) fn run(step: &Step<'_>, batch: &Batch, observer: &mut dyn Observer) -> Result<()> {
    for stage in &step.program.stages {
        show_inputs(step, stage, batch, observer)?;
        step.run(stage)?;
    }
    Ok(())
}

/// Shows the inputs of a stage that runs next, if it is a matmul.
pub(crate) fn show_inputs(
    step: &Step<'_>,
    stage: &Stage,
    batch: &Batch,
    observer: &mut dyn Observer,
) -> Result<()> {
    let Work::Matmul(matmul) = &stage.work else { return Ok(()) };
    let outputs = matmul.gathers_outputs.then_some(&batch.outputs[..]);
    let seen = Seen { input: matmul.input, outputs, experts: matmul.experts };
    let mut weights: Vec<_> = matmul.operands.iter().map(|operand| operand.weight).collect();
    weights.sort_by_key(|id| id.0);
    show(step, &seen, &weights, observer)
}

/// The input rows of a matmul.
struct Seen<'a> {
    input: Value,
    /// The rows that are multiplied, if not all.
    outputs: Option<&'a [u32]>,
    experts: Option<Experts>,
}

fn show(
    step: &Step<'_>,
    seen: &Seen<'_>,
    weights: &[bodkin_model::WeightId],
    observer: &mut dyn Observer,
) -> Result<()> {
    let cols = step.plan.weight(weights[0]).cols;
    let values = read(step, seen.input)?;
    let width = values.len() / step.size.tokens;
    let part = |row: usize, i: usize| &values[row * width + i * cols..][..cols];
    let mut rows = Vec::new();
    match (&seen.experts, seen.outputs) {
        (None, None) => {
            rows.extend(
                (0..step.size.tokens).map(|row| InputRow { expert: 0, values: part(row, 0) }),
            );
        }
        (None, Some(outputs)) => {
            let row = |&row: &u32| InputRow { expert: 0, values: part(row as usize, 0) };
            rows.extend(outputs.iter().map(row));
        }
        (Some(experts), _) => {
            let routes = experts.route.map(|route| read(step, route)).transpose()?;
            for row in 0..step.size.tokens {
                for i in 0..experts.used {
                    let chosen = |routes: &Vec<f32>| {
                        routes[row * 2 * experts.used + experts.used + i] as usize
                    };
                    let expert = routes.as_ref().map_or(i, chosen);
                    let values = part(row, if experts.shares_input { 0 } else { i });
                    rows.push(InputRow { expert, values });
                }
            }
        }
    }
    for &id in weights {
        let experts = step.weights[id.0].shape.matrices;
        observer.matmul(&Matmul { weight: step.plan.weight(id), experts, rows: &rows });
    }
    Ok(())
}

/// All rows of a value, without what pads them.
fn read(step: &Step<'_>, value: Value) -> Result<Vec<f32>> {
    let address = step.address(value);
    match step.program.values[value.0].content {
        Content::Floats(width) => {
            // A view ends before the last row of its base does.
            let (stride, rows) = (step.stride(value) as usize, step.size.tokens);
            let values: Vec<f32> = copy(step.device, address, (rows - 1) * stride + width)?;
            Ok(values.chunks(stride).flat_map(|row| &row[..width]).copied().collect())
        }
        Content::F16(halves) => {
            let stride = halves.stride();
            let len = step.size.tokens * halves.parts * stride;
            let elements: Vec<u16> = copy(step.device, address, len)?;
            let rows = elements.chunks_exact(stride).flat_map(|row| &row[..halves.cols]);
            Ok(rows.map(|&x| f16::from_bits(x).to_f32() * INPUT_DIVISOR).collect())
        }
    }
}

fn copy<T: Pod + Zeroable>(device: &Device, from: u64, len: usize) -> Result<Vec<T>> {
    let mut values = vec![T::zeroed(); len];
    // SAFETY: the value holds as much, and the copy is waited for.
    unsafe { device.copy_to_host(&mut values, from) }?;
    device.synchronize()?;
    Ok(values)
}
