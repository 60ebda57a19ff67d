// What the kernels of attention have in common: parameters, and which tokens a row sees.

const HEADS: u32 = 0u;
const KV_HEADS: u32 = 1u;
const KEY_DIM: u32 = 2u;
const VALUE_DIM: u32 = 3u;
const SCALE: u32 = 4u;
const SOFTCAP: u32 = 5u;
// The window, 0 for none, and flags.
const WINDOW: u32 = 6u;
const FLAGS: u32 = 7u;
// Temperature.
const GROWTH: u32 = 8u;
const LENGTH: u32 = 9u;
const OFFSET: u32 = 10u;
// Where values begin in the cache, the index of its window, and entries of a page.
const VALUES_AT: u32 = 11u;
const WINDOW_INDEX: u32 = 12u;
const PAGE_ENTRIES: u32 = 13u;
// The same of the blocks, and the tokens of one.
const BLOCK_VALUES_AT: u32 = 14u;
const BLOCK_WINDOW_INDEX: u32 = 15u;
const BLOCK_PAGE_ENTRIES: u32 = 16u;
const BLOCK_TOKENS: u32 = 17u;
// Entries that a row selects.
const TOP_K: u32 = 18u;

const CAUSAL: u32 = 1u;
const CHUNKED: u32 = 2u;
const HAS_SINKS: u32 = 4u;
const SELECTS: u32 = 8u;
const HAS_BLOCKS: u32 = 16u;
const HAS_TEMPERATURE: u32 = 32u;

// Of rows of a list: the list, and how many splits their entries have.
const LIST: u32 = 19u;
const SPLITS: u32 = 20u;

fn has(flag: u32) -> bool {
    return (param(FLAGS) & flag) != 0u;
}

// What scores are multiplied with.
fn scale_at(position: u32) -> f32 {
    if has(HAS_TEMPERATURE) {
        let steps = f32((position + param(OFFSET)) / param(LENGTH));
        return param_f32(SCALE) * (1.0 + param_f32(GROWTH) * log(1.0 + steps));
    }
    return param_f32(SCALE);
}

// The first token that a row sees, and the end of those.
fn seen(row: u32) -> vec2<u32> {
    let position = row_position(row);
    let window = param(WINDOW);
    if has(CAUSAL) {
        var start = 0u;
        if window > 0u && has(CHUNKED) {
            start = position / window * window;
        } else if window > 0u {
            start = max(position + 1u, window) - window;
        }
        return vec2(start, position + 1u);
    }
    let span = row_span(row);
    let to = span_position(span) + span_len(span);
    if window > 0u {
        let start = max(position, window / 2u) - window / 2u;
        return vec2(start, min(to, position + window / 2u + 1u));
    }
    return vec2(0u, to);
}

// Entries of a split of a row that sees `count` of them: whole blocks of 64.
fn split_len(count: u32) -> u32 {
    let blocks = (count + 63u) / 64u;
    return 64u * ((blocks + param(SPLITS) - 1u) / param(SPLITS));
}
