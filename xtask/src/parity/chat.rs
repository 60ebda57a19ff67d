//! The kit's chat templates: what Jinja2, set up as in transformers, renders for several
//! conversations.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use bodkin_engine::Template;
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
