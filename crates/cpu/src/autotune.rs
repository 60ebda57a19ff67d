//! Autotuning of sparse weights: measures on this machine whether a weight is faster with or
//! without its zeros. Both versions of a slice are timed as GEMVs from memory.

use std::time::Instant;

use bodkin_backend::Pool;

use crate::config::Cpu;
use crate::linear::{
    Activations, OutRows, PackedLayout, PackedWeight, SourceRows, SparsePacker, matmul,
};

/// Bytes of the dense slice: enough that starting the threads does not matter.
const SLICE_BYTES: usize = 4 << 20;
/// Interleaved runs of each version, of which the fastest counts: other programs use the memory
/// too.
const RUNS: usize = 16;

/// Packs rows of a sparse format without zeros, on all threads.
pub(crate) fn pack_sparse(
    source: SourceRows<'_>,
    rows: usize,
    cols: usize,
    pool: &mut Pool,
) -> PackedWeight {
    let packer = SparsePacker::new(source, rows, cols);
    let panels = rows.div_ceil(PackedWeight::PANEL_ROWS);
    let parts: Vec<_> = (0..pool.threads()).map(|_| std::sync::OnceLock::new()).collect();
    pool.run(&|worker| {
        let part = packer.pack(worker.share(panels));
        assert!(parts[worker.index].set(part).is_ok(), "one part of each thread");
    });
    let parts: Vec<_> = parts.into_iter().filter_map(std::sync::OnceLock::into_inner).collect();
    packer.join(&parts)
}

/// Packs rows of any format as `layout`, on all threads.
pub(crate) fn pack_dense(
    layout: PackedLayout,
    source: SourceRows<'_>,
    rows: usize,
    cols: usize,
    pool: &mut Pool,
) -> PackedWeight {
    let mut weight = PackedWeight::zeroed(layout, rows, cols);
    let panels = weight.panels();
    let packer = weight.packer(source);
    // SAFETY: the threads' shares do not overlap.
    pool.run(&|worker| unsafe { packer.pack(worker.share(panels)) });
    weight
}

/// The speedup of the first rows of a weight from leaving out zeros.
pub(crate) fn speedup(
    cpu: &Cpu,
    layout: PackedLayout,
    source: SourceRows<'_>,
    rows: usize,
    cols: usize,
    pool: &mut Pool,
) -> f64 {
    let panel = layout.panel_bytes(cols).expect("the weight was checked");
    let rows = rows.min((SLICE_BYTES / panel).max(cpu.threads) * PackedWeight::PANEL_ROWS);
    let dense = pack_dense(layout, source, rows, cols, pool);
    let sparse = pack_sparse(source, rows, cols, pool);
    let (mut dense_seconds, mut sparse_seconds) = (f64::MAX, f64::MAX);
    for _ in 0..RUNS {
        dense_seconds = dense_seconds.min(seconds(cpu, &dense, pool));
        sparse_seconds = sparse_seconds.min(seconds(cpu, &sparse, pool));
    }
    dense_seconds / sparse_seconds
}

/// The time of one GEMV that reads the weight from memory.
fn seconds(cpu: &Cpu, weight: &PackedWeight, pool: &mut Pool) -> f64 {
    let (format, cols) = (weight.layout().activation_format(cpu.isa), weight.cols());
    let mut x = Activations::with_bytes(format.bytes(1, cols));
    // SAFETY: one thread.
    unsafe { x.reshape(format, 1, cols).set(cpu.isa, 0, &vec![1.0; cols]) };
    let mut out = vec![0.0; weight.rows()];
    let out = OutRows::new(&mut out, weight.rows());
    weight.evict();
    let start = Instant::now();
    pool.run(&|worker| {
        let panels = worker.share(weight.panels());
        // SAFETY: the threads' shares do not overlap.
        unsafe { matmul(cpu.isa, weight, None, panels, &x, 0..1, out, &mut []) }
    });
    start.elapsed().as_secs_f64()
}
