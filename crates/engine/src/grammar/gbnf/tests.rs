//! Grammars that are refused, and what others become.

use super::parse::TEXT_BYTES;
use super::to_lark;

#[test]
fn wrong_grammars_are_refused_with_the_place() {
    for (text, wanted) in [
        ("", "expected a rule named root, found none"),
        ("a ::= \"b\"", "expected a rule named root, found none"),
        ("root ::= a", "the rule a is used and not defined"),
        ("root = \"a\"", "line 1: expected ::=, found ="),
        ("root ::= \"a\"\n::= b", "line 2: expected the name of a rule, found :"),
        ("root ::= (\n\"a\"", "line 2: expected ), found the end"),
        ("root ::= \"a", "line 1: expected \", found the end"),
        ("root ::= [a", "line 1: expected ], found the end"),
        ("root ::= []", "line 1: expected characters between the brackets, found none"),
        ("root ::= [b-a]", "line 1: the range b-a ends before it begins"),
        (r#"root ::= "\q""#, r#"line 1: expected an escape: one of t r n \ " [ ] x u U, found q"#),
        (
            r#"root ::= "\ud800""#,
            "line 1: expected 4 hexadecimal digits of a Unicode character, found u",
        ),
        ("root ::= \"a\"{", "line 1: expected a number, found the end"),
        ("root ::= \"a\"{3,2}", "line 1: expected a highest number of at least 3, found 2"),
        (
            "root ::= \"a\"{9999}",
            "line 1: expected a number of repetitions of at most 2000, found 9",
        ),
        (
            "root ::= \"a\"*?",
            "line 1: expected one repetition (parentheses allow another), found ?",
        ),
        (
            "root ::= <[10]>",
            "line 1: expected a text or a rule (tokens are not supported), found <",
        ),
        ("root ::= \"a\" * )", "line 1: expected the end of the rule, found )"),
    ] {
        assert_eq!(to_lark(text), Err(wanted.to_owned()), "{text}");
    }
    let deep = format!("root ::= {}\"a\"", "(".repeat(1000));
    assert_eq!(
        to_lark(&deep),
        Err("line 1: more than 64 parentheses are within each other".to_owned())
    );
    let many: String = (0..2000).map(|i| format!("r{i} ::= \"a\"\n")).collect();
    assert_eq!(to_lark(&many), Err("line 1000: the grammar has more than 1000 rules".to_owned()));
    let repeated = format!("root ::= {}", "\"a\"* ".repeat(2001));
    assert_eq!(
        to_lark(&repeated),
        Err("line 1: the grammar repeats more than 2000 items".to_owned())
    );
    assert!(to_lark(&" ".repeat(TEXT_BYTES + 1)).is_err());
}

#[test]
fn a_grammar_without_recursion_is_one_lexeme() {
    let lark = to_lark("root ::= [a-c]+ \"z\"? # letters").unwrap();
    assert_eq!(lark, "T0: /[a-c]/+ /z/?\nL1: T0\nstart: L1\n");
    let lark = to_lark("root ::= ([ \\t] root)?").unwrap();
    assert!(lark.starts_with("G1: /[\\x{20}-\\x{20}\\x{9}-\\x{9}]/\n"), "{lark}");
    assert!(lark.ends_with("L4: T0 & /(?s:.+)/\nstart: L4?\n"), "{lark}");
}

#[test]
fn a_repetition_is_a_lexeme_unless_something_else_reads_its_characters() {
    let safe = to_lark("root ::= \"(\" root \")\" | [a-z]+").unwrap();
    assert!(safe.contains("L1: /[a-z]/+\n"), "{safe}");
    let unsafe_one = to_lark("root ::= \"(\" root \")\" | [a-z]+ \"b\"").unwrap();
    assert!(unsafe_one.contains("| /[a-z]/+ /b/\n"), "{unsafe_one}");
}
