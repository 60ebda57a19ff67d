//! Parameters of recurrent layers.

// Shapes in brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use super::{Field, Structure};

parameters! {
    /// A causal convolution over a sequence's rows.
    struct Conv: 72 {
        /// [rows, stride]
        x: (const float *),
        /// [width, taps]
        weight: (const float *),
        /// [width], or none
        bias: (const float *),
        metadata: (const u32 *),
        /// [state slots, taps - 1, width]
        states: (float *),
        /// [rows, out_stride]
        out: (float *),
        stride: u32, out_stride: u32, width: u32, taps: u32, act: u32, padding: u32,
    }

    /// The selective scan of a state-space layer.
    struct Scan: 152 {
        /// [rows, stride of each]
        x: (const float *),
        b: (const float *), c: (const float *), dt: (const float *),
        /// [heads], or [heads * head_dim, state_dim] by channel
        a: (const float *),
        /// [heads], or [heads * head_dim] by channel
        d: (const float *),
        dt_bias: (const float *), metadata: (const u32 *),
        /// [state slots, heads, head_dim, state_dim]
        states: (float *),
        /// [rows, gate_stride], or none: gates the result
        gate: (const float *),
        /// [rows, out_stride], or none
        out: (float *),
        /// [rows, half_stride], or none
        half_out: (u16 *),
        gate_stride: u32, half_stride: u32, act: u32, padding: u32,
        x_stride: u32, b_stride: u32, c_stride: u32, dt_stride: u32, out_stride: u32, heads: u32,
        head_dim: u32, groups: u32, state_dim: u32, is_channelwise: u32,
    }

    /// The gated delta rule.
    struct DeltaRule: 104 {
        /// [rows, stride of each]
        qkv: (const float *),
        decay: (const float *), beta: (const float *),
        /// [heads]
        a: (const float *),
        /// [heads], or [heads * head_dim] by channel
        dt_bias: (const float *),
        metadata: (const u32 *),
        /// [state slots, heads, head_dim columns, head_dim rows]
        states: (float *),
        /// [rows, out_stride]
        out: (float *),
        qkv_stride: u32, decay_stride: u32, beta_stride: u32, out_stride: u32,
        eps: f32,
        /// of q and k
        key_heads: u32,
        /// of v
        heads: u32,
        head_dim: u32, is_cyclic: u32, is_channelwise: u32,
    }
}
