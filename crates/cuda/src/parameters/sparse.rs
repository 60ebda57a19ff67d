//! Parameters of the kernels for hyper-connections and sparse attention, and of choices of experts
//! that are made already.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use super::{Attention, Field, Route, Structure};

parameters! {
    /// Sums of the parts of a row.
    struct Mix: 48 {
        /// [rows, stride]: `parts` of `width` elements
        x: (const float *),
        /// [rows, weight_stride]: [parts, results]
        weights: (const float *),
        /// [rows, out_stride]: `results` of `width` elements
        out: (float *),
        stride: u32, weight_stride: u32, out_stride: u32, width: u32, parts: u32, results: u32,
    }

    /// The weights of hyper-connections.
    struct HyperWeights: 56 {
        /// [rows, stride]
        x: (const float *),
        /// [3], or [1]
        scale: (const float *),
        /// [width]
        base: (const float *),
        /// [rows, out_stride]
        out: (float *),
        stride: u32, out_stride: u32,
        /// streams, or streams * (streams + 2)
        width: u32,
        streams: u32, iterations: u32, eps: f32,
    }

    /// The weights of experts that are chosen already.
    struct RouteChosen: 88 {
        /// without a bias
        route: Route,
        /// [rows, chosen_stride]: ids of experts
        chosen: (const float *),
        chosen_stride: u32, padding: u32,
    }

    /// The compression of blocks of tokens.
    struct Compress: 64 {
        /// [rows, stride]: `dim` columns, or `2 * dim` if blocks overlap
        x: (const float *),
        /// [rows, score_stride], likewise
        scores: (const float *),
        metadata: (const u32 *),
        /// [state slots, 3 or 6, dim]
        states: (float *),
        /// [rows, out_stride]
        out: (float *),
        stride: u32, score_stride: u32, out_stride: u32, dim: u32,
        /// tokens of a block
        ratio: u32,
        overlaps: u32,
    }

    /// Stores entries of one head in their pages.
    struct StoreEntries: 40 {
        /// [rows, stride]: the entry that ends with each row
        x: (const float *),
        /// of all pages: `entry_row`
        entries: (KvElement *),
        metadata: (const u32 *),
        stride: u32, dim: u32,
        /// tokens of an entry
        ratio: u32,
        page_table: u32,
    }

    /// The scores of an indexer's entries.
    struct ScoreEntries: 80 {
        /// [rows, q_stride]
        q: (const float *),
        /// [rows, weight_stride]: of heads
        weights: (const float *),
        /// of all pages: `entry_row`
        keys: (const float *),
        metadata: (const u32 *),
        /// [rows from `first_row` on, score_stride]
        scores: (float *),
        q_stride: u32, weight_stride: u32, score_stride: u32, first_row: u32, heads: u32, dim: u32,
        /// tokens of an entry
        ratio: u32,
        page_table: u32,
        /// entries that are selected
        top_k: u32,
        padding: u32,
    }

    /// The selection of entries by their scores.
    struct SelectEntries: 48 {
        /// [rows from `first_row` on, score_stride]
        scores: (const float *),
        metadata: (const u32 *),
        /// [rows, out_stride]: indices, ascending, then -1
        out: (float *),
        score_stride: u32, out_stride: u32, first_row: u32,
        /// tokens of an entry
        ratio: u32,
        top_k: u32,
        padding: u32,
    }

    /// Attention to selected tokens, or to the tokens of a window and to blocks of tokens.
    struct AttendEntries: 240 {
        attention: Attention,
        /// [rows, selected_stride]: indices of entries, or none: all
        selected: (const float *),
        /// of all pages, key and value of each block; or none
        blocks: (const KvElement *),
        selected_stride: u32,
        /// indices of a row, at most
        top_k: u32,
        /// tokens of a block
        block_ratio: u32,
        block_page_table: u32,
    }
}
