//! Answers by grammars in llama.cpp's notation, and hostile ones.

use super::*;

/// JSON objects as llama.cpp's example writes them, more or less.
pub(super) const JSON_GRAMMAR: &str = r#"
    # JSON
    root   ::= object
    value  ::= object | array | string | number | ("true" | "false" | "null") ws
    object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
    array  ::= "[" ws ( value ("," ws value)* )? "]" ws
    string ::= "\"" (
        [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
      )* "\"" ws
    number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
    ws ::= | " " | "\n" [ \t]{0,20}
"#;

/// Calls and operators.
const ARITHMETIC: &str = r#"
    root ::= expression
    expression ::= term ws (("+"|"-") ws term)*
    term ::= factor ws (("*"|"/") ws factor)*
    factor ::= number | variable | "(" expression ")" | call
    number ::= [0-9]+
    variable ::= [a-zA-Z_][a-zA-Z0-9_]*
    call ::= variable ws "(" (expression ("," ws expression)*)? ")"
    ws ::= [ \t\n\r]?
"#;

/// Statements whose keyword could be a name.
pub(super) const KEYWORD_GRAMMAR: &str = r#"
    root ::= statement*
    statement ::= "return" " " expression ";" | name "=" expression ";"
    expression ::= name | "(" expression ")"
    name ::= [a-z]+
"#;

/// Grammars, with texts that are in their languages and others.
const CASES: [(&str, &[&str], &[&str]); 14] = [
    (
        JSON_GRAMMAR,
        &["{}", r#"{"a": [1, -2.5e+3, "b\n\u00e9", null], "ë": {"": true}}"#, "{\n  \"a\":0\n}"],
        &["", "[1]", "{\"a\":01}", "{\"a\":1,}", "{\"a\":  1}", "{\"a\":\"\n\"}", "{}x"],
    ),
    (
        ARITHMETIC,
        &["42", "x + 10", "(a+b)*(c - d)", "f()", "func (x, y+2)", "f(g(x), h(y, z))/3"],
        &["+", "x + + y", "f(,)", "f(x y)", "(a + b", "x +", "a   + b"],
    ),
    // Left recursion, and texts of which one begins with another.
    (
        "root ::= root \"+\" word | word\nword ::= \"ab\" | \"a\" \"bc\" | \"a\"",
        &["a", "ab", "abc", "abc+ab+a"],
        &["", "b", "abcc", "a+", "+a"],
    ),
    // What follows a repetition begins as it goes on.
    ("root ::= \"(\" root \")\" | [a-c]+ \"b\"", &["ab", "abcb", "((bb))"], &["b", "abc", "(ab"]),
    // A keyword that is a name, too.
    (
        KEYWORD_GRAMMAR,
        &["return x;", "returns=(x);", "ret=y;return return;", ""],
        &["return x", "x;", "return=;"],
    ),
    (
        "root ::= \"(\" root \")\" | [a-z]+ \"1\" | \"ab\" \"2\"",
        &["ab1", "ab2", "(ab2)"],
        &["ab", "ac2"],
    ),
    ("root ::= \"(\" root \")\" | (\"ab\" | \"a\")* \"bc\"", &["abc", "abbc"], &["ab", "abcc"]),
    // Rules that end with themselves.
    ("root ::= [a-z] (root | \"-\" root)?", &["ab", "a-b", "a-bc"], &["a-", "-a"]),
    ("root ::= \"x\" (root | \"z\" root | \"y\")", &["xy", "xxy", "xzxy"], &["x", "xz"]),
    ("root ::= [a-c]+ \"c\" \"d\"?", &["acc", "abccd"], &["c", "ab", "acdd"]),
    ("root ::= \"a\"{2,3} (\"b\"\n | [^x-z] . )", &["aab", "aaaëx"], &["ab", "aax", "aaaxx"]),
    ("root ::= [ab\\]-]* \"\\x41\\u00e9\" \"\"", &["Aé", "a]-Aé"], &["A", "cAé"]),
    ("root ::= \"x\" tail\ntail ::= | [0-9] tail", &["x", "x123"], &["xx", "1"]),
    (
        "root ::= item+\nitem ::= \"- \" [^\\r\\n]+ \"\\n\"",
        &["- milk\n", "- a\n- b c\n"],
        &["- \n", "milk\n", "- a"],
    ),
];

#[test]
fn masks_follow_a_grammar() {
    for model in ["llama.gguf", "gemma3.gguf"] {
        let tokenizer = tokenizer(model);
        let compiler = compiler(&tokenizer);
        for (grammar, valid, invalid) in CASES {
            let constraint = constraint(Grammar::Gbnf(grammar.to_owned()));
            constraint.check().unwrap();
            for text in valid {
                assert!(accepts(&compiler, &constraint, text), "{model} {grammar} {text}");
            }
            for text in invalid {
                assert!(!accepts(&compiler, &constraint, text), "{model} {grammar} {text}");
            }
        }
    }
}

/// Compiled or refused, but not for long, and without a crash.
#[test]
fn hostile_grammars_are_compiled_or_refused() {
    let tokenizer = tokenizer("llama.gguf");
    let compiler = compiler(&tokenizer);
    let nested = "(".repeat(60) + "\"a\"" + &"{2000})".repeat(60);
    let doubled: String = (1..500).map(|i| format!("r{i} ::= r{0} r{0}\n", i + 1)).collect();
    let up: String = (2..900).map(|i| format!("r{i} ::= r{}\n", i - 1)).collect();
    let cyclic: String = (0..999).map(|i| format!("r{i} ::= r{} | \"a\"\n", i + 1)).collect();
    for grammar in [
        "root ::= root".to_owned(),
        "root ::= root root | \"\"".to_owned(),
        "root ::= (\"\")* root? (\"\" | root)+".to_owned(),
        "root ::= \"(\" root{2000} \")\" | [^a]{1000,2000}".to_owned(),
        format!("root ::= {nested}"),
        format!("root ::= \"(\" root \")\" | {nested}"),
        format!("root ::= {}({}\"b\" root)", ".".repeat(6000), "|".repeat(6000)),
        format!("root ::= \"(\" root \")\" | {}", ".".repeat(60_000)),
        format!("root ::= \"(\" root \")\" | {}", "[!-~]".repeat(10_000)),
        format!("{up}r1 ::= \"(\" r1 \")\" | [a-z]+\nroot ::= r899 {}", ". ".repeat(8000)),
        format!("root ::= \"(\" root \")\" | {}", "([a-z] | [!-~])* \"a\" ".repeat(200)),
        format!("root ::= r1\n{doubled}r500 ::= [a-z]+"),
        format!("root ::= r1 | \"(\" root \")\"\n{doubled}r500 ::= [a-z]+ [a-z]"),
        format!("root ::= r0\n{cyclic}r999 ::= r0"),
        format!("root ::= {}", "[a-z]* ".repeat(2000)),
        format!("root ::= {}", "root ".repeat(12_000)),
        format!("root ::= \"{}\" root | \"b\"", "a".repeat(60_000)),
    ] {
        let started = Instant::now();
        let constraint = constraint(Grammar::Gbnf(grammar.clone()));
        let found = constraint.check().and_then(|()| compiler.compile(&constraint, None));
        let start = &grammar[..grammar.len().min(60)];
        assert!(started.elapsed() < Duration::from_secs(20), "{start}: {:?}", started.elapsed());
        let error = found.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(!error.contains(['\n', '|']), "{start}: {error}");
    }
}
