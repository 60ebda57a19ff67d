//! Changes to a template's source where minijinja has no place to plug the difference in.

/// The name of the filter for [`super::filters::escape`], which templates do not know.
pub(super) const ESCAPE: &str = "escape_beside_markup";

/// Rewrites a template for minijinja. What it does not understand stays as it is.
pub(super) fn adapt(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find(['{']) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'%') => end_of_tag(tag, "%}"),
            Some(b'{') => end_of_tag(tag, "}}"),
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            _ => None,
        };
        let is_tag = tag.as_bytes().get(1).is_some_and(|byte| b"{%#".contains(byte));
        if is_tag && end.is_none() {
            // The tag does not end, so that minijinja refuses the template.
            rest = tag;
            break;
        }
        let (tag, after) = tag.split_at(end.unwrap_or(1));
        match tag.get(..2) {
            Some("{%") => out.push_str(&without_generation(tag)),
            Some("{{") => out.push_str(&with_escaped_sums(tag)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Where a tag ends, which is not inside a text in quotes.
fn end_of_tag(tag: &str, close: &str) -> Option<usize> {
    let mut scan = Scan::default();
    let found = tag.char_indices().skip(2).find(|&(at, character)| {
        let is_code = scan.step(character) && scan.depth <= 0;
        is_code && tag[at..].starts_with(close)
    });
    found.map(|(at, _)| at + close.len())
}

/// Follows an expression: whether one is inside quotes, and how deep inside brackets.
#[derive(Default)]
struct Scan {
    quote: Option<char>,
    is_escaped: bool,
    depth: i32,
}

impl Scan {
    /// Takes a character. Returns whether it is code and not part of a text.
    fn step(&mut self, character: char) -> bool {
        if let Some(quote) = self.quote {
            if self.is_escaped {
                self.is_escaped = false;
            } else if character == '\\' {
                self.is_escaped = true;
            } else if character == quote {
                self.quote = None;
            }
            return false;
        }
        match character {
            '"' | '\'' => self.quote = Some(character),
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' => self.depth -= 1,
            // The brace that ends a tag was not opened in it.
            '}' if self.depth > 0 => self.depth -= 1,
            _ => {}
        }
        self.quote.is_none()
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, a tag of transformers that marks what
/// the model itself said, for training. minijinja takes no tags of others, so they become an `if`
/// that is always true, which keeps the way they trim white space.
fn without_generation(tag: &str) -> String {
    let name = tag.trim_matches(['{', '%', '}', '-', '+', ' ', '\t', '\n', '\r']);
    match name {
        "generation" => tag.replace(name, "if true"),
        "endgeneration" => tag.replace(name, "endif"),
        _ => tag.to_owned(),
    }
}

/// In Python, a sum with a text that is marked `safe` escapes its other parts for HTML, whatever
/// the environment says; minijinja's sum knows nothing of marks. The other parts get a filter.
fn with_escaped_sums(tag: &str) -> String {
    let unchanged = || tag.to_owned();
    let Some(inner) = tag.strip_prefix("{{").and_then(|tag| tag.strip_suffix("}}")) else {
        return unchanged();
    };
    let (open, inner) = inner.split_at(inner.len() - inner.trim_start_matches(['-', '+']).len());
    let kept = inner.trim_end_matches(['-', '+']).len();
    let (inner, close) = inner.split_at(kept);
    let Some(parts) = parts_of_sum(inner) else { return unchanged() };
    let is_safe = |part: &str| {
        let filter = part.trim_end().strip_suffix("safe").map(str::trim_end);
        filter.is_some_and(|rest| rest.ends_with('|'))
    };
    if parts.len() < 2 || !parts.iter().any(|part| is_safe(part)) {
        return unchanged();
    }
    let parts = parts.iter().map(|part| match is_safe(part) {
        true => (*part).to_owned(),
        false => format!(" ({})|{ESCAPE} ", part.trim()),
    });
    format!("{{{{{open}{}{close}}}}}", parts.collect::<Vec<_>>().join("+"))
}

/// The parts of a sum; None if the expression has operators that bind less than a sum.
fn parts_of_sum(expression: &str) -> Option<Vec<&str>> {
    let mut scan = Scan::default();
    let (mut parts, mut start, mut word) = (Vec::new(), 0, 0);
    for (at, character) in expression.char_indices() {
        let is_top = scan.step(character) && scan.depth == 0;
        if !(character.is_alphanumeric() || character == '_') {
            let name = &expression[word..at];
            if is_top && matches!(name, "if" | "else" | "and" | "or" | "not" | "in" | "is") {
                return None;
            }
            word = at + character.len_utf8();
        }
        match character {
            '+' if is_top => {
                parts.push(&expression[start..at]);
                start = at + 1;
            }
            '~' | '=' | '<' | '>' | '!' if is_top => return None,
            _ => {}
        }
    }
    parts.push(&expression[start..]);
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_it_is_changed() {
        for source in [
            "",
            "{",
            "{{",
            "a {{ x + 'a|safe + b' }} {# {% generation %} #} {%- if a -%}{{-'}}'-}}",
            "{{ x|safe }} {{ a|safe if b + c else d }} {{ {'a': {'b': 1}} }}",
            "{% set generation = 1 %}",
            "é{{ 'é' + \"é\" }}é{%",
        ] {
            assert_eq!(adapt(source), source);
        }
        assert_eq!(adapt("{%- generation -%}"), "{%- if true -%}");
        assert_eq!(adapt("{% endgeneration +%}x"), "{% endif +%}x");
        let sum = adapt("{{- 'a'|safe + f(b + 1) + c|tojson -}}");
        let expected =
            "{{- 'a'|safe + (f(b + 1))|escape_beside_markup + (c|tojson)|escape_beside_markup -}}";
        assert_eq!(sum.replace("  ", " "), expected);
    }
}
