// Sums over the threads of a workgroup of 64, SUMS of them at once: sixteen threads are added in
// order, then the four sums of these.

const THREADS: u32 = 64u;

// Sixteen in a row of seventeen: neighbours read from different banks.
var<workgroup> partial: array<f32, 68 * SUMS>;
var<workgroup> quarters: array<f32, 4 * SUMS>;

// A thread's part of sum `i`.
fn put(i: u32, thread: u32, value: f32) {
    partial[68u * i + 17u * (thread / 16u) + thread % 16u] = value;
}

// Called by all threads between `put` and `sum_of`.
fn add_up(thread: u32) {
    workgroupBarrier();
    for (var q = thread; q < 4u * SUMS; q += THREADS) {
        var sum = 0.0;
        for (var i = 0u; i < 16u; i++) {
            sum += partial[17u * q + i];
        }
        quarters[q] = sum;
    }
    workgroupBarrier();
}

fn sum_of(i: u32) -> f32 {
    let q = 4u * i;
    return (quarters[q] + quarters[q + 1u]) + (quarters[q + 2u] + quarters[q + 3u]);
}
