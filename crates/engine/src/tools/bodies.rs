//! What the calls of a form are made of.

/// What a call is.
#[derive(Debug, PartialEq)]
pub(crate) enum Body {
    /// A JSON object with a name and arguments, or an array of them.
    Objects,
    /// The name, and the arguments behind it.
    Named(Arguments),
}

/// How arguments are written behind a name.
#[derive(Debug, PartialEq)]
pub(crate) enum Arguments {
    /// A JSON object.
    Json,
    /// A pair of tags for each: strings as they are, others as JSON.
    Tagged(Tags),
    /// As Gemma 4 does: an object whose keys have no quotes and whose strings have quotes of their
    /// own.
    Gemma,
    /// As Python does: `key=value, key=value`.
    Python,
}

/// The texts around the key and the value of an argument.
#[derive(Debug, PartialEq)]
pub(crate) struct Tags {
    /// Before the key.
    pub(crate) open: &'static str,
    /// Behind the key, where its name ends.
    pub(crate) key_end: &'static str,
    /// Between `key_end` and a value that is a string, or one that is not.
    pub(crate) value: [&'static str; 2],
    /// Behind the value.
    pub(crate) close: &'static str,
}
