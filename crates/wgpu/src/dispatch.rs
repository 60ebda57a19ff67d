//! Dispatches that are ready to run: kernels compiled, buffers bound, parameters in place.

use std::sync::Arc;

use bodkin_backend::Result;

use crate::batch_data::BatchData;
use crate::gpu::{Compiled, Gpu};
use crate::program::{BufferId, Depth, Dispatch, Grid, Kernel, Program};

/// Words of the parameters of a dispatch.
const PARAM_WORDS: usize = 32;
/// The most workgroups in a dimension.
const MAX_GROUPS: usize = 32_768;

/// A dispatch with its bind group.
pub(crate) struct Ready {
    operands: wgpu::BindGroup,
    run: Run,
    /// For a list of at most that number of rows.
    short: Option<(usize, Run)>,
    /// The first operation of its stage.
    pub(crate) op: usize,
}

/// A kernel, and how many workgroups of it run.
struct Run {
    compiled: Arc<Compiled>,
    groups: [u32; 2],
    depth: Depth,
}

impl Ready {
    /// Records the dispatch, if the step has rows for it.
    pub(crate) fn record(&self, pass: &mut wgpu::ComputePass<'_>, data: &BatchData) {
        let run = match (&self.short, self.run.depth) {
            (Some((most, short)), Depth::List(list, _)) if data.list_len(list) <= *most => short,
            _ => &self.run,
        };
        let depth = data.depth(run.depth) as u32;
        if depth > 0 {
            pass.set_pipeline(&run.compiled.pipeline);
            pass.set_bind_group(0, &self.operands, &[]);
            pass.dispatch_workgroups(run.groups[0], run.groups[1], depth);
        }
    }
}

/// Bytes from the parameters of one dispatch to those of the next.
fn params_stride(gpu: &Gpu) -> usize {
    (4 * PARAM_WORDS).next_multiple_of(gpu.limits.min_uniform_buffer_offset_alignment as usize)
}

/// The parameters of all dispatches.
pub(crate) fn params(gpu: &Gpu, program: &Program) -> Result<wgpu::Buffer> {
    let stride = params_stride(gpu);
    let mut bytes = vec![0u8; (program.dispatches.len() * stride).max(4 * PARAM_WORDS)];
    for (dispatch, bytes) in program.dispatches.iter().zip(bytes.chunks_exact_mut(stride)) {
        let params = bytemuck::cast_slice(&dispatch.params);
        bytes[..params.len()].copy_from_slice(params);
    }
    let buffer = gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("parameters"),
        size: bytes.len() as u64,
        usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    gpu.queue.write_buffer(&buffer, 0, &bytes);
    gpu.check()?;
    Ok(buffer)
}

/// Compiles a dispatch's kernel, and binds its buffers.
pub(crate) fn ready(
    gpu: &Gpu,
    dispatch: &Dispatch,
    (params, i): (&wgpu::Buffer, usize),
    find: &dyn Fn(&BufferId) -> Result<wgpu::Buffer>,
) -> Result<Ready> {
    let run = |kernel: Kernel, grid: Grid| {
        let x = grid.groups.clamp(1, MAX_GROUPS);
        let groups = [x, grid.groups.div_ceil(x)].map(|groups| groups as u32);
        Run { compiled: gpu.kernel(kernel), groups, depth: grid.depth }
    };
    let short = dispatch.short.map(|(most, kernel, grid)| (most, run(kernel, grid)));
    let run = run(dispatch.kernel, dispatch.grid);
    let buffers = dispatch.buffers.iter().map(find).collect::<Result<Vec<_>>>()?;
    assert!(dispatch.params.len() <= PARAM_WORDS, "{dispatch:?}");
    let params = wgpu::BufferBinding {
        buffer: params,
        offset: (i * params_stride(gpu)) as u64,
        size: std::num::NonZero::new(4 * PARAM_WORDS as u64),
    };
    let params =
        wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(params) };
    let operands = buffers.iter().zip(1..).map(|(buffer, binding)| wgpu::BindGroupEntry {
        binding,
        resource: buffer.as_entire_binding(),
    });
    let entries: Vec<_> = std::iter::once(params).chain(operands).collect();
    let operands = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &run.compiled.operands,
        entries: &entries,
    });
    Ok(Ready { operands, run, short, op: dispatch.op })
}
