// The number of the largest logit of each output row, the first of equals; NONE where one of them
// is NaN or +inf, or all are -inf. A workgroup has a row.

// The bits of the logits.
@group(0) @binding(1) var<storage, read> logits: array<u32>;
@group(0) @binding(2) var<storage, read_write> tokens: array<u32>;

const WIDTH: u32 = 0u;

const THREADS: u32 = 256u;
const NONE: u32 = 0xffffffffu;
const INFINITY: u32 = 0x7f800000u;
// The key of -inf.
const LEAST: u32 = 0x007fffffu;

var<workgroup> keys: array<u32, 256>;
var<workgroup> places: array<u32, 256>;

// A number that is ordered as the logit is, and the largest of all for NaN and +inf.
fn key_of(bits: u32) -> u32 {
    let size = bits & 0x7fffffffu;
    if size > INFINITY || bits == INFINITY {
        return NONE;
    }
    if size == 0u {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let width = param(WIDTH);
    var key = 0u;
    var place = NONE;
    for (var i = thread; i < width; i += THREADS) {
        let k = key_of(logits[id.z * width + i]);
        if k > key {
            key = k;
            place = i;
        }
    }
    keys[thread] = key;
    places[thread] = place;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            let other = keys[thread + half];
            let is_first = other == keys[thread] && places[thread + half] < places[thread];
            if other > keys[thread] || is_first {
                keys[thread] = other;
                places[thread] = places[thread + half];
            }
        }
        workgroupBarrier();
    }
    if thread == 0u {
        tokens[id.z] = select(places[0], NONE, keys[0] == NONE || keys[0] <= LEAST);
    }
}
