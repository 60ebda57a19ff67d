//! Products of many rows: by `wide` on Hopper, by `mul` elsewhere and of 2:4 weights. The rows that
//! meet an expert are multiplied together.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::kernels::{MUL_SHARED_BYTES, MUL_WIDTH, WIDEST, WIDTHS, wide_shared_bytes};
use crate::lower::{Value, Work};
use crate::parameters as p;
use crate::sizes::Pairs;

/// Threads of a block of `wide`: two groups that multiply, and one that brings what they need.
const WIDE_THREADS: usize = 3 * 128;
/// Threads of the block that puts rows in order by their experts.
const GROUP_THREADS: usize = 1024;

/// The last order of rows by experts: what the router made, or none where all rows meet all; so
/// many rows and experts of each; and how many rows a column of blocks takes.
pub(crate) type Grouping = (Option<Value>, u32, usize, usize);

/// The last input that was put in order: whether only its rows that are outputs, and whether by the
/// last [`Grouping`].
pub(crate) type Interleaving = (Value, bool, bool);

impl Step<'_> {
    /// Sends a product that has more rows than `dot` takes.
    pub(super) fn send_many(&self, product: &p::Matmul, work: &Work, is_gated: bool) -> Result<()> {
        let Work::Product { input, factors, experts, .. } = work else {
            unreachable!("called for products");
        };
        let shape = &self.weights[factors[0].weight.0].shape;
        let kernels = self.kernels.of(shape.kind);
        let rows = product.rows as usize;
        let pairs = experts.map(|experts| Pairs::of(rows, &experts));
        let columns =
            |width: usize| pairs.map_or(rows.div_ceil(width), |pairs| pairs.columns(width));
        let tiles = (product.tiles as usize).div_ceil(if is_gated { 4 } else { 8 });
        let gated = usize::from(is_gated);
        let Some(wide) = &kernels.wide else {
            let many = self.many(product, work, pairs, MUL_WIDTH)?;
            let grid = [tiles, columns(MUL_WIDTH), 1];
            let kernel = kernels.mul[gated];
            // SAFETY: the weights have these shapes, and values room for the step's rows.
            return unsafe { self.device.launch(kernel, grid, THREADS, MUL_SHARED_BYTES, &many) };
        };
        // What times of widths are multiplied with: columns that experts fill, or how often all
        // multiprocessors have a block each.
        let turns = |i: usize| match pairs {
            Some(pairs) => pairs.likely_columns(WIDTHS[i].0),
            None => {
                let blocks = columns(WIDTHS[i].0) * tiles;
                blocks.div_ceil(self.device.processors as usize) as f64
            }
        };
        let i = usize::from(turns(1) * WIDTHS[1].1 <= turns(0) * WIDTHS[0].1);
        let width = WIDTHS[i].0;
        let mut many = self.many(product, work, pairs, width)?;
        self.interleave(&mut many, *input, pairs)?;
        let (grid, bytes) = ([columns(width), tiles, 1], wide_shared_bytes(shape.kind, width));
        // SAFETY: as above.
        unsafe { self.device.launch(wide[i][gated], grid, WIDE_THREADS, bytes, &many) }
    }

    /// What a product of many rows is told. If they meet experts, they are put in order, unless
    /// they are so from the last product.
    fn many(
        &self,
        product: &p::Matmul,
        work: &Work,
        pairs: Option<Pairs>,
        width: usize,
    ) -> Result<p::Gemm> {
        let many = p::Gemm {
            matmul: *product,
            panel_rows: WIDEST as u32,
            outputs_per_input: 1,
            ..p::Gemm::default()
        };
        let Work::Product { experts: Some(experts), .. } = work else { return Ok(many) };
        let pairs = pairs.expect("of experts");
        let many = p::Gemm {
            groups: self.at.groups,
            permutation: self.at.members,
            panel_rows: pairs.places() as u32,
            outputs_per_input: if experts.is_shared { experts.used as u32 } else { 1 },
            ..many
        };
        let key = Some((experts.route, product.rows, experts.used, width));
        if self.grouped.replace(key) == key {
            return Ok(many);
        }
        // An expert's rows may come in another order the next time.
        self.interleaved.set(None);
        let parameters = p::PermuteExperts {
            route: product.route,
            groups: many.groups,
            permutation: many.permutation,
            route_stride: product.route_stride,
            rows: product.rows,
            experts_used: product.experts_used,
            experts: pairs.experts as u32,
            group_rows: width as u32,
            max_groups: pairs.columns(width) as u32,
            permuted_rows: many.panel_rows,
            padding: 0,
        };
        let (kernel, shared) = (self.kernels.group, 4 * pairs.experts);
        // SAFETY: there is room for the groups and members of the largest step.
        unsafe { self.device.launch(kernel, [1, 1, 1], GROUP_THREADS, shared, &parameters) }?;
        Ok(many)
    }

    /// Puts a product's input in the order in which `wide` reads it, unless the last one that was
    /// is the same: a step makes each value once.
    fn interleave(&self, many: &mut p::Gemm, input: Value, pairs: Option<Pairs>) -> Result<()> {
        let product = &mut many.matmul;
        let from = std::mem::replace(&mut product.input, self.at.interleaved);
        let key = Some((input, product.gathers_outputs == 1, pairs.is_some()));
        if self.interleaved.replace(key) == key {
            return Ok(());
        }
        let rows = pairs.map_or(product.rows as usize, |pairs| pairs.places());
        let parameters = p::SwizzleInput {
            input: from,
            metadata: product.metadata,
            permutation: many.permutation,
            out: self.at.interleaved,
            stride: product.input_stride,
            chunks: product.chunks,
            rows: rows as u32,
            gathers_outputs: product.gathers_outputs,
            panel_rows: many.panel_rows,
            outputs_per_input: many.outputs_per_input,
        };
        let grid = [(product.chunks as usize).div_ceil(8), rows.div_ceil(8), 1];
        // SAFETY: there is room for the widest input of the largest step.
        unsafe { self.device.launch(self.kernels.interleave, grid, THREADS, 0, &parameters) }
    }
}
