//! Answers that must be calls: in each family's form, with markers that are text and with markers
//! that are tokens.

use super::*;
use crate::tools::tests::{EXAMPLES, format, tools};
use crate::tools::{Tool, ToolParser};

fn grammar(source: &str, tools: Vec<Tool>, is_parallel: bool) -> Constraint {
    constraint(Grammar::Tools(ToolGrammar {
        format: format(source),
        tools,
        is_parallel,
        otherwise: None,
    }))
}

/// A tokenizer of single characters and of these control tokens.
fn characters(markers: &[&str]) -> Arc<Tokenizer> {
    let mut texts = vec!["<end>".to_owned()];
    texts.extend(markers.iter().map(|marker| (*marker).to_owned()));
    let mut all: Vec<char> = EXAMPLES.iter().flat_map(|(_, text)| text.chars()).collect();
    all.extend(' '..='~');
    all.sort_unstable();
    all.dedup();
    texts.extend(all.iter().map(char::to_string));
    tokenizer_of(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The longest token at each place, control tokens among them.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while !rest.is_empty() {
        let piece = |id: &u32| tokenizer.piece(*id, true);
        let is_next = |id: &u32| !piece(id).is_empty() && rest.starts_with(&piece(id));
        let ids_here = (0..tokenizer.vocab_size() as u32).filter(is_next);
        let id = ids_here.max_by_key(|id| piece(id).len()).unwrap_or_else(|| panic!("{text}"));
        rest = &rest[piece(&id).len()..];
        ids.push(id);
    }
    ids
}

/// How much of a text is allowed, and whether it may end behind it.
fn allows(compiler: &Compiler, constraint: &Constraint, text: &str) -> (usize, bool) {
    let tokenizer = &compiler.tokenizer;
    let mut matcher = compiler.compile(constraint, None).unwrap();
    let ids = tokens(tokenizer, text);
    let (followed, is_complete) = follow(&mut matcher, tokenizer, &ids);
    let bytes = ids[..followed].iter().map(|id| tokenizer.piece(*id, true).len()).sum();
    let ends = tokenizer.ends_of_generation();
    let may_end =
        is_complete || bytes == text.len() && allowed(&mut matcher, tokenizer).contains(&ends[0]);
    (bytes, may_end)
}

const MARKERS: [&str; 40] = [
    "<tool_call>",
    "</tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_sep:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|tools_prefix|>",
    "<|tool_call_start|>",
    "<|tool_call|>",
];

#[test]
fn each_family_s_calls_are_allowed_and_nothing_else() {
    for markers in [&[][..], &MARKERS] {
        let compiler = compiler(&characters(markers));
        for (source, text) in EXAMPLES {
            // A character of SentencePiece's own, which no text has.
            if markers.is_empty() && text.contains('▁') {
                continue;
            }
            let text = text.strip_prefix(if format(source).is_open { ">>>" } else { "" }).unwrap();
            let constraint = grammar(source, tools(), true);
            assert_eq!(allows(&compiler, &constraint, text), (text.len(), true), "{source} {text}");
            // One call alone.
            let has_two = text.contains("time");
            let single = grammar(source, tools(), false);
            let (followed, may_end) = allows(&compiler, &single, text);
            assert_eq!(followed < text.len() || !may_end, has_two, "{source}");
            // Another tool, a missing argument, one of another type, text, and none.
            let others = [
                text.replacen("get_weather", "set_weather", 1),
                text.replacen("city", "town", 1),
                text.replacen('2', "x", 1),
                format!("Sure. {text}"),
                text[..text.len() / 2].to_owned(),
                String::new(),
            ];
            for other in others.iter().filter(|other| *other != text) {
                let (followed, may_end) = allows(&compiler, &constraint, other);
                assert!(followed < other.len() || !may_end, "{source}: {other}");
            }
        }
    }
}

/// Tokens at random that are allowed, until the answer may end or is long.
fn sampled(mut matcher: Matcher, tokenizer: &Tokenizer, seed: u64) -> String {
    let (mut text, mut state) = (Vec::new(), seed + 1);
    while !matcher.is_complete() && text.len() < 4000 {
        let next = allowed(&mut matcher, tokenizer);
        if next.contains(&0) {
            break;
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Closing characters end strings soon.
        let closing = |id: &&u32| b"\"<}]|)'".contains(&tokenizer.piece(**id, true)[0]);
        let closers: Vec<&u32> = next.iter().filter(closing).collect();
        let at = (state >> 33) as usize;
        let id = match closers.is_empty() || at.is_multiple_of(4) {
            true => next[at % next.len()],
            false => *closers[at % closers.len()],
        };
        text.extend(tokenizer.piece(id, true));
        matcher.accept(id).unwrap();
    }
    String::from_utf8(text).unwrap()
}

/// Whatever is sampled is read as a call: here tokens at random, more of them those that close
/// something.
#[test]
fn whatever_a_grammar_allows_is_a_call() {
    let tool = |name: &str, parameters: Value| Tool { name: name.to_owned(), parameters };
    let parameters = json!({
        "type": "object",
        "$defs": { "size": { "enum": ["small", "large"] } },
        "properties": {
            "size": { "$ref": "#/$defs/size" },
            "count": { "type": "integer", "minimum": 1, "maximum": 99 },
            "note": { "type": "string", "maxLength": 2 },
            "list": { "type": "array", "items": { "type": "boolean" }, "maxItems": 2 },
            "inner": {
                "type": "object",
                "properties": { "a": { "const": 1 } },
                "required": ["a"],
                "additionalProperties": false,
            },
        },
        "required": ["count"],
        "additionalProperties": false,
    });
    let all = vec![
        tool("order", parameters),
        tool(
            "stop",
            json!({ "type": "object",
        "properties": {}, "additionalProperties": false }),
        ),
    ];
    let (mut all_whole, mut all_samples) = (0, 0);
    for markers in [&[][..], &MARKERS] {
        let tokenizer = characters(markers);
        let compiler = compiler(&tokenizer);
        for (source, text) in EXAMPLES {
            if markers.is_empty() && text.contains('▁') {
                continue;
            }
            let mut whole = 0;
            for seed in 0..6u64 {
                let constraint = grammar(source, all.clone(), seed.is_multiple_of(2));
                let text = sampled(compiler.compile(&constraint, None).unwrap(), &tokenizer, seed);
                let start = if format(source).is_open { ">>>" } else { "" };
                let mut parser = ToolParser::new(format(source), Arc::from(all.clone()), start);
                let delta = parser.push(&text, true);
                let is_whole = !delta.calls.is_empty() && delta.content.is_empty();
                assert!(is_whole || text.len() >= 4000, "{source}: {text}: {delta:?}");
                whole += usize::from(text.len() < 4000);
            }
            // Strings that end with a whole tag may go on and on, but not all of them.
            assert!(whole >= 1, "{source}");
            (all_whole, all_samples) = (all_whole + whole, all_samples + 6);
        }
    }
    assert!(all_whole * 4 >= all_samples * 3, "{all_whole} of {all_samples}");
}

#[test]
fn tools_of_strangers_are_compiled_or_refused() {
    let compiler = compiler(&characters(&MARKERS));
    let tool = |name: String, parameters: Value| Tool { name, parameters };
    let many = |count: usize, parameters: &Value| -> Vec<Tool> {
        (0..count).map(|i| tool(format!("tool_{i}"), parameters.clone())).collect()
    };
    let text = "x".repeat(1 << 20);
    let long = json!({ "type": "object", "properties": { "a": { "const": text } } });
    let unsupported = json!({ "type": "object", "properties": { "a": { "not": {} } } });
    let combined = json!({ "anyOf": [{ "type": "object" }, { "minProperties": 1 }] });
    let recursive = json!({ "type": "object", "properties": { "a": { "$ref": "#" } } });
    let lost = json!({ "properties": { "a": { "type": "array", "$ref": "#/$defs/none" } } });
    // Many arguments beside large definitions that they need not have, or all have.
    let numbers = |has_references: bool| {
        let large = json!({ "type": "integer", "description": "x".repeat(700_000) });
        let number = match has_references {
            true => json!({ "type": "integer", "$ref": "#/$defs/large" }),
            false => json!({ "type": "integer" }),
        };
        let all: Map<_, _> = (0..1000).map(|i| (format!("a{i}"), number.clone())).collect();
        let required: Vec<&String> = all.keys().collect();
        json!({ "required": required, "properties": all, "$defs": { "large": large } })
    };
    let coder = "<tool_call> <function= <parameter=";
    for (source, tools, expected) in [
        ("<tool_call>", many(200, &properties(20)), ""),
        ("<tool_call>", many(1, &long), ""),
        ("<tool_call>", many(1001, &json!({})), "1 to 1000 tools"),
        ("<tool_call>", many(0, &json!({})), "1 to 1000 tools"),
        ("<tool_call>", many(900, &properties(300)), "more than 200000 values"),
        ("<tool_call>", many(2, &unsupported), "parameters of tool_0: keywords that are not"),
        ("<tool_call>", many(2, &nested(500)), "parameters of tool_0: the schema has more than"),
        ("<tool_call> <function= <parameter=", many(200, &properties(20)), ""),
        ("<tool_call> <function= <parameter=", many(1, &combined), "instead of anyOf"),
        ("<|tool_call>call:", many(200, &properties(20)), ""),
        ("<|tool_call>call:", many(1, &recursive), ""),
        ("<|tool_call>call:", many(1, &nested(300)), ""),
        ("<|tool_call_start|>", many(100, &properties(20)), ""),
        (coder, many(1, &numbers(false)), ""),
        (coder, many(1, &numbers(true)), "definitions for each argument"),
        ("<|tool_call_start|>", many(1, &numbers(false)), ""),
        ("<|tool_call>call:", many(1, &numbers(false)), ""),
        (coder, many(1, &lost), "nothing that $ref \"#/$defs/none\" names"),
    ] {
        let started = Instant::now();
        let shown = format!("{source} {} {expected}", tools.len());
        let found = compiler.compile(&grammar(source, tools, true), None);
        let error = found.map_or_else(|error| error.to_string(), |_| String::new());
        assert_eq!(error.is_empty(), expected.is_empty(), "{shown}: {error}");
        assert!(error.contains(expected) && error.len() < 600, "{shown}: {error}");
        assert!(started.elapsed() < Duration::from_secs(20), "{shown} {:?}", started.elapsed());
    }
}

/// What these forms cannot keep to is refused, and not left out.
#[test]
fn forms_that_write_each_argument_refuse_rules_for_all() {
    let compiler = compiler(&characters(&MARKERS));
    let compile = |source: &str, parameters: &Value| {
        let tool = Tool { name: "f".to_owned(), parameters: parameters.clone() };
        let found = compiler.compile(&grammar(source, vec![tool], false), None);
        found.map_or_else(|error| error.to_string(), |_| String::new())
    };
    let forms = ["<tool_call> <arg_key>", "<|tool_call_start|>", "<|tool_call>call:"];
    for (key, value) in [
        ("additionalProperties", json!({ "type": "integer" })),
        ("allOf", json!([{ "required": ["a"] }])),
        ("anyOf", json!([{ "required": ["a"] }])),
        ("oneOf", json!([{ "required": ["a"] }])),
        ("minProperties", json!(1)),
    ] {
        let mut parameters = properties(2);
        parameters[key] = value;
        for source in forms {
            let error = compile(source, &parameters);
            assert!(error.contains(&format!("instead of {key}")), "{source} {key}: {error}");
        }
        let whole = json!({ "$ref": "#/$defs/all", "$defs": { "all": parameters } });
        assert!(compile(forms[0], &whole).contains(key), "{key}");
    }
    assert_eq!(compile("<tool_call>", &json!({ "type": "object", "minProperties": 1 })), "");
    // References lead where they lead in the whole, and what is required stays so.
    let parameters = json!({
        "$ref": "#/$defs/all",
        "$defs": { "all": {
            "properties": {
                "first": { "enum": [1, 2] },
                "second": { "type": "integer", "$ref": "#/$defs/all/properties/first" },
            },
            "required": ["second", "third"],
        } },
    });
    let tool = Tool { name: "f".to_owned(), parameters };
    let python = grammar("<|tool_call_start|>", vec![tool], false);
    for (arguments, is_allowed) in [
        ("first=1, second=2, third=\"a\"", true),
        ("second=1, third=[3]", true),
        ("second=3, third=1", false),
        ("second=1", false),
        ("third=1", false),
    ] {
        let text = format!("<|tool_call_start|>[f({arguments})]<|tool_call_end|>");
        let (followed, may_end) = allows(&compiler, &python, &text);
        assert_eq!(followed == text.len() && may_end, is_allowed, "{text}");
    }
}

/// An answer that is no call begins as the model writes it, and its content is JSON.
#[test]
fn an_answer_instead_of_a_call_has_its_header() {
    let otherwise = json!({ "type": "object", "properties": { "a": { "const": 1 } },
        "required": ["a"], "additionalProperties": false });
    let mut headers = 0;
    for markers in [&[][..], &["<|content|>", "<|channel|>", "<|message|>", "<|open|>", "<|sep|>"]]
    {
        let compiler = compiler(&characters(markers));
        for (source, text) in EXAMPLES.iter().filter(|(_, text)| !text.contains('▁')) {
            let format = format(source);
            let start = if format.is_open { ">>>" } else { "" };
            let answer = format!("{}{{\"a\":1}}", format.answer);
            let constraint = constraint(Grammar::Tools(ToolGrammar {
                format,
                tools: tools(),
                is_parallel: false,
                otherwise: Some(otherwise.clone()),
            }));
            let whole = (answer.len(), true);
            assert_eq!(allows(&compiler, &constraint, &answer), whole, "{source}");
            let call = text.strip_prefix(start).unwrap_or(text);
            let weather = allows(&compiler, &constraint, call);
            assert!(weather.0 == call.len() || call.contains("time"), "{source}: {weather:?}");
            let mut parser = ToolParser::new(format, Arc::from(tools()), start);
            assert_eq!(parser.push(&answer, true).content, "{\"a\":1}", "{source} {text}");
            if !format.answer.is_empty() {
                headers += 1;
                assert_eq!(allows(&compiler, &constraint, "{\"a\":1}").0, 0, "{source}");
            }
        }
    }
    assert_eq!(headers, 8);
}
