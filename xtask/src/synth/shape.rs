//! The shapes that synthetic models have: what a shape's numbers mean as tensors and as metadata.

use bodkin_gguf::{Array, Metadata, Value};

use super::tokenizer;

/// Which model the shape is that of.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Size {
    /// For tests: a megabyte or two.
    Tiny,
    /// Not much more, with all that the persistent kernels for NVIDIA devices need.
    Small,
    /// The same with experts.
    SmallMoe,
    /// The same with Mamba 2 in half of the layers.
    SmallHybrid,
    /// The same with Gated DeltaNet in half of the layers.
    SmallDelta,
    /// That of Llama 3.2 1B.
    #[value(name = "1b")]
    OneB,
    /// That of Llama 3.1 8B.
    #[value(name = "8b")]
    EightB,
    /// A small Qwen 3 with experts: 1.7 billion weights, of which a token reads a fifth.
    Moe,
    /// Four layers with experts like those of Nemotron 3 Nano: 128, of which a token uses six.
    Nano,
    /// That of Granite 4.0 H 1B: attention in 4 of 40 layers, Mamba 2 in the others.
    Hybrid,
    /// That of Qwen 3.5 4B: attention in 8 of 32 layers, Gated DeltaNet in the others.
    Delta,
}

/// The numbers that make up a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layers: u32,
    pub(super) width: u32,
    /// Of the feed-forward part, or of each expert.
    pub(super) hidden: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) vocabulary: u32,
    /// Whether the token table is the head too.
    pub(super) tied: bool,
    pub(super) kind: Kind,
}

/// What else there is than attention and one feed-forward part in every layer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Nothing: a Llama.
    Dense,
    /// Of the experts in every layer, a token chooses some: a Qwen 3 with experts.
    Experts { count: u32, used: u32 },
    /// Only every so manieth layer has attention: a Granite 4.
    Hybrid { every: u32, inner: u32, heads: u32, state: u32 },
    /// Each `every`-th layer has attention: a Qwen 3.5.
    Delta { every: u32, key_heads: u32, value_heads: u32, state: u32 },
}

/// Taps of a hybrid's convolutions.
const TAPS: u32 = 4;

/// A tensor, and what it is filled with.
pub(super) struct Tensor {
    pub(super) name: String,
    /// Columns first, as files have it.
    pub(super) shape: Vec<u32>,
    pub(super) fill: Fill,
}

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Random weights, in the format that was asked for.
    Weights,
    /// Random weights of a token table.
    Table,
    /// Random weights in F32.
    Precise,
    /// One value in F32.
    Constant(f32),
}

impl Size {
    pub(super) fn shape(self) -> Shape {
        let one_b = Shape {
            layers: 16,
            width: 2048,
            hidden: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocabulary: 128_256,
            tied: true,
            kind: Kind::Dense,
        };
        let tiny = Shape {
            layers: 2,
            width: 256,
            hidden: 512,
            heads: 8,
            kv_heads: 4,
            head_dim: 32,
            vocabulary: 512,
            tied: false,
            ..one_b
        };
        let small = Shape { heads: 4, kv_heads: 2, head_dim: 64, vocabulary: 4096, ..tiny };
        match self {
            Size::Tiny => tiny,
            Size::Small => small,
            Size::SmallMoe => Shape { kind: Kind::Experts { count: 16, used: 4 }, ..small },
            Size::SmallHybrid => {
                Shape { kind: Kind::Hybrid { every: 2, inner: 512, heads: 8, state: 32 }, ..small }
            }
            Size::SmallDelta => Shape {
                head_dim: 256,
                kind: Kind::Delta { every: 2, key_heads: 2, value_heads: 4, state: 64 },
                ..small
            },
            Size::OneB => one_b,
            Size::EightB => Shape {
                layers: 32,
                width: 4096,
                hidden: 14_336,
                head_dim: 128,
                tied: false,
                ..one_b
            },
            Size::Moe => Shape {
                width: 1024,
                hidden: 512,
                heads: 16,
                kv_heads: 4,
                kind: Kind::Experts { count: 64, used: 8 },
                vocabulary: 32_768,
                ..one_b
            },
            Size::Nano => Shape {
                layers: 4,
                width: 2688,
                hidden: 1856,
                heads: 32,
                kv_heads: 2,
                head_dim: 128,
                kind: Kind::Experts { count: 128, used: 6 },
                vocabulary: 32_768,
                ..one_b
            },
            Size::Hybrid => granite(one_b),
            Size::Delta => qwen35(one_b),
        }
    }
}

/// Granite 4.0 H 1B.
fn granite(one_b: Shape) -> Shape {
    Shape {
        layers: 40,
        width: 1536,
        hidden: 4096,
        heads: 12,
        kv_heads: 4,
        head_dim: 128,
        vocabulary: 100_352,
        kind: Kind::Hybrid { every: 10, inner: 3072, heads: 48, state: 128 },
        ..one_b
    }
}

/// Qwen 3.5 4B.
fn qwen35(one_b: Shape) -> Shape {
    Shape {
        layers: 32,
        width: 2560,
        hidden: 9216,
        heads: 16,
        kv_heads: 4,
        head_dim: 256,
        vocabulary: 248_320,
        kind: Kind::Delta { every: 4, key_heads: 16, value_heads: 32, state: 128 },
        ..one_b
    }
}

impl Shape {
    /// All tensors, in the file's order.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let table = [self.width, self.vocabulary];
        let mut tensors = vec![tensor("token_embd.weight", &table, Fill::Table)];
        for layer in 0..self.layers {
            let mut block = vec![vector("attn_norm", self.width)];
            match self.kind {
                Kind::Hybrid { inner, heads, state, .. } if !self.has_attention(layer) => {
                    block.extend(self.mixer(inner, heads, state));
                }
                Kind::Delta { key_heads, value_heads, state, .. } if !self.has_attention(layer) => {
                    block.extend(self.delta_net(key_heads, value_heads, state));
                }
                _ => block.extend(self.attention()),
            }
            let is_delta = matches!(self.kind, Kind::Delta { .. });
            let norm = if is_delta { "post_attention_norm" } else { "ffn_norm" };
            block.push(vector(norm, self.width));
            block.extend(self.feed_forward());
            let prefix = format!("blk.{layer}.");
            tensors
                .extend(block.into_iter().map(|t| Tensor { name: prefix.clone() + &t.name, ..t }));
        }
        tensors.push(vector("output_norm", self.width));
        if !self.tied {
            tensors.push(tensor("output.weight", &table, Fill::Table));
        }
        tensors
    }

    fn has_attention(&self, layer: u32) -> bool {
        match self.kind {
            Kind::Hybrid { every, .. } => layer % every == every / 2,
            Kind::Delta { every, .. } => (layer + 1).is_multiple_of(every),
            _ => true,
        }
    }

    fn attention(&self) -> Vec<Tensor> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let gates = if let Kind::Delta { .. } = self.kind { q } else { 0 };
        let mut tensors = vec![
            matrix("attn_q", &[self.width, q + gates]),
            matrix("attn_k", &[self.width, kv]),
            matrix("attn_v", &[self.width, kv]),
            matrix("attn_output", &[q, self.width]),
        ];
        if let Kind::Experts { .. } | Kind::Delta { .. } = self.kind {
            tensors.extend(["attn_q_norm", "attn_k_norm"].map(|name| vector(name, self.head_dim)));
        }
        tensors
    }

    fn mixer(&self, inner: u32, heads: u32, state: u32) -> Vec<Tensor> {
        let channels = inner + 2 * state;
        vec![
            matrix("ssm_in", &[self.width, inner + channels + heads]),
            constant("ssm_conv1d.weight", &[TAPS, channels], 1.0 / TAPS as f32),
            constant("ssm_conv1d.bias", &[channels], 0.0),
            constant("ssm_dt.bias", &[heads], -2.0),
            constant("ssm_a", &[1, heads], -1.0),
            constant("ssm_d", &[1, heads], 1.0),
            constant("ssm_norm.weight", &[inner, 1], 1.0),
            matrix("ssm_out", &[inner, self.width]),
        ]
    }

    fn delta_net(&self, key_heads: u32, value_heads: u32, state: u32) -> Vec<Tensor> {
        let (width, values) = (self.width, value_heads * state);
        let channels = 2 * key_heads * state + values;
        vec![
            matrix("attn_qkv", &[width, channels]),
            matrix("attn_gate", &[width, values]),
            matrix("ssm_beta", &[width, value_heads]),
            matrix("ssm_alpha", &[width, value_heads]),
            constant("ssm_conv1d.weight", &[TAPS, channels], 1.0 / TAPS as f32),
            constant("ssm_dt.bias", &[value_heads], -2.0),
            constant("ssm_a", &[value_heads], -1.0),
            vector("ssm_norm", state),
            matrix("ssm_out", &[values, width]),
        ]
    }

    fn feed_forward(&self) -> Vec<Tensor> {
        let (width, hidden) = (self.width, self.hidden);
        match self.kind {
            Kind::Experts { count, .. } => vec![
                tensor("ffn_gate_inp.weight", &[width, count], Fill::Precise),
                matrix("ffn_gate_exps", &[width, hidden, count]),
                matrix("ffn_up_exps", &[width, hidden, count]),
                matrix("ffn_down_exps", &[hidden, width, count]),
            ],
            _ => vec![
                matrix("ffn_gate", &[width, hidden]),
                matrix("ffn_up", &[width, hidden]),
                matrix("ffn_down", &[hidden, width]),
            ],
        }
    }

    /// All metadata of a file.
    pub(super) fn metadata(&self, name: &str) -> Metadata {
        let mut metadata = Metadata::new();
        let string = |text: &str| Value::String(text.as_bytes().into());
        let architecture = match self.kind {
            Kind::Dense => "llama",
            Kind::Experts { .. } => "qwen3moe",
            Kind::Hybrid { .. } => "granitehybrid",
            Kind::Delta { .. } => "qwen35",
        };
        metadata.insert("general.architecture", string(architecture));
        metadata.insert("general.name", string(name));
        metadata.insert("general.quantization_version", Value::U32(2));
        let mut set = |key: &str, value| {
            metadata.insert(format!("{architecture}.{key}"), value);
        };
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", 8192),
            ("embedding_length", self.width),
            ("feed_forward_length", self.hidden),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("rope.dimension_count", self.head_dim),
            ("vocab_size", self.vocabulary),
        ] {
            set(key, Value::U32(value));
        }
        set("rope.freq_base", Value::F32(500_000.0));
        set("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        self.insert_kind(&mut set);
        tokenizer::insert(self.vocabulary, &mut metadata);
        metadata
    }

    /// What the kind adds to the metadata.
    fn insert_kind(&self, set: &mut dyn FnMut(&str, Value)) {
        match self.kind {
            Kind::Dense => {}
            Kind::Experts { count, used } => {
                set("expert_count", Value::U32(count));
                set("expert_used_count", Value::U32(used));
                set("expert_feed_forward_length", Value::U32(self.hidden));
                set("attention.key_length", Value::U32(self.head_dim));
                set("attention.value_length", Value::U32(self.head_dim));
            }
            Kind::Hybrid { inner, heads, state, .. } => {
                let kv_heads = |i| if self.has_attention(i) { self.kv_heads as i32 } else { 0 };
                let kv_heads = (0..self.layers).map(kv_heads).collect();
                set("attention.head_count_kv", Value::Array(Array::I32(kv_heads)));
                set("ssm.conv_kernel", Value::U32(TAPS));
                set("ssm.state_size", Value::U32(state));
                set("ssm.group_count", Value::U32(1));
                set("ssm.inner_size", Value::U32(inner));
                set("ssm.time_step_rank", Value::U32(heads));
                set("rope.scaling.finetuned", Value::Bool(false));
                for key in ["embedding_scale", "residual_scale", "logit_scale"] {
                    set(key, Value::F32(1.0));
                }
                set("attention.scale", Value::F32((self.head_dim as f32).sqrt().recip()));
            }
            Kind::Delta { every, key_heads, value_heads, state } => {
                set("attention.key_length", Value::U32(self.head_dim));
                set("attention.value_length", Value::U32(self.head_dim));
                // A quarter of each head is rotated. Text has the same position in all sections.
                let sections = [11, 11, 10, 0].map(|pairs| pairs * self.head_dim as i32 / 256);
                set("rope.dimension_count", Value::U32(self.head_dim / 4));
                set("rope.dimension_sections", Value::Array(Array::I32(sections.to_vec())));
                set("full_attention_interval", Value::U32(every));
                set("ssm.conv_kernel", Value::U32(TAPS));
                set("ssm.state_size", Value::U32(state));
                set("ssm.group_count", Value::U32(key_heads));
                set("ssm.time_step_rank", Value::U32(value_heads));
                set("ssm.inner_size", Value::U32(value_heads * state));
            }
        }
    }
}

fn matrix(name: &str, shape: &[u32]) -> Tensor {
    tensor(&format!("{name}.weight"), shape, Fill::Weights)
}

/// The weight of a norm.
fn vector(name: &str, len: u32) -> Tensor {
    constant(&format!("{name}.weight"), &[len], 1.0)
}

fn constant(name: &str, shape: &[u32], value: f32) -> Tensor {
    tensor(name, shape, Fill::Constant(value))
}

fn tensor(name: &str, shape: &[u32], fill: Fill) -> Tensor {
    Tensor { name: name.to_owned(), shape: shape.to_vec(), fill }
}
