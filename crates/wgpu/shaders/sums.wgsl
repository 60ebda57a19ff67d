// ROUNDS times SUMS sums over THREADS threads, SUMS of them at once: sixteen threads are
// added in order, then four of their sums at a time.

const PARTS: u32 = THREADS / 16u;

// Sixteen in a row of seventeen: neighbours read from different banks.
var<workgroup> partial: array<f32, 17 * PARTS * SUMS>;
var<workgroup> part_sums: array<f32, PARTS * SUMS * ROUNDS>;

// A thread's part of sum `i` of a round.
fn put(i: u32, thread: u32, value: f32) {
    partial[17u * PARTS * i + 17u * (thread / 16u) + thread % 16u] = value;
}

// Called by all threads of the workgroup between `put` and the `put` of the next round or `sum_of`.
fn add_up(index: u32, round: u32) {
    workgroupBarrier();
    for (var q = index; q < PARTS * SUMS; q += ALL_THREADS) {
        var sum = 0.0;
        for (var i = 0u; i < 16u; i++) {
            sum += partial[17u * q + i];
        }
        part_sums[PARTS * SUMS * round + q] = sum;
    }
    workgroupBarrier();
}

fn sum_of(i: u32) -> f32 {
    var sum = 0.0;
    for (var p = PARTS * i; p < PARTS * (i + 1u); p += 4u) {
        sum += (part_sums[p] + part_sums[p + 1u]) + (part_sums[p + 2u] + part_sums[p + 3u]);
    }
    return sum;
}
