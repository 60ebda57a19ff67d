//! Masks of schemas and regular expressions, reasoning before an answer, and hostile ones.

mod grammars;
mod tool_calls;

use std::path::Path;
use std::time::{Duration, Instant};

use bodkin_gguf::{Array, File, Metadata};
use serde_json::Map;

use self::grammars::{JSON_GRAMMAR, KEYWORD_GRAMMAR};
use super::*;

/// The tokenizer of a model of the parity kit.
fn tokenizer(model: &str) -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models").join(model);
    Arc::new(Tokenizer::from_metadata(File::open(path).unwrap().metadata()).unwrap())
}

/// One whose tokens with brackets or a bar are control tokens; the first ends an answer.
fn tokenizer_of(texts: &[&str]) -> Arc<Tokenizer> {
    use bodkin_gguf::Value;
    let is_control = |text: &str| text.len() > 1 && text.starts_with(['<', '[']);
    let kinds = texts.iter().map(|text| if is_control(text) { 3 } else { 1 }).collect();
    let strings = texts.iter().map(|text| Box::from(text.as_bytes())).collect();
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", Value::String(b"llama".as_slice().into()));
    metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; texts.len()])));
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(strings)));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(0));
    Arc::new(Tokenizer::from_metadata(&metadata).unwrap())
}

fn constraint(grammar: Grammar) -> Constraint {
    Constraint { field: "here".to_owned(), grammar }
}

fn schema(schema: Value) -> Constraint {
    constraint(Grammar::JsonSchema(schema))
}

fn regex(regex: &str) -> Constraint {
    constraint(Grammar::Regex(regex.to_owned()))
}

fn compiler(tokenizer: &Arc<Tokenizer>) -> Compiler {
    Compiler::new(tokenizer).unwrap()
}

/// The tokens that may come next.
fn allowed(matcher: &mut Matcher, tokenizer: &Tokenizer) -> Vec<u32> {
    // A model may have more logits than there are tokens.
    let mut logits = vec![0.0; tokenizer.vocab_size() + 40];
    matcher.mask(&mut logits).unwrap();
    let ids = 0..logits.len() as u32;
    ids.filter(|&id| logits[id as usize].is_finite()).collect()
}

/// How far the tokens of a text are allowed, and whether nothing may follow the whole of it.
fn follow(matcher: &mut Matcher, tokenizer: &Tokenizer, ids: &[u32]) -> (usize, bool) {
    for (i, id) in ids.iter().enumerate() {
        if matcher.is_complete() || !allowed(matcher, tokenizer).contains(id) {
            return (i, false);
        }
        matcher.accept(*id).unwrap();
    }
    (ids.len(), matcher.is_complete())
}

/// The longest token at each place: SentencePiece would put a space before the text.
fn longest_tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let pieces: Vec<Vec<u8>> =
        (0..tokenizer.vocab_size() as u32).map(|id| tokenizer.piece(id, false)).collect();
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while !rest.is_empty() {
        let fits = |id: &usize| !pieces[*id].is_empty() && rest.starts_with(&pieces[*id]);
        let id = (0..pieces.len()).filter(fits).max_by_key(|&id| pieces[id].len()).unwrap();
        rest = &rest[pieces[id].len()..];
        ids.push(id as u32);
    }
    ids
}

/// Whether a text is an answer to a constraint, after which nothing or an end may come.
fn accepts(compiler: &Compiler, constraint: &Constraint, text: &str) -> bool {
    let tokenizer = &compiler.tokenizer;
    let mut matcher = compiler.compile(constraint, None).unwrap();
    let ids = longest_tokens(tokenizer, text);
    let (followed, is_complete) = follow(&mut matcher, tokenizer, &ids);
    let ends = tokenizer.ends_of_generation();
    let may_end = |matcher: &mut Matcher| {
        let allowed = allowed(matcher, tokenizer);
        ends.iter().all(|end| allowed.contains(end))
    };
    followed == ids.len() && (is_complete || may_end(&mut matcher))
}

#[test]
fn masks_follow_a_schema_and_a_regular_expression() {
    let person = schema(json!({
        "type": "object",
        "properties": { "name": { "type": "string" }, "age": { "type": "integer" } },
        "required": ["name", "age"],
        "additionalProperties": false,
    }));
    for model in ["llama.gguf", "llama-spm.gguf", "gemma3.gguf"] {
        let tokenizer = tokenizer(model);
        let compiler = compiler(&tokenizer);
        let accepts = |constraint: &Constraint, text: &str| accepts(&compiler, constraint, text);
        assert!(accepts(&person, r#"{"name":"Zoë","age":41}"#), "{model}");
        assert!(accepts(&person, "{\n  \"name\":\"\",\n  \"age\":0\n}"), "{model}");
        for wrong in [
            r#"{"name":"a"}"#,
            r#"{"name":"a","age":"b"}"#,
            r#"{"name":"a","age":1}}"#,
            "{\n\n\n\n\"name\":\"a\",\"age\":1}",
            "a",
            "",
        ] {
            assert!(!accepts(&person, wrong), "{model} {wrong}");
        }
        let object = constraint(Grammar::json_object());
        assert!(accepts(&object, r#"{"a":[1,null,{}],"b":-2.5e3}"#) && !accepts(&object, "[1]"));
        let any = schema(Value::Bool(true));
        for (text, wanted) in [("[1]", true), ("[\"a\"]", true), ("12", true), ("a", false)] {
            assert_eq!(accepts(&any, text), wanted, "{model} {text}");
        }
        assert!(accepts(&regex("[a-c]+/d"), "abc/d") && !accepts(&regex("[a-c]+/d"), "abc"));
        let choice = constraint(Grammar::choice(&["a.b".to_owned(), "c|\n".to_owned()]));
        let marked = constraint(Grammar::choice(&["<yes>".to_owned(), "/no/".to_owned()]));
        assert!(accepts(&marked, "<yes>") && accepts(&marked, "/no/") && !accepts(&marked, "yes"));
        assert!(accepts(&choice, "a.b") && accepts(&choice, "c|\n") && !accepts(&choice, "axb"));
    }
}

#[test]
fn the_end_of_a_grammar_is_the_end_of_the_answer() {
    let tokenizer = tokenizer("llama.gguf");
    let compiler = compiler(&tokenizer);
    let mut matcher = compiler.compile(&schema(json!({ "enum": [true] })), None).unwrap();
    let mut copy = matcher.copy();
    for matcher in [&mut matcher, &mut copy] {
        let ids = tokenizer.encode("true", false, false);
        assert_eq!(follow(matcher, &tokenizer, &ids), (ids.len(), true));
    }
    // Here digits may go on, or an end token may come, each of which the mask allows.
    let mut matcher = compiler.compile(&regex("[0-9]+"), None).unwrap();
    let ids = tokenizer.encode("12", false, false);
    assert_eq!(follow(&mut matcher, &tokenizer, &ids), (ids.len(), false));
    let next = allowed(&mut matcher, &tokenizer);
    let ends = tokenizer.ends_of_generation();
    assert!(!ends.is_empty() && ends.iter().all(|end| next.contains(end)));
    let is_digit = |id: &u32| tokenizer.piece(*id, true).iter().all(u8::is_ascii_digit);
    assert!(next.iter().all(|id| ends.contains(id) || is_digit(id)), "{next:?}");
    matcher.accept(ends[0]).unwrap();
    assert!(matcher.is_complete());
    // A model that excludes all of them cannot go on.
    let mut matcher = compiler.compile(&regex("[0-9]+"), None).unwrap();
    let mut logits = vec![f32::NEG_INFINITY; tokenizer.vocab_size()];
    let error = matcher.mask(&mut logits).unwrap_err().to_string();
    assert!(error.starts_with("here: the model gives no probability"), "{error}");
}

/// The texts that may come at each place of an answer: `{}` may be one, maybe behind reasoning.
#[test]
fn reasoning_comes_before_the_answer() {
    let texts =
        ["<end>", "[THINK]", "[/THINK]", "[", "T", "HINK]", "a", "]", "/", "{", "}", "1", " "];
    let tokenizer = tokenizer_of(&texts);
    let compiler = compiler(&tokenizer);
    let run = |constraint: &Constraint, prompt: &str, answer: &[&str]| {
        let reasoning = Reasoning::of("'[THINK]'", prompt);
        let mut matcher = compiler.compile(constraint, reasoning).unwrap();
        let id = |text: &&str| texts.iter().position(|it| it == text).unwrap() as u32;
        let ids: Vec<u32> = answer.iter().map(id).collect();
        let (followed, is_complete) = follow(&mut matcher, &tokenizer, &ids);
        (followed == ids.len(), is_complete)
    };
    let braces = regex(r"\{\}");
    let brackets = schema(json!({ "type": "array", "items": { "const": 1 } }));
    let whole = (true, true);
    assert_eq!(run(&braces, "", &["{", "}"]), whole);
    assert_eq!(run(&braces, "", &["[THINK]", "a", "{", "[/THINK]", "{", "}"]), whole);
    assert_eq!(run(&braces, "", &["[", "T", "HINK]", "1", "[/THINK]", "{", "}"]), whole);
    assert_eq!(run(&braces, "", &["[", "T", "HINK]", "[", "/", "T", "HINK]", "{", "}"]), whole);
    assert_eq!(run(&braces, "[THINK]\n", &["{", "[/THINK]", "{", "}"]), whole);
    // An answer may begin as the marker does.
    assert_eq!(run(&brackets, "", &["[", "1", "]"]), whole);
    assert_eq!(run(&brackets, "", &["[", "T", "HINK]", "[/THINK]", "[", "]"]), whole);
    // Neither an end within the reasoning nor another answer is possible.
    for wrong in [
        &["[THINK]", "<end>"][..],
        &["[THINK]", "[/THINK]", "a"],
        &["[THINK]", "[/THINK]", "[THINK]"],
        &["[", "1"],
        &["a"],
        &["{", "[THINK]"],
        &["<end>"],
    ] {
        assert!(!run(&braces, "", wrong).0, "{wrong:?}");
    }
}

fn properties(count: usize) -> Value {
    let property = |i| (format!("property{i}"), json!({ "type": "string" }));
    json!({ "type": "object", "properties": (0..count).map(property).collect::<Map<_, _>>() })
}

/// Schemas that each stand within the next one.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({}), |items, _| json!({ "type": "array", "items": items }))
}

/// Definitions of which each refers to the next, as `link` says.
fn chain(length: usize, link: impl Fn(Value) -> Value) -> Value {
    let definition = |i| match i + 1 < length {
        true => link(json!(format!("#/$defs/d{}", i + 1))),
        false => json!({ "type": "string" }),
    };
    let definitions = (0..length).map(|i| (format!("d{i}"), definition(i)));
    json!({ "$ref": "#/$defs/d0", "$defs": definitions.collect::<Map<_, _>>() })
}

/// What strangers may send, and what the error says, or nothing if it works.
fn hostile_schemas() -> Vec<(Value, &'static str)> {
    let text = "x".repeat(1 << 20);
    let two = |link: Value| json!({ "type": "object", "properties": { "p": link, "q": link } });
    let names: Vec<String> = (0..20_000).map(|i| format!("option {i}")).collect();
    let consts = |count| names[..count].iter().map(|name| json!({ "const": name }));
    let cycle = |more: Value| {
        let with = |reference: &str| {
            let mut schema = more.clone();
            schema["$ref"] = reference.into();
            schema
        };
        json!({ "$ref": "#/$defs/a", "$defs": { "a": with("#/$defs/b"), "b": with("#/$defs/a") } })
    };
    let combine = |i| json!({ "anyOf": [properties(i), { "required": ["b"] }] });
    vec![
        (properties(1000), ""),
        (properties(10_000), "more than 2000 properties"),
        (nested(120), ""),
        (nested(500), "nested levels"),
        (chain(300, |to| json!({ "$ref": to })), ""),
        (chain(10_000, |to| json!({ "$ref": to })), "nested levels"),
        (chain(40, |to| two(json!({ "$ref": to }))), ""),
        (chain(40, |to| two(json!({ "$ref": to, "type": "object" }))), "too large"),
        (json!({ "allOf": (0..20).map(combine).collect::<Value>() }), "too large"),
        (json!({ "$ref": "#" }), "nothing can satisfy it"),
        (cycle(json!({})), "nothing can satisfy it"),
        (cycle(json!({ "type": "object" })), "circular"),
        (json!({ "$ref": "http://example.com/a" }), "Only absolute $ref's (#/...) are supported;"),
        (json!({ "$ref": "#/$defs/none" }), "not found"),
        (json!({ "enum": names }), ""),
        (json!({ "oneOf": consts(300).collect::<Value>() }), ""),
        (json!({ "oneOf": consts(301).collect::<Value>() }), "more than 300 options"),
        (json!({ "oneOf": [{ "type": "string" }, { "minLength": 1 }] }), "expected anyOf"),
        (json!({ "const": text }), ""),
        (json!({ "type": "string", "pattern": text }), ""),
        (json!({ "type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$" }), ""),
        (json!({ "type": "string", "pattern": "(".repeat(50_000) }), "regex"),
        (json!({ "type": "string", "pattern": "^(?=a)" }), "look-around"),
        (json!({ "type": "string", "minLength": u64::MAX }), "regex"),
        (json!({ "type": "array", "minItems": u64::MAX }), ""),
        (json!({ "multipleOf": 123_456_789 }), "multipleOf"),
        (json!({ "multipleOf": 0.07 }), "multipleOf"),
        (json!({ "multipleOf": 0.25 }), ""),
        (json!({ "multipleOf": 1e300 }), "multipleOf"),
        (from_the_leaves(4000), ""),
        (from_the_leaves(11_000), "nested levels together"),
        (json!({ "allOf": [{ "multipleOf": 997 }, { "multipleOf": 991 }] }), "multipleOf"),
        (json!({ "allOf": [{ "multipleOf": 6 }, { "multipleOf": 15 }] }), ""),
        (json!({ "type": "number", "minimum": 5, "maximum": 1 }), "minimum"),
        (json!({ "minLength": "é".repeat(200) }), "not valid"),
        (json!({ "type": "array", "uniqueItems": true }), r#"not supported: ["uniqueItems"]"#),
        (json!({ "not": {}, "if": {} }), r#"not supported: ["if", "not"]"#),
        (json!({ "not": {}, "x-guidance": { "lenient": true } }), "not supported"),
        (json!({ "type": "string", "format": "nonsense" }), "nonsense"),
        (json!({ "type": "strin" }), "strin"),
        (json!([1]), "expected a JSON schema"),
        (json!(false), "accepts nothing"),
    ]
}

/// It works, or one error says what is wrong; and soon.
#[test]
fn hostile_schemas_are_errors() {
    let compiler = compiler(&tokenizer("llama.gguf"));
    for (given, expected) in hostile_schemas() {
        let started = Instant::now();
        let shown: String = given.to_string().chars().take(100).collect();
        let given = schema(given);
        let found = compiler.compile(&given, None);
        if expected != "nothing can satisfy it" {
            assert_eq!(given.check().is_ok(), expected.is_empty(), "{shown}");
        }
        let error = found.map_or_else(|error| error.to_string(), |_| String::new());
        assert_eq!(error.is_empty(), expected.is_empty(), "{shown}: {error}");
        assert!(error.contains(expected) && error.len() < 600, "{shown}: {error}");
        assert!(error.is_empty() || error.starts_with("here: ") && !error.contains('\n'));
        assert!(started.elapsed() < Duration::from_secs(20), "{shown}");
    }
}

/// A chain of definitions that is looked at from its end on, and compiled from its start on.
fn from_the_leaves(count: usize) -> Value {
    let reference = |i: usize| json!({ "$ref": format!("#/$defs/d{i}") });
    let mut definitions: Map<String, Value> =
        (0..count).map(|i| (format!("d{i}"), reference(i + 1))).collect();
    definitions.insert(format!("d{count}"), json!({ "type": "null" }));
    json!({
        "type": "object",
        "properties": { "a": reference(0) },
        "additionalProperties": { "anyOf": (0..=count).rev().map(reference).collect::<Value>() },
        "$defs": definitions,
    })
}

#[test]
fn hostile_regular_expressions_are_errors() {
    let tokenizer = tokenizer("llama.gguf");
    let compiler = compiler(&tokenizer);
    let long = "a".repeat(100_000);
    for wrong in ["(", "a\\", "(?=a)b", "\\bb", "[z-a]", "a{2,1}", &long] {
        let error = compiler.compile(&regex(wrong), None).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.starts_with("here: ") && error.len() < 600, "{wrong}: {error}");
    }
    for fine in ["(a+)+b", "(.*a){25}b", "((a{100}){100}){100}", "a\nb", "//", "\"", "é"] {
        compiler.compile(&regex(fine), None).unwrap();
    }
}

/// A lexer whose states grow with the answer ends it with an error, and never without a mask.
#[test]
fn an_answer_that_exceeds_a_limit_is_an_error() {
    let letter = |bits: u32, i: u32| if bits >> i & 1 == 0 { 'a' } else { 'b' };
    let texts = (0..4096).map(|bits| (0..12).map(|i| letter(bits, i)).collect::<String>());
    let texts: Vec<String> =
        ["<end>".to_owned(), "c".to_owned()].into_iter().chain(texts).collect();
    let tokenizer = tokenizer_of(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    let mut matcher = compiler(&tokenizer).compile(&regex("[ab]*a[ab]{300}c"), None).unwrap();
    let mut next = |id| {
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        matcher.mask(&mut logits)?;
        matcher.accept(id)
    };
    let error = (2..100).find_map(|id| next(id * 37).err()).unwrap().to_string();
    assert!(error.starts_with("here: ") && error.contains("too many"), "{error}");
    assert!(next(2).is_err());
}

/// Prints the time and memory of the files in BODKIN_FILES, for commit messages.
#[test]
#[ignore = "measures"]
fn measure() {
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
    };
    let text = r#"{"name": "A person with a longer name, \"quoted\" and so on", "age": 12345,
  "tags": ["one thing", "another thing", "日本語のテキスト"], "kind": "alpha"}"#;
    let string = json!({ "type": "string" });
    let person = json!({
        "type": "object",
        "properties": {
            "name": string,
            "age": { "type": "integer" },
            "tags": { "type": "array", "items": string },
            "kind": { "enum": ["alpha", "beta"] },
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": false,
    });
    for path in std::env::var("BODKIN_FILES").unwrap().split(',') {
        let file = File::open(path).unwrap();
        let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
        let (before, started) = (resident(), Instant::now());
        let compiler = compiler(&tokenizer);
        let (time, memory) = (started.elapsed(), resident() - before);
        println!("{path}: {} tokens, {time:.1?}, {memory} MiB", tokenizer.vocab_size());
        let grammar = |text: &str| constraint(Grammar::Gbnf(text.to_owned()));
        for (given, text) in [
            (schema(person.clone()), text),
            (schema(json!({ "type": "object" })), text),
            (grammar(JSON_GRAMMAR), text),
            (grammar(KEYWORD_GRAMMAR), "number=(count);return number;returned=total;"),
            (grammar("root ::= \"{\" root \"}\" | [^{}]+ [^{}]"), text),
        ] {
            let started = Instant::now();
            let mut matcher = compiler.compile(&given, None).unwrap();
            let compile = started.elapsed();
            let mut times = Vec::new();
            for id in tokenizer.encode(text, false, false) {
                let mut logits = vec![0.0; tokenizer.vocab_size()];
                let started = Instant::now();
                if matcher.mask(&mut logits).is_err() || logits[id as usize] != 0.0 {
                    println!("refused {:?}", tokenizer.piece(id, false));
                    break;
                }
                matcher.accept(id).unwrap();
                times.push(started.elapsed());
            }
            times.sort();
            let at = |share: usize| times[(times.len() - 1) * share / 100];
            println!("compile {compile:.1?}; p50 {:.1?}, p99 {:.1?}", at(50), at(99));
        }
    }
}
