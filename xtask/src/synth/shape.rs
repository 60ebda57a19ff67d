//! The shapes that synthetic models have: what a shape's numbers mean as tensors.

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
    /// Only every so manieth layer has attention, the others Mamba 2: a Granite 4, with experts or
    /// without.
    Hybrid { every: u32, mixer: Mixer, experts: Option<SharingExperts> },
    /// Each layer is one thing: `M` a mixer, `E` experts, `*` attention. A Nemotron 3.
    Blocks { layers: &'static str, mixer: Mixer, experts: SharingExperts },
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
    /// The same with latent attention: a GLM 4.7 Flash.
    Latent { latent: Latent, count: u32, used: u32, hidden: u32 },
    /// Texts become vectors, of at most this number of tokens: a BERT.
    Encoder { tokens: u32 },
}

/// Latent attention: the lengths of the latent rows of queries and of keys with values, and of the
/// parts of a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latent {
    pub(super) q_rank: u32,
    pub(super) rank: u32,
    pub(super) nope: u32,
    pub(super) rotary: u32,
    pub(super) value: u32,
}

/// A Mamba 2 mixer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixer {
    pub(super) inner: u32,
    pub(super) heads: u32,
    pub(super) groups: u32,
    pub(super) state: u32,
}

/// Experts of a layer, of which a token chooses some, beside a shared one of another width.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharingExperts {
    pub(super) count: u32,
    pub(super) used: u32,
    pub(super) hidden: u32,
    pub(super) shared: u32,
}

/// Kinds of token of a BERT: of a first and of a second sentence.
pub(super) const TOKEN_KINDS: u32 = 2;

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

impl Shape {
    /// All tensors, in the file's order.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let table = [self.width, self.vocabulary];
        let mut tensors = vec![tensor("token_embd.weight", &table, Fill::Table)];
        let of_layer = |layer: u32, block: Vec<Tensor>| {
            let named = move |t: Tensor| Tensor { name: format!("blk.{layer}.{}", t.name), ..t };
            block.into_iter().map(named)
        };
        if let Kind::Encoder { tokens } = self.kind {
            tensors.extend(self.encoder_tables(tokens));
            tensors.extend((0..self.layers).flat_map(|i| of_layer(i, self.encoder_layer())));
            return tensors;
        }
        tensors.extend(self.layer_inputs());
        for layer in 0..self.layers {
            let mut block = self.layer(layer);
            block.extend(self.layer_input());
            tensors.extend(of_layer(layer, block));
        }
        tensors.push(vector("output_norm", self.width));
        if !self.tied {
            tensors.push(tensor("output.weight", &table, Fill::Table));
        }
        tensors
    }

    /// A layer whose parts read normalised inputs.
    fn layer(&self, layer: u32) -> Vec<Tensor> {
        let mut block = vec![vector("attn_norm", self.width)];
        match self.kind {
            Kind::Blocks { experts, .. } if self.has_experts(layer) => {
                block.extend(self.sharing_experts(experts));
            }
            Kind::Hybrid { mixer, .. } | Kind::Blocks { mixer, .. }
                if !self.has_attention(layer) =>
            {
                block.extend(self.mixer(mixer));
            }
            Kind::Delta { key_heads, value_heads, state, .. } if !self.has_attention(layer) => {
                block.extend(self.delta_net(key_heads, value_heads, state));
            }
            Kind::Latent { latent, .. } => block.extend(self.latent_attention(latent)),
            _ => block.extend(self.attention(layer)),
        }
        let norm = match self.kind {
            Kind::Delta { .. } | Kind::SharedExpert { .. } | Kind::Sinks { .. } => {
                "post_attention_norm"
            }
            _ => "ffn_norm",
        };
        if !matches!(self.kind, Kind::Blocks { .. }) {
            block.push(vector(norm, self.width));
            block.extend(self.feed_forward(layer));
        }
        block
    }

    /// A layer whose sums are normalised, with a bias for every matrix.
    fn encoder_layer(&self) -> Vec<Tensor> {
        let (width, hidden) = (self.width, self.hidden);
        let matrices = [
            ("attn_q", width, width),
            ("attn_k", width, width),
            ("attn_v", width, width),
            ("attn_output", width, width),
            ("ffn_up", width, hidden),
            ("ffn_down", hidden, width),
        ];
        let mut tensors = Vec::new();
        for (name, cols, rows) in matrices {
            tensors.push(matrix(name, &[cols, rows]));
            tensors.push(constant(&format!("{name}.bias"), &[rows], 0.0));
        }
        tensors.extend(layer_norm("attn_output_norm", width));
        tensors.extend(layer_norm("layer_output_norm", width));
        tensors
    }

    pub(super) fn has_attention(&self, layer: u32) -> bool {
        match self.kind {
            Kind::Hybrid { every, .. } => layer % every == every / 2,
            Kind::Delta { every, .. } => (layer + 1).is_multiple_of(every),
            Kind::Blocks { layers, .. } => layers.as_bytes()[layer as usize] == b'*',
            _ => true,
        }
    }

    /// Whether a layer of a Nemotron has experts.
    pub(super) fn has_experts(&self, layer: u32) -> bool {
        match self.kind {
            Kind::Blocks { layers, .. } => layers.as_bytes()[layer as usize] == b'E',
            _ => false,
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

    fn latent_attention(&self, latent: Latent) -> Vec<Tensor> {
        let Latent { q_rank, rank, nope, rotary, value } = latent;
        let (width, heads) = (self.width, self.heads);
        vec![
            matrix("attn_q_a", &[width, q_rank]),
            vector("attn_q_a_norm", q_rank),
            matrix("attn_q_b", &[q_rank, heads * (nope + rotary)]),
            matrix("attn_kv_a_mqa", &[width, rank + rotary]),
            vector("attn_kv_a_norm", rank),
            matrix("attn_k_b", &[nope, rank, heads]),
            matrix("attn_v_b", &[rank, value, heads]),
            matrix("attn_output", &[heads * value, width]),
        ]
    }

    fn mixer(&self, Mixer { inner, heads, groups, state }: Mixer) -> Vec<Tensor> {
        let channels = inner + 2 * groups * state;
        vec![
            matrix("ssm_in", &[self.width, inner + channels + heads]),
            constant("ssm_conv1d.weight", &[TAPS, channels], 1.0 / TAPS as f32),
            constant("ssm_conv1d.bias", &[channels], 0.0),
            constant("ssm_dt.bias", &[heads], -2.0),
            constant("ssm_a", &[1, heads], -1.0),
            constant("ssm_d", &[1, heads], 1.0),
            constant("ssm_norm.weight", &[inner / groups, groups], 1.0),
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
            Kind::SharedExpert { count, hidden, .. } | Kind::Latent { count, hidden, .. }
                if layer > 0 =>
            {
                (count, hidden)
            }
            Kind::Hybrid { experts: Some(experts), .. } => return self.sharing_experts(experts),
            _ => return self.gated("", self.hidden).into(),
        };
        let mut tensors = vec![
            tensor("ffn_gate_inp.weight", &[width, count], Fill::Precise),
            matrix("ffn_gate_exps", &[width, hidden, count]),
            matrix("ffn_up_exps", &[width, hidden, count]),
            matrix("ffn_down_exps", &[hidden, width, count]),
        ];
        if let Kind::SharedExpert { .. } | Kind::Latent { .. } = self.kind {
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

    /// Experts beside a shared one. Those of a Nemotron have no gates and a bias of the choice.
    fn sharing_experts(&self, experts: SharingExperts) -> Vec<Tensor> {
        let (width, SharingExperts { count, hidden, shared, .. }) = (self.width, experts);
        let mut tensors = vec![
            tensor("ffn_gate_inp.weight", &[width, count], Fill::Precise),
            matrix("ffn_up_exps", &[width, hidden, count]),
            matrix("ffn_down_exps", &[hidden, width, count]),
            matrix("ffn_up_shexp", &[width, shared]),
            matrix("ffn_down_shexp", &[shared, width]),
        ];
        tensors.extend(match self.kind {
            Kind::Blocks { .. } => vec![constant("exp_probs_b.bias", &[count], 0.0)],
            _ => vec![
                matrix("ffn_gate_exps", &[width, hidden, count]),
                matrix("ffn_gate_shexp", &[width, shared]),
            ],
        });
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

    /// Tables of an encoder's positions and kinds of token, and the norm behind their sum.
    fn encoder_tables(&self, tokens: u32) -> Vec<Tensor> {
        let position = tensor("position_embd.weight", &[self.width, tokens], Fill::Precise);
        let kinds = tensor("token_types.weight", &[self.width, TOKEN_KINDS], Fill::Precise);
        let norm = layer_norm("token_embd_norm", self.width);
        [position, kinds].into_iter().chain(norm).collect()
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

/// Weight and bias of a layer norm.
fn layer_norm(name: &str, len: u32) -> [Tensor; 2] {
    [vector(name, len), constant(&format!("{name}.bias"), &[len], 0.0)]
}

fn constant(name: &str, shape: &[u32], value: f32) -> Tensor {
    tensor(name, shape, Fill::Constant(value))
}

fn tensor(name: &str, shape: &[u32], fill: Fill) -> Tensor {
    Tensor { name: name.to_owned(), shape: shape.to_vec(), fill }
}
