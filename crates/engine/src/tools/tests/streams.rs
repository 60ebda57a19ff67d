//! What a parser gives out of an answer at once, and what it refuses to read as a call.

use super::*;

/// What a parser shows of each piece of a text at once.
fn shown(source: &str, pieces: &[&str]) -> Vec<String> {
    let mut parser = ToolParser::new(format(source), Arc::from(tools()), "");
    let shown = pieces.iter().map(|piece| {
        let delta = parser.push(piece, false);
        assert!(delta.calls.is_empty(), "{source}: {delta:?}");
        delta.content
    });
    shown.collect()
}

/// What begins as a call does is shown as soon as it can be none.
#[test]
fn answers_that_are_no_calls_are_not_held_back() {
    let llama = "<|start_header_id|> \"parameters\": ";
    let functionary = ">>>${recipient} '>>>all\\n'";
    for (source, pieces, wanted) in [
        (llama, ["{\n  \"tot", "al\":", " 3"], ["", "{\n  \"total\":", " 3"]),
        (llama, ["{\"name\": \"Al", "ice\"", ", \"a"], ["", "{\"name\": \"Alice\"", ", \"a"]),
        (llama, ["{\"name\": [1]", ", \"b\"", ": 2"], ["{\"name\": [1]", ", \"b\"", ": 2"]),
        ("functools[", ["use func", "tools.", "partial"], ["use", " functools.", "partial"]),
        (functionary, [">>", "> prin", "t(1)"], ["", ">>> prin", "t(1)"]),
        ("<tool_call>", ["Use `<tool_call>", "` ", "tags"], ["Use `", "<tool_call>`", " tags"]),
        (
            "<tool_call>",
            ["<tool_call>{\"name\"", ": \"se", "t\"}"],
            ["", "", "<tool_call>{\"name\": \"set\"}"],
        ),
        ("[TOOL_CALLS] [ARGS]", ["[TOOL_CALLS]g", "o ", "on"], ["", "[TOOL_CALLS]go", " on"]),
    ] {
        assert_eq!(shown(source, &pieces), wanted, "{source}");
    }
    // Later it is looked at when its length has doubled.
    let long =
        format!("<tool_call>{{\"name\": \"get\", \"arguments\": {{\"a\": \"{}", "b".repeat(100));
    let behind = "c\" d ".repeat(100);
    let shown = shown("<tool_call>", &[&long, &behind, "e"]);
    assert_eq!(shown, [String::new(), format!("{long}{}", behind.trim_end()), " e".to_owned()]);
    // A call without an end is whole when something else follows.
    let mut parser = ToolParser::new(format("[TOOL_CALLS] [ARGS]"), Arc::from(tools()), "");
    let calls = [call("time", json!({}))];
    assert_eq!(parser.push("[TOOL_CALLS]time[ARGS]{}", false), found("", &[]));
    assert_eq!(parser.push(" [TOOL", false), found("", &calls));
    assert_eq!(parser.push("_CALLS]time[ARGS]{} So", false), found("So", &calls));
    let long = call("get", json!({ "a": "b".repeat(1000) }));
    let text = format!("[TOOL_CALLS]get[ARGS]{}", long.arguments_text());
    for piece in text.split_inclusive(['"', '}']) {
        assert_eq!(parser.push(piece, false), found("", &[]));
    }
    assert_eq!(parser.push("\n", false), found("", &[]));
    assert_eq!(parser.push("So", false), found("So", &[long]));
}

/// A name that begins as a tool's does is another one, in each family.
#[test]
fn the_start_of_a_name_is_no_tool() {
    for (source, text) in EXAMPLES {
        for unknown in ["get_wether", "get2", "get.weather", "get-", "ge"] {
            let text = text.replace("get_weather", unknown);
            let delta = parse(source, &[&text]);
            assert!(delta.calls.iter().all(|call| call.name == "time"), "{source}: {delta:?}");
            assert!(delta.content.contains(unknown), "{source}: {delta:?}");
        }
        let text = text.replace("get_weather", "get").replace("time", "get");
        let delta = parse(source, &[&text]);
        assert!(!delta.calls.is_empty() && delta.content.is_empty(), "{source}: {delta:?}");
    }
}

/// An object whose arguments would be lost is no call.
#[test]
fn arguments_are_not_left_out() {
    for text in [
        r#"<tool_call>{"name": "get", "results": [1]}</tool_call>"#,
        r#"<tool_call>{"name": "get", "city": "Paris"}</tool_call>"#,
    ] {
        assert_eq!(parse("<tool_call>", &[text]), found(text, &[]));
    }
    for text in [
        r#"<tool_call>{"name": "get"}</tool_call>"#,
        r#"<tool_call>{"type": "function", "name": "get", "id": "1"}</tool_call>"#,
        r#"<tool_call>{"name": "get", "arguments": {}, "why": "so"}</tool_call>"#,
        r#"<tool_call>{"type": "function", "function": {"name": "get"}}</tool_call>"#,
    ] {
        assert_eq!(parse("<tool_call>", &[text]), found("", &[call("get", json!({}))]), "{text}");
    }
}

#[test]
fn much_white_space_is_not_held_back() {
    let space = " \n".repeat(10_000);
    for (source, _) in EXAMPLES {
        let mut parser = ToolParser::new(format(source), Arc::from(tools()), "");
        let mut content = parser.push("a", false).content;
        for piece in space.as_bytes().chunks(2) {
            content += &parser.push(std::str::from_utf8(piece).unwrap(), false).content;
        }
        assert!(space.len() - content.len() < 5000, "{source}: {}", content.len());
        content += &parser.push("b", true).content;
        assert_eq!(content, format!("a{space}b"), "{source}");
    }
}

#[test]
fn escapes_of_python_and_of_json_are_read() {
    for (escaped, wanted) in [
        (r"\ud83d\ude00", "😀"),
        (r"\U0001F600", "😀"),
        (r"\x41\u00e9\n", "Aé\n"),
        (r"\ud83dx", "\u{fffd}x"),
        (r"\ud83d\u0041", "\u{fffd}A"),
        (r"\ude00\ud83d", "\u{fffd}\u{fffd}"),
    ] {
        let text = format!("<|tool_call_start|>[get(a='{escaped}')]<|tool_call_end|>");
        let wanted = found("", &[call("get", json!({ "a": wanted }))]);
        assert_eq!(parse("<|tool_call_start|>", &[&text]), wanted, "{escaped}");
        let letters: Vec<&str> = text.split("").collect();
        assert_eq!(parse("<|tool_call_start|>", &letters), wanted, "{escaped}");
    }
}
