// The largest logit of a part of an output row; a workgroup has one of PARTS parts.

// The bits of the logits.
@group(0) @binding(1) var<storage, read> logits: array<u32>;
// The key and the place of each part.
@group(0) @binding(2) var<storage, read_write> parts: array<vec2<u32>>;

const WIDTH: u32 = 0u;

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
    let len = (width + PARTS - 1u) / PARTS;
    let start = min(id.y * len, width - 1u);
    let to = min(start + len, width);
    var key = 0u;
    var place = NONE;
    for (var i = start + thread; i < to; i += 8u * THREADS) {
        //@ for j 8
        let bits{j} = logits[id.x * width + min(i + {j}u * THREADS, to - 1u)];
        //@ end
        //@ for j 8
        let key{j} = key_of(bits{j});
        if key{j} > key {
            key = key{j};
            place = min(i + {j}u * THREADS, to - 1u);
        }
        //@ end
    }
    reduce(thread, key, place);
    if thread == 0u {
        parts[id.x * PARTS + id.y] = vec2(keys[0], places[0]);
    }
}
