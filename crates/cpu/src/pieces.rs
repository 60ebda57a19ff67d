//! How products are shared out: a thread reads its own share of the weights in pieces, one behind
//! the other, so that what it asks for ahead is what it reads next. Then it takes pieces of the
//! others' shares, so that one which the system holds up does not hold up the rest. While a thread
//! waits for the others, it asks for the first lines of its next share: memory is not idle between
//! products.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_model::Rows;

use crate::lower::{Place, Product, Stage};
use crate::memory::prefetch_l2;
use crate::pool::Worker;
use crate::step::Step;

/// Where the pieces of a share end, in parts of the last: of bytes, since rows of sparse weights
/// differ. The last pieces are small, so that threads end together.
const ENDS: [usize; 8] = [3, 6, 9, 11, 13, 14, 15, 16];

/// The most that a waiting thread asks for: it has to stay in its second-level cache.
const AHEAD_BYTES: usize = 128 << 10;
/// Lines that every thread asks for before it waits, the last one, too.
pub(crate) const FIRST_LINES: usize = 32;
/// Lines that a waiting thread asks for at once.
pub(crate) const WAITING_LINES: usize = 8;

/// The part of the first of a thread's bytes of a stage that was not asked for yet.
pub(crate) struct Ahead {
    /// The stage that reads them.
    stage: usize,
    lines: Range<*const u8>,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead { stage: usize::MAX, lines: std::ptr::null()..std::ptr::null() }
    }
}

impl Ahead {
    /// Asks for so many more lines.
    pub(crate) fn ask(&mut self, lines: usize) {
        for _ in 0..lines {
            if self.lines.start >= self.lines.end {
                return;
            }
            prefetch_l2(self.lines.start);
            self.lines.start = self.lines.start.wrapping_add(64);
        }
    }
}

impl Step<'_> {
    /// Looks for the first lines that this thread will read in a product from a stage on.
    pub(crate) fn look_ahead(&self, worker: &Worker<'_>, from: usize, ahead: &mut Ahead) {
        let mut products = self.program.stages.iter().enumerate().skip(from);
        let next = products.find_map(|(stage, what)| match what {
            Stage::Multiply { products, .. } => Some((stage, products)),
            _ => None,
        });
        let Some((stage, products)) = next.filter(|(stage, _)| *stage != ahead.stage) else {
            return;
        };
        let total = self.bytes(products);
        let share = worker.share(total);
        // Only of the first product: if its place is unknown, nothing is asked for.
        let mut first = None;
        self.parts(products, share, worker.threads, |product, panels| {
            first.get_or_insert_with(|| {
                self.weights[product.weight.0].matrices[0].addresses(panels)
            });
        });
        let mut lines = first.unwrap_or(std::ptr::null()..std::ptr::null());
        lines.end = lines.end.min(lines.start.wrapping_add(AHEAD_BYTES));
        *ahead = Ahead { stage, lines };
    }

    fn bytes(&self, products: &[Product]) -> usize {
        products.iter().map(|p| self.weights[p.weight.0].matrices[0].bytes()).sum()
    }

    /// Calls `run` with the panels of each product that a part of the bytes of all of them has.
    fn parts(
        &self,
        products: &[Product],
        bytes: Range<usize>,
        threads: usize,
        mut run: impl FnMut(&Product, Range<usize>),
    ) {
        let mut before = 0;
        for product in products {
            let matrix = &self.weights[product.weight.0].matrices[0];
            let start = before;
            before += matrix.bytes();
            let [from, to] = [bytes.start, bytes.end].map(|at| at.clamp(start, before) - start);
            let panels = matrix.panels_in(from..to, threads);
            if !panels.is_empty() {
                run(product, panels);
            }
        }
    }

    /// This thread's part of the products of one input.
    pub(crate) fn matmul(
        &self,
        worker: &Worker<'_>,
        rows: Rows,
        input: Place,
        products: &[Product],
        taken: &[AtomicUsize],
    ) {
        let total = self.bytes(products);
        let (threads, units) = (worker.threads, ENDS[ENDS.len() - 1]);
        let scratch = self.scratch[worker.index];
        for owner in (0..threads).map(|i| (worker.index + i) % threads) {
            let at = |end: usize| (owner * units + end) * total / (threads * units);
            while taken[owner].load(Relaxed) < ENDS.len() {
                let piece = taken[owner].fetch_add(1, Relaxed);
                if piece >= ENDS.len() {
                    break;
                }
                let first = piece.checked_sub(1).map_or(0, |piece| ENDS[piece]);
                self.parts(products, at(first)..at(ENDS[piece]), threads, |product, panels| {
                    self.product(rows, input, product, panels, scratch);
                });
            }
        }
    }
}
