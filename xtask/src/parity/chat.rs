//! The kit's chat templates: what Jinja2, set up as in transformers, renders for several
//! conversations, and whether the tool call that a template writes is read back.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use bodkin_engine::{Template, Tool, ToolCall, ToolFormat, ToolParser};
use serde_json::{Map, Value};

use super::kit::{Report, Selection, read_json};

/// Renders all cases. Errors that Jinja2 itself makes, unlike those that a template raises, need
/// not happen here: such cases are left out.
pub(crate) fn run(kit: &Path, _: &Selection) -> Result<Report> {
    let folder = kit.join("chat");
    let kit = read_json(&folder.join("chat.json"))?;
    let mut report = Report::default();
    let mut sources = BTreeMap::new();
    for case in kit["cases"].as_array().context("chat.json: no cases")? {
        let name = case["template"].as_str().context("chat.json: a case without template")?;
        if !sources.contains_key(name) {
            let path = folder.join(name);
            let source =
                std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            sources.insert(name, source);
        }
        check(name, &sources[name], case, &kit, &mut report);
        if case["chat"] == "tool-call" && case["tools"] == true {
            check_calls(name, &sources[name], case, &kit, &mut report);
        }
    }
    Ok(report)
}

fn check(name: &str, source: &str, case: &Value, kit: &Value, report: &mut Report) {
    let text = |key: &str| kit[key].as_str().unwrap_or_default();
    let chat = case["chat"].as_str().unwrap_or_default();
    let generation = case["add_generation_prompt"].as_bool().unwrap_or_default();
    let tools = case["tools"].as_bool().unwrap_or_default().then_some(&kit["tools_value"]);
    let rendered = Template::new(source, text("bos_token"), text("eos_token"))
        .and_then(|template| template.at(text("strftime_now")))
        .and_then(|t| t.render(&kit["chats"][chat], tools, generation, &Map::new()));
    let describe = |what: String| {
        format!("{name}, {chat}, prompt {generation}, tools {}: {what}", tools.is_some())
    };
    if let Some(error) = case["error"].as_str() {
        if error.starts_with("TemplateError") {
            report.check(rendered.is_err(), || describe(format!("expected error {error}")));
        }
        return;
    }
    let expected = case["rendered"].as_str().unwrap_or_default();
    match rendered {
        Err(error) => report.check(false, || describe(error.to_string())),
        Ok(found) => report.check(found == expected, || {
            describe(format!("expected {expected:?}, found {found:?}"))
        }),
    }
}

/// Renders a call of a tool, and reads it as if the model had written it: in one piece, and
/// character by character.
fn check_calls(name: &str, source: &str, case: &Value, kit: &Value, report: &mut Report) {
    let Some(format) = ToolFormat::of(source) else {
        report.check(!ToolFormat::shows_tools(source), || {
            format!("{name}: tool calls have no known form")
        });
        return;
    };
    let Some(rendered) = rendered_call(source, kit) else {
        // Templates that fail by themselves do with Jinja2, too.
        report.check(case["error"].is_string(), || format!("{name}: the call is not rendered"));
        return;
    };
    let (prompt, answer) = rendered;
    let call = &kit["chats"]["tool-call"][1]["tool_calls"][0]["function"];
    let wanted = ToolCall {
        name: call["name"].as_str().unwrap_or_default().to_owned(),
        arguments: call["arguments"].as_object().cloned().unwrap_or_default(),
    };
    let parameters = kit["tools_value"][0]["function"]["parameters"].clone();
    let tools: Arc<[Tool]> = Arc::from([Tool { name: wanted.name.clone(), parameters }]);
    let pieces: Vec<&str> = answer.split("").collect();
    for pieces in [&[answer.as_str()][..], &pieces] {
        let mut parser = ToolParser::new(format, Arc::clone(&tools), &prompt);
        let mut found = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            found.extend(parser.push(piece, i + 1 == pieces.len()).calls);
        }
        report.check(found == [wanted.clone()], || {
            format!("{name}: {answer:?} is read as {found:?}")
        });
    }
}

/// A prompt, and the answer with a call that the template writes behind it.
fn rendered_call(source: &str, kit: &Value) -> Option<(String, String)> {
    let template = Template::new(source, "<|BOS|>", "<|EOS|>").ok()?.at("2025-01-15T12:00:00");
    let template = template.ok()?;
    let mut messages = kit["chats"]["tool-call"].as_array()?[..2].to_vec();
    let render = |messages: &[Value], has_mark| {
        let messages = template.with_calls(messages.to_vec()).into();
        template.render(&messages, Some(&kit["tools_value"]), has_mark, &Map::new()).ok()
    };
    let whole = render(&messages, false)?;
    messages.pop();
    // The mark of an answer may have more than an answer with a call.
    let prompts = [render(&messages, true)?, render(&messages, false)?];
    let prompt = prompts.into_iter().find(|prompt| whole.starts_with(prompt))?;
    let answer = whole[prompt.len()..].to_owned();
    Some((prompt, answer))
}
