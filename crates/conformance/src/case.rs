//! A model of a few operations, made by hand: its plan, and a file in memory with its weights.

use std::sync::Arc;

use bodkin_backend::{Backend, Error, KvType, Limits, Model, PAGE_TOKENS, Result};
use bodkin_gguf::{File, Format, Metadata, Writer};
use bodkin_model::{
    Attention, EmbedBy, Entries, KvSlot, Op, Plan, RecurrentState, SlotId, StateId, Value,
};
use bodkin_model::{Weight, WeightId};

use super::random::Random;

/// The most that float weights may be off, as an NMSE.
pub(super) const FLOAT: f64 = 1e-6;
/// Likewise where keys and values may be kept in half precision.
pub(super) const HALF_STATE: f64 = 1e-5;
/// Likewise where keys and values are kept as bytes. Backends differ by some 2^-12 of a number
/// before that, and the codes lie some 2 % of a usual number apart: so of a hundred numbers one
/// becomes the code beside the reference's, which is 0.01 * 0.02^2 in keys and again in values, and
/// more where scores are large.
const BYTE_STATE: f64 = 5e-5;
/// Likewise where activations may be rounded to bfloat16: each by 2^-8 of it at most.
pub(super) const BFLOAT: f64 = 1.0 / (1 << 16) as f64;
/// Likewise where activations may be rounded to eight bits.
pub(super) const INTEGER: f64 = 1e-3;

/// Token ids, and logits of a row: no multiple of any tile.
pub(super) const VOCABULARY: usize = 67;

/// Causal attention without extras, scaled as usual.
pub(super) fn usual_attention(heads: usize, kv_heads: usize, dim: usize) -> Attention {
    Attention {
        heads,
        kv_heads,
        key_dim: dim,
        value_dim: dim,
        scale: 1.0 / (dim as f32).sqrt(),
        temperature: None,
        softcap: None,
        window: None,
        chunked: false,
        causal: true,
        sinks: None,
        entries: Entries::Tokens,
    }
}

/// One model and one prompt.
pub(super) struct Case {
    /// The operation, format and shape.
    pub(super) name: String,
    pub(super) plan: Arc<Plan>,
    pub(super) file: Arc<File>,
    /// The largest NMSE against the reference.
    pub(super) tolerance: f64,
    pub(super) tokens: Vec<u32>,
    /// The position of the first token; not zero only where no state is kept.
    pub(super) position: usize,
    /// Whether a backend may refuse to load it.
    pub(super) is_optional: bool,
}

impl Case {
    /// Loads it for its prompt beside another one.
    pub(super) fn load(&self, backend: &dyn Backend) -> Result<Box<dyn Model>> {
        backend.load(Arc::clone(&self.plan), &self.file, &self.limits(), &|_, _| ())
    }

    /// Whether the backend does not support it, and may.
    pub(super) fn is_refused(&self, backend: &dyn Backend) -> bool {
        self.is_optional && matches!(self.load(backend), Err(Error::Unsupported { .. }))
    }

    /// The same as one that a backend may refuse to load.
    pub(super) fn optional(self) -> Case {
        Case { is_optional: true, ..self }
    }

    /// The largest NMSE of a backend that keeps keys and values so.
    pub(super) fn limit(&self, kv_type: KvType) -> f64 {
        if kv_type == KvType::Q8_0 { self.tolerance.max(BYTE_STATE) } else { self.tolerance }
    }

    /// Room for the prompt beside another sequence of the same length.
    pub(super) fn limits(&self) -> Limits {
        let outputs = self.tokens.len();
        let pages = 2 * self.tokens.len().div_ceil(PAGE_TOKENS) + 2;
        Limits {
            tokens: outputs + 8,
            outputs,
            pages: vec![pages; self.plan.windows().len()],
            state_slots: 2,
        }
    }
}

/// Makes a case, one operation at a time.
pub(super) struct Maker {
    name: String,
    pub(super) random: Random,
    plan: Plan,
    /// The data of each weight of the plan.
    data: Vec<Vec<u8>>,
}

impl Maker {
    /// Starts a plan with nothing in it. The name decides over all random numbers.
    pub(super) fn empty(name: impl Into<String>) -> Maker {
        Maker::speaking(name, VOCABULARY)
    }

    /// Likewise with a vocabulary of this size.
    pub(super) fn speaking(name: impl Into<String>, vocabulary: usize) -> Maker {
        let name = name.into();
        let plan = Plan {
            architecture: "conformance".to_owned(),
            context_length: 1 << 16,
            vocabulary,
            weights: Vec::new(),
            slots: Vec::new(),
            states: Vec::new(),
            ops: Vec::new(),
            widths: Vec::new(),
        };
        Maker { random: Random::of(&name), name, plan, data: Vec::new() }
    }

    /// Starts a plan whose first value is `[tokens, width]`, read from a table of floats.
    pub(super) fn start(name: impl Into<String>, width: usize) -> (Maker, Value) {
        Maker::start_speaking(name, VOCABULARY, width)
    }

    /// Likewise with a vocabulary of this size.
    pub(super) fn start_speaking(
        name: impl Into<String>,
        vocabulary: usize,
        width: usize,
    ) -> (Maker, Value) {
        let mut maker = Maker::speaking(name, vocabulary);
        let table = maker.matrix(Format::F32, vocabulary, width);
        let value = maker.push(Op::Embed { table, by: EmbedBy::Token }, width);
        (maker, value)
    }

    pub(super) fn push(&mut self, op: Op, width: usize) -> Value {
        self.plan.ops.push(op);
        self.plan.widths.push(width);
        Value(self.plan.ops.len() - 1)
    }

    pub(super) fn width(&self, value: Value) -> usize {
        self.plan.width(value)
    }

    /// A weight whose data are given.
    pub(super) fn stored(
        &mut self,
        format: Format,
        rows: usize,
        cols: usize,
        data: Vec<u8>,
    ) -> WeightId {
        let name = format!("weight.{}", self.data.len());
        let bytes = data.len() as u64;
        self.plan.weights.push(Weight { name, format, cols, rows, bytes, layer: None });
        self.data.push(data);
        WeightId(self.data.len() - 1)
    }

    /// A matrix of normal values that leaves the size of its input about as it is; where the format
    /// is sparse, half of them are zero. Quantising takes long: of large matrices only the first
    /// rows are, and the others have blocks of these at random.
    pub(super) fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> WeightId {
        const QUANTIZED: usize = 1 << 14;
        let block_bytes = format.block_bytes().filter(|_| format.block_elements() > 1);
        let quantized_rows = block_bytes.map_or(rows, |_| rows.min(1 + QUANTIZED / cols));
        let mut values = self.random.normals(quantized_rows * cols);
        let is_table = self.plan.ops.is_empty();
        let scale = if is_table { 1.0 } else { 1.0 / (cols as f32).sqrt() };
        values.iter_mut().for_each(|x| *x *= scale);
        if format.base().is_some() {
            values.iter_mut().filter(|_| self.random.below(2) == 0).for_each(|x| *x = 0.0);
        }
        let mut data = format.encode(&values, cols).expect("a format with a quantiser");
        if let Some(block_bytes) = block_bytes {
            let quantized = data.len() / block_bytes;
            for _ in quantized..rows * cols / format.block_elements() {
                let start = self.random.below(quantized) * block_bytes;
                data.extend_from_within(start..start + block_bytes);
            }
        }
        self.stored(format, rows, cols, data)
    }

    /// Replaces a row of the table of floats that the plan starts with.
    pub(super) fn set_row_of_table(&mut self, row: usize, values: &[f32]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes());
        self.data[0].splice(row * 4 * values.len()..(row + 1) * 4 * values.len(), bytes);
    }

    /// A vector of normal values around `mean`.
    pub(super) fn vector(&mut self, len: usize, mean: f32) -> WeightId {
        let values = self.random.normals(len);
        self.floats(&values.iter().map(|x| mean + 0.3 * x).collect::<Vec<_>>())
    }

    /// A vector of these values.
    pub(super) fn floats(&mut self, values: &[f32]) -> WeightId {
        let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.stored(Format::F32, 1, values.len(), data)
    }

    pub(super) fn linear(&mut self, input: Value, format: Format, rows: usize) -> Value {
        let weight = self.matrix(format, rows, self.plan.width(input));
        self.push(Op::Linear { input, weight, bias: None }, rows)
    }

    /// Projections and attention on them.
    pub(super) fn attention(&mut self, input: Value, format: Format, a: Attention) -> Value {
        let q = self.linear(input, format, a.heads * a.key_dim);
        let k = self.linear(input, format, a.kv_heads * a.key_dim);
        let v = self.linear(input, format, a.kv_heads * a.value_dim);
        self.attend(q, k, v, a)
    }

    pub(super) fn attend(&mut self, q: Value, k: Value, v: Value, a: Attention) -> Value {
        let slot = self.slot(KvSlot::of(&a));
        let op = Op::Attention { q, kv: Some([k, v]), attention: a, slot };
        self.push(op, a.heads * a.value_dim)
    }

    /// Attention with the keys and values of the attention before it.
    pub(super) fn attend_again(&mut self, q: Value, a: Attention) -> Value {
        let slot = SlotId(self.plan.slots.len() - 1);
        self.push(Op::Attention { q, kv: None, attention: a, slot }, a.heads * a.value_dim)
    }

    pub(super) fn slot(&mut self, slot: KvSlot) -> SlotId {
        self.plan.slots.push(slot);
        SlotId(self.plan.slots.len() - 1)
    }

    /// A state of the plan, for one operation.
    pub(super) fn state(&mut self, state: RecurrentState) -> StateId {
        self.plan.states.push(state);
        StateId(self.plan.states.len() - 1)
    }

    /// A head of floats, so that every element of `input` shows in every logit.
    pub(super) fn logits(&mut self, input: Value) -> Value {
        let vocabulary = self.plan.vocabulary;
        let weight = self.matrix(Format::F32, vocabulary, self.plan.width(input));
        self.push(Op::Logits { input, weight, bias: None }, vocabulary)
    }

    /// A case with a prompt of random tokens.
    pub(super) fn finish(mut self, tolerance: f64, tokens: usize) -> Case {
        let tokens = (0..tokens).map(|_| self.random.below(VOCABULARY) as u32).collect();
        let metadata = Metadata::new();
        let mut writer = Writer::new("conformance.gguf", &metadata).expect("no metadata");
        for (weight, data) in self.plan.weights.iter().zip(&self.data) {
            let shape = [weight.cols as u64, weight.rows as u64];
            writer.tensor(&weight.name, weight.format, &shape, data).expect("a valid tensor");
        }
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes).expect("memory takes all bytes");
        let file = File::from_bytes("conformance.gguf", bytes).expect("what was just written");
        let (plan, file) = (Arc::new(self.plan), Arc::new(file));
        let (position, is_optional) = (0, false);
        Case { name: self.name, plan, file, tolerance, tokens, position, is_optional }
    }
}
