//! The keys that most architectures share, in the order of llama.cpp's converter.

use bodkin_gguf::{Metadata, Value};
use serde_json::Value as Json;

use crate::config::Config;
use crate::error::Result;

/// Metadata of one architecture.
pub(crate) struct Keys<'a> {
    pub(super) architecture: &'static str,
    pub(super) file_type: u32,
    /// The id of a pooling that the model's files name.
    pub(super) pooling: Option<u32>,
    pub(super) metadata: &'a mut Metadata,
}

/// Keys in `config.json` of numbers of layers, and of heads.
pub(super) const LAYERS: &[&str] = &["n_layers", "num_hidden_layers", "n_layer", "num_layers"];
pub(super) const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads"];
pub(super) const KV_HEADS: &[&str] = &["num_key_value_heads", "n_kv_heads"];
pub(super) const WIDTH: &[&str] = &["hidden_size", "n_embd", "dim"];

impl Keys<'_> {
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(format!("{}.{key}", self.architecture), value);
    }

    pub(super) fn u32(&mut self, key: &str, value: u32) {
        self.set(key, Value::U32(value));
    }

    pub(super) fn f32(&mut self, key: &str, value: f64) {
        self.set(key, Value::F32(value as f32));
    }

    pub(super) fn str(&mut self, key: &str, value: &str) {
        self.set(key, Value::String(value.as_bytes().into()));
    }

    /// The file type.
    pub(super) fn file_type(&mut self) {
        self.metadata.insert("general.file_type", Value::U32(self.file_type));
    }

    /// The pooling, if the model's files name one.
    pub(super) fn pooling(&mut self) {
        if let Some(id) = self.pooling {
            self.u32("pooling_type", id);
        }
    }

    /// Sizes, rotary embedding, epsilons, experts and the file type.
    pub(super) fn standard(&mut self, config: &Config) -> Result<()> {
        self.u32("block_count", config.need_count(LAYERS)?);
        let sizes: [(&str, &[&str]); 5] = [
            ("context_length", &["max_position_embeddings", "n_ctx", "n_positions"]),
            ("embedding_length", WIDTH),
            ("feed_forward_length", &["intermediate_size", "n_inner", "hidden_dim"]),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
        ];
        for (key, names) in sizes {
            if let Some(size) = config.u32(names)? {
                self.u32(key, size);
            }
        }
        if config.get(&["is_causal"]) == Some(&Json::Bool(false)) {
            self.set("attention.causal", Value::Bool(false));
        }
        self.rope(config)?;
        let epsilons: [(&str, &[&str]); 2] = [
            ("attention.layer_norm_rms_epsilon", &["rms_norm_eps", "norm_eps"]),
            ("attention.layer_norm_epsilon", &["layer_norm_eps", "layer_norm_epsilon"]),
        ];
        for (key, names) in epsilons {
            if let Some(epsilon) = config.f64(names)? {
                self.f32(key, epsilon);
            }
        }
        let experts: [(&str, &[&str]); 2] = [
            ("expert_count", &["num_local_experts", "num_experts"]),
            ("expert_used_count", &["num_experts_per_tok"]),
        ];
        for (key, names) in experts {
            if let Some(count) = config.u32(names)? {
                self.u32(key, count);
            }
        }
        if let Some(width) = config.u32(&["head_dim"])? {
            self.u32("attention.key_length", width);
            self.u32("attention.value_length", width);
        }
        self.file_type();
        Ok(())
    }

    /// The rotary embedding: its scaling and its bases.
    fn rope(&mut self, config: &Config) -> Result<()> {
        let rope = Rope::of(config)?;
        let factor = rope.number("factor");
        match (rope.kind(), factor) {
            (Some("linear"), Some(factor)) => {
                self.str("rope.scaling.type", "linear");
                self.f32("rope.scaling.factor", factor);
            }
            (Some("yarn"), Some(factor)) => {
                self.str("rope.scaling.type", "yarn");
                self.f32("rope.scaling.factor", factor);
                let trained = config.u32(&["max_position_embeddings"])?.map(f64::from);
                let trained = rope.number("original_max_position_embeddings").or(trained);
                let key = "rope.scaling.original_context_length";
                self.u32(key, trained.unwrap_or_default() as u32);
                for (name, key) in [
                    ("extrapolation_factor", "yarn_ext_factor"),
                    ("attention_factor", "yarn_attn_factor"),
                    ("beta_fast", "yarn_beta_fast"),
                    ("beta_slow", "yarn_beta_slow"),
                ] {
                    if let Some(value) = rope.number(name) {
                        self.f32(&format!("rope.scaling.{key}"), value);
                    }
                }
            }
            (None | Some("default" | "llama3"), _) => {}
            (Some(kind), _) => {
                let expected = "a rope_type of default, linear, yarn or llama3 with its factor";
                return Err(config.invalid("rope_scaling", expected, kind));
            }
        }
        if let Some(base) = rope.base {
            self.f32("rope.freq_base", base);
        }
        if let Some(base) = rope.local_base {
            self.f32("rope.freq_base_swa", base);
        }
        Ok(())
    }
}

/// The rotary embedding of layers that see the whole context, and the base of the others.
pub(super) struct Rope<'a> {
    parameters: Option<&'a Json>,
    pub(super) base: Option<f64>,
    local_base: Option<f64>,
}

impl<'a> Rope<'a> {
    /// Reads both forms: one object, or one for each kind of layer.
    pub(super) fn of(config: &'a Config) -> Result<Rope<'a>> {
        let all = config.get(&["rope_parameters", "rope_scaling"]);
        let parameters = all.map(|all| all.get("full_attention").unwrap_or(all));
        let base = |parameters: Option<&Json>| parameters?.get("rope_theta")?.as_f64();
        let local = all.and_then(|all| all.get("sliding_attention"));
        let names = &["rope_theta", "rotary_emb_base"];
        Ok(Rope {
            parameters,
            base: base(parameters).or(config.f64(names)?),
            local_base: base(local).or(config.f64(&["rope_local_base_freq"])?),
        })
    }

    pub(super) fn kind(&self) -> Option<&'a str> {
        let parameters = self.parameters?;
        parameters.get("rope_type").or(parameters.get("type"))?.as_str()
    }

    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.parameters?.get(name)?.as_f64()
    }
}
