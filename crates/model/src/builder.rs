//! The builder of plans: one method for each component of a transformer block. Tensors in the file
//! determine optional features, such as biases; all shapes are checked here.

mod altup;
mod delta;
mod encoder;
mod experts;
mod feed_forward;
mod gemma;
mod hyper;
mod indexer;
mod latent;
mod state;

pub use delta::DeltaMixer;
pub use experts::ExpertLayer;
pub use hyper::HyperConnections;
pub use indexer::{Compressor, IndexerLayer};
pub use latent::LatentAttention;
pub use state::{MambaMixer, SelectiveMixer};

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use bodkin_gguf::Tensor;

use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::ids::{SlotId, Value, WeightId};
use crate::op::{Act, Attention, EmbedBy, NormKind, Op};
use crate::plan::{KvSlot, Plan, Weight};
use crate::rope::Rope;

/// The settings of an attention layer besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionLayer {
    /// Heads, scale, window.
    pub attention: Attention,
    /// The rotary embedding of queries and keys, if any.
    pub rope: Option<Rope>,
    /// The kind and the epsilon of query and key norms, if the file has them.
    pub norm: (NormKind, f32),
    /// Whether queries and keys have RMS norms without weights, which no file has.
    pub weightless_norm: bool,
    /// Whether these norms follow the rotary embedding.
    pub norm_after_rope: bool,
    /// The activation of the output gate, if the file has one.
    pub gate: Act,
}

impl AttentionLayer {
    /// A layer with RMS norms of queries and keys before the rotary embedding, and a sigmoid as the
    /// activation of a gate.
    pub fn new(attention: Attention, rope: Option<Rope>, eps: f32) -> AttentionLayer {
        let (norm, gate) = ((NormKind::Rms, eps), Act::Sigmoid);
        let (weightless_norm, norm_after_rope) = (false, false);
        AttentionLayer { attention, rope, norm, weightless_norm, norm_after_rope, gate }
    }
}

/// Builds a plan, one operation at a time.
pub struct Builder<'a> {
    tensors: HashMap<&'a str, &'a Tensor>,
    weight_ids: HashMap<String, WeightId>,
    /// The optional tensors looked for so far that the file has not, without the prefix.
    absent: RefCell<BTreeSet<String>>,
    /// The prefix of every tensor name: empty, or `blk.N.`.
    prefix: String,
    /// The layer of that prefix.
    layer: Option<usize>,
    plan: Plan,
}

impl<'a> Builder<'a> {
    /// Starts a plan over the tensors of a file.
    pub fn new(keys: &HyperParameters<'_>, tensors: &'a [Tensor]) -> Result<Builder<'a>> {
        let tensors: HashMap<_, _> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let plan = Plan {
            architecture: keys.architecture().to_owned(),
            context_length: keys.context_length()?,
            vocabulary: tensors.get("token_embd.weight").map_or(0, |t| t.rows()),
            weights: Vec::new(),
            slots: Vec::new(),
            states: Vec::new(),
            ops: Vec::new(),
            widths: Vec::new(),
        };
        Ok(Builder {
            tensors,
            weight_ids: HashMap::new(),
            absent: RefCell::default(),
            prefix: String::new(),
            layer: None,
            plan,
        })
    }

    /// The finished plan, whose logits are `output`.
    ///
    /// # Errors
    /// If a gate has an activation that is none of gates, or a weight a scale that the plan does
    /// not read. Scales of inputs are for kernels with 4-bit activations, and change nothing where
    /// activations are wider.
    pub fn finish(self, output: Value) -> Result<Plan> {
        assert_eq!(output, self.plan.output(), "the logits are computed last");
        for weight in &self.plan.weights {
            let Some(name) = weight.name.strip_suffix(".weight") else { continue };
            let scale = format!("{name}.scale");
            if self.tensors.contains_key(scale.as_str()) && !self.weight_ids.contains_key(&scale) {
                return Err(Error::Unsupported(format!("the scale tensor `{scale}`")));
            }
        }
        self.check_gates()?;
        Ok(self.plan)
    }

    /// Sets the prefix of tensor names to block `layer`.
    pub fn block(&mut self, layer: usize) -> &mut Self {
        self.prefix = format!("blk.{layer}.");
        self.layer = Some(layer);
        self
    }

    /// Whether the file has this tensor in the current block. `name` has no `.weight`.
    pub fn has(&self, name: &str) -> bool {
        self.look_up(&format!("{}{name}.weight", self.prefix)).is_some()
    }

    /// The rows of a tensor of the current block, if the file has it. `name` has no `.weight`.
    fn rows(&self, name: &str) -> Option<usize> {
        self.look_up(&format!("{}{name}.weight", self.prefix)).map(Tensor::rows)
    }

    /// The width of a value.
    pub fn width(&self, value: Value) -> usize {
        self.plan.width(value)
    }

    /// The names of the tensors that the plan reads so far.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &str> {
        self.plan.weights.iter().map(|weight| weight.name.as_str())
    }

    /// How many optional tensors were looked for so far that the file has not, those of all blocks
    /// counted once.
    pub(crate) fn absent(&self) -> usize {
        self.absent.borrow().len()
    }

    /// A tensor that a file need not have.
    fn look_up(&self, full_name: &str) -> Option<&'a Tensor> {
        let found = self.tensors.get(full_name).copied();
        if found.is_none() {
            let name = full_name.strip_prefix(&self.prefix).unwrap_or(full_name);
            self.absent.borrow_mut().insert(name.to_owned());
        }
        found
    }

    /// Whether any layer has experts.
    pub fn has_experts(&self) -> bool {
        self.tensors.keys().any(|name| name.ends_with(".ffn_gate_inp.weight"))
    }

    fn push(&mut self, op: Op, width: usize) -> Value {
        self.plan.ops.push(op);
        self.plan.widths.push(width);
        Value(self.plan.ops.len() - 1)
    }

    /// The weight called `full_name`, which must have `cols` columns and `rows` rows.
    fn find(&mut self, full_name: &str, cols: usize, rows: usize) -> Result<WeightId> {
        let missing = || Error::MissingTensor(full_name.to_owned());
        let tensor = *self.tensors.get(full_name).ok_or_else(missing)?;
        if tensor.cols() != cols || tensor.rows() != rows {
            return Err(Error::Shape {
                name: full_name.to_owned(),
                found: tensor.shape.clone(),
                wanted: if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] },
            });
        }
        if let Some(&id) = self.weight_ids.get(full_name) {
            return Ok(id);
        }
        let id = WeightId(self.plan.weights.len());
        let (name, format, bytes) = (full_name.to_owned(), tensor.format, tensor.bytes);
        // Names that callers give in full are of no layer.
        let layer = self.layer.filter(|_| name.starts_with(&self.prefix));
        self.plan.weights.push(Weight { name, format, cols, rows, bytes, layer });
        self.weight_ids.insert(full_name.to_owned(), id);
        Ok(id)
    }

    fn weight(&mut self, name: &str, cols: usize, rows: usize) -> Result<WeightId> {
        let bare = format!("{}{name}", self.prefix);
        let full = format!("{bare}.weight");
        // Some converters omit `.weight`.
        let is_bare =
            self.tensors.contains_key(bare.as_str()) && !self.tensors.contains_key(full.as_str());
        self.find(if is_bare { &bare } else { &full }, cols, rows)
    }

    /// As [`Builder::find`], for a weight that the file may lack.
    fn find_optional(&mut self, name: &str, cols: usize, rows: usize) -> Result<Option<WeightId>> {
        self.look_up(name).is_some().then(|| self.find(name, cols, rows)).transpose()
    }

    fn bias(&mut self, name: &str, cols: usize) -> Result<Option<WeightId>> {
        self.find_optional(&format!("{}{name}.bias", self.prefix), cols, 1)
    }

    /// A vector outside the blocks, if the file has it, such as `rope_freqs`.
    pub fn vector(&mut self, name: &str, cols: usize) -> Result<Option<WeightId>> {
        self.find_optional(&format!("{name}.weight"), cols, 1)
    }

    /// Token embeddings.
    pub fn embed(&mut self, name: &str, width: usize) -> Result<Value> {
        let full = format!("{name}.weight");
        let rows = self.tensors.get(full.as_str()).map_or(0, |t| t.rows());
        let table = self.find(&full, width, rows)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::Token }, width))
    }

    /// The row of a table of the current block for each token id.
    pub fn embed_in_block(&mut self, name: &str, width: usize) -> Result<Value> {
        let table = self.weight(name, width, self.plan.vocabulary)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::Token }, width))
    }

    /// An RMS norm over whole rows.
    pub fn rms_norm(&mut self, input: Value, name: &str, eps: f32) -> Result<Value> {
        let (kind, width) = (NormKind::Rms, self.width(input));
        let weight = Some(self.weight(name, width, 1)?);
        Ok(self.push(Op::Norm { input, kind, weight, bias: None, eps, groups: 1 }, width))
    }

    /// An RMS norm of each of `groups` parts of a row, without a weight.
    pub fn weightless_norm(&mut self, input: Value, groups: usize, eps: f32) -> Value {
        let (kind, weight, bias) = (NormKind::Rms, None, None);
        self.push(Op::Norm { input, kind, weight, bias, eps, groups }, self.width(input))
    }

    /// A layer norm over whole rows, plus its bias if there is one.
    pub fn layer_norm(&mut self, input: Value, name: &str, eps: f32) -> Result<Value> {
        let (kind, width) = (NormKind::Layer, self.width(input));
        let (weight, bias) = (Some(self.weight(name, width, 1)?), self.bias(name, width)?);
        Ok(self.push(Op::Norm { input, kind, weight, bias, eps, groups: 1 }, width))
    }

    /// A norm of each head with shared or separate weights, or of the whole row if the weight is
    /// that wide. The input itself if the file has no such weight.
    fn head_norm(
        &mut self,
        input: Value,
        name: &str,
        head_dim: usize,
        (kind, eps): (NormKind, f32),
    ) -> Result<Value> {
        let width = self.width(input);
        let full = format!("{}{name}.weight", self.prefix);
        let Some(tensor) = self.tensors.get(full.as_str()) else { return Ok(input) };
        let part = if tensor.cols() == width { width } else { head_dim };
        let (bias, groups) = (None, width / part);
        let rows = if tensor.rows() == groups { groups } else { 1 };
        let weight = Some(self.find(&full, part, rows)?);
        Ok(self.push(Op::Norm { input, kind, weight, bias, eps, groups }, width))
    }

    /// A matmul with the weight `name`, plus its bias if there is one, or times its scale.
    pub fn linear(&mut self, input: Value, name: &str, rows: usize) -> Result<Value> {
        let weight = self.weight(name, self.width(input), rows)?;
        let bias = self.bias(name, rows)?;
        let out = self.push(Op::Linear { input, weight, bias }, rows);
        let scale = format!("{name}.scale");
        let tensor = self.tensors.get(format!("{}{scale}", self.prefix).as_str());
        // What this leaves unread, `finish` refuses: a bias would have to follow the scale.
        match tensor.is_some_and(|tensor| tensor.elements() == 1) && bias.is_none() {
            true => self.scale_by(out, &scale, 1),
            false => Ok(out),
        }
    }

    /// As [`Builder::linear`], with the tensor's number of rows.
    pub fn linear_of_file(&mut self, input: Value, name: &str) -> Result<Value> {
        let rows = self.rows(name).unwrap_or(0);
        self.linear(input, name, rows)
    }

    /// A matmul of each of `groups` parts of the input with `rows` rows of the weight.
    pub fn group_linear(
        &mut self,
        input: Value,
        name: &str,
        groups: usize,
        rows: usize,
    ) -> Result<Value> {
        let weight = self.weight(name, self.width(input) / groups, groups * rows)?;
        let op = Op::ExpertLinear { input, route: None, weight, bias: None, experts: groups };
        Ok(self.push(op, groups * rows))
    }

    fn slice(&mut self, input: Value, start: usize, len: usize) -> Value {
        self.slices(input, 1, start, len)
    }

    /// The same columns of each of `groups` parts.
    fn slices(&mut self, input: Value, groups: usize, start: usize, len: usize) -> Value {
        self.push(Op::Slice { input, groups, start, len }, groups * len)
    }

    /// Self-attention: QKV projections, QK norms, rotary embedding, attention, output projection.
    /// Tensors determine attention sinks, norms, an output gate for each element or each head, and
    /// a norm of the output.
    pub fn attention(&mut self, input: Value, layer: AttentionLayer) -> Result<Value> {
        let mut a = layer.attention;
        a.sinks = self.sinks(a.heads)?;
        let widths = [a.heads * a.key_dim, a.kv_heads * a.key_dim, a.kv_heads * a.value_dim];
        let [q, k, v] = self.qkv(input, widths)?;
        let gate = match self.rows("attn_gate") {
            Some(rows) if rows == a.heads => Some(self.linear(input, "attn_gate", rows)?),
            Some(_) => Some(self.linear(input, "attn_gate", a.heads * a.value_dim)?),
            None => None,
        };
        let mut out = self.rotate_and_attend([q, k, v], a, &layer)?;
        if let Some(gate) = gate {
            let op = Op::Glu { gate, up: out, act: layer.gate };
            out = self.push(op, a.heads * a.value_dim);
        }
        if self.has("attn_sub_norm") {
            out = self.rms_norm(out, "attn_sub_norm", layer.norm.1)?;
        }
        self.linear(out, "attn_output", self.width(input))
    }

    /// Queries, keys and values of these widths, of one matmul or of three.
    fn qkv(&mut self, input: Value, widths: [usize; 3]) -> Result<[Value; 3]> {
        let [q_width, k_width, v_width] = widths;
        if !self.has("attn_qkv") {
            let q = self.linear(input, "attn_q", q_width)?;
            let k = self.linear(input, "attn_k", k_width)?;
            return Ok([q, k, self.linear(input, "attn_v", v_width)?]);
        }
        let all = self.linear(input, "attn_qkv", q_width + k_width + v_width)?;
        let q = self.slice(all, 0, q_width);
        let k = self.slice(all, q_width, k_width);
        Ok([q, k, self.slice(all, q_width + k_width, v_width)])
    }

    /// As [`Builder::attention`], with an output gate for each query head, which follows the head
    /// in `attn_q`.
    pub fn gated_attention(&mut self, input: Value, layer: AttentionLayer) -> Result<Value> {
        let a = layer.attention;
        let q_width = a.heads * (a.key_dim + a.value_dim);
        let widths = [q_width, a.kv_heads * a.key_dim, a.kv_heads * a.value_dim];
        let [both, k, v] = self.qkv(input, widths)?;
        let q = self.slices(both, a.heads, 0, a.key_dim);
        let gate = self.slices(both, a.heads, a.key_dim, a.value_dim);
        let up = self.rotate_and_attend([q, k, v], a, &layer)?;
        let out = self.push(Op::Glu { gate, up, act: layer.gate }, self.width(up));
        self.linear(out, "attn_output", self.width(input))
    }

    /// QK norms, rotary embedding, attention.
    fn rotate_and_attend(
        &mut self,
        [q, k, v]: [Value; 3],
        a: Attention,
        layer: &AttentionLayer,
    ) -> Result<Value> {
        let mut qk = [q, k];
        if !layer.norm_after_rope {
            qk = self.qk_norms(qk, layer)?;
        }
        if let Some(rope) = layer.rope {
            qk = qk.map(|input| {
                let (width, head_dim) = (self.width(input), a.key_dim);
                self.push(Op::Rope { input, heads: width / head_dim, head_dim, rope }, width)
            });
        }
        if layer.norm_after_rope {
            qk = self.qk_norms(qk, layer)?;
        }
        Ok(self.attend(qk[0], qk[1], v, a))
    }

    /// Queries and keys with their norms, if there are any.
    fn qk_norms(&mut self, [q, k]: [Value; 2], layer: &AttentionLayer) -> Result<[Value; 2]> {
        let head_dim = layer.attention.key_dim;
        if layer.weightless_norm {
            let norm = |x| self.weightless_norm(x, self.width(x) / head_dim, layer.norm.1);
            return Ok([q, k].map(norm));
        }
        let q = self.head_norm(q, "attn_q_norm", head_dim, layer.norm)?;
        Ok([q, self.head_norm(k, "attn_k_norm", head_dim, layer.norm)?])
    }

    /// The attention sinks of all heads, if the file has them.
    pub fn sinks(&mut self, heads: usize) -> Result<Option<WeightId>> {
        self.has("attn_sinks").then(|| self.weight("attn_sinks", heads, 1)).transpose()
    }

    /// Attention with a KV cache of its own.
    pub fn attend(&mut self, q: Value, k: Value, v: Value, attention: Attention) -> Value {
        let slot = self.slot(&attention);
        self.attend_in(slot, q, Some([k, v]), attention)
    }

    /// A new KV cache.
    fn slot(&mut self, attention: &Attention) -> SlotId {
        self.plan.slots.push(KvSlot::of(attention));
        SlotId(self.plan.slots.len() - 1)
    }

    /// Attention over a KV cache that earlier operations may have filled.
    fn attend_in(
        &mut self,
        slot: SlotId,
        q: Value,
        kv: Option<[Value; 2]>,
        attention: Attention,
    ) -> Value {
        let width = attention.heads * attention.value_dim;
        self.push(Op::Attention { q, kv, attention, slot }, width)
    }

    /// The sum of two values.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        let width = self.width(a);
        assert_eq!(width, self.width(b), "only values of one width are added");
        self.push(Op::Add { a, b }, width)
    }

    /// A value times a factor, or the value itself without a factor.
    pub fn scale(&mut self, input: Value, factor: Option<f32>) -> Value {
        let width = self.width(input);
        factor.map_or(input, |factor| self.push(Op::Scale { input, factor }, width))
    }

    /// Ends the blocks: names of tensors have no prefix from here on.
    pub fn leave_blocks(&mut self) -> &mut Self {
        self.prefix.clear();
        self.layer = None;
        self
    }

    /// The final RMS norm and the output head: the first tensor of `names` in the file.
    pub fn logits(&mut self, input: Value, norm: &str, eps: f32, names: &[&str]) -> Result<Value> {
        let input = self.leave_blocks().rms_norm(input, norm, eps)?;
        self.head(input, names)
    }

    /// As [`Builder::logits`], with a layer norm.
    pub fn layer_norm_logits(
        &mut self,
        input: Value,
        norm: &str,
        eps: f32,
        names: &[&str],
    ) -> Result<Value> {
        let input = self.leave_blocks().layer_norm(input, norm, eps)?;
        self.head(input, names)
    }

    fn head(&mut self, input: Value, names: &[&str]) -> Result<Value> {
        let name = names.iter().find(|name| self.has(name));
        let name = *name.ok_or_else(|| Error::MissingTensor(format!("{}.weight", names[0])))?;
        let rows = self.plan.vocabulary;
        let weight = self.weight(name, self.width(input), rows)?;
        let bias = self.bias(name, rows)?;
        Ok(self.push(Op::Logits { input, weight, bias }, rows))
    }

    /// `cap * tanh(x / cap)`, or the value itself without a cap.
    pub fn softcap(&mut self, input: Value, cap: Option<f32>) -> Value {
        let width = self.width(input);
        cap.map_or(input, |cap| self.push(Op::Softcap { input, cap }, width))
    }
}
