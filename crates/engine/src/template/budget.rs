//! What one rendering may cost. A template comes with a model and is not trusted: its fuel bounds
//! the number of instructions, and the budget bounds what a single instruction can do. Every value
//! that an instruction makes is admitted here, so that no later instruction gets a value that is
//! too large, too deep or part of a cycle.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use minijinja::value::{DynObject, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The longest rendering; a long conversation takes milliseconds.
const TIME: Duration = Duration::from_millis(1500);
/// Bytes that all values and the output of a rendering take together, beside those that follow
/// from the size of the conversation.
const TOTAL_BYTES: u64 = 64 << 20;
/// Bytes that one value takes when it is written out, likewise.
const VALUE_BYTES: u64 = 4 << 20;
/// Bytes of the rendering, likewise. The tokenizer comes with the model, too, and may need a
/// thousand times its memory. The longest template that is published has 40 kB.
const OUTPUT_BYTES: u64 = 256 << 10;
/// How much larger than the conversation its values and the rendering may become.
const INPUT_FACTOR: u64 = 16;
/// What a value counts that is no string.
const NODE_BYTES: u64 = 64;
/// How deep values may be nested; parsers of JSON allow 128.
const DEPTH_MAX: usize = 200;

/// The remaining resources of a rendering.
#[derive(Debug)]
pub(super) struct Budget {
    deadline: Instant,
    value_bytes: u64,
    output_bytes: u64,
    bytes_left: AtomicU64,
}

impl Budget {
    /// The budget of a rendering that starts now, of a conversation of `input_bytes`.
    pub(super) fn new(input_bytes: usize) -> Arc<Budget> {
        let input = (input_bytes as u64).saturating_mul(INPUT_FACTOR);
        Arc::new(Budget {
            deadline: Instant::now() + TIME,
            value_bytes: VALUE_BYTES + input,
            output_bytes: OUTPUT_BYTES + input,
            bytes_left: AtomicU64::new(TOTAL_BYTES + input),
        })
    }

    /// Fails once the time is over.
    pub(super) fn check_time(&self) -> Result<(), Error> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(exceeded(format!("the rendering takes longer than {} ms", TIME.as_millis())))
    }

    /// Takes bytes out of the budget of the whole rendering.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), Error> {
        let take = |left: u64| left.checked_sub(bytes);
        match self.bytes_left.fetch_update(Relaxed, Relaxed, take) {
            Ok(_) => Ok(()),
            Err(_) => Err(exceeded("the rendering needs too much memory")),
        }
    }

    /// Fails if `bytes` exceeds the limit of one value.
    pub(super) fn check_size(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= self.value_bytes {
            return Ok(());
        }
        Err(exceeded(format!("a value is larger than {} bytes", self.value_bytes)))
    }

    /// Fails if a rendering of `bytes` exceeds its limit.
    pub(super) fn check_output(&self, bytes: usize) -> Result<(), Error> {
        if bytes as u64 <= self.output_bytes {
            return Ok(());
        }
        Err(exceeded(format!("the rendering is longer than {} bytes", self.output_bytes)))
    }

    /// About how many bytes a value takes when it is written out. Fails if the value is too large,
    /// nested too deep, or holds an object that can change.
    pub(super) fn written_bytes(&self, value: &Value) -> Result<u64, Error> {
        let mut left = self.value_bytes;
        self.walk(value, 0, true, &mut left)?;
        Ok(self.value_bytes - left)
    }

    /// Takes the size of a value out of `left`.
    fn walk(
        &self,
        value: &Value,
        depth: usize,
        may_change: bool,
        left: &mut u64,
    ) -> Result<(), Error> {
        let bytes = match value.as_str() {
            Some(text) if depth == 0 => text.len() as u64,
            Some(text) => NODE_BYTES + text.len() as u64,
            None => NODE_BYTES,
        };
        match left.checked_sub(bytes) {
            Some(rest) => *left = rest,
            None => return self.check_size(u64::MAX),
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if !may_change && is_mutable(object) {
            return Err(exceeded("a namespace or a loop is part of another value"));
        }
        if depth == DEPTH_MAX {
            return Err(exceeded(format!("a value is nested more than {DEPTH_MAX} deep")));
        }
        // Keyword arguments are passed on one by one, and may be namespaces.
        let may_change = value.is_kwargs();
        if object.repr() == ObjectRepr::Map {
            for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                self.walk(&key, depth + 1, false, left)?;
                self.walk(&item, depth + 1, may_change, left)?;
            }
        } else {
            for item in object.try_iter().into_iter().flatten() {
                self.walk(&item, depth + 1, may_change, left)?;
            }
        }
        Ok(())
    }

    /// Admits the result of an instruction. Lazy sequences become lists: one that is made of
    /// another would need a stack frame for each when it is read.
    pub(super) fn admit(&self, value: Value) -> Result<Value, Error> {
        self.check_time()?;
        let bytes = self.written_bytes(&value)?;
        if value.as_str().is_some() {
            self.charge(bytes)?;
        } else if value.as_object().is_some() {
            let items = value.len().unwrap_or_default() as u64;
            self.charge(NODE_BYTES.saturating_mul(1 + items))?;
        }
        if value.kind() == ValueKind::Iterable {
            return Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>()));
        }
        Ok(value)
    }

    /// Admits a value that a namespace will hold. Neither may be a namespace, or it could hold
    /// itself.
    pub(super) fn admit_member(&self, value: Value) -> Result<Value, Error> {
        if value.as_object().is_some_and(is_mutable) {
            return Err(exceeded("a namespace holds a namespace or a loop"));
        }
        self.admit(value)
    }
}

/// Whether an object's members change after it was made.
fn is_mutable(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}

/// The error of a template that asks for more than a chat needs.
pub(super) fn exceeded(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what}, which no chat needs"))
}
