//! Work of the host on rows of logits, on several cores: a row of a large vocabulary takes a core
//! longer than many models take for a token.

use std::panic::resume_unwind;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

/// Values that take a core longer than starting a thread does.
const VALUES_PER_THREAD: usize = 1 << 18;
/// The most threads for rows: more would wait for memory.
pub const MAX_ROW_THREADS: usize = 16;

/// Calls `work` with the index of each item, the item, and its row of `width` values; on several
/// threads if the rows are long. Each thread has one of `scratch`, which are at least one.
///
/// # Panics
/// If there is not a row for each item. A panic of `work` is passed on.
pub fn for_each_row<T: Send, S: Send>(
    items: &mut [T],
    (rows, width): (&mut [f32], usize),
    scratch: &mut [S],
    work: impl Fn(usize, &mut T, &mut [f32], &mut S) + Sync,
) {
    assert_eq!(rows.len(), items.len() * width, "a row for each item");
    let threads = (rows.len() / VALUES_PER_THREAD).min(items.len()).min(cores());
    let rows = items.iter_mut().zip(rows.chunks_exact_mut(width.max(1)));
    let rows = Mutex::new(rows.enumerate());
    let run = |scratch: &mut S| {
        loop {
            let next = rows.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((i, (item, row))) = next else { return };
            work(i, item, row, scratch);
        }
    };
    let (own, others) = scratch.split_first_mut().expect("scratch for a thread");
    if threads <= 1 {
        // A scope would allocate.
        return run(own);
    }
    thread::scope(|scope| {
        let others = others.iter_mut().take(threads - 1);
        // The others take the rows of a thread that cannot be started.
        let start = |scratch| thread::Builder::new().spawn_scoped(scope, || run(scratch)).ok();
        let others: Vec<_> = others.map_while(start).collect();
        run(own);
        if let Some(panic) = others.into_iter().find_map(|thread| thread.join().err()) {
            resume_unwind(panic);
        }
    });
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn each_item_gets_its_row_once() {
        for (count, width) in [(0, 7), (1, 7), (7, 3), (9, VALUES_PER_THREAD / 2)] {
            let mut rows: Vec<f32> = (0..count * width).map(|i| (i / width) as f32).collect();
            let (mut items, mut seen) = (vec![0; count], [0; 3]);
            for_each_row(&mut items, (&mut rows, width), &mut seen, |i, item, row, seen| {
                assert!(row.len() == width && row.iter().all(|&x| x == i as f32));
                row.fill(-1.0);
                *item += i + 1;
                *seen += 1;
            });
            assert!(rows.iter().all(|&x| x == -1.0));
            assert!(items.iter().copied().eq(1..=count), "{items:?}");
            assert_eq!(seen.iter().sum::<usize>(), count);
        }
    }

    #[test]
    fn a_panic_says_what_it_said() {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut rows = vec![0.0; 8 * VALUES_PER_THREAD];
            let rows = (&mut rows[..], VALUES_PER_THREAD);
            for_each_row(&mut [(); 8], rows, &mut [(); 8], |i, _, _, _| {
                assert_ne!(i, 5, "row {i}");
            });
        }));
        let panic = panicked.expect_err("it panics");
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(text.contains("row 5"), "{text}");
    }
}
