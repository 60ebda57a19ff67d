//! Work of the host on rows of logits, on several cores: a row of a large vocabulary takes a core
//! longer than many models take for a token.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

/// Values that take a core longer than starting a thread does.
const VALUES_PER_THREAD: usize = 1 << 18;
/// More threads wait for memory.
const MAX_THREADS: usize = 16;

/// Calls `work` with the index of each item, the item, and its row of `rows`, which all have the
/// same length; on several threads if the rows are long.
pub fn for_each_row<T: Send>(
    items: &mut [T],
    rows: &mut [f32],
    work: impl Fn(usize, &mut T, &mut [f32]) + Sync,
) {
    let width = rows.len() / items.len().max(1);
    let threads = (rows.len() / VALUES_PER_THREAD).min(items.len()).min(cores());
    let rows = items.iter_mut().zip(rows.chunks_exact_mut(width.max(1)));
    let rows = Mutex::new(rows.enumerate());
    let run = || loop {
        let next = rows.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some((i, (item, row))) = next else { return };
        work(i, item, row);
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // Without it, the others take its rows.
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    let count = || thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    *CORES.get_or_init(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_gets_its_row_once() {
        for (count, width) in [(0, 7), (1, 7), (5, 0), (7, 3), (9, VALUES_PER_THREAD / 2)] {
            let mut rows: Vec<f32> = (0..count * width).map(|i| (i / width) as f32).collect();
            let mut items = vec![0; count];
            for_each_row(&mut items, &mut rows, |i, item, row| {
                assert!(row.len() == width && row.iter().all(|&x| x == i as f32));
                row.fill(-1.0);
                *item += i + 1;
            });
            assert!(rows.iter().all(|&x| x == -1.0));
            assert!(width == 0 || items.iter().copied().eq(1..=count), "{items:?}");
        }
    }
}
