//! Times that the device writes down between dispatches.

use crate::gpu::Gpu;

/// Where the device writes times, and the times of all steps since profiling began.
pub(crate) struct Timestamps {
    /// One before the first dispatch, and one behind each.
    queries: wgpu::QuerySet,
    pub(crate) resolved: wgpu::Buffer,
    /// Of each dispatch.
    pub(crate) seconds: Vec<f64>,
    pub(crate) steps: u64,
    pub(crate) tokens: u64,
    pub(crate) outputs: u64,
}

impl Timestamps {
    /// None if the device measures no times, or too few of them.
    pub(crate) fn new(gpu: &Gpu, dispatches: usize) -> Option<Timestamps> {
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
        Some(Timestamps { queries, resolved, seconds, steps: 0, tokens: 0, outputs: 0 })
    }

    /// Notes the time behind `dispatches` of them.
    pub(crate) fn mark(&self, pass: &mut wgpu::ComputePass<'_>, dispatches: usize) {
        pass.write_timestamp(&self.queries, dispatches as u32);
    }

    /// Puts the times where they can be read.
    pub(crate) fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let all = 0..self.seconds.len() as u32 + 1;
        encoder.resolve_query_set(&self.queries, all, &self.resolved, 0);
    }
}
