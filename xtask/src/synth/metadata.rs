//! What a shape's numbers are in the metadata of a file.

use bodkin_gguf::{Array, Metadata, Value};

use super::shape::{Kind, Latent, Mixer, Shape, SharingExperts, TAPS, TOKEN_KINDS};
use super::tokenizer;

/// The number of routing by sigmoids in metadata.
const SIGMOID: u32 = 2;
/// The number of pooling by means in metadata.
const MEAN: u32 = 1;

impl Shape {
    /// All metadata of a file.
    pub(super) fn metadata(&self, name: &str) -> Metadata {
        let mut metadata = Metadata::new();
        let string = |text: &str| Value::String(text.as_bytes().into());
        let architecture = match self.kind {
            Kind::Dense => "llama",
            Kind::Experts { .. } => "qwen3moe",
            Kind::Hybrid { .. } => "granitehybrid",
            Kind::Blocks { .. } => "nemotron_h_moe",
            Kind::Delta { .. } => "qwen35",
            Kind::Gemma { .. } => "gemma4",
            Kind::SharedExpert { .. } => "glm4moe",
            Kind::Latent { .. } => "deepseek2",
            Kind::Sinks { .. } => "gpt-oss",
            Kind::Encoder { .. } => "bert",
        };
        let context = if let Kind::Encoder { tokens } = self.kind { tokens } else { 8192 };
        metadata.insert("general.architecture", string(architecture));
        metadata.insert("general.name", string(name));
        metadata.insert("general.quantization_version", Value::U32(2));
        let mut set = |key: &str, value| {
            metadata.insert(format!("{architecture}.{key}"), value);
        };
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", context),
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
        if let Kind::Encoder { .. } = self.kind {
            metadata.insert("tokenizer.ggml.token_type_count", Value::U32(TOKEN_KINDS));
        }
        metadata
    }

    /// What the kind adds to the metadata.
    fn insert_kind(&self, set: &mut dyn FnMut(&str, Value)) {
        match self.kind {
            Kind::Dense => {}
            Kind::Encoder { .. } => {
                set("attention.layer_norm_epsilon", Value::F32(1e-12));
                set("attention.causal", Value::Bool(false));
                set("pooling_type", Value::U32(MEAN));
            }
            Kind::Experts { count, used } => self.insert_experts(count, used, self.hidden, set),
            Kind::Sinks { count, used, window } => {
                self.insert_experts(count, used, self.hidden, set);
                set("attention.sliding_window", Value::U32(window));
            }
            Kind::SharedExpert { count, used, hidden } => {
                self.insert_experts(count, used, hidden, set);
                set("rope.dimension_count", Value::U32(self.head_dim / 2));
                insert_shared_expert(set);
            }
            Kind::Latent { latent, count, used, hidden } => {
                self.insert_experts(count, used, hidden, set);
                insert_shared_expert(set);
                insert_latent(latent, set);
            }
            Kind::Gemma { global_dim, window, shared, input, .. } => {
                let is_local = (0..self.layers).map(|layer| !self.is_global(layer)).collect();
                let pattern = Value::Array(Array::Bool(is_local));
                set("attention.sliding_window_pattern", pattern);
                set("attention.sliding_window", Value::U32(window));
                set("attention.shared_kv_layers", Value::U32(shared));
                set("embedding_length_per_layer_input", Value::U32(input));
                for (key, size) in [("", global_dim), ("_swa", self.head_dim)] {
                    set(&format!("attention.key_length{key}"), Value::U32(size));
                    set(&format!("attention.value_length{key}"), Value::U32(size));
                    set(&format!("rope.dimension_count{key}"), Value::U32(size));
                }
                set("rope.freq_base_swa", Value::F32(10_000.0));
                set("final_logit_softcapping", Value::F32(30.0));
            }
            Kind::Blocks { mixer, experts, .. } => self.insert_blocks(mixer, experts, set),
            Kind::Hybrid { mixer, experts, .. } => {
                self.insert_mixer(mixer, set);
                if let Some(experts) = experts {
                    self.insert_sharing_experts(experts, set);
                }
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

    /// What a Nemotron has.
    fn insert_blocks(
        &self,
        mixer: Mixer,
        experts: SharingExperts,
        set: &mut dyn FnMut(&str, Value),
    ) {
        let hidden = |i| if self.has_experts(i) { experts.hidden as i32 } else { 0 };
        let hidden = (0..self.layers).map(hidden).collect();
        set("feed_forward_length", Value::Array(Array::I32(hidden)));
        // llama.cpp does not load a Nemotron without it.
        set("attention.layer_norm_epsilon", Value::F32(1e-5));
        self.insert_mixer(mixer, set);
        self.insert_sharing_experts(experts, set);
        set("expert_shared_count", Value::U32(1));
        set("expert_weights_norm", Value::Bool(true));
        set("expert_weights_scale", Value::F32(2.5));
        set("expert_group_count", Value::U32(1));
        set("expert_group_used_count", Value::U32(1));
    }

    fn insert_mixer(&self, mixer: Mixer, set: &mut dyn FnMut(&str, Value)) {
        let kv_heads = |i| if self.has_attention(i) { self.kv_heads as i32 } else { 0 };
        let kv_heads = (0..self.layers).map(kv_heads).collect();
        set("attention.head_count_kv", Value::Array(Array::I32(kv_heads)));
        set("ssm.conv_kernel", Value::U32(TAPS));
        set("ssm.state_size", Value::U32(mixer.state));
        set("ssm.group_count", Value::U32(mixer.groups));
        set("ssm.inner_size", Value::U32(mixer.inner));
        set("ssm.time_step_rank", Value::U32(mixer.heads));
        set("rope.scaling.finetuned", Value::Bool(false));
    }

    fn insert_sharing_experts(&self, experts: SharingExperts, set: &mut dyn FnMut(&str, Value)) {
        self.insert_experts(experts.count, experts.used, experts.hidden, set);
        set("expert_shared_feed_forward_length", Value::U32(experts.shared));
    }

    fn insert_experts(&self, count: u32, used: u32, hidden: u32, set: &mut dyn FnMut(&str, Value)) {
        set("expert_count", Value::U32(count));
        set("expert_used_count", Value::U32(used));
        set("expert_feed_forward_length", Value::U32(hidden));
        set("attention.key_length", Value::U32(self.head_dim));
        set("attention.value_length", Value::U32(self.head_dim));
    }
}

/// What tells of a shared expert in every layer but the first.
fn insert_shared_expert(set: &mut dyn FnMut(&str, Value)) {
    set("expert_shared_count", Value::U32(1));
    set("leading_dense_block_count", Value::U32(1));
    set("expert_weights_norm", Value::Bool(true));
    set("expert_weights_scale", Value::F32(1.0));
    set("expert_gating_func", Value::U32(SIGMOID));
}

fn insert_latent(latent: Latent, set: &mut dyn FnMut(&str, Value)) {
    let Latent { q_rank, rank, nope, rotary, value } = latent;
    for (key, size) in [
        ("attention.q_lora_rank", q_rank),
        ("attention.kv_lora_rank", rank),
        ("attention.key_length", rank + rotary),
        ("attention.value_length", rank),
        ("attention.key_length_mla", nope + rotary),
        ("attention.value_length_mla", value),
        ("rope.dimension_count", rotary),
    ] {
        set(key, Value::U32(size));
    }
}
