//! Operators of templates as filters, which a compiled template calls in the place of minijinja's
//! instructions, or behind them: what an operator makes is admitted to the budget.

use std::sync::Arc;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, context};

use super::budget::Budget;
use super::filters::escape;

// No template can name these filters but as texts, and then they are harmless.
pub(super) const ADD: &str = "=add";
pub(super) const ADMIT: &str = "=admit";
pub(super) const ADMIT_MEMBER: &str = "=admit_member";
pub(super) const CHECK_TIME: &str = "=check_time";
pub(super) const FLATTEN: &str = "=flatten";
pub(super) const MULTIPLY: &str = "=multiply";
pub(super) const SLICE: &str = "=slice";

type Operator = fn(&Budget, &State, &[Value]) -> Result<Value, Error>;

const OPERATORS: [(&str, Operator); 7] = [
    (ADD, add),
    (ADMIT, |budget, _, operands| budget.admit(operand(operands, 0))),
    (ADMIT_MEMBER, |budget, _, operands| budget.admit_member(operand(operands, 0))),
    (CHECK_TIME, |budget, _, operands| budget.check_time().map(|()| operand(operands, 0))),
    (FLATTEN, flatten),
    (MULTIPLY, multiply),
    (SLICE, slice),
];

/// Adds the operators, and a formatter that charges the output.
pub(super) fn add_filters(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    for (name, operator) in OPERATORS {
        let own = Arc::clone(budget);
        environment.add_filter(name, move |state: &mut State, operands: Rest<ValueOrKwargs>| {
            let operands = operands.0.into_iter().map(ValueOrKwargs::into_value);
            operator(&own, state, &operands.collect::<Vec<_>>())
        });
    }
    let own = Arc::clone(budget);
    environment.set_formatter(move |out, state, value| {
        own.check_time()?;
        let bytes = own.written_bytes(value)?;
        // Texts inside other values are written with escapes of up to six bytes.
        own.charge(if value.as_object().is_some() { 6 * bytes } else { bytes })?;
        minijinja::escape_formatter(out, state, value)
    });
}

/// An operand; undefined if a template left it out.
fn operand(operands: &[Value], index: usize) -> Value {
    operands.get(index).cloned().unwrap_or_default()
}

/// All items of some lists, which a call or a list unpacks.
fn flatten(budget: &Budget, _: &State, operands: &[Value]) -> Result<Value, Error> {
    let lists = operand(operands, 0);
    budget.written_bytes(&lists)?;
    let mut items = Vec::new();
    for list in lists.try_iter()? {
        items.extend(list.try_iter()?);
    }
    budget.admit(Value::from(items))
}

/// `a + b`. As in Python, a text that is marked `safe` escapes the other one for HTML.
fn add(budget: &Budget, state: &State, operands: &[Value]) -> Result<Value, Error> {
    let (a, b) = (operand(operands, 0), operand(operands, 1));
    let is_safe = a.is_safe() || b.is_safe();
    let part = |value: &Value, text: &str| match value.is_safe() == is_safe {
        true => text.to_owned(),
        false => escape(text),
    };
    let sum = match (a.as_str(), b.as_str()) {
        (Some(left), Some(right)) if is_safe => {
            Value::from_safe_string(part(&a, left) + &part(&b, right))
        }
        (Some(left), Some(right)) => Value::from(left.to_owned() + right),
        _ => state.env().compile_expression("a + b")?.eval(context! { a, b })?,
    };
    budget.admit(sum)
}

/// `a * b`, after a look at how often a text or a list will be repeated.
fn multiply(budget: &Budget, state: &State, operands: &[Value]) -> Result<Value, Error> {
    let (a, b) = (operand(operands, 0), operand(operands, 1));
    for (value, count) in [(&a, &b), (&b, &a)] {
        let is_repeated = matches!(
            value.kind(),
            ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Iterable
        );
        if is_repeated && let Ok(count) = i128::try_from(count.clone()) {
            let bytes = budget.written_bytes(value)?;
            let count = u64::try_from(count.max(0)).unwrap_or(u64::MAX);
            budget.check_size(bytes.saturating_mul(count))?;
        }
    }
    let product = state.env().compile_expression("a * b")?;
    budget.admit(product.eval(context! { a, b })?)
}

/// `value[start:stop:step]` as in Python. minijinja's panics for empty values and large steps.
fn slice(budget: &Budget, _: &State, operands: &[Value]) -> Result<Value, Error> {
    let value = operand(operands, 0);
    budget.written_bytes(&value)?;
    let sliced = match (value.as_str(), value.kind()) {
        (Some(text), _) => {
            let characters: Vec<char> = text.chars().collect();
            Value::from(sliced(&characters, operands)?.into_iter().collect::<String>())
        }
        (_, ValueKind::Undefined | ValueKind::None) => Value::from(Vec::<Value>::new()),
        (_, ValueKind::Seq | ValueKind::Iterable) => {
            Value::from(sliced(&value.try_iter()?.collect::<Vec<_>>(), operands)?)
        }
        (_, kind) => {
            let message = format!("value of type {kind} cannot be sliced");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    budget.admit(sliced)
}

/// The items that the operands of a slice choose.
fn sliced<T: Clone>(items: &[T], operands: &[Value]) -> Result<Vec<T>, Error> {
    let bound = |index: usize| match operand(operands, index) {
        value if value.is_none() || value.is_undefined() => Ok(None),
        value => i64::try_from(value).map(Some),
    };
    let (start, stop, step) = (bound(1)?, bound(2)?, bound(3)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot slice by step size of 0"));
    }
    let len = items.len() as i64;
    // Where a slice may begin and end, in the direction of its steps.
    let (first, last) = if step > 0 { (0, len) } else { (len - 1, -1) };
    let place = |index: i64| {
        let index = if index < 0 { index.saturating_add(len) } else { index };
        index.clamp(first.min(last), first.max(last))
    };
    let (mut at, stop) = (start.map_or(first, place), stop.map_or(last, place));
    let mut chosen = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        chosen.push(items[at as usize].clone());
        at = at.saturating_add(step);
    }
    Ok(chosen)
}
