// Sorts the pairs of a list's rows and their experts by expert. It writes the number of tiles; for
// each tile its expert, its first pair and the end of its pairs; then the pairs, as `row of the list *
// USED + number of the expert in the row`. One workgroup does it. In which order an expert's pairs
// stand differs from run to run, but a tile sums each row alone, so no bit depends on it.

@group(0) @binding(1) var<storage, read> route: array<f32>;
@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

// All experts, those of a token, whether only some are used, and the list.
const EXPERTS: u32 = 0u;
const USED: u32 = 1u;
const IS_ROUTED: u32 = 2u;
const LIST: u32 = 3u;
// Where pairs begin, and how many a tile has.
const PAIRS_AT: u32 = 4u;
const TILE: u32 = 5u;

const THREADS: u32 = 256u;

// Pairs of each expert, and the place of its next pair.
var<workgroup> counts: array<atomic<u32>, 1024>;
var<workgroup> places: array<atomic<u32>, 1024>;

fn expert_of(pair: u32) -> u32 {
    let used = param(USED);
    if param(IS_ROUTED) == 0u {
        return pair % used;
    }
    let row = batch[batch[LISTS + 4u * param(LIST)] + 2u * (pair / used)];
    return min(u32(route[row * 2u * used + used + pair % used]), param(EXPERTS) - 1u);
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    let experts = param(EXPERTS);
    let pairs = batch[LISTS + 4u * param(LIST) + 1u] * param(USED);
    for (var e = thread; e < experts; e += THREADS) {
        atomicStore(&counts[e], 0u);
    }
    workgroupBarrier();
    for (var p = thread; p < pairs; p += THREADS) {
        atomicAdd(&counts[expert_of(p)], 1u);
    }
    workgroupBarrier();
    for (var e = thread; e < experts; e += THREADS) {
        var place = 0u;
        var tile = 0u;
        for (var before = 0u; before < e; before++) {
            let count = atomicLoad(&counts[before]);
            place += count;
            tile += (count + param(TILE) - 1u) / param(TILE);
        }
        atomicStore(&places[e], place);
        let end = place + atomicLoad(&counts[e]);
        for (; place < end; place += param(TILE)) {
            tiles[1u + 3u * tile] = e;
            tiles[2u + 3u * tile] = place;
            tiles[3u + 3u * tile] = min(place + param(TILE), end);
            tile++;
        }
        if e == experts - 1u {
            tiles[0] = tile;
        }
    }
    workgroupBarrier();
    for (var p = thread; p < pairs; p += THREADS) {
        tiles[param(PAIRS_AT) + atomicAdd(&places[expert_of(p)], 1u)] = p;
    }
}
