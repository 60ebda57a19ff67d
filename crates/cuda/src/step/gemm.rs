//! GEMMs: by `gemm_wgmma` on Hopper, by `gemm_mma` elsewhere and for 2:4 weights.
//! Matmuls of experts are grouped GEMMs over permuted rows.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::constants::{GEMM_TILES, GEMM_WIDTH, MAX_WIDTH, WIDTHS};
use crate::lower::{Experts, Matmul, Value};
use crate::packed::MmaLayout;
use crate::parameters as p;
use crate::shared_memory::{GEMM_BYTES, wgmma_bytes};
use crate::sizes::Pairs;
use crate::tuning::MatmulShape;

/// Threads of a block that multiplies with `wgmma`: two consumer warp groups and a producer.
pub(super) const WGMMA_THREADS: usize = 3 * 128;
/// Threads of the block that permutes rows by their experts.
const PERMUTE_THREADS: usize = 1024;

impl Step<'_> {
    /// Launches a matmul of more rows than [`gemv_rows`](crate::sizes::gemv_rows).
    pub(super) fn launch_gemm(
        &self,
        parameters: &p::Matmul,
        matmul: &Matmul,
        layout: MmaLayout,
    ) -> Result<()> {
        let kernels = self.kernels.of(layout);
        let rows = parameters.rows as usize;
        let experts = matmul.experts.map(|experts| (experts, Pairs::of(rows, &experts)));
        let pairs = experts.map(|(_, pairs)| pairs);
        let matrices = if matmul.is_gated() { 2 } else { 1 };
        let blocks = (parameters.tiles as usize * matrices).div_ceil(GEMM_TILES);
        let gated = usize::from(matmul.is_gated());
        let Some(wgmma) = &kernels.gemm_wgmma else {
            let gemm = self.gemm_parameters(parameters, experts, GEMM_WIDTH)?;
            let groups = rows.div_ceil(GEMM_WIDTH);
            let groups = pairs.map_or(groups, |pairs| pairs.groups(GEMM_WIDTH));
            let grid = [blocks, groups, 1];
            let kernel = kernels.gemm_mma[gated];
            // SAFETY: the weights have these shapes, and values room for the step's rows.
            return unsafe { self.device.launch(kernel, grid, THREADS, GEMM_BYTES, &gemm) };
        };
        let divisions = self.divisions(parameters, layout, matmul.is_gated(), pairs);
        let tuned = MatmulShape::of(layout, matmul.is_gated(), parameters);
        let division = divisions.best(tuned.and_then(|shape| self.tuning.gemm(&shape)));
        let (width, is_split) = (WIDTHS[division.width].rows, division.grid[2] > 1);
        let mut gemm = self.gemm_parameters(parameters, experts, width)?;
        self.swizzle(&mut gemm, matmul.input, pairs)?;
        gemm.split_chunks = parameters.slice_chunks * division.slices as u32;
        gemm.slice_sums = if is_split { self.at.slice_sums } else { 0 };
        let (kernel, bytes) = (wgmma[division.width][gated], wgmma_bytes(layout, width));
        // SAFETY: as above, and the sums of slices have room.
        unsafe { self.device.launch(kernel, division.grid, WGMMA_THREADS, bytes, &gemm) }?;
        if !is_split {
            return Ok(());
        }
        let (kernel, grid) =
            (self.kernels.add_slices[gated], [division.grid[0], blocks, width / 8]);
        // SAFETY: as above.
        unsafe { self.device.launch(kernel, grid, THREADS / matrices, 0, &gemm) }
    }

    /// The parameters of a GEMM. Rows with experts are permuted, unless the last GEMM's permutation
    /// is the same.
    fn gemm_parameters(
        &self,
        matmul: &p::Matmul,
        experts: Option<(Experts, Pairs)>,
        width: usize,
    ) -> Result<p::Gemm> {
        let gemm = p::Gemm {
            matmul: *matmul,
            panel_rows: MAX_WIDTH as u32,
            outputs_per_input: 1,
            ..p::Gemm::default()
        };
        let Some((experts, pairs)) = experts else { return Ok(gemm) };
        let gemm = p::Gemm {
            groups: self.at.groups,
            permutation: self.at.permutation,
            panel_rows: pairs.permuted_rows() as u32,
            outputs_per_input: if experts.shares_input { experts.used as u32 } else { 1 },
            ..gemm
        };
        let key = Some((experts.route, matmul.rows, experts.used, width));
        if self.permuted.replace(key) == key {
            return Ok(gemm);
        }
        // The next permutation may order an expert's rows differently.
        self.swizzled.set(None);
        let parameters = p::PermuteExperts {
            route: matmul.route,
            groups: gemm.groups,
            permutation: gemm.permutation,
            route_stride: matmul.route_stride,
            rows: matmul.rows,
            experts_used: matmul.experts_used,
            experts: pairs.experts as u32,
            group_rows: width as u32,
            max_groups: pairs.groups(width) as u32,
            permuted_rows: gemm.panel_rows,
            padding: 0,
        };
        let (kernel, shared) = (self.kernels.permute_experts, 4 * pairs.experts);
        // SAFETY: there is room for the groups and the permutation of the largest step.
        unsafe { self.device.launch(kernel, [1, 1, 1], PERMUTE_THREADS, shared, &parameters) }?;
        Ok(gemm)
    }

    /// Swizzles the input for `gemm_wgmma`, unless the last swizzled input is the same: a step
    /// makes each value once.
    fn swizzle(&self, gemm: &mut p::Gemm, input: Value, pairs: Option<Pairs>) -> Result<()> {
        // Its maker has stored it so.
        if self.is_swizzled(input) {
            return Ok(());
        }
        let matmul = &mut gemm.matmul;
        let from = std::mem::replace(&mut matmul.input, self.at.swizzled);
        let gathers_outputs = matmul.metadata != 0;
        let key = Some((input, gathers_outputs, pairs.is_some()));
        if self.swizzled.replace(key) == key {
            return Ok(());
        }
        let rows = pairs.map_or(matmul.rows as usize, Pairs::permuted_rows);
        let parameters = p::SwizzleInput {
            input: from,
            metadata: matmul.metadata,
            permutation: gemm.permutation,
            out: self.at.swizzled,
            stride: matmul.input_stride,
            chunks: matmul.chunks,
            rows: rows as u32,
            gathers_outputs: u32::from(gathers_outputs),
            panel_rows: gemm.panel_rows,
            outputs_per_input: gemm.outputs_per_input,
        };
        let grid = [(matmul.chunks as usize).div_ceil(8), rows.div_ceil(8), 1];
        // SAFETY: there is room for the widest input of the largest step.
        unsafe { self.device.launch(self.kernels.swizzle_input, grid, THREADS, 0, &parameters) }
    }
}
