//! minijinja's filters and methods, bounded: what their arguments ask for is estimated before they
//! run, and their results are admitted to the budget.

use std::sync::Arc;

use minijinja::value::{ObjectRepr, Rest, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::budget::{Budget, exceeded};

/// The most items that a filter splits a text into, or reads one by one.
const ITEMS_MAX: u64 = 1 << 18;
/// The most that items times the size of arguments may be, for filters that read their arguments
/// again for every item.
const WORK_MAX: u64 = 1 << 26;
/// The most that items times the parts of an attribute such as `a.b,c` may be, which are looked up
/// in each item.
const LOOKUPS_MAX: u64 = 1 << 20;
/// The widest field of a format.
const WIDTH_DIGITS_MAX: usize = 3;

macro_rules! table {
    ($($name:ident),* $(,)?) => {
        [$((stringify!($name), Value::from_function(filters::$name))),*]
    };
}

/// Replaces minijinja's filters by bounded ones.
pub(super) fn add_filters(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let originals = table![
        safe, escape, lower, upper, title, capitalize, replace, length, dictsort, items, reverse,
        trim, join, default, round, abs, int, float, attr, first, last, min, max, sort, list,
        string, batch, slice, sum, select, reject, selectattr, rejectattr, map, groupby, unique,
        pprint, format,
    ];
    for (name, original) in originals {
        let aliases: &[&str] = match name {
            "escape" => &["escape", "e"],
            "length" => &["length", "count"],
            "default" => &["default", "d"],
            _ => &[name],
        };
        for alias in aliases {
            let (budget, original) = (Arc::clone(budget), original.clone());
            environment.add_filter(
                *alias,
                move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                    budget.check_time()?;
                    let arguments = arguments.0.into_iter().map(ValueOrKwargs::into_value);
                    let arguments: Vec<Value> = arguments.collect();
                    if let [value, arguments @ ..] = &arguments[..] {
                        check(&budget, name, value, arguments)?;
                    }
                    budget.admit(original.call(state, &arguments)?)
                },
            );
        }
    }
}

/// Fails if a filter or method would make or do far more than its arguments are large.
pub(super) fn check(
    budget: &Budget,
    name: &str,
    value: &Value,
    arguments: &[Value],
) -> Result<(), Error> {
    let bytes = budget.written_bytes(value)?;
    let mut argument_bytes = 0;
    for argument in arguments {
        argument_bytes += budget.written_bytes(argument)?;
    }
    let items = |value: &Value| value.len().unwrap_or_default() as u64;
    let text = || value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let argument = |index: usize| arguments.get(index).and_then(Value::as_str);
    check_lookups(name, items(value), arguments)?;
    match name {
        "replace" => {
            let found = argument(0).map_or(0, |from| text().matches(from).count() as u64);
            let to = argument(1).map_or(0, |to| to.len() as u64);
            budget.check_size(found.saturating_mul(to))
        }
        "format" => check_format(budget, &text(), argument_bytes),
        "split" | "splitlines" => {
            let text = text();
            let pieces = match argument(0).filter(|_| name == "split") {
                Some(separator) => text.matches(separator).count(),
                None => text.split_whitespace().count().max(text.lines().count()),
            };
            check_items(pieces as u64)
        }
        // As a method, the text separates the items of the argument.
        "join" if value.as_str().is_some() && arguments.len() == 1 && argument(0).is_none() => {
            budget.check_size(items(&arguments[0]).saturating_mul(bytes))
        }
        "trim" | "strip" | "lstrip" | "rstrip" => check_work(bytes, argument_bytes),
        "slice" | "batch" => {
            let count = arguments.first().and_then(|n| u64::try_from(n.clone()).ok()).unwrap_or(0);
            check_items(items(value))?;
            check_items(count)
        }
        // Each level of a value writes all that is in it again, and indents each of its lines.
        "pprint" => {
            let levels = depth(value);
            check_work(levels.saturating_mul(levels), bytes)
        }
        "sum" => check_work(items(value), bytes + argument_bytes),
        "join" | "dictsort" | "items" | "reverse" | "min" | "max" | "sort" | "list" | "select"
        | "reject" | "selectattr" | "rejectattr" | "map" | "groupby" | "unique" => {
            check_items(items(value))?;
            check_work(items(value), argument_bytes)
        }
        _ => Ok(()),
    }
}

/// How deep a value is nested, which `Budget::written_bytes` has bounded.
fn depth(value: &Value) -> u64 {
    let Some(object) = value.as_object() else { return 0 };
    let items: Vec<Value> = if object.repr() == ObjectRepr::Map {
        object.try_iter_pairs().into_iter().flatten().flat_map(|(key, item)| [key, item]).collect()
    } else {
        object.try_iter().into_iter().flatten().collect()
    };
    1 + items.iter().map(depth).max().unwrap_or(0)
}

/// Checks the widths of a format's fields, and how often it can repeat its arguments.
fn check_format(budget: &Budget, format: &str, argument_bytes: u64) -> Result<(), Error> {
    let mut digits = 0;
    for character in format.chars() {
        digits = if character.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > WIDTH_DIGITS_MAX || (character == '*' && format.contains('%')) {
            return Err(exceeded("a format has too wide a field"));
        }
    }
    let fields = format.matches(['%', '{']).count() as u64;
    budget.check_size(fields.saturating_mul(argument_bytes + 1000))
}

/// Checks the attribute that a filter looks up in each item: the argument of that name, or the
/// first one of some filters.
fn check_lookups(name: &str, items: u64, arguments: &[Value]) -> Result<(), Error> {
    let first =
        arguments.first().filter(|_| ["selectattr", "rejectattr", "groupby"].contains(&name));
    let named = arguments.last().and_then(|last| last.get_attr("attribute").ok());
    let names = first.into_iter().chain(&named).filter_map(Value::as_str);
    let parts = names.map(|name| name.matches(['.', ',']).count() as u64 + 1).max().unwrap_or(0);
    if items.saturating_mul(parts) <= LOOKUPS_MAX {
        return Ok(());
    }
    Err(exceeded("a filter looks up a long attribute in each of many items"))
}

fn check_items(count: u64) -> Result<(), Error> {
    if count <= ITEMS_MAX {
        return Ok(());
    }
    Err(exceeded(format!("a filter reads or makes more than {ITEMS_MAX} items")))
}

fn check_work(items: u64, bytes: u64) -> Result<(), Error> {
    if items.saturating_mul(bytes) <= WORK_MAX {
        return Ok(());
    }
    Err(exceeded("a filter reads a long value or argument again and again"))
}
