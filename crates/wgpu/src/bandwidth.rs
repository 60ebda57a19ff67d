//! The bandwidth of an adapter's memory, as shaders read it. Copies of buffers run on another
//! engine, which on some GPUs has a quarter of it.

use std::time::Instant;

use bodkin_backend::Result;

use crate::gpu::Gpu;

/// Bytes of the buffer that is read: more than a GPU's caches hold.
const LARGE_BYTES: u64 = 512 << 20;
/// Of software, which would take long, and whose memory is the host's.
const SMALL_BYTES: u64 = 64 << 20;
/// Workgroups of 256 threads.
const GROUPS: u32 = 4096;
/// Times that the buffer is read.
const PASSES: u64 = 8;
/// Measurements, of which the fastest counts.
const TRIES: usize = 3;

/// Bytes of the memory of the host that is read over the bus.
const HOST_BYTES: u64 = 256 << 20;

/// Bytes per second of the adapter's memory.
pub(crate) fn measure(gpu: &Gpu) -> Result<f64> {
    let bytes = if gpu.is_software() { SMALL_BYTES } else { LARGE_BYTES };
    measure_reads(gpu, bytes, |bytes| gpu.buffer("bandwidth", bytes))
}

/// Bytes per second of the host's memory; none if kernels cannot read it.
pub(crate) fn measure_host(gpu: &Gpu) -> Result<Option<f64>> {
    if !gpu.reads_host_memory {
        return Ok(None);
    }
    let bytes = if gpu.is_software() { SMALL_BYTES } else { HOST_BYTES };
    measure_reads(gpu, bytes, |bytes| gpu.host_buffer("bandwidth", bytes)).map(Some)
}

/// Bytes per second at which kernels read a buffer of about this size.
fn measure_reads(
    gpu: &Gpu,
    bytes: u64,
    buffer: impl Fn(u64) -> Result<wgpu::Buffer>,
) -> Result<f64> {
    let largest = gpu.limits.max_storage_buffer_binding_size.min(gpu.limits.max_buffer_size);
    // Each thread reads four vectors of 16 bytes at a time.
    let whole = u64::from(GROUPS) * 256 * 4 * 16;
    let bytes = (bytes.min(largest) / whole * whole).max(whole);
    let data = buffer(bytes)?;
    let sums = gpu.buffer("bandwidth", u64::from(GROUPS) * 256 * 4)?;
    let module = gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("bandwidth"),
        source: wgpu::ShaderSource::Wgsl(include_str!("../shaders/bandwidth.wgsl").into()),
    });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("bandwidth"),
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let operands = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("bandwidth"),
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry { binding: 0, resource: data.as_entire_binding() },
            wgpu::BindGroupEntry { binding: 1, resource: sums.as_entire_binding() },
        ],
    });
    let seconds = |passes: u64| -> Result<f64> {
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &operands, &[]);
        (0..passes).for_each(|_| pass.dispatch_workgroups(GROUPS, 1, 1));
        drop(pass);
        let start = Instant::now();
        gpu.run(Some(encoder.finish()))?;
        Ok(start.elapsed().as_secs_f64())
    };
    seconds(1)?;
    let (mut few, mut many) = (f64::MAX, f64::MAX);
    for _ in 0..TRIES {
        few = few.min(seconds(1)?);
        many = many.min(seconds(1 + PASSES)?);
    }
    // What a submission takes beside the passes is in both.
    Ok((PASSES * bytes) as f64 / (many - few).max(1e-9))
}
