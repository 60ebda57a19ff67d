//! The tools of a request, of all interfaces: what the template shows, what may be called, and
//! whether something must be.

use std::collections::HashSet;
use std::sync::Arc;

use bodkin_engine::{Constraint, Grammar, Tool, ToolFormat, ToolGrammar, ToolParser};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::models::Lease;

/// The most tools of a request.
const TOOLS: usize = 1000;

/// Tools that an answer may call.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    /// All of them, as OpenAI's interface has them and templates read them.
    pub(crate) shown: Value,
    /// Those that may be called.
    callable: Arc<[Tool]>,
    /// Whether the answer must call one.
    is_required: bool,
    /// Whether it may call several.
    is_parallel: bool,
}

/// Which of them may be called, as a request says it.
enum ToolChoice {
    None,
    /// All.
    Auto,
    /// One of all.
    Required,
    /// These, and whether one must be.
    Named(Vec<String>, bool),
}

/// Those of OpenAI's chat.
pub(crate) fn openai(fields: &mut Fields) -> Result<Option<Tools>> {
    for (name, instead) in [("functions", "tools"), ("function_call", "tool_choice")] {
        if fields.refuse(name).is_err() {
            let message = format!("{name} is not supported: expected {instead}");
            return Err(ApiError::field(name, message));
        }
    }
    let tools = read(fields, nested_function)?;
    let choice = openai_choice(fields, "function", "allowed_tools")?;
    choose_openai(fields, tools, choice)
}

/// Those of OpenAI's responses, which have no object around a function.
pub(crate) fn responses(fields: &mut Fields) -> Result<Option<Tools>> {
    let tools = read(fields, |tool| {
        expect_type(tool, "function")?;
        function(tool, "parameters")
    })?;
    let choice = openai_choice(fields, "", "")?;
    choose_openai(fields, tools, choice)
}

/// What OpenAI's requests ask for.
fn choose_openai(
    fields: &mut Fields,
    tools: Vec<(Value, Tool)>,
    choice: ToolChoice,
) -> Result<Option<Tools>> {
    let is_parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    chosen(tools, choice, is_parallel, &fields.field("tool_choice"))
}

/// Anthropic's.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<Option<Tools>> {
    let tools = read(fields, |tool| {
        expect_type(tool, "custom")?;
        function(tool, "input_schema")
    })?;
    let mut given = fields.object("tool_choice")?;
    let is_single = given.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let choice = match given.string("type")?.as_deref() {
        None | Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Named(vec![name(&mut given)?], true),
        Some(other) => {
            let field = given.field("type");
            let message = format!("{field}: expected auto, any, tool or none, found {other}");
            return Err(ApiError::field(field, message));
        }
    };
    chosen(tools, choice, !is_single, "tool_choice")
}

/// Ollama's.
pub(crate) fn ollama(fields: &mut Fields) -> Result<Option<Tools>> {
    let tools = read(fields, nested_function)?;
    chosen(tools, ToolChoice::Auto, true, "tools")
}

/// A tool with an object for its function.
fn nested_function(tool: &mut Fields) -> Result<(Value, Tool)> {
    expect_type(tool, "function")?;
    function(&mut tool.object("function")?, "parameters")
}

/// Reads all tools: each as a template reads it, and as the engine does.
fn read(
    fields: &mut Fields,
    read: impl Fn(&mut Fields) -> Result<(Value, Tool)>,
) -> Result<Vec<(Value, Tool)>> {
    let given = fields.array("tools")?.unwrap_or_default();
    if given.len() > TOOLS {
        let message = format!("tools: expected at most {TOOLS}, found {}", given.len());
        return Err(ApiError::field("tools", message));
    }
    let mut names = HashSet::new();
    let mut tools = Vec::with_capacity(given.len());
    for (i, tool) in given.into_iter().enumerate() {
        let at = format!("tools[{i}]");
        let Value::Object(map) = tool else {
            return Err(fields.mismatch(&at, "an object", &tool));
        };
        let (shown, tool) = read(&mut Fields::within(&at, map))?;
        if !names.insert(tool.name.clone()) {
            let message = format!("{at}: expected names that differ, found {} twice", tool.name);
            return Err(ApiError::field(at, message));
        }
        tools.push((shown, tool));
    }
    Ok(tools)
}

/// Refuses tools that the client's own service would run.
fn expect_type(tool: &mut Fields, expected: &str) -> Result<()> {
    match tool.string("type")? {
        Some(found) if found != expected => {
            let field = tool.field("type");
            let message = format!("{field}: expected {expected}, found {found}");
            Err(ApiError::field(field, message))
        }
        _ => Ok(()),
    }
}

/// A function, whose schema of arguments has this field.
fn function(fields: &mut Fields, schema: &str) -> Result<(Value, Tool)> {
    let name = name(fields)?;
    let description = fields.string("description")?;
    let given = fields.object(schema)?.rest();
    let parameters = match given.is_empty() {
        true => Map::from_iter([
            ("type".to_owned(), "object".into()),
            ("properties".to_owned(), json!({})),
        ]),
        false => given,
    };
    let mut shown = json!({ "name": name });
    if let Some(description) = description {
        shown["description"] = description.into();
    }
    shown["parameters"] = parameters.clone().into();
    let field = fields.field(schema);
    let parameters = arguments(parameters, &field)?;
    Ok((json!({ "type": "function", "function": shown }), Tool { name, parameters }))
}

/// The name of a tool.
fn name(fields: &mut Fields) -> Result<String> {
    let field = fields.field("name");
    match fields.string("name")? {
        Some(name) if Tool::is_name(&name) => Ok(name),
        found => {
            let expected = "a name of letters, digits and _ - . : /";
            let found = found.map_or_else(|| "none".to_owned(), |name| format!("{name:?}"));
            Err(ApiError::field(&field, format!("{field}: expected {expected}, found {found}")))
        }
    }
}

/// The schema of arguments, which are an object. One that lists its properties has no others,
/// unless it says so: a model would invent some.
fn arguments(mut schema: Map<String, Value>, field: &str) -> Result<Value> {
    match schema.get("type") {
        None => drop(schema.insert("type".to_owned(), "object".into())),
        Some(Value::String(kind)) if kind == "object" => {}
        Some(found) => {
            let message = format!("{field}.type: expected object, found {found}");
            return Err(ApiError::field(format!("{field}.type"), message));
        }
    }
    let others = ["additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"];
    let is_whole = !others.iter().any(|keyword| schema.contains_key(*keyword));
    if schema.contains_key("properties") && is_whole {
        schema.insert("additionalProperties".to_owned(), false.into());
    }
    Ok(schema.into())
}

/// OpenAI's `tool_choice`; a function's name and the list of tools stand in objects of these names,
/// if they have some.
fn openai_choice(fields: &mut Fields, function: &str, allowed: &str) -> Result<ToolChoice> {
    let expected = "none, auto, required, a function or allowed_tools";
    let given = fields.take("tool_choice");
    let wrong = |fields: &Fields, found: &Value| match found {
        Value::String(found) => {
            let message = format!("tool_choice: expected {expected}, found {found}");
            ApiError::field("tool_choice", message)
        }
        found => fields.mismatch("tool_choice", expected, found),
    };
    match given {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(text)) => match text.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            _ => Err(wrong(fields, &text.into())),
        },
        Some(Value::Object(map)) => {
            let mut choice = Fields::within("tool_choice", map);
            match choice.string("type")?.as_deref() {
                Some("function") => {
                    Ok(ToolChoice::Named(vec![name(&mut within(choice, function)?)?], true))
                }
                Some("allowed_tools") => allowed_tools(&mut within(choice, allowed)?, function),
                found => {
                    let found = found.unwrap_or("none");
                    let message = format!(
                        "tool_choice.type: expected function or allowed_tools, found {found}"
                    );
                    Err(ApiError::field("tool_choice.type", message))
                }
            }
        }
        Some(other) => Err(wrong(fields, &other)),
    }
}

/// The object of this name, or the fields themselves without one.
fn within(mut fields: Fields, nested: &str) -> Result<Fields> {
    if nested.is_empty() { Ok(fields) } else { fields.object(nested) }
}

/// A list of tools of which one may be called, or must be.
fn allowed_tools(list: &mut Fields, function: &str) -> Result<ToolChoice> {
    let is_required = list.string("mode")?.as_deref() == Some("required");
    let mut names = Vec::new();
    for (i, tool) in list.array("tools")?.unwrap_or_default().into_iter().enumerate() {
        let at = list.field(&format!("tools[{i}]"));
        let Value::Object(map) = tool else {
            return Err(ApiError::field(&at, format!("{at}: expected an object")));
        };
        let mut tool = Fields::within(&at, map);
        expect_type(&mut tool, "function")?;
        names.push(name(&mut within(tool, function)?)?);
    }
    Ok(ToolChoice::Named(names, is_required))
}

/// What a request asks for; none if nothing is to be called.
fn chosen(
    tools: Vec<(Value, Tool)>,
    choice: ToolChoice,
    is_parallel: bool,
    field: &str,
) -> Result<Option<Tools>> {
    let (shown, mut tools): (Vec<Value>, Vec<Tool>) = tools.into_iter().unzip();
    let is_required = match choice {
        ToolChoice::None => return Ok(None),
        ToolChoice::Auto if tools.is_empty() => return Ok(None),
        ToolChoice::Auto => false,
        ToolChoice::Required => true,
        ToolChoice::Named(names, is_required) => {
            let known: HashSet<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            let is_unknown = |name: &&String| !known.contains(name.as_str());
            if let Some(name) = names.iter().find(is_unknown) {
                let message = format!("{field}: expected the name of one of tools, found {name}");
                return Err(ApiError::field(field, message));
            }
            let names: HashSet<String> = names.into_iter().collect();
            tools.retain(|tool| names.contains(&tool.name));
            is_required
        }
    };
    if is_required && tools.is_empty() {
        let message = format!("{field}: expected tools to choose from, found none");
        return Err(ApiError::field(field, message));
    }
    Ok(Some(Tools { shown: shown.into(), callable: tools.into(), is_required, is_parallel }))
}

/// The tools that an answer may call, and how its model calls them.
pub(crate) struct Calling {
    tools: Arc<Tools>,
    pub(crate) format: &'static ToolFormat,
}

impl Calling {
    /// # Errors
    /// As [`format()`].
    pub(crate) fn new(tools: &Arc<Tools>, lease: &Lease) -> Result<Calling> {
        Ok(Calling { tools: Arc::clone(tools), format: format(lease)? })
    }

    /// What the answer must be, if it must be something, by the request's own constraint: where no
    /// call is required, its schema is the alternative.
    ///
    /// # Errors
    /// If both cannot hold.
    pub(crate) fn constraint(&self, own: Option<&Constraint>) -> Result<Option<Arc<Constraint>>> {
        let Tools { callable, is_required, is_parallel, .. } = &*self.tools;
        let otherwise = match own.map(|own| (&own.grammar, &own.field)) {
            None if !is_required => return Ok(None),
            None => None,
            Some((Grammar::JsonSchema(schema), _)) if !is_required => Some(schema.clone()),
            Some((_, field)) => {
                let message = format!("{field}: expected none, as tools say what the answer is");
                return Err(ApiError::field(field, message));
            }
        };
        let grammar = Grammar::Tools(ToolGrammar {
            format: self.format,
            tools: callable.to_vec(),
            is_parallel: *is_parallel,
            otherwise,
        });
        Ok(Some(Arc::new(Constraint { field: "tools".to_owned(), grammar })))
    }

    /// What finds calls in the answer to a prompt.
    pub(crate) fn parser(&self, prompt: &str) -> ToolParser {
        let parser = ToolParser::new(self.format, Arc::clone(&self.tools.callable), prompt);
        parser.with_single_call(!self.tools.is_parallel)
    }
}

/// The form of a model's calls.
///
/// # Errors
/// If its template writes calls in a form that is not known.
pub(crate) fn format(lease: &Lease) -> Result<&'static ToolFormat> {
    let source = lease.text()?.template()?.source();
    ToolFormat::of_model(source).ok_or_else(|| {
        let of = format!("the chat template of {}", lease.id());
        let message = format!("tools: {of} writes tool calls in a form that is not known");
        ApiError::field("tools", message)
    })
}
