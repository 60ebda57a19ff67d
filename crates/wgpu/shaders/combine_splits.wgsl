// Combines the splits of a head of a row by log-sum-exp, in their order. A workgroup has a head.

@group(0) @binding(1) var<storage, read> splits: array<f32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

const THREADS: u32 = 64u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = linear_id(id, groups);
    let heads = param(HEADS);
    if head >= heads {
        return;
    }
    let row = batch[batch[LISTS + 2u * param(LIST)] + 2u * id.z];
    let range = seen(row);
    let count = range.y - range.x;
    let len = split_len(count);
    let used = (count + len - 1u) / len;
    let dim = param(VALUE_DIM);
    let at = (id.z * heads + head) * param(SPLITS) * (dim + 2u);
    var largest = splits[at];
    for (var s = 1u; s < used; s++) {
        largest = max(largest, splits[at + s * (dim + 2u)]);
    }
    var total = 0.0;
    if has(HAS_SINKS) {
        largest = max(largest, sinks[head]);
        total = exp(sinks[head] - largest);
    }
    for (var s = 0u; s < used; s++) {
        let split = at + s * (dim + 2u);
        total += exp(splits[split] - largest) * splits[split + 1u];
    }
    for (var c = thread; c < dim; c += THREADS) {
        var y = 0.0;
        for (var s = 0u; s < used; s++) {
            let split = at + s * (dim + 2u);
            y += exp(splits[split] - largest) * splits[split + 2u + c];
        }
        output[(row * heads + head) * dim + c] = y / total;
    }
}
