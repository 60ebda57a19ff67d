//! The shapes that synthetic models have: what a shape's numbers mean as tensors.

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
    /// That of Qwen 2.5 1.5B, as a Llama: without biases.
    #[value(name = "1.5b")]
    OneAndHalfB,
    /// That of Llama 3.1 8B.
    #[value(name = "8b")]
    EightB,
    /// That of Llama 3.1 70B.
    #[value(name = "70b")]
    SeventyB,
    /// A small Qwen 3 with experts: 1.7 billion weights, of which a token reads a fifth.
    Moe,
    /// Four layers with experts like those of Nemotron 3 Nano: 128, of which a token uses six.
    Nano,
    /// That of Granite 4.0 H 1B: attention in 4 of 40 layers, Mamba 2 in the others.
    Hybrid,
    /// That of Qwen 3.5 4B: attention in 8 of 32 layers, Gated DeltaNet in the others.
    Delta,
    /// That of Gemma 4 E4B: an input of its own for each layer, sliding windows in five of six
    /// layers, and 18 of 42 layers that share the keys and values of earlier ones.
    Gemma4,
    /// Ten layers of Qwen 3 30B-A3B, with a smaller vocabulary: 128 experts, of which a token uses
    /// eight.
    A3b,
    /// Qwen 3 30B-A3B with all layers and tokens.
    #[value(name = "30b-a3b")]
    WholeA3b,
    /// GPT-OSS 120B: 128 experts, of which a token uses four.
    #[value(name = "gpt-oss-120b")]
    GptOss,
    /// Three layers of GLM 4.5 Air, the first without experts, with a smaller vocabulary: a shared
    /// expert and 128 others, of which a token uses eight.
    GlmMoe,
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
    /// Each `every`-th layer attends to all positions, with heads of `global_dim`, the others to a
    /// window. The last `shared` layers have no keys and values of their own, and each layer has an
    /// input of `input` columns: a Gemma 4.
    Gemma { every: u32, global_dim: u32, window: u32, shared: u32, input: u32 },
    /// As `Experts`, with biases, attention sinks, and a window in every other layer: a GPT-OSS.
    Sinks { count: u32, used: u32, window: u32 },
    /// Experts of width `hidden` and a shared one in every layer but the first: a GLM 4.5.
    SharedExpert { count: u32, used: u32, hidden: u32 },
}

/// Taps of a hybrid's convolutions.
pub(super) const TAPS: u32 = 4;

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
    /// Random weights of a table whose rows are read by token, in the format that was asked for.
    Rows,
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
        let small = Shape { heads: 4, kv_heads: 2, head_dim: 64, vocabulary: 8192, ..tiny };
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
            Size::OneAndHalfB => qwen2(one_b),
            Size::EightB => Shape {
                layers: 32,
                width: 4096,
                hidden: 14_336,
                head_dim: 128,
                tied: false,
                ..one_b
            },
            Size::SeventyB => {
                Shape { layers: 80, width: 8192, hidden: 28_672, heads: 64, ..Size::EightB.shape() }
            }
            Size::Moe => Shape {
                width: 1024,
                hidden: 512,
                heads: 16,
                kv_heads: 4,
                kind: Kind::Experts { count: 64, used: 8 },
                vocabulary: 32_768,
                ..one_b
            },
            Size::Nano => nemotron(one_b),
            Size::Hybrid => granite(one_b),
            Size::Delta => qwen35(one_b),
            Size::Gemma4 => gemma4(one_b),
            Size::A3b => qwen3_moe(one_b),
            Size::WholeA3b => Shape { layers: 48, vocabulary: 151_936, ..qwen3_moe(one_b) },
            Size::GptOss => gpt_oss(one_b),
            Size::GlmMoe => glm(one_b),
        }
    }
}

/// Qwen 2.5 1.5B, without biases.
fn qwen2(one_b: Shape) -> Shape {
    Shape {
        layers: 28,
        width: 1536,
        hidden: 8960,
        heads: 12,
        kv_heads: 2,
        head_dim: 128,
        vocabulary: 151_936,
        ..one_b
    }
}

/// Four layers with experts like those of Nemotron 3 Nano.
fn nemotron(one_b: Shape) -> Shape {
    Shape {
        layers: 4,
        width: 2688,
        hidden: 1856,
        heads: 32,
        kv_heads: 2,
        head_dim: 128,
        kind: Kind::Experts { count: 128, used: 6 },
        vocabulary: 32_768,
        ..one_b
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

/// Gemma 4 E4B.
fn gemma4(one_b: Shape) -> Shape {
    Shape {
        layers: 42,
        width: 2560,
        hidden: 10_240,
        heads: 8,
        kv_heads: 2,
        head_dim: 256,
        vocabulary: 262_144,
        kind: Kind::Gemma { every: 6, global_dim: 512, window: 512, shared: 18, input: 256 },
        ..one_b
    }
}

/// Qwen 3 30B-A3B, but for the numbers of layers and of tokens.
fn qwen3_moe(one_b: Shape) -> Shape {
    Shape {
        layers: 10,
        hidden: 768,
        kv_heads: 4,
        head_dim: 128,
        vocabulary: 32_768,
        tied: false,
        kind: Kind::Experts { count: 128, used: 8 },
        ..one_b
    }
}

/// GPT-OSS 120B.
fn gpt_oss(one_b: Shape) -> Shape {
    Shape {
        layers: 36,
        width: 2880,
        hidden: 2880,
        heads: 64,
        vocabulary: 201_088,
        tied: false,
        kind: Kind::Sinks { count: 128, used: 4, window: 128 },
        ..one_b
    }
}

/// GLM 4.5 Air, but for the numbers of layers and of tokens.
fn glm(one_b: Shape) -> Shape {
    Shape {
        layers: 3,
        width: 4096,
        hidden: 10_944,
        heads: 96,
        head_dim: 128,
        vocabulary: 32_768,
        tied: false,
        kind: Kind::SharedExpert { count: 128, used: 8, hidden: 1408 },
        ..one_b
    }
}

impl Shape {
    /// All tensors, in the file's order.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let table = [self.width, self.vocabulary];
        let mut tensors = vec![tensor("token_embd.weight", &table, Fill::Table)];
        tensors.extend(self.layer_inputs());
        for layer in 0..self.layers {
            let mut block = vec![vector("attn_norm", self.width)];
            match self.kind {
                Kind::Hybrid { inner, heads, state, .. } if !self.has_attention(layer) => {
                    block.extend(self.mixer(inner, heads, state));
                }
                Kind::Delta { key_heads, value_heads, state, .. } if !self.has_attention(layer) => {
                    block.extend(self.delta_net(key_heads, value_heads, state));
                }
                _ => block.extend(self.attention(layer)),
            }
            let norm = match self.kind {
                Kind::Delta { .. } | Kind::SharedExpert { .. } | Kind::Sinks { .. } => {
                    "post_attention_norm"
                }
                _ => "ffn_norm",
            };
            block.push(vector(norm, self.width));
            block.extend(self.feed_forward(layer));
            block.extend(self.layer_input());
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

    pub(super) fn has_attention(&self, layer: u32) -> bool {
        match self.kind {
            Kind::Hybrid { every, .. } => layer % every == every / 2,
            Kind::Delta { every, .. } => (layer + 1).is_multiple_of(every),
            _ => true,
        }
    }

    /// Whether a layer of a Gemma attends to all positions.
    pub(super) fn is_global(&self, layer: u32) -> bool {
        matches!(self.kind, Kind::Gemma { every, .. } if (layer + 1).is_multiple_of(every))
    }

    fn attention(&self, layer: u32) -> Vec<Tensor> {
        let head_dim = match self.kind {
            Kind::Gemma { global_dim, .. } if self.is_global(layer) => global_dim,
            _ => self.head_dim,
        };
        let (q, kv) = (self.heads * head_dim, self.kv_heads * head_dim);
        let gates = if let Kind::Delta { .. } = self.kind { q } else { 0 };
        let has_norms =
            matches!(self.kind, Kind::Experts { .. } | Kind::Delta { .. } | Kind::Gemma { .. });
        let has_kv = match self.kind {
            Kind::Gemma { shared, .. } => layer + shared < self.layers,
            _ => true,
        };
        let mut tensors = vec![matrix("attn_q", &[self.width, q + gates])];
        if has_kv {
            tensors.extend(["attn_k", "attn_v"].map(|name| matrix(name, &[self.width, kv])));
        }
        tensors.push(matrix("attn_output", &[q, self.width]));
        if has_norms {
            tensors.push(vector("attn_q_norm", head_dim));
            tensors.extend(has_kv.then(|| vector("attn_k_norm", head_dim)));
        }
        if let Kind::SharedExpert { .. } | Kind::Sinks { .. } = self.kind {
            let biases = [("attn_q.bias", q), ("attn_k.bias", kv), ("attn_v.bias", kv)];
            tensors.extend(biases.map(|(name, len)| constant(name, &[len], 0.0)));
        }
        if let Kind::Sinks { .. } = self.kind {
            // Only experts are in few bits.
            let matrices = tensors.iter_mut().filter(|tensor| tensor.fill == Fill::Weights);
            matrices.for_each(|tensor| tensor.fill = Fill::Table);
            tensors.push(constant("attn_output.bias", &[self.width], 0.0));
            tensors.push(constant("attn_sinks.weight", &[self.heads], 0.0));
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

    fn feed_forward(&self, layer: u32) -> Vec<Tensor> {
        let width = self.width;
        let (count, hidden) = match self.kind {
            Kind::Experts { count, .. } | Kind::Sinks { count, .. } => (count, self.hidden),
            Kind::SharedExpert { count, hidden, .. } if layer > 0 => (count, hidden),
            _ => return self.gated("", self.hidden).into(),
        };
        let mut tensors = vec![
            tensor("ffn_gate_inp.weight", &[width, count], Fill::Precise),
            matrix("ffn_gate_exps", &[width, hidden, count]),
            matrix("ffn_up_exps", &[width, hidden, count]),
            matrix("ffn_down_exps", &[hidden, width, count]),
        ];
        if let Kind::SharedExpert { .. } = self.kind {
            tensors.push(constant("exp_probs_b.bias", &[count], 0.0));
            tensors.extend(self.gated("_shexp", hidden));
        }
        if let Kind::Sinks { .. } = self.kind {
            tensors.push(constant("ffn_gate_inp.bias", &[count], 0.0));
            let biases = [("gate", hidden), ("up", hidden), ("down", width)];
            tensors.extend(
                biases.map(|(part, len)| {
                    constant(&format!("ffn_{part}_exps.bias"), &[len, count], 0.0)
                }),
            );
        }
        tensors
    }

    /// A gated feed-forward network.
    fn gated(&self, suffix: &str, hidden: u32) -> [Tensor; 3] {
        [
            matrix(&format!("ffn_gate{suffix}"), &[self.width, hidden]),
            matrix(&format!("ffn_up{suffix}"), &[self.width, hidden]),
            matrix(&format!("ffn_down{suffix}"), &[hidden, self.width]),
        ]
    }

    /// What gives each layer of a Gemma its input, and the frequency factors of its global layers.
    fn layer_inputs(&self) -> Vec<Tensor> {
        let Kind::Gemma { global_dim, input, .. } = self.kind else { return Vec::new() };
        let width = input * self.layers;
        vec![
            tensor("per_layer_token_embd.weight", &[width, self.vocabulary], Fill::Rows),
            matrix("per_layer_model_proj", &[self.width, width]),
            vector("per_layer_proj_norm", input),
            vector("rope_freqs", global_dim / 2),
        ]
    }

    /// What a layer of a Gemma has beside attention and its feed-forward network.
    fn layer_input(&self) -> Vec<Tensor> {
        let Kind::Gemma { input, .. } = self.kind else { return Vec::new() };
        let norms = ["post_attention_norm", "post_ffw_norm", "post_norm"];
        let mut tensors = Vec::from(norms.map(|name| vector(name, self.width)));
        tensors.extend([
            matrix("inp_gate", &[self.width, input]),
            matrix("proj", &[input, self.width]),
            constant("layer_output_scale.weight", &[1], 1.0),
        ]);
        tensors
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
