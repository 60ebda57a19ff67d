//! Tool calls in the messages of a request, and the ids that join them with their results.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};

/// The most calls of a message: each result looks for its call among them.
const MAX_CALLS: usize = 1024;

/// Checks the tool calls of a message; none at all are as good as absent. Their arguments are an
/// object, or the text of one.
pub(crate) fn check(message: &mut Map<String, Value>, at: &str) -> Result<()> {
    let Some(calls) = message.get_mut("tool_calls") else { return Ok(()) };
    let at = format!("{at}.tool_calls");
    match calls {
        Value::Null => {}
        Value::Array(calls) if calls.is_empty() => {}
        Value::Array(calls) => {
            for (i, call) in calls.iter_mut().enumerate() {
                check_call(call, &format!("{at}[{i}]"))?;
            }
            return Ok(());
        }
        _ => return Err(ApiError::field(&at, format!("{at}: expected an array"))),
    }
    message.remove("tool_calls");
    Ok(())
}

fn check_call(call: &mut Value, at: &str) -> Result<()> {
    let at = format!("{at}.function");
    match call.get_mut("function").and_then(Value::as_object_mut) {
        Some(function) => check_function(function, &at),
        None => Err(ApiError::field(&at, format!("{at}: expected an object"))),
    }
}

/// Checks the name and the arguments of a call, and makes these an object.
pub(crate) fn check_function(function: &mut Map<String, Value>, at: &str) -> Result<()> {
    let wrong = |name: &str, expected: &str| {
        let at = format!("{at}.{name}");
        Err(ApiError::field(&at, format!("{at}: expected {expected}")))
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return wrong("name", "a string");
    }
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => arguments,
            _ => return wrong("arguments", "the JSON text of an object"),
        },
        Some(Value::Object(_)) => return Ok(()),
        Some(_) => return wrong("arguments", "the JSON text of an object"),
    };
    function.insert("arguments".to_owned(), arguments.into());
    Ok(())
}

/// Refuses a conversation that ends with calls, to which no model can add anything.
pub(crate) fn check_end(messages: &[Value], field: &str) -> Result<()> {
    if messages.last().is_some_and(has_calls) {
        let message = format!("{field}: expected the results of the tool calls at its end");
        return Err(ApiError::field(field, message));
    }
    Ok(())
}

/// Whether a message calls tools.
pub(crate) fn has_calls(message: &Value) -> bool {
    message.get("tool_calls").is_some()
}

/// Gives calls without an id one, as templates may need it, and results without one that of the
/// call that they answer: the first of their name that has none yet, or the first at all.
///
/// # Errors
/// If a message has too many calls.
pub(crate) fn pair(messages: &mut [Value], field: &str) -> Result<()> {
    let mut open: VecDeque<(String, String)> = VecDeque::new();
    let mut count = 0;
    for message in messages {
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            if calls.len() > MAX_CALLS {
                let found = calls.len();
                let message = format!("{field}: expected at most {MAX_CALLS} calls in a message");
                return Err(ApiError::field(field, format!("{message}, found {found}")));
            }
            open.clear();
            for call in calls {
                let name = call["function"]["name"].as_str().unwrap_or_default().to_owned();
                let id = match call.get("id").and_then(Value::as_str) {
                    Some(id) => id.to_owned(),
                    None => format!("call_{count}"),
                };
                count += 1;
                call["id"] = id.as_str().into();
                call["type"] = json!("function");
                open.push_back((name, id));
            }
            name_reasoning(message);
        } else if message["role"] == "tool" {
            // Ollama's name of the field.
            if let Some(name) = message.get("tool_name").cloned() {
                message["name"] = name;
            }
            let text = |name: &str| message.get(name).and_then(Value::as_str);
            let at = match (text("tool_call_id"), text("name")) {
                (Some(id), _) => open.iter().position(|(_, own)| own == id),
                (None, Some(name)) => {
                    Some(open.iter().position(|(own, _)| own == name).unwrap_or(0))
                }
                (None, None) => Some(0),
            };
            if let Some((_, id)) = at.and_then(|at| open.remove(at)) {
                message["tool_call_id"] = id.into();
            }
        }
    }
    Ok(())
}

/// Gives the reasoning of a message with calls the names that templates know: they show it to the
/// model until the answer to the user is there. GPT-OSS's refuses it beside content.
pub(crate) fn name_reasoning(message: &mut Value) {
    let text = |name: &str| message.get(name).and_then(Value::as_str).filter(|it| !it.is_empty());
    let Some(reasoning) = text("reasoning_content").or(text("thinking")).map(str::to_owned) else {
        return;
    };
    let is_alone = text("content").is_none();
    message["reasoning_content"] = reasoning.as_str().into();
    match message.as_object_mut() {
        Some(fields) if is_alone => drop(fields.insert("thinking".to_owned(), reasoning.into())),
        Some(fields) => drop(fields.remove("thinking")),
        None => {}
    }
}

/// A field of an item that has to be there.
pub(crate) fn text_field<'a>(at: &str, item: &'a Value, name: &str) -> Result<&'a str> {
    let at = format!("{at}.{name}");
    let missing = || ApiError::field(&at, format!("{at}: expected a string"));
    item.get(name).and_then(Value::as_str).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_ids_of_their_calls() {
        let call = |name: &str| json!({ "function": { "name": name, "arguments": {} } });
        let mut messages = vec![
            json!({ "role": "assistant", "tool_calls": [call("f"), call("g"), call("f")] }),
            json!({ "role": "tool", "tool_name": "g", "content": "1" }),
            json!({ "role": "tool", "content": "2" }),
            json!({ "role": "tool", "tool_name": "f", "content": "3" }),
            json!({ "role": "tool", "content": "4" }),
            json!({ "role": "assistant", "tool_calls": [call("g")] }),
            json!({ "role": "tool", "tool_call_id": "mine", "content": "5" }),
        ];
        pair(&mut messages, "messages").unwrap();
        let ids: Vec<&Value> = messages.iter().map(|message| &message["tool_call_id"]).collect();
        let wanted = [json!("call_1"), json!("call_0"), json!("call_2"), Value::Null];
        assert_eq!(ids[1..5], wanted.iter().collect::<Vec<_>>());
        assert_eq!((ids[6], &messages[1]["name"]), (&json!("mine"), &json!("g")));
        assert_eq!(messages[5]["tool_calls"][0]["id"], "call_3");
    }

    #[test]
    fn a_result_with_an_unknown_id_answers_no_call() {
        let call = |name: &str| json!({ "function": { "name": name, "arguments": {} } });
        let mut messages = vec![
            json!({ "role": "assistant", "tool_calls": [call("f"), call("g")] }),
            json!({ "role": "tool", "tool_call_id": "other", "content": "1" }),
            json!({ "role": "tool", "content": "2" }),
        ];
        pair(&mut messages, "messages").unwrap();
        let ids = [1, 2].map(|i| messages[i]["tool_call_id"].as_str());
        assert_eq!(ids, [Some("other"), Some("call_0")]);
    }

    #[test]
    fn a_message_has_a_bounded_number_of_calls() {
        let calls = vec![json!({ "function": { "name": "f" } }); MAX_CALLS + 1];
        let mut messages = [json!({ "role": "assistant", "tool_calls": calls })];
        let error = pair(&mut messages, "input").unwrap_err();
        assert_eq!(error.message, "input: expected at most 1024 calls in a message, found 1025");
    }

    #[test]
    fn reasoning_beside_calls_has_the_names_of_all_templates() {
        let named = |mut message: Value| {
            name_reasoning(&mut message);
            message
        };
        let both = json!({ "content": null, "reasoning_content": "a", "thinking": "a" });
        for given in [
            json!({ "content": null, "thinking": "a" }),
            json!({ "content": null, "reasoning_content": "a" }),
        ] {
            assert_eq!(named(given), both);
        }
        let given = json!({ "content": "b", "thinking": "a" });
        assert_eq!(named(given), json!({ "content": "b", "reasoning_content": "a" }));
        assert_eq!(named(json!({ "content": "b" })), json!({ "content": "b" }));
    }

    #[test]
    fn wrong_calls_are_named() {
        let read = |calls: Value| {
            let mut message = Map::from_iter([("tool_calls".to_owned(), calls)]);
            let found = check(&mut message, "messages[1]").map_err(|error| error.message);
            found.map(|()| message.remove("tool_calls"))
        };
        let call =
            |arguments: Value| json!([{ "function": { "name": "f", "arguments": arguments } }]);
        for (calls, wanted) in [
            (json!(1), "messages[1].tool_calls: expected an array"),
            (json!([{}]), "messages[1].tool_calls[0].function: expected an object"),
            (
                json!([{ "function": { "name": 1 } }]),
                "messages[1].tool_calls[0].function.name: expected a string",
            ),
            (
                call(json!("{")),
                "messages[1].tool_calls[0].function.arguments: expected the JSON text of an object",
            ),
            (
                call(json!([1])),
                "messages[1].tool_calls[0].function.arguments: expected the JSON text of an object",
            ),
        ] {
            assert_eq!(read(calls), Err(wanted.to_owned()));
        }
        assert_eq!(read(json!([])), Ok(None));
        assert_eq!(read(Value::Null), Ok(None));
        for given in [json!("{\"a\": 1}"), json!({ "a": 1 })] {
            assert_eq!(read(call(given)), Ok(Some(call(json!({ "a": 1 })))));
        }
        assert_eq!(read(call(json!(""))), Ok(Some(call(json!({})))));
    }
}
