//! How a JSON schema is compiled, and bounds on it that are checked before. The compiler copies
//! what `$ref` names into each place where it is combined with other keywords, so that a small
//! schema can become an exponentially large one, and it follows references without a limit of
//! depth.

use llguidance::JsonCompileOptions;
use rustc_hash::FxHashMap;
use serde_json::{Map, Value, json};

/// White space between the tokens of JSON. Without an end, a model may write nothing else.
const WHITE_SPACE: &str = r"[ \t]{1,2}|\n[ \t]{0,64}";

/// The most nested schemas, references included.
pub(super) const MAX_DEPTH: usize = 400;
/// The most values of a schema in which the combined ones are copied.
pub(super) const MAX_SIZE: f64 = 200_000.0;
/// The most options of `oneOf`, and patterns of `patternProperties`: each is compared with all
/// others of its kind.
const MAX_OPTIONS: usize = 300;
const MAX_PATTERNS: usize = 50;

/// The most properties of an object: the time to compile them grows with their square.
const MAX_PROPERTIES: usize = 2000;

/// The most nested levels of all schemas that `$ref` names together. The compiler may follow one
/// from within the other in any order, so they bound its stack.
pub(super) const MAX_LEVELS: usize = 10_000;

/// The largest `multipleOf`, without its decimal point: its remainders are states of the lexer,
/// which are all found before the first token. Of those that may be combined it is the least
/// common multiple.
const MAX_MULTIPLE: u64 = 10_000;

/// Keywords whose values are schemas, arrays of them, or objects of them.
const NESTED: [&str; 6] = [
    "additionalItems",
    "additionalProperties",
    "items",
    "patternProperties",
    "prefixItems",
    "properties",
];

/// Checks that a schema can be compiled in bounded time, memory and stack. Returns its size.
pub(super) fn check(schema: &Value) -> Result<f64, String> {
    match schema {
        Value::Bool(true) => return Ok(1.0),
        Value::Object(_) => {}
        Value::Bool(false) => return Err("the schema false accepts nothing".to_owned()),
        _ => return Err("expected a JSON schema, which is an object".to_owned()),
    }
    let known = FxHashMap::default();
    let mut sizes = Sizes { root: schema, known, definitions: 0.0, levels: 0, multiple: 1 };
    let root = sizes.of(schema, false, 0)?;
    if root.levels + sizes.levels > MAX_LEVELS {
        return Err(format!(
            "the schemas that $ref names have more than {MAX_LEVELS} nested levels together"
        ));
    }
    let size = root.size + sizes.definitions;
    if size > MAX_SIZE {
        return Err(format!(
            "the schema is too large: with what $ref, allOf, anyOf and oneOf combine it has more \
             than {MAX_SIZE} values"
        ));
    }
    Ok(size)
}

/// A schema with the options that it is compiled with, which nobody else can set.
pub(super) fn prepared(schema: &Value) -> Result<Value, String> {
    check(schema)?;
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        schema => schema.clone(),
    };
    let options = JsonCompileOptions {
        whitespace_pattern: Some(WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok(schema)
}

/// What a schema becomes.
#[derive(Clone, Copy)]
struct Shape {
    /// The number of alternatives that it is a choice of.
    alternatives: f64,
    /// The values of all of them.
    size: f64,
    /// The nested levels, without those of references.
    levels: usize,
}

const SMALL: Shape = Shape { alternatives: 1.0, size: 1.0, levels: 1 };

struct Sizes<'a> {
    root: &'a Value,
    /// Schemas that `$ref` names: whether they are combined with others, and what they become.
    /// Those whose size is being computed refer to themselves, and are not copied into themselves.
    known: FxHashMap<(&'a str, bool), Shape>,
    /// The values of those that are not combined, which are compiled once.
    definitions: f64,
    /// The levels of all that `$ref` names.
    levels: usize,
    /// The least common multiple of those that may be combined.
    multiple: u64,
}

impl<'a> Sizes<'a> {
    /// `is_combined` says that other keywords apply to the same value.
    fn of(&mut self, schema: &'a Value, is_combined: bool, depth: usize) -> Result<Shape, String> {
        if depth > MAX_DEPTH {
            return Err(format!("the schema has more than {MAX_DEPTH} nested levels"));
        }
        let Value::Object(keywords) = schema else { return Ok(SMALL) };
        let own = OWN.iter().any(|keyword| keywords.contains_key(*keyword));
        let all_of = keywords.get("allOf").and_then(Value::as_array);
        let others = ["anyOf", "oneOf", "enum", "const", "$ref"];
        let factors = usize::from(own)
            + all_of.map_or(0, Vec::len)
            + others.iter().filter(|keyword| keywords.contains_key(**keyword)).count();
        let is_combined = is_combined || factors > 1;
        let depth = depth + 1;
        let mut shapes = Vec::with_capacity(factors);
        if own {
            shapes.push(self.own(keywords, is_combined, depth)?);
        }
        for schema in all_of.into_iter().flatten() {
            shapes.push(self.of(schema, is_combined, depth)?);
        }
        for keyword in ["anyOf", "oneOf"] {
            let Some(options) = keywords.get(keyword).and_then(Value::as_array) else { continue };
            if keyword == "oneOf" && options.len() > MAX_OPTIONS {
                return Err(format!("oneOf has more than {MAX_OPTIONS} options"));
            }
            let mut sum = Shape { alternatives: 0.0, size: 0.0, levels: 0 };
            for option in options {
                let shape = self.of(option, is_combined, depth)?;
                sum.alternatives += shape.alternatives;
                sum.size += shape.size;
                sum.levels = sum.levels.max(shape.levels);
            }
            shapes.push(sum);
        }
        if let Some(values) = keywords.get("enum").and_then(Value::as_array) {
            let alternatives = values.len() as f64;
            shapes.push(Shape { alternatives, size: count(values.iter()), ..SMALL });
        }
        if let Some(value) = keywords.get("const") {
            shapes.push(Shape { size: count([value].into_iter()), ..SMALL });
        }
        if let Some(Value::String(reference)) = keywords.get("$ref") {
            shapes.push(self.referenced(reference, is_combined, depth)?);
        }
        let alternatives = shapes.iter().map(|shape| shape.alternatives.max(1.0)).product::<f64>();
        let sum: f64 = shapes.iter().map(|shape| shape.size).sum();
        let copies = if shapes.len() > 1 { alternatives } else { 1.0 };
        let levels = 1 + shapes.iter().map(|shape| shape.levels).max().unwrap_or(0);
        Ok(Shape { alternatives, size: 1.0 + copies * sum, levels })
    }

    /// The keywords of a schema that say what a value of a type is.
    fn own(
        &mut self,
        keywords: &'a Map<String, Value>,
        is_combined: bool,
        depth: usize,
    ) -> Result<Shape, String> {
        let alternatives = match keywords.get("type") {
            Some(Value::Array(types)) => types.len() as f64,
            Some(_) => 1.0,
            // All that there are.
            None => 6.0,
        };
        let properties = keywords.get("properties").and_then(Value::as_object);
        if properties.is_some_and(|properties| properties.len() > MAX_PROPERTIES) {
            return Err(format!("an object has more than {MAX_PROPERTIES} properties"));
        }
        if let Some(multiple) = keywords.get("multipleOf").and_then(Value::as_f64) {
            self.add_multiple(multiple, is_combined)?;
        }
        let patterns = keywords.get("patternProperties").and_then(Value::as_object);
        if patterns.is_some_and(|patterns| patterns.len() > MAX_PATTERNS) {
            return Err(format!("patternProperties has more than {MAX_PATTERNS} patterns"));
        }
        let (mut size, mut levels) = (alternatives, 0);
        for keyword in NESTED {
            let mut add = |schema: &'a Value| -> Result<(), String> {
                let shape = self.of(schema, is_combined, depth)?;
                size += shape.size;
                levels = levels.max(shape.levels);
                Ok(())
            };
            match keywords.get(keyword) {
                None => {}
                Some(Value::Array(schemas)) => schemas.iter().try_for_each(add)?,
                Some(Value::Object(schemas))
                    if keyword.ends_with("roperties") && keyword != "additionalProperties" =>
                {
                    schemas.values().try_for_each(add)?;
                }
                Some(schema) => add(schema)?,
            }
        }
        Ok(Shape { alternatives, size, levels })
    }

    /// Checks a `multipleOf`, and adds it to those that may be combined.
    fn add_multiple(&mut self, multiple: f64, is_combined: bool) -> Result<(), String> {
        let whole = without_point(multiple).filter(|&whole| whole <= MAX_MULTIPLE);
        let Some(whole) = whole else {
            return Err(format!(
                "multipleOf {multiple:e} has too many digits: without a decimal point it may be at \
                 most {MAX_MULTIPLE}"
            ));
        };
        if !is_combined || whole == 0 {
            return Ok(());
        }
        self.multiple *= whole / greatest_common_divisor(self.multiple, whole);
        if self.multiple > MAX_MULTIPLE {
            return Err(format!(
                "multipleOf {multiple:e} and others that may be combined with it have a common \
                 multiple of more than {MAX_MULTIPLE}"
            ));
        }
        Ok(())
    }

    /// What `$ref` names. Errors about names that lead nowhere are the compiler's.
    fn referenced(
        &mut self,
        reference: &'a str,
        is_combined: bool,
        depth: usize,
    ) -> Result<Shape, String> {
        let key = (reference, is_combined);
        let shape = match self.known.get(&key) {
            Some(shape) => *shape,
            None => {
                self.known.insert(key, SMALL);
                let schema = self.find(reference);
                let shape = schema.map_or(Ok(SMALL), |it| self.of(it, is_combined, depth))?;
                self.known.insert(key, shape);
                self.definitions += shape.size;
                self.levels += shape.levels;
                shape
            }
        };
        Ok(if is_combined { Shape { levels: 1, ..shape } } else { SMALL })
    }

    fn find(&self, reference: &str) -> Option<&'a Value> {
        match reference.strip_prefix('#')? {
            "" | "/" => Some(self.root),
            pointer => self.root.pointer(pointer),
        }
    }
}

/// A number without its decimal point, as the compiler finds it: none for some whose binary
/// fraction is not exact, such as 0.07.
fn without_point(number: f64) -> Option<u64> {
    let (mut whole, mut digits) = (number.abs(), 0);
    while whole.fract() != 0.0 && digits < 9 {
        (whole, digits) = (whole * 10.0, digits + 1);
    }
    Some(whole as u64).filter(|_| whole.fract() == 0.0)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Keywords about values of a type.
const OWN: [&str; 21] = [
    "type",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// All values within these.
fn count<'a>(values: impl Iterator<Item = &'a Value>) -> f64 {
    values
        .map(|value| match value {
            Value::Array(values) => 1.0 + count(values.iter()),
            Value::Object(values) => 1.0 + count(values.values()),
            _ => 1.0,
        })
        .sum()
}
