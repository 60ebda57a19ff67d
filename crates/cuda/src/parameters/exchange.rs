//! Parameters of what the devices of a tensor-parallel group do together.

// Shapes in brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use super::{Field, Structure};
use crate::constants::{MATRICES, MAX_PEERS};

parameters! {
    /// The columns of a value that a device has computed.
    struct OwnColumns: 24 {
        at: (u8 *),
        /// bytes from row to row
        stride: u64,
        /// of a row
        bytes: u32, padding: u32,
    }

    /// An all-gather, or without values a barrier, of the devices of a tensor-parallel group.
    struct AllGather: 200 {
        values: [OwnColumns; MATRICES],
        /// [peers]: bytes from a value on this device to the same one on each other device
        peer_offsets: (const u64 *),
        /// on each other device: the barriers that this one has reached
        arrivals: [u64; MAX_PEERS],
        /// [peers]: the barriers that each other device has reached
        reached: (const u32 *),
        /// [peers]: how many it has to have reached
        expected: (u32 *),
        /// 0 between launches
        finished_blocks: (u32 *),
        value_count: u32, rows: u32, peers: u32, padding: u32,
    }
}
