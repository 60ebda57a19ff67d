//! The filter `tojson` as transformers defines it: Python's `json.dumps` with
//! `ensure_ascii=False`. minijinja's own escapes for HTML.

use super::budget::Budget;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// `value | tojson(indent=None, separators=None, sort_keys=False)`.
pub(super) fn filter(
    budget: &Budget,
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = indent.or(options.get::<Option<Value>>("indent")?).filter(|v| !v.is_none());
    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            // No chat needs more, and Python would take any number.
            None => Some(" ".repeat(usize::try_from(indent)?.min(16))),
        },
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let item_end = if indent.is_some() { "," } else { ", " };
    let [item, key] = match separators.as_deref() {
        None => [item_end.to_owned(), ": ".to_owned()],
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(error("separators must be two texts")),
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    // What Python would escape is never escaped in templates that are rendered to text.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    budget.written_bytes(value)?;
    let mut writer = Writer { budget, out: String::new(), indent, item, key, sort_keys, depth: 0 };
    writer.value(value)?;
    budget.admit(Value::from(writer.out))
}

/// How deep values may be nested, which is what parsers of JSON allow too.
const DEPTH_MAX: usize = 128;

struct Writer<'a> {
    budget: &'a Budget,
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    depth: usize,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        self.budget.check_size(self.out.len() as u64)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.sequence(value)?,
            ValueKind::Map => self.map(value)?,
            kind => return Err(error(format!("a value of type {kind} cannot be JSON"))),
        }
        Ok(())
    }

    fn sequence(&mut self, value: &Value) -> Result<(), Error> {
        self.open('[')?;
        let mut is_empty = true;
        for item in value.try_iter()? {
            self.start_item(is_empty);
            is_empty = false;
            self.value(&item)?;
        }
        self.close(']', is_empty);
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<(), Error> {
        self.open('{')?;
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let is_empty = keys.is_empty();
        for (index, key) in keys.iter().enumerate() {
            self.start_item(index == 0);
            match key.kind() {
                ValueKind::String => self.text(key.as_str().unwrap_or_default()),
                ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                    self.out.push('"');
                    self.value(key)?;
                    self.out.push('"');
                }
                kind => return Err(error(format!("a key of type {kind} cannot be JSON"))),
            }
            self.out.push_str(&self.key);
            self.value(&value.get_item(key)?)?;
        }
        self.close('}', is_empty);
        Ok(())
    }

    fn open(&mut self, bracket: char) -> Result<(), Error> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(error(format!("a value is nested more than {DEPTH_MAX} deep")));
        }
        self.out.push(bracket);
        Ok(())
    }

    fn start_item(&mut self, is_first: bool) {
        if !is_first {
            self.out.push_str(&self.item);
        }
        self.new_line();
    }

    fn close(&mut self, bracket: char, is_empty: bool) {
        self.depth -= 1;
        if !is_empty {
            self.new_line();
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..self.depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => self.out.push_str(&format!("\\u{:04x}", character as u32)),
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }
}

fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// A float as Python writes it: like Rust's debug form, but for the exponent.
fn float(value: f64) -> String {
    if !value.is_finite() {
        let name = if value.is_nan() { "NaN" } else { "Infinity" };
        return format!("{}{name}", if value < 0.0 { "-" } else { "" });
    }
    let text = format!("{value:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_python_s() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (-2.5e100, "-2.5e+100"),
            (123456789012345.0, "123456789012345.0"),
            (0.0001, "0.0001"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (value, text) in cases {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let options = Kwargs::from_iter(Vec::<(&str, Value)>::new());
        let text = filter(&Budget::new(0), &Value::from("\u{1}\n\u{7f}é/"), None, options).unwrap();
        assert_eq!(text.as_str(), Some("\"\\u0001\\n\u{7f}é/\""));
    }
}
