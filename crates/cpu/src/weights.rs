//! Loads weights: matrices are packed for matmuls, embedding tables stay in the file, everything
//! else becomes f32.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bodkin_backend::{Pool, Progress, WeightLayout};
use bodkin_gguf::{File, Format, Tensor};
use bodkin_model::{Op, Plan, Weight, WeightId};

use crate::autotune::{pack_dense, pack_sparse, speedup};
use crate::config::{Cpu, Sparse};
use crate::isa::Isa;
use crate::linear::{
    ActivationFormat, PackedLayout, PackedWeight, SourceRows, float_layout, has_columns,
    pack_columns,
};

/// A weight in every representation that the plan uses.
#[derive(Default)]
pub(crate) struct LoadedWeight {
    /// For matmuls: one matrix, or one per expert.
    pub(crate) matrices: Vec<PackedWeight>,
    /// Where not all experts have room, and `matrices` are in the file: packed ones.
    pub(crate) slots: Vec<WeightSlot>,
    /// For everything else, in f32.
    pub(crate) vector: Option<Vec<f32>>,
}

/// A packed matrix that steps replace.
pub(crate) struct WeightSlot {
    matrix: PackedWeight,
    /// The first byte of its panels, to write to.
    start: *mut u8,
}

// SAFETY: the pointer is to memory of the matrix, and `pack` requires that threads write different
// panels, which no other thread reads.
unsafe impl Send for WeightSlot {}
// SAFETY: as for Send.
unsafe impl Sync for WeightSlot {}

impl LoadedWeight {
    /// Memory for some of the matrices.
    fn slots_for(&self, count: usize) -> Vec<WeightSlot> {
        let slots = self.matrices.iter().take(count);
        slots.map(|m| WeightSlot::new(m.layout(), m.rows(), m.cols())).collect()
    }
}

impl WeightSlot {
    fn new(layout: PackedLayout, rows: usize, cols: usize) -> WeightSlot {
        let mut matrix = PackedWeight::zeroed(layout, rows, cols);
        let start = matrix.start_mut().expect("it is dense");
        // What is read of the file fills the page cache, for which the system would swap them out.
        matrix.lock();
        WeightSlot { matrix, start }
    }

    /// What matmuls read.
    pub(crate) fn matrix(&self) -> &PackedWeight {
        &self.matrix
    }

    /// Packs some panels of an expert of the same size.
    ///
    /// # Safety
    /// No other thread reads or writes these panels before the next barrier.
    pub(crate) unsafe fn pack(&self, isa: Isa, expert: &PackedWeight, panels: Range<usize>) {
        assert!(panels.end <= self.matrix.panels(), "panel {}", panels.end);
        let bytes = self.matrix.panel_bytes();
        assert_eq!(expert.panel_bytes(), bytes, "experts of one size");
        // SAFETY: the panels lie in the matrix; the caller keeps other threads off them.
        unsafe { expert.pack_into(isa, panels.clone(), self.start.add(bytes * panels.start)) }
    }
}

/// How the plan uses a weight.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uses {
    /// The number of stacked matrices, if it is the weight of a matmul; 0 otherwise.
    pub(crate) matrices: usize,
    /// Whether other operations read it as f32.
    pub(crate) vector: bool,
    /// The columns, if these operations read them one after the other; 0 otherwise.
    columns: usize,
    /// Whether it is of experts that tokens choose, which can be cached. Sparse weights are not, as
    /// they are small already, nor are formats without a layout of their own: all values decide
    /// how they are packed.
    pub(crate) can_be_cached: bool,
}

/// How the plan uses each of its weights.
pub(crate) fn uses(plan: &Plan) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); plan.weights.len()];
    for op in &plan.ops {
        let matrices = match op {
            Op::Embed { .. } => continue,
            Op::Linear { weight, .. } | Op::Logits { weight, .. } => Some((*weight, 1)),
            Op::ExpertLinear { weight, experts, .. } => Some((*weight, *experts)),
            _ => None,
        };
        if let Some((weight, count)) = matrices {
            uses[weight.0].matrices = count;
        }
        match op {
            Op::Conv { weight, .. } => uses[weight.0].columns = plan.weight(*weight).cols,
            Op::Scan { a, scan, .. } if scan.is_channelwise => uses[a.0].columns = scan.state,
            _ => {}
        }
        let vectors = op.weights().filter(|id| matrices.is_none_or(|(matrix, _)| matrix != *id));
        vectors.for_each(|id| uses[id.0].vector = true);
    }
    let routed = plan.routed_weights();
    let is_native = |id: &&WeightId| PackedLayout::native(plan.weight(**id).format).is_some();
    let dense = |id: &&WeightId| plan.weight(**id).format.base().is_none();
    let cached = routed.iter().flatten().filter(dense).filter(is_native);
    cached.for_each(|id| uses[id.0].can_be_cached = true);
    uses
}

/// Loads all weights on all threads, and returns the layouts chosen for the sparse ones. With
/// `cpu.repack`, each matrix is packed into memory and its file pages are released before the next,
/// so that memory never holds both. Without, matrices stay in the file and each matmul packs them,
/// unless their format is sparse. With `slots`, experts stay there too, and each layer gets memory
/// for that number of them.
pub(crate) fn load(
    cpu: &Cpu,
    plan: &Plan,
    file: &Arc<File>,
    slots: Option<usize>,
    pool: &mut Pool,
    progress: Progress<'_>,
) -> (Vec<LoadedWeight>, Vec<WeightLayout>) {
    let total = plan.cost().weight_bytes;
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    let mut layouts = Vec::new();
    let mut speedups = Speedups::default();
    let thresholded = thresholded(cpu, plan);
    for (id, (weight, uses)) in plan.weights.iter().zip(uses(plan)).enumerate() {
        let tensor = tensor(file, weight);
        let slots = slots.filter(|_| uses.can_be_cached);
        let bytes = &*file.read(tensor);
        let mut loaded = LoadedWeight::default();
        if uses.matrices > 0 {
            let choice = choose_sparse(cpu, weight, bytes, uses.matrices, (&mut speedups, pool));
            let is_sparse = choice.as_ref().is_some_and(|choice| choice.sparse);
            loaded.matrices = if thresholded.contains(&WeightId(id)) && is_column_major(cpu, weight)
            {
                let source = SourceRows::new(weight.format, bytes, weight.rows);
                let layout = PackedLayout::planned(weight.format);
                vec![pack_columns(layout, source, weight.rows, weight.cols)]
            } else if (cpu.repack && slots.is_none()) || choice.is_some() {
                pack(weight, bytes, uses.matrices, is_sparse, pool)
            } else {
                map_from_file(weight, file, uses.matrices)
            };
            loaded.slots = loaded.slots_for(slots.unwrap_or(0));
            layouts.extend(choice);
        }
        if uses.vector {
            let mut values = vec![0.0; weight.cols * weight.rows];
            weight.format.dequantize(bytes, &mut values);
            loaded.vector = Some(match uses.columns {
                0 => values,
                columns => transposed(&values, columns),
            });
        }
        weights.push(loaded);
        if cpu.repack {
            file.release(tensor);
        }
        done += weight.bytes;
        progress(done, total);
    }
    (weights, layouts)
}

/// The weights of the linears whose inputs have thresholds.
pub(crate) fn thresholded(cpu: &Cpu, plan: &Plan) -> Vec<WeightId> {
    if cpu.skip_inputs { plan.sparse_input_matmuls() } else { Vec::new() }
}

/// Whether a weight is packed column-major if its input has a threshold. Sparse weights are not:
/// they are small already.
pub(crate) fn is_column_major(cpu: &Cpu, weight: &Weight) -> bool {
    cpu.repack
        && weight.format.base().is_none()
        && PackedLayout::native(weight.format).is_some_and(|layout| {
            has_columns(layout) && layout.activation_format(cpu.isa) != ActivationFormat::Bf16
        })
}

/// Measured speedups of sparse layouts by format, rows, columns and density class. Weights that
/// agree in these share one measurement.
type Speedups = HashMap<(Format, usize, usize, usize), f64>;

/// The number of density classes.
const DENSITIES: usize = 32;

/// Chooses the layout of a weight of a sparse format; `None` for dense formats.
fn choose_sparse(
    cpu: &Cpu,
    weight: &Weight,
    bytes: &[u8],
    count: usize,
    (speedups, pool): (&mut Speedups, &mut Pool),
) -> Option<WeightLayout> {
    let base = weight.format.base()?;
    let measured = (cpu.sparse == Sparse::Auto).then(|| {
        let (rows, cols) = (weight.rows / count, weight.cols);
        let dense = base.row_bytes(cols).expect("the weight was checked") * weight.rows;
        let density = weight.bytes as usize * DENSITIES / dense;
        *speedups.entry((weight.format, rows, cols, density)).or_insert_with(|| {
            let source = SourceRows::new(weight.format, bytes, weight.rows);
            speedup(cpu, PackedLayout::planned(weight.format), source, rows, cols, pool)
        })
    });
    let sparse = measured.map_or(cpu.sparse == Sparse::Always, |speedup| speedup > 1.0);
    let (weight, format) = (weight.name.clone(), weight.format);
    Some(WeightLayout { weight, format, sparse, speedup: measured })
}

/// The packed layout of all matrices of a weight.
fn layout_of(weight: &Weight, bytes: &[u8]) -> PackedLayout {
    let native = PackedLayout::native(weight.format);
    native.unwrap_or_else(|| float_layout(weight.format, bytes, weight.cols))
}

/// Packs the `count` matrices of a weight.
fn pack(
    weight: &Weight,
    bytes: &[u8],
    count: usize,
    is_sparse: bool,
    pool: &mut Pool,
) -> Vec<PackedWeight> {
    let layout = layout_of(weight, bytes);
    let (rows, cols) = (weight.rows / count, weight.cols);
    let source = SourceRows::new(weight.format, bytes, weight.rows);
    let matrix = |i: usize| match is_sparse {
        true => pack_sparse(source.from(i * rows), rows, cols, pool),
        false => pack_dense(layout, source.from(i * rows), rows, cols, pool),
    };
    (0..count).map(matrix).collect()
}

/// A byte range of a tensor of an open file.
struct Part {
    file: Arc<File>,
    tensor: Tensor,
    bytes: std::ops::Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.file.data(&self.tensor)[self.bytes.clone()]
    }
}

/// The `count` matrices of a weight, unpacked in the file.
fn map_from_file(weight: &Weight, file: &Arc<File>, count: usize) -> Vec<PackedWeight> {
    let (rows, len) = (weight.rows / count, weight.bytes as usize / count);
    let layout = layout_of(weight, file.data(tensor(file, weight)));
    let matrix = |i: usize| {
        let (file, tensor) = (Arc::clone(file), tensor(file, weight).clone());
        let part = Part { file, tensor, bytes: i * len..(i + 1) * len };
        PackedWeight::unpacked(layout, (Box::new(part), weight.format), rows, weight.cols)
    };
    (0..count).map(matrix).collect()
}

/// The embedding tables of a plan. They stay in the file, and each lookup maps pages around its
/// row; in the end the whole table would be resident. Releasing the pages now and then prevents
/// that.
pub(crate) struct EmbeddingTables {
    ids: Vec<WeightId>,
    /// Rows looked up since the last release.
    rows: usize,
}

/// Lookups between two releases; each may map some hundred KiB.
const TABLE_ROWS: usize = 16;

impl EmbeddingTables {
    /// The tables of a plan, if weights are repacked. Otherwise matmuls may read the same pages.
    pub(crate) fn new(cpu: &Cpu, plan: &Plan) -> EmbeddingTables {
        let table = |op: &Op| match op {
            Op::Embed { table, .. } if cpu.repack => Some(*table),
            _ => None,
        };
        EmbeddingTables { ids: plan.ops.iter().filter_map(table).collect(), rows: 0 }
    }

    /// Counts the rows that a step looked up.
    pub(crate) fn after_step(&mut self, file: &File, plan: &Plan, rows: usize) {
        self.rows += rows;
        if self.rows >= TABLE_ROWS {
            self.rows = 0;
            self.ids.iter().for_each(|id| file.release(tensor(file, plan.weight(*id))));
        }
    }
}

/// Dequantises one row of a weight in the file: an embedding.
pub(crate) fn read_row(file: &File, weight: &Weight, row: usize, out: &mut [f32]) {
    let bytes = file.data(tensor(file, weight));
    weight.format.dequantize_row(weight.format.row(bytes, weight.rows, row), out);
}

/// The tensor of a weight.
pub(crate) fn tensor<'a>(file: &'a File, weight: &Weight) -> &'a Tensor {
    file.tensor(&weight.name).expect("the plan was made from this file")
}

/// Transposes a matrix from `[rows][columns]` to `[columns][rows]`.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..columns).flat_map(|c| (0..rows).map(move |row| values[row * columns + c])).collect()
}
