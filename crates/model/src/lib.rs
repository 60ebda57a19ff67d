//! From GGUF metadata to a [`Plan`]: a straight-line list of operations over numbered values and
//! named weights, with its cost in bytes and operations. Files of old converters are first brought
//! into canonical form. This crate is pure: it must not know a device, a thread, a page table or a
//! token, and no plan depends on the value of a weight.

#![forbid(unsafe_code)]

mod arch;
mod builder;
mod canonical;
mod cost;
mod error;
pub mod fusion;
mod hyperparameters;
mod ids;
mod nearest;
mod op;
mod part;
mod plan;
mod pooling;
mod rope;
mod split;
mod text;

pub use arch::{architectures, embedding_plan, plan, plan_for};
pub use builder::{
    AttentionLayer, Builder, Compressor, DeltaMixer, ExpertLayer, HyperConnections, IndexerLayer,
    LatentAttention, MambaMixer, SelectiveMixer,
};
pub use canonical::{canonical, open};
pub use cost::{Buffers, Cost};
pub use error::{Error, Result};
pub use hyperparameters::HyperParameters;
pub use ids::{SlotId, StateId, Value, WeightId};
pub use op::{
    Act, Attention, Compression, DeltaRule, EmbedBy, Entries, Gating, Indexer, NormKind, Op,
    PoolKind, Routing, Scan, Temperature, Xielu,
};
pub use part::Part;
pub use plan::{KvSlot, Plan, RecurrentState, Rows, Weight};
pub use pooling::Pooling;
pub use rope::{Rope, RopeScaling, RopeStyle, RopeTable};
