//! Products of many rows on Hopper.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::driver::Kernel;
use crate::kernels::{WIDTHS, wide_shared_bytes};
use crate::lower::Value;
use crate::parameters as p;
use crate::planes::Kind;

/// Threads of a block of `wide`: two groups that multiply, and one that brings what they need.
const WIDE_THREADS: usize = 3 * 128;

impl Step<'_> {
    /// Sends a product of `input` without experts.
    pub(super) fn send_wide(
        &self,
        kernels: &[[Kernel; 2]; 2],
        product: &p::Product,
        input: Value,
        kind: Kind,
        is_gated: bool,
    ) -> Result<()> {
        self.interleave(product, input)?;
        let tiles = if is_gated { 4 } else { 8 };
        let rows = product.rows as usize;
        let grid =
            |i: usize| [rows.div_ceil(WIDTHS[i].0), (product.tiles as usize).div_ceil(tiles), 1];
        // A block has a multiprocessor for itself.
        let turns = |i: usize| {
            let blocks = grid(i).iter().product::<usize>();
            blocks.div_ceil(self.device.processors as usize) as f64
        };
        let i = usize::from(turns(1) * WIDTHS[1].1 <= turns(0) * WIDTHS[0].1);
        let kernel = kernels[i][usize::from(is_gated)];
        let bytes = wide_shared_bytes(kind, WIDTHS[i].0);
        let product = p::Product { input: self.at.interleaved, ..*product };
        // SAFETY: the weights have these shapes, and values room for the step's rows.
        unsafe { self.device.launch(kernel, grid(i), WIDE_THREADS, bytes, &product) }
    }

    /// Puts a product's input in order, unless the last one that was is the same: a step makes each
    /// value once.
    fn interleave(&self, product: &p::Product, input: Value) -> Result<()> {
        let key = Some((input, product.is_outputs == 1));
        if self.interleaved.replace(key) == key {
            return Ok(());
        }
        let parameters = p::Interleave {
            input: product.input,
            feed: product.feed,
            out: self.at.interleaved,
            stride: product.input_stride,
            chunks: product.chunks,
            rows: product.rows,
            is_outputs: product.is_outputs,
        };
        let (rows, chunks) = (product.rows as usize, product.chunks as usize);
        let grid = [chunks.div_ceil(8), rows.div_ceil(8), 1];
        // SAFETY: there is room for the widest input of the largest step.
        unsafe { self.device.launch(self.kernels.interleave, grid, THREADS, 0, &parameters) }
    }
}
