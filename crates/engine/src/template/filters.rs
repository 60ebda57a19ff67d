//! Filters and tests where minijinja differs from Jinja2.

use super::budget::Budget;
use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

/// The widest indentation, so that a template cannot ask for all memory.
const WIDTH_MAX: usize = 1024;

/// `text | indent(width=4, first=False, blank=False)`. minijinja's drops a newline at the end.
pub(super) fn indent(
    budget: &Budget,
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.or(options.get("width")?);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let indentation = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(width) => width.to_owned(),
            None => match usize::try_from(width)? {
                width if width <= WIDTH_MAX => " ".repeat(width),
                _ => return Err(error(format!("indent: wider than {WIDTH_MAX}"))),
            },
        },
    };
    let lines = 1 + text.matches('\n').count() as u64;
    budget.check_size(lines.saturating_mul(indentation.len() as u64))?;
    let mut out = if first { indentation.clone() } else { String::new() };
    for (index, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if index > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&indentation);
            }
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `value is iterable`. minijinja's also says so of none.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `value is divisibleby number`. minijinja's panics for 0.
pub(super) fn is_divisible(value: &Value, by: &Value) -> Result<bool, Error> {
    if by.as_i64() == Some(0) {
        return Err(error("divisibleby: expected a number other than 0, found 0".to_owned()));
    }
    Ok(minijinja::tests::is_divisibleby(value, by))
}

/// Escapes for HTML as markupsafe does, which Jinja2 uses.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(character),
        }
    }
    out
}

fn error(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indent_is_jinja_s() {
        let indent = |text: &str, first| {
            let options = Kwargs::from_iter(Vec::<(&str, Value)>::new());
            indent(&Budget::new(0), text, Some(Value::from(2)), Some(first), None, options).unwrap()
        };
        assert_eq!(indent("a\nb\n\nc\n", false), "a\n  b\n\n  c\n");
        assert_eq!(indent("a\n", true), "  a\n");
        assert_eq!(indent("", true), "  ");
    }
}
