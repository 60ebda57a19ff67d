//! Dispatches that are ready to run: kernels compiled, buffers bound, parameters in place.

use std::ops::RangeInclusive;
use std::sync::Arc;

use bodkin_backend::Result;

use crate::batch_data::BatchData;
use crate::gpu::{Compiled, Gpu};
use crate::program::{BufferId, Depth, Dispatch, Grid, Program};

/// Words of the parameters of a dispatch.
const PARAM_WORDS: usize = 32;
/// The most workgroups in the second dimension; what is more goes to the third.
const MAX_GROUPS: usize = 32_768;

/// A dispatch with its bind group.
pub(crate) struct Ready {
    operands: wgpu::BindGroup,
    compiled: Arc<Compiled>,
    /// Workgroups for each of `depth`, in two dimensions.
    groups: [u32; 2],
    depth: Depth,
    /// The lengths of a list for which it runs.
    lens: RangeInclusive<usize>,
    /// The first operation of its stage.
    pub(crate) op: usize,
}

impl Ready {
    /// Records the dispatch, if the step has rows for it.
    pub(crate) fn record(&self, pass: &mut wgpu::ComputePass<'_>, data: &BatchData) {
        if let Depth::List(list, _) = self.depth
            && !self.lens.contains(&data.list_len(list))
        {
            return;
        }
        let depth = data.depth(self.depth) as u32;
        if depth > 0 {
            pass.set_pipeline(&self.compiled.pipeline);
            pass.set_bind_group(0, &self.operands, &[]);
            pass.dispatch_workgroups(depth, self.groups[0], self.groups[1]);
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
    let compiled = gpu.kernel(dispatch.kernel);
    let Grid { groups, depth } = dispatch.grid;
    let y = groups.clamp(1, MAX_GROUPS);
    let groups = [y, groups.div_ceil(y)].map(|groups| groups as u32);
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
        layout: &compiled.operands,
        entries: &entries,
    });
    let (lens, op) = (dispatch.lens.clone(), dispatch.op);
    Ok(Ready { operands, compiled, groups, depth, lens, op })
}
