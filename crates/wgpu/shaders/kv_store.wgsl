// Stores the keys, or the values, of the tokens of a step in their pages.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read_write> kv: array<u32>;

// Heads and their width; words of a head; where keys or values begin; tokens of an entry, entries
// of a page, and the window.
const HEADS: u32 = 0u;
const DIM: u32 = 1u;
const HEAD_WORDS: u32 = 2u;
const FIRST_WORD: u32 = 3u;
const RATIO: u32 = 4u;
const PAGE_ENTRIES: u32 = 5u;
const WINDOW: u32 = 6u;
// Elements of a unit that a thread stores, and its words.
const UNIT: u32 = {unit}u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = id.z;
    let dim = param(DIM);
    let units = (dim + UNIT - 1u) / UNIT;
    let i = linear_id(id, groups) * 64u + thread;
    if i >= param(HEADS) * units {
        return;
    }
    let position = row_position(row);
    if (position + 1u) % param(RATIO) != 0u {
        return;
    }
    let page = page_of(row_span(row), param(WINDOW), position);
    let cell = page * param(PAGE_ENTRIES) + position % 32u / param(RATIO);
    let head = i / units;
    let unit = i % units;
    let to = param(FIRST_WORD) + (cell * param(HEADS) + head) * param(HEAD_WORDS);
    let at = (row * param(HEADS) + head) * dim + unit * UNIT;
    let count = min(UNIT, dim - unit * UNIT);
    store_unit(at, count, to, unit);
}
