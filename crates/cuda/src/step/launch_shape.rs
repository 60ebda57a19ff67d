//! The launch shapes of matmuls: the one that a measurement found, or else the one that a model of
//! the device's time finds.

use super::Step;
use crate::constants::{GEMM_TILES, WIDTHS, Width};
use crate::lower::{Matmul, Stage, Work};
use crate::packed::{MmaLayout, PackedLayout, Shape};
use crate::parameters as p;
use crate::shared_memory::wgmma_bytes;
use crate::sizes::{Pairs, gemv_rows, slice_sum_bytes};
use crate::tuning::{GemmShape, LaunchShape, MatmulShape};

/// Microseconds that a block of `gemm_wgmma` takes until its first chunk, and those that it takes
/// for the results of an input row.
const BLOCK_TIME: f64 = 2.0;
const ROW_TIME: f64 = 0.04;
/// Microseconds for adding up slices, besides reading them.
const ADD_TIME: f64 = 2.0;
/// What a block takes for a chunk where there is no room for another, of its time beside one. A few
/// blocks also come in pairs: they start while those of the kernel before end.
const ALONE: f64 = 0.65;
/// Bytes of the sums of slices that are stored and added in a microsecond; they stay in the cache.
const SLICE_SUM_SPEED: f64 = 3e6;
/// Blocks of `gemv_mma` for each multiprocessor, and the most that are measured.
const GEMV_BLOCKS: usize = 2;
const MAX_GEMV_BLOCKS: usize = 4;
/// Divisions that are measured, of those that should take the least time.
const MEASURED_DIVISIONS: usize = 6;

/// How blocks of `gemm_wgmma` divide a matmul.
#[derive(Clone, Copy)]
pub(super) struct Division {
    /// The index in [`WIDTHS`].
    pub(super) width: usize,
    /// Row groups, blocks of weight tiles, and blocks that share the slices of the same sums.
    pub(super) grid: [usize; 3],
    /// Slices of a block.
    pub(super) slices: usize,
}

impl Division {
    fn shape(&self) -> GemmShape {
        GemmShape { width: WIDTHS[self.width].rows, slices: self.slices }
    }
}

/// A matmul on `gemm_wgmma`, and what bounds its divisions.
pub(super) struct Divisions<'a> {
    matmul: &'a p::Matmul,
    layout: MmaLayout,
    /// Blocks of weight tiles.
    tile_blocks: usize,
    pairs: Option<Pairs>,
    processors: usize,
    /// The most shared memory of a block.
    shared_bytes: usize,
    /// Of the memory for the sums of slices that several blocks share.
    slice_sum_bytes: usize,
}

impl Divisions<'_> {
    fn all(&self) -> impl Iterator<Item = Division> {
        let all = self.matmul.slices as usize;
        let of = move |width: usize, slices: usize| {
            let rows = WIDTHS[width].rows;
            let groups = (self.matmul.rows as usize).div_ceil(rows);
            let groups = self.pairs.map_or(groups, |pairs| pairs.groups(rows));
            Division { width, grid: [groups, self.tile_blocks, all.div_ceil(slices)], slices }
        };
        let split = if self.pairs.is_none() { 1..all } else { 0..0 };
        let divisions = (0..WIDTHS.len())
            .flat_map(move |width| split.clone().chain([all]).map(move |slices| of(width, slices)));
        divisions.filter(|division| {
            division.grid[2] == 1 || self.sum_bytes(division) <= self.slice_sum_bytes
        })
    }

    fn sum_bytes(&self, division: &Division) -> usize {
        let rows = division.grid[0] * WIDTHS[division.width].rows;
        slice_sum_bytes(self.matmul.slices as usize, self.tile_blocks, rows)
    }

    /// The microseconds that a division should take.
    fn time(&self, division: &Division) -> f64 {
        let Width { rows, blocks, chunk_time } = WIDTHS[division.width];
        let resident = (self.shared_bytes / wgmma_bytes(self.layout, rows)).clamp(1, blocks);
        let slots = (resident * self.processors) as f64;
        let [groups, tile_blocks, splits] = division.grid;
        let waves = match self.pairs {
            Some(pairs) => pairs.expected_groups(rows) * tile_blocks as f64 / slots,
            None => ((groups * tile_blocks * splits) as f64 / slots).ceil(),
        };
        let chunks = self.matmul.chunks.min(self.matmul.slice_chunks * division.slices as u32);
        let chunk_time = if resident < blocks { ALONE * chunk_time } else { chunk_time };
        let (storing, adding) = match splits {
            1 => (ROW_TIME * rows as f64, 0.0),
            _ => (0.0, ADD_TIME + self.sum_bytes(division) as f64 / SLICE_SUM_SPEED),
        };
        waves * (f64::from(chunks) * chunk_time + BLOCK_TIME + storing) + adding
    }

    /// The measured division, unless it has no room in this step; else the one that should take the
    /// least time.
    pub(super) fn best(&self, measured: Option<GemmShape>) -> Division {
        let measured = measured.and_then(|shape| self.all().find(|d| d.shape() == shape));
        let predicted = || self.all().min_by(|a, b| self.time(a).total_cmp(&self.time(b)));
        measured.or_else(predicted).expect("a block may take all slices")
    }

    /// The divisions to measure, that of [`Divisions::best`] first, and of those with the same
    /// blocks only one.
    fn candidates(&self) -> Vec<LaunchShape> {
        let mut all: Vec<_> = self.all().map(|division| (self.time(&division), division)).collect();
        // Stable, as `min_by` takes the first of equals.
        all.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut measured: Vec<Division> = Vec::new();
        for (_, division) in all {
            let blocks = |division: &Division| (division.width, division.grid);
            if measured.iter().all(|other| blocks(other) != blocks(&division)) {
                measured.push(division);
            }
        }
        measured.truncate(MEASURED_DIVISIONS);
        measured.iter().map(|division| LaunchShape::Gemm(division.shape())).collect()
    }
}

impl Step<'_> {
    /// The divisions of a matmul among blocks of `gemm_wgmma`.
    pub(super) fn divisions<'a>(
        &self,
        matmul: &'a p::Matmul,
        layout: MmaLayout,
        is_gated: bool,
        pairs: Option<Pairs>,
    ) -> Divisions<'a> {
        let matrices = if is_gated { 2 } else { 1 };
        Divisions {
            matmul,
            layout,
            tile_blocks: (matmul.tiles as usize * matrices).div_ceil(GEMM_TILES),
            pairs,
            processors: self.device.processors as usize,
            shared_bytes: self.device.shared_bytes,
            slice_sum_bytes: self.sizes.slice_sum_bytes,
        }
    }

    /// Whether `gemv_mma` computes a matmul of these rows, and not a GEMM.
    pub(super) fn is_gemv(&self, rows: usize, matmul: &Matmul, layout: MmaLayout) -> bool {
        let has_wgmma = self.kernels.of(layout).gemm_wgmma.is_some();
        rows <= gemv_rows(has_wgmma, matmul.experts, self.program.devices)
    }

    /// The blocks of `gemv_mma` on all multiprocessors.
    pub(super) fn gemv_blocks(
        &self,
        matmul: &p::Matmul,
        layout: MmaLayout,
        is_gated: bool,
    ) -> usize {
        let shape = MatmulShape::of(layout, is_gated, matmul);
        let measured = shape.and_then(|shape| self.tuning.gemv(&shape));
        let measured = measured.filter(|blocks| (1..=MAX_GEMV_BLOCKS).contains(blocks));
        measured.unwrap_or(GEMV_BLOCKS) * self.device.processors as usize
    }

    /// The launch shapes to measure of a stage, the built-in one first; none of stages that have no
    /// choice of them.
    pub(crate) fn launch_shapes(&self, stage: &Stage) -> Option<(MatmulShape, Vec<LaunchShape>)> {
        let Work::Matmul(matmul) = &stage.work else { return None };
        let weight = &self.weights[matmul.operands[0].weight.0].shape;
        let PackedLayout::Mma(layout) = weight.layout else { return None };
        let (rows, is_gated) = (self.rows(stage.rows), matmul.is_gated());
        let parameters = self.matmul_parameters(rows, matmul);
        let shape = MatmulShape::of(layout, is_gated, &parameters).filter(|_| rows > 0)?;
        if self.is_gemv(rows, matmul, layout) {
            let work = gemv_work(&parameters, weight);
            return Some((shape, gemv_candidates(work, self.device.processors as usize)));
        }
        self.kernels.of(layout).gemm_wgmma?;
        Some((shape, self.divisions(&parameters, layout, is_gated, None).candidates()))
    }
}

/// The blocks of `gemv_mma` that have work.
pub(super) fn gemv_work(matmul: &p::Matmul, weight: &Shape) -> usize {
    (matmul.tiles as usize).div_ceil(weight.tiles_per_block())
}

/// The launch shapes of `gemv_mma` that differ in their blocks, the built-in one first.
fn gemv_candidates(work: usize, processors: usize) -> Vec<LaunchShape> {
    let grid = |blocks: usize| work.min(blocks * processors);
    let mut candidates = vec![GEMV_BLOCKS];
    for blocks in 1..=MAX_GEMV_BLOCKS {
        if candidates.iter().all(|&other| grid(other) != grid(blocks)) {
            candidates.push(blocks);
        }
    }
    candidates.into_iter().map(LaunchShape::Gemv).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matmul(rows: u32) -> p::Matmul {
        let (tiles, chunks, slice_chunks, slices) = (256, 64, 8, 8);
        p::Matmul { tiles, chunks, slice_chunks, slices, rows, ..p::Matmul::default() }
    }

    fn divisions(matmul: &p::Matmul, slice_sum_bytes: usize) -> Divisions<'_> {
        Divisions {
            matmul,
            layout: MmaLayout::U4,
            tile_blocks: 32,
            pairs: None,
            processors: 132,
            shared_bytes: 227 << 10,
            slice_sum_bytes,
        }
    }

    #[test]
    fn measured_divisions_need_room() {
        let measured = GemmShape { width: 64, slices: 2 };
        let matmul = matmul(100);
        let roomy = divisions(&matmul, 32 << 20);
        assert_eq!(roomy.best(Some(measured)).shape(), measured);
        assert_eq!(roomy.best(Some(measured)).grid, [2, 32, 4]);
        // Without memory for the sums of slices, a block takes all of them.
        let tight = divisions(&matmul, 0);
        assert_eq!(tight.best(Some(measured)).shape(), tight.best(None).shape());
        assert_eq!(tight.best(None).grid[2], 1);
    }

    #[test]
    fn divisions_that_do_not_exist_are_ignored() {
        let matmul = matmul(100);
        let divisions = divisions(&matmul, 32 << 20);
        let built_in = divisions.best(None).shape();
        for (width, slices) in [(48, 2), (64, 0), (64, 9), (0, 1), (usize::MAX, usize::MAX)] {
            assert_eq!(divisions.best(Some(GemmShape { width, slices })).shape(), built_in);
        }
        let candidates = divisions.candidates();
        assert_eq!(candidates.len(), MEASURED_DIVISIONS);
        assert_eq!(candidates[0], LaunchShape::Gemm(built_in));
        // Of eight slices, two blocks take four each.
        let slices = |launch: &LaunchShape| match launch {
            LaunchShape::Gemm(gemm) => gemm.slices,
            LaunchShape::Gemv(_) => 0,
        };
        assert!(candidates.iter().all(|launch| [1, 2, 3, 4, 8].contains(&slices(launch))));
    }

    #[test]
    fn only_different_grids_are_measured() {
        let blocks = |work| gemv_candidates(work, 132).len();
        assert_eq!([blocks(64), blocks(200), blocks(300), blocks(10_000)], [1, 2, 3, 4]);
        assert_eq!(gemv_candidates(10_000, 132)[0], LaunchShape::Gemv(GEMV_BLOCKS));
    }
}
