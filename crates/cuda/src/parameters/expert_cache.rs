//! Parameters of the cache of experts whose tiles are in memory of the host.

// Shapes in brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use super::{Field, Structure};
use crate::constants::MATRICES;

parameters! {
    /// A weight whose experts are cached.
    struct CachedWeight: 56 {
        /// [experts]: addresses of their tiles, which matmuls read; then [SPARE_SLOTS] addresses of
        /// the layer's spare slots
        table: (u64 *),
        /// [experts]: addresses of their tiles in memory of the host, or 0
        host: (u64 *),
        /// [slots] tiles on the device
        slots: (u8 *),
        /// tiles there, of experts without a slot, for one step
        streamed_tiles: (u8 *),
        /// of one expert's tiles
        expert_bytes: u64,
        /// [experts, exponent_bytes] on the device
        exponents: (u8 *),
        /// of one expert's, which lie behind its tiles in memory of the host; or 0 if those on the
        /// device are always there
        exponent_bytes: u64,
    }

    /// The experts of a layer, and those that are cached.
    struct CachedLayer: 288 {
        weights: [CachedWeight; MATRICES],
        /// [experts]: how often each was chosen, now and when the cache was updated last
        counts: (const u32 *), last_counts: (u32 *),
        /// [experts]: updates before which each was chosen, those further back count less
        scores: (float *),
        /// [experts]: the slot of each, or NO_SLOT
        slots: (u32 *),
        /// [SPARE_SLOTS]: slots that hold no expert, or NO_SLOT
        spares: (u32 *),
        /// [CACHE_COUNTERS]: hits, misses, and experts that were copied to slots
        counters: (u64 *),
        /// of the update, zero between two
        finished_blocks: (u32 *),
        experts: u32, weight_count: u32,
    }

    /// A request for a layer's chosen experts that are in the model's file.
    struct RequestExperts: 32 {
        layer: (const CachedLayer *),
        /// [experts], in memory of the host: the time when each was chosen last without a
        /// slot on the device
        used_at: (u32 *),
        /// [MAILBOX], there
        mailbox: (u32 *),
        routing: u32, padding: u32,
    }

    /// The update of the caches of some layers, one behind the other.
    struct UpdateExpertCache: 16 {
        layers: (const CachedLayer *),
        /// whether the first chosen experts without a slot are in the spare slots
        uses_spares: u32,
        /// how many chosen experts without a slot are copied for this step, at most
        most_streamed: u32,
    }
}
