//! The ordered key-value pairs of a GGUF file and typed reads of them. It must not know what any
//! key means, apart from `general.architecture`.

use indexmap::IndexMap;

use crate::error::{Error, Result};

/// One metadata value. Strings are bytes, because files hold strings that are not UTF-8.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Box<[u8]>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array, all of one type. Arrays of arrays carry the type of each inner array.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<Box<[u8]>>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Type ids of values, as the file holds them.
pub(crate) mod kind {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const I16: u32 = 3;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const I64: u32 = 11;
    pub(crate) const F64: u32 = 12;
    /// The least bytes of a value, by type id; a string or an array starts with its length.
    pub(crate) const MIN_BYTES: [u64; 13] = [1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8];
    /// The name of a type, by type id.
    #[rustfmt::skip]
    pub(crate) const NAMES: [&str; 13] = [
        "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64",
        "f64",
    ];
}

/// Evaluates an expression on the vector inside an [`Array`].
macro_rules! each_array {
    ($array:expr, $items:ident => $body:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::F32($items) => $body,
            Array::Bool($items) => $body,
            Array::String($items) => $body,
            Array::Array($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F64($items) => $body,
        }
    };
}
pub(crate) use each_array;

impl Array {
    /// The number of elements.
    pub fn len(&self) -> usize {
        each_array!(self, items => items.len())
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the element type, for error messages and `inspect`.
    pub fn element_type(&self) -> &'static str {
        kind::NAMES[self.kind() as usize]
    }

    /// The id of the element type.
    pub(crate) fn kind(&self) -> u32 {
        match self {
            Array::U8(_) => kind::U8,
            Array::I8(_) => kind::I8,
            Array::U16(_) => kind::U16,
            Array::I16(_) => kind::I16,
            Array::U32(_) => kind::U32,
            Array::I32(_) => kind::I32,
            Array::F32(_) => kind::F32,
            Array::Bool(_) => kind::BOOL,
            Array::String(_) => kind::STRING,
            Array::Array(_) => kind::ARRAY,
            Array::U64(_) => kind::U64,
            Array::I64(_) => kind::I64,
            Array::F64(_) => kind::F64,
        }
    }

    /// The elements as wide integers; None if they are not integers.
    fn integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(items: &[T]) -> Option<Vec<i128>> {
            Some(items.iter().map(|&item| item.into()).collect())
        }
        match self {
            Array::U8(items) => widen(items),
            Array::I8(items) => widen(items),
            Array::U16(items) => widen(items),
            Array::I16(items) => widen(items),
            Array::U32(items) => widen(items),
            Array::I32(items) => widen(items),
            Array::U64(items) => widen(items),
            Array::I64(items) => widen(items),
            _ => None,
        }
    }
}

impl Value {
    /// The type, with the value if that is short, for error messages.
    fn describe(&self) -> String {
        match self {
            Value::U8(v) => format!("u8 {v}"),
            Value::I8(v) => format!("i8 {v}"),
            Value::U16(v) => format!("u16 {v}"),
            Value::I16(v) => format!("i16 {v}"),
            Value::U32(v) => format!("u32 {v}"),
            Value::I32(v) => format!("i32 {v}"),
            Value::F32(v) => format!("f32 {v}"),
            Value::Bool(v) => format!("bool {v}"),
            Value::String(v) if std::str::from_utf8(v).is_err() => {
                format!("a string of {} bytes that is not UTF-8", v.len())
            }
            Value::String(v) => format!("a string of {} bytes", v.len()),
            Value::Array(v) => format!("an array of {} x {}", v.len(), v.element_type()),
            Value::U64(v) => format!("u64 {v}"),
            Value::I64(v) => format!("i64 {v}"),
            Value::F64(v) => format!("f64 {v}"),
        }
    }

    /// The value as a wide integer; None if it is not an integer.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

/// Metadata in the order of the file, with lookup by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: IndexMap<String, Value>,
}

impl Metadata {
    /// No entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a key: in place if it is there already, else at the end.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) {
        self.entries.insert(key.into(), value);
    }

    /// Removes a key and preserves the order of the others.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.entries.shift_remove(key)
    }

    /// The value of a key as it is in the file.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// All entries in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// An integer of any width that fits u32; None if absent, an error if it is something else.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.read(key, "u32", |value| value.integer()?.try_into().ok())
    }

    /// An integer of any width that fits u64; None if absent, an error if it is something else.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "u64", |value| value.integer()?.try_into().ok())
    }

    /// An f32, or an f64 rounded to it; None if absent, an error if it is something else.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.read(key, "f32", |value| match *value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        })
    }

    /// A bool; None if absent, an error if it is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "bool", |value| match *value {
            Value::Bool(v) => Some(v),
            _ => None,
        })
    }

    /// A string; None if absent, an error if it is something else or not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "UTF-8 string", |value| match value {
            Value::String(v) => std::str::from_utf8(v).ok(),
            _ => None,
        })
    }

    /// An array of any integer type; a single integer reads as an array of one.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.read(key, "array of u32", |value| {
            let wide = match value {
                Value::Array(array) => array.integers()?,
                single => vec![single.integer()?],
            };
            wide.into_iter().map(|item| item.try_into().ok()).collect()
        })
    }

    /// An array of f32 or f64; a single float reads as an array of one.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.read(key, "array of f32", |value| match value {
            Value::F32(v) => Some(vec![*v]),
            Value::F64(v) => Some(vec![*v as f32]),
            Value::Array(Array::F32(items)) => Some(items.clone()),
            Value::Array(Array::F64(items)) => Some(items.iter().map(|&v| v as f32).collect()),
            _ => None,
        })
    }

    /// An array of bool; a single bool reads as an array of one.
    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.read(key, "array of bool", |value| match value {
            Value::Bool(v) => Some(vec![*v]),
            Value::Array(Array::Bool(items)) => Some(items.clone()),
            _ => None,
        })
    }

    /// An array of strings, as bytes; None if absent, an error if it is something else.
    pub fn strings(&self, key: &str) -> Result<Option<&[Box<[u8]>]>> {
        self.read(key, "array of string", |value| match value {
            Value::Array(Array::String(items)) => Some(items.as_slice()),
            _ => None,
        })
    }

    /// [`Metadata::u32`] where absence is an error.
    pub fn need_u32(&self, key: &str) -> Result<u32> {
        needed(key, "u32", self.u32(key)?)
    }

    /// [`Metadata::f32`] where absence is an error.
    pub fn need_f32(&self, key: &str) -> Result<f32> {
        needed(key, "f32", self.f32(key)?)
    }

    /// [`Metadata::str`] where absence is an error.
    pub fn need_str(&self, key: &str) -> Result<&str> {
        needed(key, "UTF-8 string", self.str(key)?)
    }

    /// `general.architecture`, the prefix of the keys that belong to the model's family.
    pub fn architecture(&self) -> Result<&str> {
        self.need_str("general.architecture")
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                Err(Error::WrongType { key: key.to_string(), expected, found: value.describe() })
            }
        }
    }
}

fn needed<T>(key: &str, expected: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::MissingKey { key: key.to_string(), expected })
}
