// The number of the largest logit of each output row, the first of equals; NONE where one of them
// is NaN or +inf, or all are -inf. A workgroup has a row.

@group(0) @binding(1) var<storage, read> parts: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read_write> tokens: array<u32>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let part = parts[id.x * PARTS + min(thread, PARTS - 1u)];
    reduce(thread, part.x, part.y);
    if thread == 0u {
        tokens[id.x] = select(places[0], NONE, keys[0] == NONE || keys[0] <= LEAST);
    }
}
