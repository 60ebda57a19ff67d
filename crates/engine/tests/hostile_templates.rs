//! Chat templates that were written to end the process, fill the memory or never end. Each must be
//! one line of error, or a text that is no larger than it may be, within two seconds.

use std::time::{Duration, Instant};

use bodkin_engine::Template;
use serde_json::{Map, json};

/// Renders a template with a short conversation.
fn render(source: &str) -> Result<String, String> {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    Template::new(source, "<s>", "</s>")
        .and_then(|template| template.render(&messages, None, true, &Map::new()))
        .map_err(|error| error.to_string())
}

/// Renders within two seconds, with one line of error if there is one.
fn render_in_time(source: &str) -> Result<String, String> {
    let start = Instant::now();
    let rendered = render(source);
    let shown: String = source.chars().take(120).collect();
    let time = start.elapsed();
    // Two seconds on an idle machine; test runs share theirs with compilers.
    assert!(time < Duration::from_secs(20), "{shown}: {time:?}");
    match &rendered {
        Ok(text) => assert!(text.len() < 1 << 20, "{shown}: {} bytes", text.len()),
        Err(error) => {
            assert!(error.starts_with("chat template: "), "{shown}: {error}");
            assert!(!error.contains('\n') && error.len() < 2000, "{shown}: {error}");
        }
    }
    rendered
}

fn refused(source: &str) {
    let shown: String = source.chars().take(120).collect();
    if let Ok(text) = render_in_time(source) {
        panic!("{shown}: rendered {} bytes", text.len());
    }
}

/// Repeats what `step` does to a variable `x`.
fn doubled(start: &str, step: &str, times: usize, end: &str) -> String {
    format!("{{% set x = {start} %}}{}{end}", format!("{{% set x = {step} %}}").repeat(times))
}

/// Puts a body into nested loops over these numbers of items.
fn looped(items: &[u32], body: &str) -> String {
    let open: String = items.iter().map(|n| format!("{{% for i in range({n}) %}}")).collect();
    format!("{open}{body}{}", "{% endfor %}".repeat(items.len()))
}

#[test]
fn chains_of_operators_do_not_overflow_the_stack() {
    let n = 20_000;
    for (first, link) in [("", "not "), ("", "-"), ("", "+"), ("", "("), ("", "["), ("", "{1:")] {
        let source = format!("{{{{ {first}{}x }}}}", link.repeat(n));
        let _ = render_in_time(&source);
    }
    for link in
        ["~a", ".a", "|upper", "[0]", "()", " if a", " or a", " and a", "+1", "*2", "**1", "==1"]
    {
        for first in ["a", "1", "'a'"] {
            let _ = render_in_time(&format!("{{{{ {first}{} }}}}", link.repeat(n)));
            // As long as a tag may be.
            let _ = render_in_time(&format!("{{{{ {first}{} }}}}", link.repeat(2000)));
        }
    }
    for link in [" is defined", " not in a", " < 1", " else a if a", "[:]", "|map('upper')"] {
        let _ = render_in_time(&format!("{{{{ a{} }}}}", link.repeat(n)));
        let _ = render_in_time(&format!("{{{{ a{} }}}}", link.repeat(2000)));
    }
}

#[test]
fn chains_of_statements_do_not_overflow_the_stack() {
    let n = 20_000;
    let elif = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(n));
    let _ = render_in_time(&elif);
    for (open, close) in [
        ("{% if true %}", "{% endif %}"),
        ("{% for i in [1] %}", "{% endfor %}"),
        ("{% macro m() %}", "{% endmacro %}"),
        ("{% set x %}", "{% endset %}"),
        ("{% filter upper %}", "{% endfilter %}"),
        ("{% with %}", "{% endwith %}"),
        ("{% generation %}", "{% endgeneration %}"),
    ] {
        let _ = render_in_time(&format!("{}{}", open.repeat(n), close.repeat(n)));
        let _ = render_in_time(&open.repeat(n));
    }
    let _ = render_in_time(&"{% set x = 1 %}".repeat(n));
    let _ = render_in_time(&"{{ x }}".repeat(n));
}

#[test]
fn nested_macros_do_not_walk_names_again_and_again() {
    let names =
        |count: usize| (0..count).map(|i| format!("{{{{a{i}}}}}")).collect::<Vec<_>>().join("\n");
    for (open, close) in [
        ("{%macro m()%}", "{%endmacro%}"),
        ("{%call m()%}", "{%endcall%}"),
        ("{%macro m()%}{%if a%}", "{%endif%}{%endmacro%}"),
        ("{%macro m()%}{%- call(x) m()%}", "{%+ endcall%}{%endmacro%}"),
    ] {
        for (depth, count) in [(60, 3000), (60, 40_000), (5, 40_000), (20, 20_000)] {
            let source = format!("{}{}{}", open.repeat(depth), names(count), close.repeat(depth));
            let start = Instant::now();
            refused(&source);
            let time = start.elapsed();
            // Counting tokens takes milliseconds.
            assert!(time < Duration::from_secs(2), "{open} {depth} x {count}: {time:?}");
        }
    }
    // Many one after another, and a few in each other with thousands of names.
    let flat = "{%macro m(a)%}{{a}}{{b}}{%endmacro%}\n".repeat(5000);
    assert!(render_in_time(&flat).unwrap().trim().is_empty());
    let body = format!("{{% if a %}}{}{{% endif %}}", names(3000));
    let nested =
        format!("{0}{0}{body}{1}{1}", "{%macro m()%}{%for i in l%}", "{%endfor%}{%endmacro%}");
    assert_eq!(render_in_time(&nested).unwrap(), "");
}

#[test]
fn values_are_not_indented_by_great_depths() {
    let deep = |items: &str, depth: usize| {
        let start = format!("{{% set ns = namespace(x={items}) %}}");
        format!("{start}{{% for i in range({depth}) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}")
    };
    for (items, depth) in [("range(4000)|list", 190), ("range(60000)|list", 40), ("[]", 190)] {
        let start = Instant::now();
        let error = render_in_time(&(deep(items, depth) + "{{ ns.x|pprint }}")).unwrap_err();
        assert!(error.contains("again and again"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{items}: {:?}", start.elapsed());
    }
    assert_eq!(render_in_time("{{ [{'a': 1}]|pprint }}").unwrap().lines().count(), 5);
    let shallow = deep("range(3000)|list", 10) + "{{ ns.x|pprint|length }}";
    assert!(render_in_time(&shallow).is_ok());
}

#[test]
fn unfinished_tags_take_linear_time() {
    for part in ["{", "{{", "{%", "{#", "{{ ( }}", "{{ '", "{% raw %}", "{%-", "}}", "{{ [", "#}"] {
        let _ = render_in_time(&part.repeat(100_000 / part.len()));
    }
    refused(&"{".repeat(2 << 20));
}

#[test]
fn values_that_hold_themselves_are_refused() {
    for end in [
        "{{ ns }}",
        "{{ ns == ns }}",
        "{{ ns ~ '' }}",
        "{{ ns|list }}",
        "{{ ns|tojson }}",
        "{{ ns|string }}",
        "{{ ns|pprint }}",
        "{{ {ns: 1} }}",
        "{{ [ns] == [ns] }}",
        "{{ ns < ns }}",
        "{{ ns in [ns] }}",
        "{{ ns.me.me }}",
        "{{ ns|dictsort }}",
        "{{ '%s'|format(ns) }}",
    ] {
        refused(&format!("{{% set ns = namespace() %}}{{% set ns.me = ns %}}{end}"));
        refused(&format!("{{% set ns = namespace() %}}{{% set ns.me = [[ns]] %}}{end}"));
        let by_map = "{% set ns = namespace() %}{% set m = {'a': ns} %}{% set ns.m = m %}";
        refused(&format!("{by_map}{end}"));
        let two = "{% set ns = namespace() %}{% set b = namespace(a=ns) %}{% set ns.b = b %}";
        refused(&format!("{two}{end}"));
    }
    // A list of the same namespace grows with it.
    refused(concat!(
        "{% set ns = namespace(a='') %}{% set x = [ns] * 1000 %}",
        "{% set ns.a = 'a' * 1000000 %}{{ x }}"
    ));
    refused("{% for i in [1, 2, 'x' * 9999999] %}{% set y = [loop] * 9999 %}{{ y }}{% endfor %}");
    for step in ["{'a': ns.a}", "[(ns.a|reverse)[:]]", "(ns.a, ns.a)"] {
        let step = format!("{{% set ns.a = {step} %}}");
        refused(&format!("{{% set ns = namespace(a=[]) %}}{}", looped(&[99_999], &step)));
    }
    let deep = "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = [ns.a] %}";
    for end in ["{{ ns.a }}", "{{ ns.a == ns.a }}", "{{ ns.a|tojson }}", ""] {
        refused(&format!("{deep}{{% endfor %}}{end}"));
    }
}

#[test]
fn texts_have_bounded_sizes() {
    for source in [
        "{{ range(90000)|join('x' * 90000) }}",
        "{{ ('x' * 90000).join(range(90000)) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '%.1000000000f'|format(1.0) }}",
        "{{ '%*d'|format(1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ ('{0}' * 99999).format('x' * 99999) }}",
        "{{ ('%(a)s' * 99999)|format(a='x' * 99999) }}",
        "{{ ('a' * 90000).replace('', 'b' * 90000) }}",
        "{{ ('a' * 90000)|replace('', 'b' * 90000) }}",
        "{{ ('a' * 90000)|replace('a', 'b' * 90000) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ 'x' * 9999 * 9999 * 9999 }}",
        "{{ ['x'] * 1000000000 }}",
        "{{ ('x' * 9999999) | list }}",
        "{{ ('x' * 9999999) | batch(1) }}",
        "{{ [1]|slice(1000000000) }}",
        "{{ [1]|batch(1000000000, 'x') }}",
        "{{ ('\\n' * 90000)|indent(1000) }}",
        "{{ ('\\n' * 90000)|indent('x' * 90000) }}",
        "{{ range(90000)|list|tojson(indent='x' * 90000) }}",
        "{{ range(90000)|list|tojson(separators=('x' * 90000, 'x')) }}",
        "{{ strftime_now('%c' * 9999999) }}",
        "{{ raise_exception('x\\n' * 5000000) }}",
        "{{ ('x ' * 9000000).split() }}",
        "{{ ('x' * 9000000).split('') }}",
        "{{ ('\\n' * 9000000).splitlines() }}",
        "{{ ['x' * 9000000] * 9000 }}",
        "{{ [range(90000)] * 90000 }}",
        "{{ range(90000)|map('replace', '', 'x' * 90000)|list }}",
        "{{ range(90000)|map('=multiply', 'x')|join }}",
        "{{ range(90000)|map('string')|sum(start='') }}",
    ] {
        refused(source);
    }
    refused(&"{{ 'x' * 10000000 }}".repeat(1000));
    refused("{% set x %}{{ x }}{{ 'x' * 100000000 }}{% endset %}");
}

#[test]
fn growth_is_bounded() {
    for (start, step) in [
        ("'x'", "x ~ x"),
        ("'x'", "x + x"),
        ("'x'", "x * 2"),
        ("'x'", "[x, x]|join"),
        ("'x'", "x|replace('x', 'xx')"),
        ("'x'", "x.replace('x', 'xx')"),
        ("'x'", "'%s%s'|format(x, x)"),
        ("'x'", "'{}{}'.format(x, x)"),
        ("'<'", "x|e"),
        ("'\"'", "x|tojson"),
        ("[1]", "x + x"),
        ("[1]", "[x, x]"),
        ("[1]", "[*x, *x]"),
        ("[1]", "x * 2"),
        ("[1]", "{'a': x, 'b': x}"),
        ("[1]", "(x, x)"),
        ("[1]", "dict(a=x, b=x)"),
        ("[1]", "[x, x]|map('list')|list"),
        ("[1]", "{'a': x}|items"),
    ] {
        for end in ["{{ x }}", "{{ x|tojson }}", "{{ x == x }}", "{{ {x: 1} }}"] {
            let _ = render_in_time(&doubled(start, step, 60, end));
        }
    }
    refused(&doubled("'xxxx'", "x ~ x", 40, "{{ x }}"));
    refused(&doubled("[1]", "x + x", 40, "{{ x|tojson }}"));
    refused(&doubled("[1]", "[x, x]", 40, "{{ x == x }}"));
    let captured = "{% set x %}{{ x }}{{ x }}{% endset %}".repeat(40);
    refused(&format!("{{% set x = 'xxxx' %}}{captured}"));
    let filtered = "{% filter upper %}".repeat(60);
    let _ = render_in_time(&format!("{filtered}x{}", "{% endfilter %}".repeat(60)));
    // Raw text in loops.
    refused(&looped(&[9999, 9999], &"raw text ".repeat(10_000)));
    refused(&format!(
        "{{% set x %}}{}{{% endset %}}",
        looped(&[9999, 9999], &"raw ".repeat(25_000))
    ));
    // Values that stay alive.
    let kept = "{% set ns.l = ns.l + ['x' * 1000000 ~ i] %}";
    refused(&format!("{{% set ns = namespace(l=[]) %}}{}", looped(&[9999], kept)));
    let macros = "{% macro m(n) %}{{ 'x' * 100000 }}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}";
    refused(macros);
}

#[test]
fn work_is_bounded() {
    let text = "{% set s = 'x' * 3000000 %}";
    let list = "{% set l = range(99999)|list %}";
    for body in [
        "{% if s == s ~ 'y' %}{% endif %}",
        "{% if 'y' in s %}{% endif %}",
        "{% if s is upper %}{% endif %}",
        "{% if s|length %}{% endif %}",
        "{% if s.count('y') %}{% endif %}",
        "{% if s.strip('x') %}{% endif %}",
        "{% if s.isalnum() %}{% endif %}",
        "{% for c in s %}{% break %}{% endfor %}",
        "{% set y = s[::2] %}",
        "{% set y = {}[s] %}",
        "{% if s < s ~ 'y' %}{% endif %}",
        "{{ s|title|first }}",
        "{% set y = s|trim('abcdefghijklmnopqrstuvwx') %}",
    ] {
        refused(&format!("{text}{}", looped(&[9999, 99], body)));
    }
    for body in [
        "{% if l == l %}{% endif %}",
        "{% if 'y' in l %}{% endif %}",
        "{% set y = l|sort %}",
        "{% set y = l|map('string')|list %}",
        "{% set y = l|tojson %}",
        "{% set y = l[1:] %}",
        "{% set y = l|sum %}",
        "{% set y = l|unique|list %}",
        "{% set y = {}[l] %}",
        "{% set y = l ~ '' %}",
        "{% set a, b = l %}",
        "{{ dict(*[l]) }}",
        "{% set y = l|groupby('a') %}",
        "{% set y = l|select('in', l)|list %}",
    ] {
        refused(&format!("{list}{}", looped(&[9999, 99], body)));
    }
    for source in [
        "{% set s = 'a.' * 900000 %}{{ range(90000)|map(attribute=s)|list }}",
        "{{ ('x' * 900000)|trim('y' * 900000 ~ 'x') }}",
        "{{ ('x' * 900000).strip('y' * 900000 ~ 'x') }}",
        "{{ range(90000)|list|select('in', range(90000)|list)|list|length }}",
        "{{ range(90000)|map('string')|sum(start='x') }}",
    ] {
        refused(source);
    }
    refused(&looped(&[99_999, 99_999, 99_999], ""));
    refused(&looped(&[99_999, 99_999, 99_999], "{% if false %}{% endif %}"));
    refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    refused(concat!(
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}",
        "{{ m(60) }}"
    ));
    refused("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    refused("{% block a %}{{ self.a() }}{% endblock %}");
    refused("{% include 'chat' %}");
    refused("{% extends 'chat' %}");
    refused("{% import 'chat' as c %}");
    refused("{{ debug() }}");
    refused(&format!("{{{{ dict({}) }}}}", "**{'a': 1}, ".repeat(1000)));
    refused(&format!("{list}{{{{ [{}] }}}}", "*l, ".repeat(2000)));
}

#[test]
fn honest_templates_still_work() {
    let ok = |source: &str, expected: &str| assert_eq!(render_in_time(source).unwrap(), expected);
    ok("{{ '=' * 80 }}", &"=".repeat(80));
    ok("{{ 2 * 3 * 1.5 }} {{ [1, 2] * 2 }} {{ 2 ** 8 }}", "9.0 [1, 2, 1, 2] 256");
    ok(
        concat!(
            "{% macro m(a, ns=none) %}{% set ns.n = a %}{% endmacro %}",
            "{% set n = namespace() %}{{ m(*[1], ns=n) }}{{ n.n }}"
        ),
        "1",
    );
    ok(
        "{{ messages[0:] }}{{ [1] + [2] }}{{ 'a' ~ 1 }}",
        "[{'role': 'user', 'content': 'Hi'}][1, 2]a1",
    );
    ok(
        "{% for i in [[1, [2]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
        "12",
    );
    ok("{% block a %}x{% endblock %}{{ [3, 1]|sort|join(',') }}", "x1,3");
    ok(
        concat!(
            "{% set ns = namespace(l=[]) %}",
            "{% for i in range(300) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l|length }}"
        ),
        "300",
    );
    ok(
        "{{ 'a b'.split(' ')|map('upper')|list|tojson }}{{ '%05.1f'|format(2.5) }}",
        "[\"A\", \"B\"]002.5",
    );
    // A long conversation with long messages.
    let messages: Vec<_> = (0..2000)
        .map(|i| json!({"role": "user", "content": format!(" {i} {}", "text ".repeat(400))}))
        .collect();
    let source = concat!(
        "{% set ns = namespace(n=0) %}{% for m in messages %}",
        "{% set ns.n = ns.n + m.content|length %}",
        "<|im_start|>{{ m['role'] + '\\n' + m.content|trim ~ '<|im_end|>' }}\n",
        "{% endfor %}{{ ns.n }}"
    );
    let template = Template::new(source, "", "").unwrap();
    let text = template.render(&json!(messages), None, true, &Map::new()).unwrap();
    assert!(text.len() > 4_000_000, "{}", text.len());
}

#[test]
fn division_by_zero_is_named() {
    for source in ["{{ 5 is divisibleby 0 }}", "{{ 5 is divisibleby(false) }}"] {
        let error = render_in_time(source).unwrap_err();
        assert!(error.contains("expected a number other than 0"), "{source}: {error}");
    }
    assert_eq!(render_in_time("{{ 6 is divisibleby 3 }}").unwrap(), "True");
}
