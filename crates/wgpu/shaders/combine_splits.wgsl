// Combines the splits of a head of a row by log-sum-exp, in their order. A workgroup has a head.

@group(0) @binding(1) var<storage, read> splits: array<f32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

const THREADS: u32 = 64u;

// Of each split; there are at most 16.
var<workgroup> maxima: array<f32, 16>;
var<workgroup> split_sums: array<f32, 16>;

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
    let row = batch[batch[LISTS + 4u * param(LIST)] + 2u * id.x];
    let range = seen(row);
    let count = range.y - range.x;
    let len = split_len(count);
    let used = (count + len - 1u) / len;
    let dim = param(VALUE_DIM);
    let at = (id.x * heads + head) * param(SPLITS) * (dim + 2u);
    if thread < used {
        maxima[thread] = splits[at + thread * (dim + 2u)];
        split_sums[thread] = splits[at + thread * (dim + 2u) + 1u];
    }
    workgroupBarrier();
    var largest = maxima[0];
    for (var s = 1u; s < used; s++) {
        largest = max(largest, maxima[s]);
    }
    var total = 0.0;
    if has(HAS_SINKS) {
        largest = max(largest, sinks[head]);
        total = exp(sinks[head] - largest);
    }
    for (var s = 0u; s < used; s++) {
        total += exp(maxima[s] - largest) * split_sums[s];
    }
    for (var c = thread; c < dim; c += THREADS) {
        var y = 0.0;
        // Eight splits are read together.
        for (var first = 0u; first < used; first += 8u) {
            //@ for j 8
            let x{j} = splits[at + min(first + {j}u, used - 1u) * (dim + 2u) + 2u + c];
            //@ end
            //@ for j 8
            if first + {j}u < used {
                y += exp(maxima[first + {j}u] - largest) * x{j};
            }
            //@ end
        }
        output[(row * heads + head) * dim + c] = y / total;
    }
}
