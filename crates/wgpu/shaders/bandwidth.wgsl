// Reads a large buffer once. Neighbouring threads read neighbouring vectors; the sums keep the
// compiler from leaving reads out.

@group(0) @binding(0) var<storage, read> data: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(256)
fn main(
    @builtin(global_invocation_id) thread: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let threads = 256u * groups.x;
    let count = arrayLength(&data);
    var sum = vec4<u32>();
    // Four reads in flight.
    for (var i = thread.x; i + 3u * threads < count; i += 4u * threads) {
        sum += data[i];
        sum += data[i + threads];
        sum += data[i + 2u * threads];
        sum += data[i + 3u * threads];
    }
    sums[thread.x] = sum.x + sum.y + sum.z + sum.w;
}
