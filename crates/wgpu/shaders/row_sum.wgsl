// Sums over the threads of a workgroup of 256, in the same order whatever the device.

const THREADS: u32 = 256u;

var<workgroup> sums: array<f32, 256>;

// The sum over all threads.
fn sum_of_all(thread: u32, value: f32) -> f32 {
    sums[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            sums[thread] += sums[thread + half];
        }
        workgroupBarrier();
    }
    let sum = sums[0];
    workgroupBarrier();
    return sum;
}
