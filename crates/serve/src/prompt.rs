//! What to generate from: texts, token ids, or a conversation that the chat template renders.

use std::sync::Arc;

use bodkin_engine::ToolFormat;
use serde_json::{Map, Value};
use tokio::task::spawn_blocking;

use crate::error::{ApiError, Result};
use crate::models::Lease;
use crate::tools::{self, Tools};

/// What to generate from.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// A text; special tokens in it are parsed.
    Text(String),
    /// A sequence of texts and token ids.
    Mixed(Vec<Prompt>),
    /// Messages for the model's chat template.
    Chat(Chat),
}

impl Prompt {
    /// What the answer may call.
    pub(crate) fn tools(&self) -> Option<&Arc<Tools>> {
        match self {
            Prompt::Chat(chat) => chat.tools.as_ref(),
            _ => None,
        }
    }
}

/// A conversation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chat {
    /// Messages as OpenAI has them.
    pub(crate) messages: Vec<Value>,
    /// Further variables of the template.
    pub(crate) variables: Map<String, Value>,
    pub(crate) end: ChatEnd,
    /// What the answer may call.
    pub(crate) tools: Option<Arc<Tools>>,
}

/// What the prompt of a conversation ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChatEnd {
    /// The mark of the answer that the model is to write.
    #[default]
    Answer,
    /// The last message, which is the start of the answer.
    Continued,
    /// The end of the last message.
    Message,
}

/// The tokens of a prompt, and its text if it has been rendered.
pub(crate) fn tokenize(lease: &Lease, prompt: Prompt) -> Result<(Vec<u32>, Option<String>)> {
    let model = lease.text()?;
    match prompt {
        Prompt::Tokens(tokens) => Ok((tokens, None)),
        Prompt::Text(text) => Ok((model.tokenize(&text)?, None)),
        Prompt::Mixed(parts) => {
            let mut tokens = Vec::new();
            for (i, part) in parts.into_iter().enumerate() {
                match part {
                    Prompt::Text(text) => {
                        let tokenizer = model.engine().tokenizer();
                        tokens.extend(tokenizer.try_encode(&text, i == 0, true)?);
                    }
                    part => tokens.extend(tokenize(lease, part)?.0),
                }
            }
            Ok((tokens, None))
        }
        Prompt::Chat(chat) => {
            let text = render(lease, &chat)?;
            // The template writes the special tokens itself.
            Ok((model.engine().tokenizer().try_encode(&text, false, true)?, Some(text)))
        }
    }
}

/// The tokens of a conversation, counted.
pub(crate) async fn count_tokens(lease: Lease, chat: Chat) -> Result<usize> {
    let task = spawn_blocking(move || tokenize(&lease, Prompt::Chat(chat)));
    let (tokens, _) = task.await.map_err(|_| ApiError::internal("counting panicked"))??;
    Ok(tokens.len())
}

/// The text of a conversation.
pub(crate) fn render(lease: &Lease, chat: &Chat) -> Result<String> {
    let mut variables = lease.defaults.variables.clone();
    variables.extend(chat.variables.clone());
    if let Some(tools) = &chat.tools {
        tools::format(lease)?;
        variables.insert("tools".to_owned(), tools.shown.clone());
    }
    let has_mark = chat.end == ChatEnd::Answer;
    let render = |messages| Ok(lease.text()?.render_chat(messages, &variables, has_mark)?);
    let mut messages = chat.messages.clone();
    let source = lease.text()?.template()?.source();
    // What Mistral's templates say where they refuse it. Others get results as text.
    if source.contains("must alternate") && ToolFormat::shows_tools(source) {
        join_behind_results(&mut messages);
    }
    match chat.end {
        ChatEnd::Continued => render_continued(messages, render),
        ChatEnd::Answer | ChatEnd::Message => render(messages),
    }
}

/// Makes what a user says behind the results of calls a part of the last result: clients such as
/// Claude Code put reminders there, and for some templates it is no user's turn.
fn join_behind_results(messages: &mut Vec<Value>) {
    let mut joined: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages.drain(..) {
        match joined.last_mut() {
            Some(last) if last["role"] == "tool" && message["role"] == "user" => {
                let [first, second] =
                    [&*last, &message].map(|it| it["content"].as_str().unwrap_or_default());
                last["content"] = format!("{first}\n\n{second}").into();
            }
            _ => joined.push(message),
        }
    }
    *messages = joined;
}

/// The text of a conversation up to the end of its last message, without what the template writes
/// behind it. A marker that is not in the conversation shows where the message ends.
fn render_continued(
    mut messages: Vec<Value>,
    render: impl FnOnce(Vec<Value>) -> Result<String>,
) -> Result<String> {
    let marker = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
    if let Some(last) = messages.last_mut() {
        let text = last.get("content").and_then(Value::as_str).unwrap_or_default();
        last["content"] = format!("{}{marker}", text.trim_end()).into();
    }
    let mut text = render(messages)?;
    let Some(end) = text.rfind(&marker) else {
        let message = "the chat template does not repeat the message to continue";
        return Err(ApiError::bad_request(message));
    };
    text.truncate(end);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_user_says_behind_results_is_a_part_of_the_last_one() {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let mut messages = vec![
            message("user", "a"),
            message("tool", "b"),
            message("tool", "c"),
            message("user", "d"),
            message("user", "e"),
            message("assistant", "f"),
        ];
        join_behind_results(&mut messages);
        let wanted = [
            message("user", "a"),
            message("tool", "b"),
            message("tool", "c\n\nd\n\ne"),
            message("assistant", "f"),
        ];
        assert_eq!(messages, wanted);
    }

    #[test]
    fn a_continued_message_ends_where_its_text_does() {
        let render = |messages: Vec<Value>| {
            let line = |m: &Value| format!("<|start|>{}<|end|>", m["content"].as_str().unwrap());
            Ok(messages.iter().map(line).collect::<String>())
        };
        for text in ["end", "<", "|", "", "an answer", "end  \n"] {
            let messages = vec![json!({ "content": "hi" }), json!({ "content": text })];
            let wanted = format!("<|start|>hi<|end|><|start|>{}", text.trim_end());
            assert_eq!(render_continued(messages, render).unwrap(), wanted);
        }
        let first = |messages: Vec<Value>| Ok(messages[0]["content"].to_string());
        let messages = vec![json!({ "content": "hi" }), json!({ "content": "hi" })];
        assert!(render_continued(messages, first).is_err());
    }
}
