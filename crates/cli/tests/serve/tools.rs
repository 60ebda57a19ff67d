//! Tools through each interface, whole and streamed: by the official clients, and wrong requests.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::clients::PACKAGES;
use crate::python::python;
use crate::server::Server;

/// A template that shows tools and writes calls, as Hermes does.
const TEMPLATE: &str = r#"{%- if tools %}
{%- for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"#;

fn template(source: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    std::fs::write(&file, source).unwrap();
    (folder, file)
}

fn start(source: &str) -> (TempDir, Server) {
    let (folder, file) = template(source);
    let args = ["--ctx-size", "2048", "--parallel", "4"];
    let server =
        Server::start(&[&args[..], &["--chat-template-file", file.to_str().unwrap()]].concat());
    (folder, server)
}

fn tool(name: &str, parameters: Value) -> Value {
    let function = json!({ "name": name, "description": "A tool.", "parameters": parameters });
    json!({ "type": "function", "function": function })
}

fn weather() -> Value {
    let city = json!({ "enum": ["Paris", "Rome"] });
    tool(
        "weather",
        json!({ "type": "object", "properties": { "city": city }, "required": ["city"] }),
    )
}

fn chat(fields: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "a" }]);
    let mut body = json!({ "messages": messages, "max_tokens": 200, "tools": [weather()] });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[test]
fn official_clients_call_tools() {
    let (_folder, server) = start(TEMPLATE);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/tools.py");
    let output = Command::new(python(&PACKAGES)).arg(script).arg(server.url()).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}{stderr}");
}

/// A real model calls a tool with what the question says.
#[test]
fn a_real_model_calls_a_tool() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_bodkin")).args(["pull", "smollm2"]).output().unwrap();
    let path = String::from_utf8(output.stdout).unwrap();
    let (_folder, file) = template(TEMPLATE);
    let args = ["--ctx-size", "1024", "--chat-template-file", file.to_str().unwrap()];
    let server = Server::of(Path::new(path.trim()), &args);
    let city = json!({ "type": "string", "description": "The name of a city." });
    let parameters =
        json!({ "type": "object", "properties": { "city": city }, "required": ["city"] });
    let question = "Call the tool weather for the city of Paris.";
    let body = chat(json!({
        "messages": [{ "role": "user", "content": question }],
        "tools": [tool("weather", parameters), tool("clock", json!({}))],
        "tool_choice": { "type": "function", "function": { "name": "weather" } },
        "parallel_tool_calls": false,
        "temperature": 0,
    }));
    let answer = server.post("/v1/chat/completions", &body).json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "weather", "{answer}");
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["city"].as_str().unwrap().contains("Paris"), "{answer}");
}

#[test]
fn wrong_requests_are_named() {
    let (_folder, server) = start(TEMPLATE);
    let call = |arguments: &str| {
        let call = json!({ "id": "a", "function": { "name": "f", "arguments": arguments } });
        json!([{ "role": "assistant", "tool_calls": [call] }, { "role": "user", "content": "a" }])
    };
    let unanswered = json!([call("{}")[0]]);
    let choice = |choice: Value| json!({ "tool_choice": choice });
    let tools = |tools: Value| json!({ "tools": tools, "tool_choice": "required" });
    let named = |name: &str| json!({ "type": "function", "function": { "name": name } });
    let many: Value = (0..1001).map(|i| tool(&format!("t{i}"), json!({}))).collect();
    for (fields, wanted) in [
        (tools(json!([{}])), "tools[0].function.name: expected a name of letters"),
        (tools(json!(["a"])), "tools[0]: expected an object, found a string"),
        (tools(json!([{ "type": "retrieval" }])), "tools[0].type: expected function, found retr"),
        (tools(json!([tool("a b", json!({}))])), "tools[0].function.name: expected a name"),
        (tools(json!([tool("a", json!(1))])), "tools[0].function.parameters: expected an object"),
        (
            tools(json!([tool("a", json!({ "type": "array" }))])),
            "tools[0].function.parameters.type: expected object, found \"array\"",
        ),
        (tools(json!([weather(), weather()])), "tools[1]: expected names that differ, found we"),
        (tools(json!([])), "tool_choice: expected tools to choose from, found none"),
        (tools(many), "tools: expected at most 1000, found 1001"),
        (
            tools(json!([tool("a", json!({ "properties": { "b": { "not": {} } } }))])),
            "tools: the parameters of a: keywords that are not supported: [\"not\"]",
        ),
        (choice(json!("always")), "tool_choice: expected none, auto, required, a function or"),
        (choice(json!(1)), "tool_choice: expected none, auto, required"),
        (choice(json!({ "type": "web" })), "tool_choice.type: expected function or allowed_tools"),
        (choice(named("other")), "tool_choice: expected the name of one of tools, found other"),
        (json!({ "functions": [{}] }), "functions is not supported: expected tools"),
        (json!({ "messages": unanswered }), "messages: expected the results of the tool calls at"),
        (
            json!({ "messages": call("{") }),
            "messages[0].tool_calls[0].function.arguments: expected",
        ),
        (
            json!({ "tool_choice": "required", "guided_regex": "a+" }),
            "guided_regex: expected none, as tools say what the answer is",
        ),
        (json!({ "parallel_tool_calls": "no" }), "parallel_tool_calls: expected true or false"),
    ] {
        for streams in [false, true] {
            let mut body = chat(fields.clone());
            body["stream"] = streams.into();
            let refused = server.post("/v1/chat/completions", &body);
            assert_eq!(refused.status, 400, "{wanted}: {refused:?}");
            let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(wanted), "{wanted}: {message}");
        }
    }
}

/// 200 tools, and a megabyte of schemas, are compiled or refused, and the server goes on.
#[test]
fn large_tools_are_compiled_or_refused() {
    let (_folder, server) = start("{{ messages[0].content }}{# tools <tool_call> #}");
    let properties: Value = (0..20)
        .map(|i| (format!("p{i}"), json!({ "type": "string", "description": "x".repeat(200) })))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let parameters = json!({ "type": "object", "properties": properties });
    let many: Value = (0..200).map(|i| tool(&format!("t{i}"), parameters.clone())).collect();
    assert!(many.to_string().len() > 900_000);
    for tools in [many.clone(), json!([weather()])] {
        let body = chat(json!({ "tools": tools, "tool_choice": "required", "max_tokens": 20 }));
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let body = chat(json!({ "tools": many, "max_tokens": 2 }));
    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
}

/// Tools are described in a message, whether the template writes system messages or refuses them.
#[test]
fn a_template_without_tools_gets_them_as_text() {
    const MESSAGES: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    const REFUSAL: &str = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}\
        {% endif %}{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}\
        {{ raise_exception('they must alternate') }}{% endif %}{% endfor %}";
    let refuses = format!("{REFUSAL}{MESSAGES}");
    for (source, first) in [(MESSAGES, "system"), (&refuses, "user")] {
        let (_folder, server) = start(source);
        let history = json!([
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": null, "tool_calls": [{
                "id": "c", "type": "function",
                "function": { "name": "weather", "arguments": "{\"city\": \"Rome\"}" },
            }] },
            { "role": "tool", "tool_call_id": "c", "content": "sun" },
            { "role": "user", "content": "and now?" },
        ]);
        // Without tools to call, earlier calls are text all the same.
        let body = chat(json!({ "messages": history, "tool_choice": "none" }));
        let prompt = server.post("/apply-template", &body).json()["prompt"].to_string();
        assert!(prompt.starts_with("\"user: a\\nassistant: <tool_call>\\n"), "{prompt}");
        let body = chat(json!({ "messages": history }));
        let prompt = server.post("/apply-template", &body).json()["prompt"].to_string();
        for part in [
            &format!("\"{first}: You can call functions."),
            r#"{\"name\":\"weather\",\"description\":\"A tool.\","#,
            r#"assistant: <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\":"#,
            r"user: <tool_response>\nsun\n</tool_response>\nand now?\n",
        ] {
            assert!(prompt.contains(part), "{part} is not in {prompt}");
        }
        for fields in [json!({}), json!({ "messages": history })] {
            let mut body = chat(fields);
            body["tool_choice"] = "required".into();
            let answer = server.post("/v1/chat/completions", &body);
            assert_eq!(answer.status, 200, "{answer:?}");
            let call = &answer.json()["choices"][0]["message"]["tool_calls"][0]["function"];
            let arguments: Value =
                serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            assert!(arguments["city"] == "Paris" || arguments["city"] == "Rome", "{answer:?}");
        }
    }
}

#[test]
fn calls_need_a_known_form() {
    let (_folder, server) = start("{{ tools }}{{ messages[0].content }}");
    let messages = json!([{ "role": "user", "content": "a" }]);
    let flat = json!({ "type": "function", "name": "a", "parameters": {} });
    let theirs = json!({ "name": "a", "input_schema": { "type": "object" } });
    let input = json!({ "input": "a", "messages": messages, "max_tokens": 2 });
    for (path, tool) in [
        ("/v1/chat/completions", weather()),
        ("/v1/responses", flat),
        ("/v1/messages", theirs.clone()),
        ("/v1/messages/count_tokens", theirs),
        ("/api/chat", weather()),
    ] {
        let mut body = input.clone();
        body["tools"] = json!([tool]);
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        let wanted = "writes tool calls in a form that is not known";
        assert!(refused.body.contains(wanted), "{path}: {}", refused.body);
    }
    // None that may be called are none.
    for fields in [json!({ "tools": [] }), json!({ "tool_choice": "none" })] {
        let answer = server.post("/v1/chat/completions", &chat(fields));
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}
