//! Typed reads of `config.json`. It must not know what a key means.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The keys of a model's configuration.
pub(crate) struct Config {
    /// The file, for errors.
    shown: String,
    keys: Map<String, Value>,
}

impl Config {
    /// The keys of `config.json`, with those of a text model inside it before its own.
    pub(crate) fn new(shown: String, value: Value) -> Result<Config> {
        let Value::Object(mut keys) = value else {
            return Err(Error::invalid(shown, "an object", "another value"));
        };
        if let Some(Value::Object(text)) = keys.remove("text_config") {
            let architectures = keys.get("architectures").cloned();
            keys.extend(text);
            keys.extend(architectures.map(|value| ("architectures".to_owned(), value)));
        }
        Ok(Config { shown, keys })
    }

    /// The value of the first of these keys that is there and is not null.
    pub(crate) fn get(&self, names: &[&str]) -> Option<&Value> {
        names.iter().filter_map(|name| self.keys.get(*name)).find(|value| !value.is_null())
    }

    /// Sets keys that are missing.
    pub(crate) fn set_defaults(&mut self, defaults: &[(&str, Value)]) {
        for (name, value) in defaults {
            if self.get(&[name]).is_none() {
                self.keys.insert((*name).to_owned(), value.clone());
            }
        }
    }

    /// Sets a key.
    pub(crate) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.keys.insert(name.to_owned(), value.into());
    }

    /// An integer.
    pub(crate) fn u32(&self, names: &[&str]) -> Result<Option<u32>> {
        self.typed(names, "an integer of 32 bits", |value| value.as_u64()?.try_into().ok())
    }

    /// [`Config::u32`] where absence is an error.
    pub(crate) fn need_u32(&self, names: &[&str]) -> Result<u32> {
        self.u32(names)?.ok_or_else(|| self.invalid(names[0], "an integer", "none"))
    }

    /// [`Config::need_u32`], but not zero.
    pub(crate) fn need_count(&self, names: &[&str]) -> Result<u32> {
        match self.need_u32(names)? {
            0 => Err(self.invalid(names[0], "a positive integer", "0")),
            count => Ok(count),
        }
    }

    /// A number.
    pub(crate) fn f64(&self, names: &[&str]) -> Result<Option<f64>> {
        self.typed(names, "a number", Value::as_f64)
    }

    /// A string.
    pub(crate) fn str(&self, names: &[&str]) -> Result<Option<&str>> {
        self.typed(names, "a string", Value::as_str)
    }

    /// The first of the model's classes.
    pub(crate) fn class(&self) -> Result<&str> {
        let classes = self.get(&["architectures"]);
        let first = classes.and_then(|classes| classes.get(0)?.as_str());
        first.ok_or_else(|| self.invalid("architectures", "the name of a class", "none"))
    }

    /// Fails if a key is there with a value that is none of these.
    pub(crate) fn expect(&self, name: &str, values: &[Value]) -> Result<()> {
        match self.get(&[name]).filter(|found| !values.contains(found)) {
            None => Ok(()),
            Some(found) => {
                let known: Vec<String> = values.iter().map(Value::to_string).collect();
                let found: String = found.to_string().chars().take(40).collect();
                Err(self.invalid(name, &known.join(" or "), &found))
            }
        }
    }

    /// Builds an error about a key.
    pub(crate) fn invalid(&self, name: &str, expected: &str, found: &str) -> Error {
        Error::invalid(format!("{}: {name}", self.shown), expected, found)
    }

    fn typed<'a, T>(
        &'a self,
        names: &[&str],
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(names) else { return Ok(None) };
        let name = names.iter().find(|name| self.get(&[name]).is_some()).unwrap_or(&names[0]);
        let found = || value.to_string().chars().take(40).collect::<String>();
        convert(value).map(Some).ok_or_else(|| self.invalid(name, expected, &found()))
    }
}
