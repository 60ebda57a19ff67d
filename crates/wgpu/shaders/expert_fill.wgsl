// Copies the experts that got a slot in this step from memory of the host to their slots. Each
// thread copies a few words of every such expert, so that an expert crosses the bus once.

@group(0) @binding(1) var<storage, read> host: array<u32>;
@group(0) @binding(2) var<storage, read_write> device: array<u32>;
@group(0) @binding(3) var<storage, read> cache: array<u32>;

// Words of the codes and of the scales of an expert's matrix, its rows, and the number of matrices
// that are stacked, of which one has all experts before the next begins.
const CODES: u32 = 0u;
const SCALES: u32 = 1u;
const ROWS: u32 = 2u;
const MATRICES: u32 = 3u;
// Where the step's number of fills is; the experts and their slots are behind it.
const FILLS_AT: u32 = 4u;
// Of the host's part, then of the device's: where scales and factors begin, the first expert or
// slot, and how many there are.
const HOST: u32 = 5u;
const DEVICE: u32 = 9u;

// Where word `i` of the matrix of expert or slot `number` is, with the matrices that come before
// it in the stack.
fn place(part: u32, matrix: u32, number: u32, i: u32) -> u32 {
    let before = matrix * param(part + 3u) + number - param(part + 2u);
    let codes = param(CODES);
    let scales = param(SCALES);
    if i < codes {
        return before * codes + i;
    }
    if i < codes + scales {
        return param(part) + before * scales + i - codes;
    }
    return param(part + 1u) + before * param(ROWS) + i - codes - scales;
}

fn is_in(part: u32, number: u32) -> bool {
    return number >= param(part + 2u) && number - param(part + 2u) < param(part + 3u);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let words = param(CODES) + param(SCALES) + param(ROWS);
    let first = linear_id(id, groups) * (256u * FILL_WORDS) + thread;
    let fills = cache[param(FILLS_AT)];
    for (var f = 0u; f < fills; f++) {
        let expert = cache[param(FILLS_AT) + 1u + 2u * f];
        let slot = cache[param(FILLS_AT) + 2u + 2u * f];
        if !is_in(HOST, expert) || !is_in(DEVICE, slot) {
            continue;
        }
        // All words are asked for before one is stored.
        //@ for w FILL_WORDS
        let i{w} = first + {w}u * 256u;
        let matrix{w} = i{w} / words;
        let word{w} = i{w} % words;
        let is_there{w} = matrix{w} < param(MATRICES);
        var copied{w} = 0u;
        if is_there{w} {
            copied{w} = host[place(HOST, matrix{w}, expert, word{w})];
        }
        //@ end
        //@ for w FILL_WORDS
        if is_there{w} {
            device[place(DEVICE, matrix{w}, slot, word{w})] = copied{w};
        }
        //@ end
    }
}
