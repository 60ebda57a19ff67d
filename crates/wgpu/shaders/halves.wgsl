// Input rows of a list in half precision, of which each row of the list has `groups.y`, divided by a power of two
// that the largest column decides.

@group(0) @binding(1) var<storage, read_write> halves: array<vec4<f16>>;

// From one input row to the next, and the list of rows.
const INPUT_STRIDE: u32 = 12u;
const LIST: u32 = 13u;

const THREADS: u32 = 256u;

var<workgroup> largest: array<f32, 64>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let list = batch[LISTS + 4u * param(LIST)];
    let at = (batch[list + 2u * id.x] * groups.y + id.y) * param(INPUT_STRIDE);
    let quads = 8u * param(GROUPS);
    var most = vec4<f32>();
    for (var i = thread; i < quads; i += THREADS) {
        most = max(most, abs(input4(at, i)));
    }
    let mine = max(max(most.x, most.y), max(most.z, most.w));
    //@ for q 4
    if thread / 64u == {q}u {
        if {q}u == 0u {
            largest[thread % 64u] = mine;
        } else {
            largest[thread % 64u] = max(largest[thread % 64u], mine);
        }
    }
    workgroupBarrier();
    //@ end
    var row_max = 0.0;
    for (var i = 0u; i < 64u; i++) {
        row_max = max(row_max, largest[i]);
    }
    let exponent = exponent_of(row_max);
    let scale = bitcast<f32>(u32(127 - exponent) << 23u);
    let out = (id.x * groups.y + id.y) * (quads + 1u);
    for (var i = thread; i < quads; i += THREADS) {
        halves[out + i] = vec4<f16>(input4(at, i) * scale);
    }
    if thread == 0u {
        halves[out + quads] = vec4<f16>(f16(exponent));
    }
}
