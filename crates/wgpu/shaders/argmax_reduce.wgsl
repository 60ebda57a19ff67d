// The largest key of the threads of a workgroup, and the first place where it is.

const THREADS: u32 = 256u;
const NONE: u32 = 0xffffffffu;
const INFINITY: u32 = 0x7f800000u;
// The key of -inf.
const LEAST: u32 = 0x007fffffu;
// Parts of a row.
const PARTS: u32 = 64u;

var<workgroup> keys: array<u32, 256>;
var<workgroup> places: array<u32, 256>;

fn reduce(thread: u32, key: u32, place: u32) {
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
}
