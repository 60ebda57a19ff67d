//! Shared memory of a block of each kernel, and what no block has enough of it for.

use bodkin_model::{Attention, Indexer, KvSlot, Plan, Routing};

use crate::constants::{BLOCK_HEADS, CHUNK_COLS, COMBINED_AT_ONCE, COMBINED_PER_THREAD};
use crate::constants::{
    GEMM_TILES, GEMV_ROWS, GEMV_WARPS, GUARANTEED_SHARED_BYTES, KV_SPLIT, MAX_WIDTH, MMA_COLUMNS,
};
use crate::constants::{
    MAX_SPLIT_DIM, MMA_WORKSPACE_BYTES, PARTIAL_EXTRA, PREFILL_ROWS, PREFILL_WGMMA_ROWS, TILE_ROWS,
};
use crate::kv_layout::{INDEX_KEYS, KvLayout};
use crate::lower::{AttendEntries, RouteChosen, Sparse, Stage, Work};
use crate::packed::{MmaLayout, PackedLayout};

/// Of a block of `gemm_mma`: its results, which are larger than its inputs.
pub(crate) const GEMM_BYTES: usize = 64 << 10;
/// The most that blocks of decode attention may ask for.
pub(crate) const ATTENTION_BYTES: usize = 112 << 10;
/// The most that a block may ask for without an attribute of its kernel.
const DEFAULT_BYTES: usize = 48 << 10;

/// Of a block of `gemm_wgmma`: stages with chunks of its input and of its tiles of weights, and
/// their barriers.
pub(crate) fn wgmma_bytes(layout: MmaLayout, width: usize) -> usize {
    let stages = if width == MAX_WIDTH && layout != MmaLayout::F16 { 4 } else { 3 };
    stages * (2 * (128 * width + GEMM_TILES * layout.chunk_bytes()) + 16)
}

/// Of a block of prefill attention: queries, and keys and values twice.
pub(crate) const fn prefill_bytes(dims: usize) -> usize {
    2 * (PREFILL_ROWS + 4 * 64) * dims
}

/// Likewise with `wgmma`, with barriers, and with tiles of pages in bytes, or merged splits.
pub(crate) const fn prefill_wgmma_bytes(dims: usize, kv: KvLayout) -> usize {
    let has_splits = dims <= MAX_SPLIT_DIM;
    let positions = if has_splits { 128 } else { 64 };
    let more = match kv {
        KvLayout::Q8 => 2 * positions * (dims + dims / 16) + positions,
        _ => PREFILL_WGMMA_ROWS * (if has_splits { 4 * dims } else { 16 } + 8),
    };
    2 * (PREFILL_WGMMA_ROWS + 4 * positions) * dims + 64 + more
}

/// The most dynamic shared memory of a block on Hopper, beside what is static in prefill attention.
const HOPPER_BYTES: usize = 226 << 10;
const _: () = assert!(prefill_wgmma_bytes(128, KvLayout::F16) <= HOPPER_BYTES);
const _: () = assert!(prefill_wgmma_bytes(256, KvLayout::Q8) <= 1024 + HOPPER_BYTES);

/// Of a block of `gemv_mma` for `rows` rows of input: slots of weights with their barriers,
/// barriers of teams, partial sums, and a single row's `cached` columns.
pub(crate) fn gemv_bytes(layout: MmaLayout, is_gated: bool, rows: usize, cached: usize) -> usize {
    let tiles = if is_gated { 2 } else { 1 };
    let slot = tiles * (layout.slot_chunks() / tiles) * layout.chunk_bytes();
    let depth = match slot {
        2561.. => 10240 / slot,
        _ if is_gated && rows > 8 => 3,
        _ => 4,
    };
    let sums = 2 * GEMV_WARPS * tiles * (rows * (TILE_ROWS + 1) + 3) / 4 * 4;
    GEMV_WARPS * (depth * slot + 32 + 8) + 4 * sums + 2 * cached
}

/// Of a block that chooses experts.
pub(crate) fn route_bytes(routing: &Routing) -> usize {
    4 * (2 * route_places(routing) + routing.groups + 2 * routing.used)
}

/// Places of experts there, as in `kernels/route.cuh`.
pub(crate) fn route_places(routing: &Routing) -> usize {
    routing.experts.next_multiple_of(16)
}

/// Query heads that a block of decode attention takes at once.
fn heads_of_block(a: &Attention) -> usize {
    if a.heads == a.kv_heads { 1 } else { BLOCK_HEADS }
}

/// Of a block of decode attention: without and with the keys and values of a split, which tensor
/// cores have in registers.
pub(crate) fn attend_bytes(kv: KvLayout, a: &Attention, slot: &KvSlot) -> [usize; 2] {
    if kv.has_mma(slot) {
        let columns = kv.stride(slot.value_dim).min(MMA_COLUMNS) + PARTIAL_EXTRA;
        let combined = 4 * COMBINED_AT_ONCE * BLOCK_HEADS * columns;
        return [MMA_WORKSPACE_BYTES.max(combined); 2];
    }
    let split = KV_SPLIT * (kv.bytes(slot.key_dim) + kv.bytes(slot.value_dim));
    let (keys, values) = (kv.stride(slot.key_dim), kv.stride(slot.value_dim));
    let bytes = sums_bytes(heads_of_block(a), keys, values);
    [bytes, bytes + split]
}

/// Of the queries, the probabilities and the sums of values of some heads.
fn sums_bytes(heads: usize, keys: usize, values: usize) -> usize {
    // Threads share the positions of a column of values.
    let shares = if values / 8 >= 128 { 1 } else { 128 / (values / 8) };
    4 * heads * (keys + KV_SPLIT + (shares + 1) * values)
}

/// Of a block of attention to entries: queries, probabilities, and sums of values.
pub(crate) fn entries_bytes(kv: KvLayout, a: &Attention) -> usize {
    let (keys, values) = (kv.stride(a.key_dim), kv.stride(a.value_dim));
    sums_bytes(heads_of_block(a), keys, values)
}

/// Of a block that computes the weights of hyper-connections: those of streams in streams.
pub(crate) fn hyper_bytes(streams: usize) -> usize {
    4 * streams * streams
}

/// Of a block that scores entries: the queries of eight heads.
pub(crate) fn index_bytes(indexer: &Indexer) -> usize {
    4 * 8 * INDEX_KEYS.stride(indexer.dim)
}

/// Why a block cannot run a stage: it lacks the shared memory, or the registers.
pub(crate) fn too_wide(plan: &Plan, kv: KvLayout, stage: &Stage) -> Option<String> {
    let (what, bytes, limit) = match &stage.work {
        Work::Matmul(matmul) => {
            let weight = plan.weight(matmul.operands[0].weight);
            let PackedLayout::Mma(layout) = PackedLayout::of(weight.format) else { return None };
            let cols = weight.cols.next_multiple_of(CHUNK_COLS);
            let cached = if matmul.experts.is_none() { cols } else { 0 };
            let one = gemv_bytes(layout, matmul.is_gated(), 1, cached);
            let bytes = one.max(gemv_bytes(layout, matmul.is_gated(), GEMV_ROWS, 0));
            (format!("{cols} columns of {}", weight.name), bytes, GUARANTEED_SHARED_BYTES)
        }
        Work::Attend(attend) => {
            return attention_too_wide(kv, &attend.attention, &plan.slots[attend.slot]);
        }
        Work::Route(route) => {
            let what = format!("a choice among {} experts", route.routing.experts);
            (what, route_bytes(&route.routing), DEFAULT_BYTES)
        }
        Work::Sparse(sparse) => sparse_bytes(kv, sparse)?,
        _ => return None,
    };
    (bytes > limit).then(|| format!("{what}: {bytes} bytes of a block's {limit}"))
}

/// What a stage of sparse attention is, its bytes, and the most that they may be.
fn sparse_bytes(kv: KvLayout, sparse: &Sparse) -> Option<(String, usize, usize)> {
    Some(match sparse {
        Sparse::Attend(AttendEntries { attend, .. }) => {
            let a = &attend.attention;
            let what = format!("heads of {} + {}", a.key_dim, a.value_dim);
            (what, entries_bytes(kv, a), ATTENTION_BYTES)
        }
        Sparse::HyperWeights(weights) => {
            let what = format!("hyper-connections of {} streams", weights.streams);
            (what, hyper_bytes(weights.streams), DEFAULT_BYTES)
        }
        Sparse::Select(select) => {
            let what = format!("an indexer's heads of {}", select.indexer.dim);
            (what, index_bytes(&select.indexer), DEFAULT_BYTES)
        }
        Sparse::Route(RouteChosen { route, .. }) => {
            let what = format!("a choice among {} experts", route.routing.experts);
            (what, route_bytes(&route.routing), DEFAULT_BYTES)
        }
        Sparse::Mix(_) | Sparse::Compress(_) => return None,
    })
}

fn attention_too_wide(kv: KvLayout, a: &Attention, slot: &KvSlot) -> Option<String> {
    let [bytes, _] = attend_bytes(kv, a, slot);
    let results = heads_of_block(a) * kv.stride(slot.value_dim);
    let most_results = COMBINED_PER_THREAD * KV_SPLIT;
    let why = if bytes > ATTENTION_BYTES {
        format!("{bytes} bytes of a block's {ATTENTION_BYTES}")
    } else if results > most_results {
        format!("{results} results of a block's {most_results}")
    } else {
        return None;
    };
    Some(format!("heads of {} + {}: {why}", a.key_dim, a.value_dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn too_wide_with(kv_heads: usize, dim: usize, kv: KvLayout) -> Option<String> {
        let a = Attention {
            heads: 8,
            kv_heads,
            key_dim: dim,
            value_dim: dim,
            scale: 1.0,
            chunked: false,
            causal: true,
            temperature: None,
            entries: bodkin_model::Entries::Tokens,
            softcap: None,
            window: None,
            sinks: None,
        };
        let slot = KvSlot { kv_heads, key_dim: dim, value_dim: dim, window: None, ratio: 1 };
        attention_too_wide(kv, &a, &slot)
    }

    #[test]
    fn heads_that_no_block_can_take_are_named() {
        assert_eq!(too_wide_with(2, 512, KvLayout::F16), None);
        assert_eq!(too_wide_with(8, 1024, KvLayout::F16), None);
        let results = "heads of 1024 + 1024: 4096 results of a block's 2048";
        assert_eq!(too_wide_with(2, 1024, KvLayout::F16).as_deref(), Some(results));
        let bytes = "heads of 4096 + 4096: 198656 bytes of a block's 114688";
        assert_eq!(too_wide_with(2, 4096, KvLayout::F16).as_deref(), Some(bytes));
    }
}
