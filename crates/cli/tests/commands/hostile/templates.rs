//! Chat templates that were written to crash the binary, to fill the memory or never to end.

use bodkin_gguf::Metadata;

use super::{assert_none, bounded, fault, text};
use crate::place::Place;

fn nested(open: &str, inside: &str, close: &str, times: usize) -> String {
    format!("{}{inside}{}", open.repeat(times), close.repeat(times))
}

/// A template that changes `ns.x` sixty times.
fn looped(start: &str, step: &str, end: &str) -> String {
    let body = format!("{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}");
    format!("{{% set ns = namespace(x={start}) %}}{body}{end}")
}

/// Templates that are hard to parse.
fn deep_templates() -> Vec<(&'static str, String)> {
    let (n, filter) = (5000, "{% filter replace('a', 'aaaa') %}");
    let names: String = (0..3000).map(|i| format!("{{{{a{i}}}}}\n")).collect();
    vec![
        ("parentheses", format!("{{{{ {} }}}}", nested("(", "1", ")", n))),
        ("lists", format!("{{% set x = {} %}}", nested("[", "1", "]", n))),
        ("dictionaries", format!("{{% set x = {} %}}", nested("{'a': ", "1", "}", n))),
        ("calls", format!("{{{{ {} }}}}", nested("range(", "1", ")", n))),
        ("loops with else", nested("{% for a in [] %}{% else %}", "x", "{% endfor %}", n)),
        ("call blocks", nested("{% call f() %}", "x", "{% endcall %}", n)),
        ("names in macros", nested("{%macro m()%}", &names, "{%endmacro%}", 100)),
        ("names in call blocks", nested("{%call m()%}", &names, "{%endcall%}", 100)),
        ("conditions", format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(n))),
        ("an open comment", format!("{{#{}", "x\n".repeat(60_000))),
        ("an open text", format!("{{{{ '{}", "\\'\n".repeat(60_000))),
        ("a filter of a filter", nested(filter, "a", "{% endfilter %}", 20)),
    ]
}

/// Templates that call themselves or hold themselves.
fn recursive_templates() -> Vec<(&'static str, String)> {
    let caller = concat!(
        "{% macro a() %}{{ caller() }}{% endmacro %}",
        "{% macro b() %}{% call a() %}{{ b() }}{% endcall %}{% endmacro %}{{ b() }}",
    );
    let mutual = concat!(
        "{% macro a(n) %}{{ b(n + 1) }}{% endmacro %}",
        "{% macro b(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
    );
    let fibonacci = concat!(
        "{% macro f(n) %}{% if n < 2 %}1{% else %}{{ f(n - 1) }}{{ f(n - 2) }}{% endif %}",
        "{% endmacro %}{{ f(60) }}",
    );
    let member = concat!(
        "{% set ns = namespace() %}{% macro m() %}{{ ns.m() }}{% endmacro %}",
        "{% set ns.m = m %}{{ ns.m() }}",
    );
    let cycle = concat!(
        "{% set ns = namespace() %}{% for i in [1] %}{% set ns.l = [loop, ns] %}{% endfor %}",
        "{{ ns.l }}",
    );
    let argument = "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}";
    let templates = [
        ("caller recursion", caller),
        ("mutual recursion", mutual),
        ("a macro of itself", argument),
        ("Fibonacci numbers", fibonacci),
        ("a macro in a namespace", member),
        ("a loop in a namespace", cycle),
    ];
    templates.map(|(name, template)| (name, template.to_owned())).to_vec()
}

/// Templates that make too much or take too long.
fn large_templates() -> Vec<(&'static str, String)> {
    let kept = concat!(
        "{% set ns = namespace(x=[]) %}",
        "{% for i in range(9999) %}{% set ns.x = ns.x + ['x' * 4000000] %}{% endfor %}",
    );
    let pairs = "{% set l = range(90000)|list %}{{ l|reject('in', l)|list|length }}";
    let field = "{{ '{:>999999999}'.format('x') }}";
    let (doubled, replaced) = ("{'a': ns.x, 'b': ns.x}", "ns.x|replace('a', 'aa')");
    let endless = "{% for i in range(999999999999) %}{% endfor %}";
    let output = "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}";
    let large = "{% set x = 'x' * 3999999 %}{% for i in range(14) %}{{ x }}{% endfor %}";
    let many = |body: &str| format!("{{% for i in range(90000) %}}{body}{{% endfor %}}");
    let counted = many("{% if x[-1] %}{% endif %}");
    let key = "k".repeat(60_000);
    let hashed = many(&format!("{{% if d['{key}'] %}}{{% endif %}}"));
    vec![
        ("counted characters", format!("{{% set x = 'x' * 3999999 %}}{counted}")),
        ("hashed keys", format!("{{% set d = {{'a': 1, 'b': 2}} %}}{hashed}{}", many(&hashed))),
        (
            "included names",
            format!(
                "{{% set l = range(60000)|map('string')|list %}}{}",
                many("{% include l ignore missing %}")
            ),
        ),
        ("a long output", large.to_owned()),
        ("a cycle of nothing", "{% for i in [1] %}{{ loop.cycle() }}{% endfor %}".to_owned()),
        ("a letter in a format", "{{ '%(\u{e9}'|format(1) }}".to_owned()),
        ("a letter in a field", "{{ '{0[\u{e9}'.format([1]) }}".to_owned()),
        ("a doubled text", looped("'ab'", "ns.x ~ ns.x", "{{ ns.x }}")),
        ("a doubled list", looped("[1]", "ns.x + ns.x", "{{ ns.x|tojson }}")),
        ("a doubled nested list", looped("[1]", "[ns.x, ns.x]", "{{ ns.x|string }}")),
        ("a doubled dictionary", looped("{}", doubled, "{{ ns.x|tojson(indent=2) }}")),
        ("a doubled replacement", looped("'a'", replaced, "{{ ns.x }}")),
        ("quotes of quotes", looped("'\"'", "ns.x|tojson|tojson", "{{ ns.x }}")),
        ("a wide number", "{{ '%0999999999d'|format(1) }}".to_owned()),
        ("a wide field", field.to_owned()),
        ("many digits", "{{ '{:.999999999f}'.format(1.5) }}".to_owned()),
        ("a tower of powers", "{{ 10 ** 10 ** 10 }}".to_owned()),
        ("an endless range", endless.to_owned()),
        ("nested ranges", nested("{% for i in range(9999) %}", "", "{% endfor %}", 4)),
        ("sorted texts", "{{ (['x' * 100000] * 30000)|sort|length }}".to_owned()),
        ("all pairs", pairs.to_owned()),
        ("a long path", "{{ (['x'] * 200)|sort(attribute='0.' * 70000 ~ '0') }}".to_owned()),
        ("many keys", "{{ (['x'] * 200)|sort(attribute='a,' * 70000 ~ 'a') }}".to_owned()),
        ("a sum of a path", "{{ (['x'] * 200)|sum(attribute='0.' * 70000 ~ '0') }}".to_owned()),
        ("a million lists", "{{ ([[[]] * 1000] * 1000)|tojson }}".to_owned()),
        ("kept texts", kept.to_owned()),
        ("repeated output", output.to_owned()),
        ("a long message", "{{ raise_exception('x\\n' * 1000000) }}".to_owned()),
        ("deep indentation", looped("range(20000)|list", "[ns.x]", "{{ ns.x|pprint }}")),
        ("indentation", "{{ ('\\n' * 10000)|indent(10000) }}".to_owned()),
    ]
}

#[test]
fn templates_end_with_one_line() {
    let place = Place::new();
    let templates = [deep_templates(), recursive_templates(), large_templates()].concat();
    let faults = templates.into_iter().filter_map(|(name, template)| {
        let change = |m: &mut Metadata| m.insert("tokenizer.chat_template", text(&template));
        let path = place.variant("llama", change);
        let output = bounded(&place, &["run", &path, "Hello", "-n", "1", "-t", "1", "-q"]);
        fault(name, &output)
    });
    assert_none(faults);
}
