//! Calls of each family, whole and in pieces, and answers that only look like calls.

mod streams;

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::*;

/// The marks of a family in the source of a template, and two calls as its models write them: the
/// weather of Paris, and the time. Families with one call for each answer have the first alone.
pub(crate) const EXAMPLES: [(&str, &str); 33] = [
    (
        "<tool_call>",
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \
         \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n\
         </tool_call>",
    ),
    (
        "<tool_call> <function= <parameter=",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n\
         <parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n\
         <tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    (
        "<seed:tool_call> <function=",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n\
         <parameter=days>2</parameter>\n</function>\n<function=time>\n</function>\n\
         </seed:tool_call>",
    ),
    (
        "<tool_call> <arg_key>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n\
         <arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n\
         </tool_call>",
    ),
    (
        "<tool_sep :opensource",
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n\
         <arg_key:opensource>city</arg_key:opensource>\n\
         <arg_value:opensource>Paris</arg_value:opensource>\n\
         <arg_key:opensource>days</arg_key:opensource>\n\
         <arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n\
         <tool_call:opensource>time<tool_sep:opensource>\n</tool_call:opensource>\n\
         </tool_calls:opensource>",
    ),
    (
        "<function= </function>",
        "<function=get_weather>{\"city\": \"Paris\", \"days\": 2}</function>\
         <function=time>{}</function>",
    ),
    (
        ">>>${recipient} '>>>all\\n'",
        ">>>get_weather\n{\"city\": \"Paris\", \"days\": 2}>>>time\n{}",
    ),
    (
        "<function name= <param name=",
        "<function name=\"get_weather\"><param name=\"city\">Paris</param><param name=\"days\">2\
         </param></function><function name=\"time\"></function>",
    ),
    (
        "]<]minimax[>[ <invoke name=",
        "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<city>\
         Paris]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n\
         ]<]minimax[>[<invoke name=\"time\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    (
        "<minimax:tool_call> <invoke name=",
        "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris\
         </parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n\
         <invoke name=\"time\">\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "｜DSML｜ function_calls>",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter \
         name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" \
         string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"time\">\n\
         </｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "｜DSML｜ tool_calls>",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter \
         name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" \
         string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"time\">\n\
         </｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "<atem:function_calls>",
        "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">\
         Paris</atem:parameter>\n<atem:parameter name=\"days\">2</atem:parameter>\n</atem:invoke>\n\
         <atem:invoke name=\"time\">\n</atem:invoke>\n</atem:function_calls>",
    ),
    (
        "<｜tool▁sep｜> ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n\
         {\"city\": \"Paris\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function\
         <｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "<｜tool▁sep｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\", \
         \"days\": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>\
         <｜tool▁calls▁end｜>",
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0\
         <|tool_call_argument_begin|>{\"city\": \"Paris\", \"days\": 2}<|tool_call_end|>\
         <|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>\
         <|tool_calls_section_end|>",
    ),
    (
        "<|channel|>commentary functions.",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>\
         {\"city\": \"Paris\", \"days\": 2}",
    ),
    (
        "<|tool_call:begin|>",
        "<|tool_calls|><|tool_call:begin|>abcdefghi<|tool_call:name|>get_weather<|tool_call:args|>\
         {\"city\": \"Paris\", \"days\": 2}<|tool_call:end|><|tool_call:begin|>abcdefghj\
         <|tool_call:name|>time<|tool_call:args|>{}<|tool_call:end|>",
    ),
    (
        "<|open|> <|sep|> 'call'",
        "<|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument \
         key=\"city\" type=\"string\"<|sep|>Paris<|close|>argument<|sep|><|open|>argument \
         key=\"days\" type=\"number\"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>\
         <|open|>call tool=\"time\" index=\"2\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    (
        "<|tool_call>call:",
        "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:2}<tool_call|>\
         <|tool_call>call:time{}<tool_call|>",
    ),
    (
        "[TOOL_CALLS] [CALL_ID]",
        "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Paris\", \"days\": 2}\
         [TOOL_CALLS]time[CALL_ID]abcdefghj[ARGS]{}",
    ),
    (
        "[TOOL_CALLS] [ARGS]",
        "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Paris\", \"days\": 2}[TOOL_CALLS]time[ARGS]{}",
    ),
    (
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": \
         2}, \"id\": \"abcdefghi\"}, {\"name\": \"time\", \"arguments\": {}, \
         \"id\": \"abcdefghj\"}]",
    ),
    (
        "<|START_ACTION|>",
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \
         \"parameters\": {\"city\": \"Paris\", \"days\": 2}},\n    {\"tool_call_id\": \"1\", \
         \"tool_name\": \"time\", \"parameters\": {}}\n]<|END_ACTION|>",
    ),
    (
        "Action:\\n```json \"tool_name\"",
        "Action:\n```json\n[\n    {\n        \"tool_name\": \"get_weather\",\n        \
         \"parameters\": {\"city\": \"Paris\", \"days\": 2}\n    },\n    {\n        \
         \"tool_name\": \"time\",\n        \"parameters\": {}\n    }\n]```",
    ),
    (
        "<|tools_prefix|>",
        "<|tools_prefix|>[{\"get_weather\": {\"city\": \"Paris\", \"days\": 2}}, {\"time\": {}}]\
         <|tools_suffix|>",
    ),
    (
        "<TOOLCALL>",
        "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \
         \"days\": 2}}, {\"name\": \"time\", \"arguments\": {}}]</TOOLCALL>",
    ),
    (
        "<|tool_call_start|>",
        "<|tool_call_start|>[get_weather(city=\"Paris\", days=2), time()]<|tool_call_end|>",
    ),
    (
        "<|function_call|>",
        "<|function_call|>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \
         \"days\": 2}}",
    ),
    (
        "functools[",
        "functools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 2}}, \
         {\"name\": \"time\", \"arguments\": {}}]",
    ),
    (
        "<tool_calls>\\n{ </tool_calls>",
        "<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": \
         2}}\n{\"name\": \"time\", \"arguments\": {}}\n</tool_calls>",
    ),
    (
        "<|tool_call|>",
        "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": \
         2}}, {\"name\": \"time\", \"arguments\": {}}]",
    ),
    (
        "<|start_header_id|> \"parameters\": ",
        "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\", \"days\": 2}}",
    ),
];

/// The tools of the examples.
pub(crate) fn tools() -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": { "city": { "type": "string" }, "days": { "type": "integer" } },
        "required": ["city"],
        "additionalProperties": false,
    });
    let tool = |name: &str, parameters: Value| Tool { name: name.to_owned(), parameters };
    let time = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    vec![tool("get_weather", weather), tool("get", json!({})), tool("time", time)]
}

fn call(name: &str, arguments: Value) -> ToolCall {
    let Value::Object(arguments) = arguments else { panic!("{arguments}") };
    ToolCall { name: name.to_owned(), arguments }
}

fn weather() -> ToolCall {
    call("get_weather", json!({ "city": "Paris", "days": 2 }))
}

pub(crate) fn format(source: &str) -> &'static ToolFormat {
    ToolFormat::of(source).unwrap_or_else(|| panic!("{source}"))
}

/// What a parser finds in pieces of a text.
fn parse(source: &str, pieces: &[&str]) -> ToolDelta {
    let mut parser = ToolParser::new(format(source), Arc::from(tools()), "");
    let mut whole = ToolDelta::default();
    for (i, piece) in pieces.iter().enumerate() {
        let delta = parser.push(piece, i + 1 == pieces.len());
        whole.content += &delta.content;
        whole.calls.extend(delta.calls);
    }
    whole
}

fn found(content: &str, calls: &[ToolCall]) -> ToolDelta {
    ToolDelta { content: content.to_owned(), calls: calls.to_vec() }
}

#[test]
fn calls_of_each_family_are_found_wherever_the_text_is_split() {
    for (source, text) in EXAMPLES {
        let mut calls = vec![weather()];
        calls.extend(text.contains("time").then(|| call("time", json!({}))));
        let wanted = found("", &calls);
        assert_eq!(parse(source, &[text]), wanted, "{source}");
        for (at, _) in text.char_indices() {
            let (before, behind) = text.split_at(at);
            assert_eq!(parse(source, &[before, behind]), wanted, "{source} at {at}");
        }
        let letters: Vec<&str> = text.split("").collect();
        assert_eq!(parse(source, &letters), wanted, "{source}");
        // An answer without calls is as it is, and content may come before calls.
        let words: Vec<&str> = "I < 2, \"a\" [b] { c.\n\n d ".split_inclusive(' ').collect();
        assert_eq!(parse(source, &words), found(&words.concat(), &[]), "{source}");
        if format(source).bare.is_empty() || text.starts_with("<tool_call>") {
            let both = ["Let me see.\n\n", text];
            assert_eq!(parse(source, &both), found("Let me see.", &calls), "{source}");
        }
    }
}

#[test]
fn what_a_family_writes_is_what_it_reads() {
    let calls = [weather(), call("time", json!({}))];
    for (source, text) in EXAMPLES {
        if let Some(written) = format(source).write(&calls[..1 + text.matches("time").count()]) {
            let wanted = if text.contains("time") { &calls[..] } else { &calls[..1] };
            assert_eq!(parse(source, &[&written]), found("", wanted), "{source}: {written}");
        }
    }
}

#[test]
fn other_spellings_of_a_family_are_read_too() {
    let hermes = "<tool_call>";
    let coder = "<tool_call> <function= <parameter=";
    let llama = "<|start_header_id|> \"parameters\": ";
    let harmony = "<|channel|>commentary functions.";
    let object = r#"{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}"#;
    for (source, text) in [
        (hermes, format!("<tool_call>{object}</tool_call>")),
        (hermes, format!("<tool_call>\n{object}")),
        (hermes, format!("<tool_call>[{object}]</tool_call>")),
        (
            hermes,
            r#"<tool_call>{"arguments": "{\"city\": \"Paris\", \"days\": 2}",
             "name": "get_weather"}</tool_call>"#
                .to_owned(),
        ),
        (llama, format!("<|python_tag|>{object}")),
        (
            llama,
            r#"{"type": "function", "function": "get_weather",
             "parameters": {"city": "Paris", "days": 2}}"#
                .to_owned(),
        ),
        (
            coder,
            "<function=get_weather><parameter=city>Paris</parameter><parameter=days>2</parameter>\
             </function></tool_call>"
                .to_owned(),
        ),
        (
            harmony,
            " to=functions.get_weather<|channel|>commentary json<|message|>\
             {\"city\": \"Paris\", \"days\": 2}"
                .to_owned(),
        ),
        (
            harmony,
            "<|channel|>commentary to=functions.get_weather<|message|>{\"city\": \"Paris\", \
             \"days\": 2}"
                .to_owned(),
        ),
        ("List of tools: ", "<|tool_call_start|>[get_weather(days = 2, city='Paris')]".to_owned()),
        (
            "<tool_call> <arg_key>",
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>\
             <arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
                .to_owned(),
        ),
    ] {
        let mut delta = parse(source, &[&text]);
        delta.calls.iter_mut().for_each(|call| call.arguments.sort_keys());
        assert_eq!(delta, found("", &[weather()]), "{text}");
    }
    let preamble = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>\
                    commentary to=functions.time json<|message|>{}";
    assert_eq!(parse(harmony, &[preamble]), found("Wait.", &[call("time", json!({}))]));
    let plain = "<|channel|>final<|message|>Hello.";
    assert_eq!(parse(harmony, &[plain]), found("Hello.", &[]));
}

#[test]
fn values_are_what_the_schema_says() {
    let parameters = json!({
        "$defs": { "name": { "type": "string" }, "number": { "type": "integer" } },
        "type": "object",
        "properties": {
            "text": { "type": "string" },
            "count": { "$ref": "#/$defs/number" },
            "name": { "$ref": "#/$defs/name" },
            "flag": { "type": "boolean" },
            "either": { "type": ["string", "null"] },
            "any": { "anyOf": [{ "type": "array" }, { "type": "null" }] },
            "kind": { "enum": ["1", "2"] },
        },
    });
    let tools = Arc::from(vec![Tool { name: "f".to_owned(), parameters }]);
    let source = "<tool_call> <function= <parameter=";
    let mut parser = ToolParser::new(format(source), tools, "");
    let given = [
        ("text", "12"),
        ("count", "12"),
        ("name", "true"),
        ("flag", "True"),
        ("either", "null"),
        ("any", "[1, \"a\"]"),
        ("kind", "1"),
        ("unknown", "{\"a\": 1}"),
        ("other", "a </parameter> b\n"),
    ];
    let all = given.map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n"));
    let text = format!("<tool_call>\n<function=f>\n{}</function>\n</tool_call>", all.concat());
    let wanted = json!({
        "text": "12", "count": 12, "name": "true", "flag": true, "either": null,
        "any": [1, "a"], "kind": "1", "unknown": { "a": 1 }, "other": "a </parameter> b\n",
    });
    assert_eq!(parser.push(&text, true), found("", &[call("f", wanted)]));
    let gemma = "<|tool_call>call:get{a:[1,{b:<|\"|>x,}<|\"|>}],c:true,d:-1.5e3}<tool_call|>";
    let wanted = json!({ "a": [1, { "b": "x,}" }], "c": true, "d": -1500.0 });
    assert_eq!(parse("<|tool_call>call:", &[gemma]), found("", &[call("get", wanted)]));
    let python =
        "<|tool_call_start|>[get(a=['it\\'s', \"\\u00e9\\n\"], b={'c': None, \"d\": True})]";
    let wanted = json!({ "a": ["it's", "é\n"], "b": { "c": null, "d": true } });
    assert_eq!(parse("<|tool_call_start|>", &[python]), found("", &[call("get", wanted)]));
}

#[test]
fn what_is_no_call_is_content() {
    for (source, text) in EXAMPLES {
        let hidden = format(source).hidden;
        let shown = |text: &str| hidden.iter().fold(text.to_owned(), |t, h| t.replace(h, ""));
        // A tool that the request does not have.
        let unknown = text.replace("get_weather", "set_weather");
        let delta = parse(source, &[&unknown]);
        let name = "set_weather";
        assert!(delta.content.contains(name), "{source}: {delta:?}");
        assert!(delta.calls.iter().all(|call| call.name == "time"), "{source}: {delta:?}");
        // A call that is cut off.
        let cut = &text[..text.find("ris").unwrap()];
        let delta = parse(source, &[cut]);
        assert_eq!(delta.content.trim_start(), shown(cut).trim_start(), "{source}");
        assert!(delta.calls.is_empty(), "{source}");
    }
    for text in [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{\"name\": \"time\", \"arguments\": 1}</tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"time\", \"arguments\": {}} x</tool_call>",
        "Use <tool_call> and </tool_call>.",
    ] {
        assert_eq!(parse("<tool_call>", &[text]), found(text, &[]), "{text}");
    }
    // One behind another that is none; and an end within a string.
    let both = "<tool_call>no</tool_call><tool_call>{\"name\": \"time\"}</tool_call>";
    let wanted = found("<tool_call>no</tool_call>", &[call("time", json!({}))]);
    assert_eq!(parse("<tool_call>", &[both]), wanted);
    let inner = r#"<tool_call>{"name": "get", "arguments": {"a": "</tool_call>"}}</tool_call> So"#;
    let wanted = found("So", &[call("get", json!({ "a": "</tool_call>" }))]);
    let letters: Vec<&str> = inner.split("").collect();
    assert_eq!(parse("<tool_call>", &letters), wanted);
}

/// Long, deep and repeated texts cost bounded time and stack, and nothing of them is lost.
#[test]
fn hostile_answers_are_bounded() {
    let started = std::time::Instant::now();
    let deep = |open: &str| open.repeat(100_000);
    for (source, text) in [
        ("<tool_call>", format!("<tool_call>{}", deep("["))),
        ("<tool_call>", format!("<tool_call>{}", deep("{\"a\":"))),
        ("<tool_call>", deep("<tool_call>")),
        ("<tool_call>", deep("<tool_call>\"</tool_call>")),
        ("<tool_call>", format!("<tool_call>{{\"a\": \"{}", deep("</tool_call>"))),
        ("<tool_call>", format!("<tool_call>{{\"a\": \"{}", "b".repeat(3 << 20))),
        ("<|tool_call>call:", format!("<|tool_call>call:get{{a:{}", deep("["))),
        ("<|tool_call>call:", format!("<|tool_call>call:get{{a:{}", deep("{b:"))),
        ("<|tool_call_start|>", format!("<|tool_call_start|>[get(a={}", deep("["))),
        ("<|tool_call_start|>", format!("<|tool_call_start|>{}", deep("get(),"))),
        ("<|channel|>commentary functions.", deep("to=functions.")),
        (
            "<tool_call> <function= <parameter=",
            format!("<tool_call><function=get><parameter=a>{}", deep("</parameter>")),
        ),
    ] {
        let pieces: Vec<&str> =
            text.as_bytes().chunks(997).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
        let delta = parse(source, &pieces);
        assert_eq!(delta.content.len(), text.len(), "{source}");
        assert!(delta.calls.is_empty(), "{source}");
    }
    let calls = "<tool_call>{\"name\": \"time\"}</tool_call>".repeat(3000);
    let delta = parse("<tool_call>", &[&calls]);
    assert_eq!(delta.calls.len(), 1024);
    assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_prompt_may_begin_the_first_call() {
    let source = ">>>${recipient} '>>>all\\n'";
    let read = |text: &str| {
        let mut parser = ToolParser::new(format(source), Arc::from(tools()), "assistant\n\n>>>");
        parser.push(text, true)
    };
    assert_eq!(read("time\n{}"), found("", &[call("time", json!({}))]));
    assert_eq!(read("all\nHello"), found("Hello", &[]));
    assert_eq!(read("all\nHello\n>>>time\n{}"), found("Hello", &[call("time", Map::new().into())]));
}

#[test]
fn nothing_comes_behind_a_single_call() {
    for (source, text) in EXAMPLES {
        for is_single in [true, false] {
            let mut parser =
                ToolParser::new(format(source), Arc::from(tools()), "").with_single_call(is_single);
            let mut whole = parser.push(text, false);
            for (piece, is_last) in [("\n", false), ("Done.", false), (text, true)] {
                let delta = parser.push(piece, is_last);
                whole.content += &delta.content;
                whole.calls.extend(delta.calls);
            }
            if is_single {
                // Without an end, a call is whole when something else comes behind it.
                assert_eq!(whole, found("", &[weather()]), "{source}");
            } else {
                assert!(whole.content.contains("Done."), "{source}: {whole:?}");
            }
        }
    }
    let call = weather();
    assert_eq!(call.arguments_text(), r#"{"city":"Paris","days":2}"#);
}
