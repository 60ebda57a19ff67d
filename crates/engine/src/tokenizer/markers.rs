//! Control tokens that are a part of an answer's text: they divide reasoning and tool calls from
//! the rest, and who reads the answer looks for their texts. Many files call such tokens control
//! tokens, as they do those around messages, which are no part of an answer.

use super::vocabulary::{TokenType, Vocabulary};

/// Texts of markers whose words do not say so.
const MARKERS: &[&str] = &[
    // Tool calls of Cohere, GigaChat, GLM, Hunyuan 3, Llama 3, Mistral, Apertus, DeepSeek, Gemma 4,
    // Kimi K3 and MiniMax M3.
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|function_call|>",
    "<|role_sep|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "<|python_tag|>",
    "[ARGS]",
    "[CALL_ID]",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "<|\"|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "]<]minimax[>[",
    // Reasoning of Apertus and Gemma 4.
    "<|inner_prefix|>",
    "<|inner_suffix|>",
    "<|channel>",
    "<channel|>",
    // Parts of a message of Solar Open.
    "<|begin|>",
    "<|content|>",
];

/// The control tokens of a vocabulary that are markers, ascending, but for those that end a
/// generation.
pub(super) fn find(vocabulary: &Vocabulary, eog_ids: &[u32]) -> Vec<u32> {
    let is_control = |id: &u32| vocabulary.token_type(*id) == TokenType::Control;
    let is_end = |id: &u32| eog_ids.binary_search(id).is_ok();
    let ids = (0..vocabulary.len() as u32).filter(|id| is_control(id) && !is_end(id));
    ids.filter(|&id| str::from_utf8(vocabulary.text(id)).is_ok_and(is_marker)).collect()
}

/// Whether a text is in the list, or has the words of thinking or of a tool call: `[THINK]`,
/// `</seed:think>`, `<|tool_call_begin|>`.
fn is_marker(text: &str) -> bool {
    let lower = text.to_lowercase();
    let words = || lower.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let is_named = words().any(|word| matches!(word, "think" | "thinking" | "toolcall"));
    let calls = words().zip(words().skip(1));
    let mut calls = calls.map(|(first, second)| first == "tool" && second.starts_with("call"));
    is_named || calls.any(|is_call| is_call) || MARKERS.contains(&text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bodkin_gguf::{Array, Metadata, Value};

    use super::super::Tokenizer;
    use crate::stream::TextStream;

    const CONTROL: i32 = 3;

    /// A tokenizer of these control tokens, the last of which ends a generation, and of `a`.
    fn tokenizer(control: &[&str]) -> Tokenizer {
        let mut texts: Vec<Box<[u8]>> = vec![Box::from(&b"a"[..])];
        texts.extend(control.iter().map(|text| Box::from(text.as_bytes())));
        let mut kinds = vec![1];
        kinds.resize(texts.len(), CONTROL);
        let eos = control.len() as u32;
        let mut metadata = Metadata::new();
        metadata.insert("tokenizer.ggml.model", Value::String(b"llama".as_slice().into()));
        metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; texts.len()])));
        metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(texts)));
        metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
        metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(eos));
        Tokenizer::from_metadata(&metadata).unwrap()
    }

    /// What a stream shows of all tokens.
    fn shown(tokenizer: Tokenizer) -> String {
        let ids = 0..tokenizer.vocab_size() as u32;
        let mut stream = TextStream::new(Arc::new(tokenizer), false);
        ids.map(|id| stream.push(id)).collect()
    }

    #[test]
    fn markers_are_shown_though_they_are_control_tokens() {
        let markers = [
            "[THINK]",
            "[/THINK]",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<think>",
            "</think>",
            "</seed:think>",
            "<tool_call>",
            "</tool_call>",
            "<|tool_call>",
            "<tool_call|>",
            "<channel|>",
            "<minimax:tool_call>",
            "<|tool_calls_section_begin|>",
            "<｜tool▁calls▁begin｜>",
            "<|START_THINKING|>",
            "<TOOLCALL>",
        ];
        let mut control = markers.to_vec();
        control.push("</s>");
        assert_eq!(shown(tokenizer(&control)), format!("a{}", markers.concat()));
    }

    #[test]
    fn other_control_tokens_and_ends_stay_hidden() {
        let hidden = ["<|im_start|>", "[INST]", "<|tool_response|>", "[TOOL_RESULTS]", "<|turn>"];
        let tokenizer = |end| tokenizer(&[&hidden[..], &["<|tool|>", "<pad>", end]].concat());
        assert_eq!(shown(tokenizer("</s>")), "a");
        assert_eq!(shown(tokenizer("<|tool_call_end|>")), "a");
        // Texts and single pieces are as before.
        let tokenizer = tokenizer("[THINK]");
        assert_eq!(tokenizer.decode(&[0, 1, 2], false), b"a");
    }
}
