//! Rows with a vector as record batches. The schema is made here alone, because stores compare it
//! to the last detail.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arrow_array::builder::StringBuilder;
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Float32Array, Int64Array, TimestampNanosecondArray,
};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, SchemaRef, TimeUnit};
use serde_json::Value;

use crate::columns::{ColumnBuilder, Columns, NumberedRow, Waiting, infer};
use crate::error::{Error, Result};

pub use arrow_array::RecordBatch;
pub use arrow_schema::Schema;

/// What identifies a row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Id {
    /// A number, as a store can search for.
    Number(i64),
    /// Any text.
    Text(String),
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Id::Number(id) => write!(f, "{id}"),
            Id::Text(id) => write!(f, "{id:?}"),
        }
    }
}

/// A text with its vector.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Its number among all rows, from 0; its id unless the caller gives one in the column `id`.
    pub number: u64,
    /// What was embedded.
    pub text: &'a str,
    /// Other columns of the caller.
    pub columns: Columns<'a>,
    /// `[dimension]`
    pub vector: &'a [f32],
}

/// The id of a row.
///
/// # Errors
/// If the caller's is neither an integer nor text.
pub(crate) fn id_of(number: u64, columns: Columns<'_>) -> Result<Id> {
    let wrong = |found: &Value| Error::Row {
        row: number + 1,
        reason: format!("`id`: expected an integer or a text, found {found}"),
    };
    match columns.id() {
        None => Ok(Id::Number(number as i64)),
        Some(Value::String(text)) => Ok(Id::Text(text.clone())),
        Some(value) => value.as_i64().map(Id::Number).ok_or_else(|| wrong(value)),
    }
}

/// Ids of one type.
enum Ids {
    Numbers(Vec<i64>),
    Texts(StringBuilder),
}

/// Collects rows and makes record batches of them: `id`, `vector`, `text`, then `timestamp` if
/// asked for and the caller has none, then the caller's columns. A vector is copied once.
pub struct BatchBuilder {
    schema: Option<SchemaRef>,
    with_time: bool,
    dimension: usize,
    ids: Ids,
    vectors: Vec<f32>,
    texts: StringBuilder,
    columns: Vec<NumberedRow>,
    column_bytes: usize,
    column_builder: ColumnBuilder,
    rows: usize,
}

impl BatchBuilder {
    /// For vectors of a length; `with_time` adds the column `timestamp`.
    pub fn new(dimension: usize, with_time: bool) -> BatchBuilder {
        BatchBuilder {
            schema: None,
            with_time,
            dimension,
            ids: Ids::Numbers(Vec::new()),
            vectors: Vec::new(),
            texts: StringBuilder::new(),
            columns: Vec::new(),
            column_bytes: 0,
            column_builder: ColumnBuilder::default(),
            rows: 0,
        }
    }

    /// For batches that follow those of a schema which another builder made.
    pub fn with_schema(mut self, schema: SchemaRef) -> BatchBuilder {
        self.schema = Some(schema);
        self
    }

    /// Rows since the last batch.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of the rows since the last batch, nearly.
    pub fn bytes(&self) -> usize {
        let vectors = size_of_val(self.vectors.as_slice());
        vectors + self.texts.values_slice().len() + self.column_bytes
    }

    /// Adds a row.
    ///
    /// # Errors
    /// If its vector has another length or its id another type than those before.
    pub fn push(&mut self, row: Row<'_>) -> Result<()> {
        let wrong = |reason: String| Error::Row { row: row.number + 1, reason };
        if row.vector.len() != self.dimension {
            let (expected, found) = (self.dimension, row.vector.len());
            return Err(wrong(format!("expected a vector of {expected}, found {found}")));
        }
        if let Some(name) = ["vector", "text"].iter().find(|name| row.columns.has(name)) {
            return Err(wrong(format!("the column `{name}` is made here: rename the caller's")));
        }
        let id = id_of(row.number, row.columns)?;
        if self.rows == 0 {
            let are_numbers = match &self.schema {
                Some(schema) => schema.field(0).data_type() == &DataType::Int64,
                None => matches!(id, Id::Number(_)),
            };
            self.ids = match are_numbers {
                true => Ids::Numbers(Vec::new()),
                false => Ids::Texts(StringBuilder::new()),
            };
        }
        match (&mut self.ids, id) {
            (Ids::Numbers(ids), Id::Number(id)) => ids.push(id),
            (Ids::Texts(ids), Id::Text(id)) => ids.append_value(id),
            (_, id) => {
                return Err(wrong(format!("`id`: expected the type of the first, found {id:?}")));
            }
        }
        self.vectors.extend_from_slice(row.vector);
        self.texts.append_value(row.text);
        let columns = Waiting::of(row.columns);
        self.column_bytes += columns.bytes();
        self.columns.push((row.number, columns));
        self.rows += 1;
        Ok(())
    }

    /// The rows since the last batch.
    ///
    /// # Errors
    /// If a column has another type than in the first batch, or is new.
    pub fn finish(&mut self) -> Result<RecordBatch> {
        let rows = std::mem::take(&mut self.rows);
        self.column_bytes = 0;
        let schema = match &self.schema {
            Some(schema) => Arc::clone(schema),
            None => self.infer()?,
        };
        let ids: ArrayRef = match &mut self.ids {
            Ids::Numbers(ids) => Arc::new(Int64Array::from(std::mem::take(ids))),
            Ids::Texts(ids) => Arc::new(ids.finish()),
        };
        let capacity = self.vectors.len();
        let vectors = std::mem::replace(&mut self.vectors, Vec::with_capacity(capacity));
        let vectors = Arc::new(Float32Array::from(vectors));
        let (item, size) = vector_item(self.dimension)?;
        let vectors = FixedSizeListArray::try_new(item, size, vectors, None)?;
        let mut arrays: Vec<ArrayRef> = vec![ids, Arc::new(vectors), Arc::new(self.texts.finish())];
        if schema.fields().get(3).is_some_and(|field| is_own_time(field)) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
            arrays.push(Arc::new(TimestampNanosecondArray::from(vec![now; rows])));
        }
        let columns = std::mem::take(&mut self.columns);
        let given = self.column_builder.arrays(&schema.fields()[arrays.len()..], columns)?;
        arrays.extend(given);
        Ok(RecordBatch::try_new(schema, arrays)?)
    }

    /// The schema of the rows at hand.
    fn infer(&mut self) -> Result<SchemaRef> {
        let given = infer(&self.columns)?;
        let id = match self.ids {
            Ids::Numbers(_) => DataType::Int64,
            Ids::Texts(_) => DataType::Utf8,
        };
        let has_time = given.iter().any(|field| field.name() == "timestamp");
        let mut fields = fields(id, self.dimension)?;
        if self.with_time && !has_time {
            let kind = DataType::Timestamp(TimeUnit::Nanosecond, None);
            fields.push(Arc::new(Field::new("timestamp", kind, false)));
        }
        fields.extend(given);
        let schema = Arc::new(Schema::new(fields));
        self.schema = Some(Arc::clone(&schema));
        Ok(schema)
    }
}

/// Whether a field is the time that a builder adds.
fn is_own_time(field: &Field) -> bool {
    field.name() == "timestamp" && !field.is_nullable()
}

fn fields(id: DataType, dimension: usize) -> Result<Vec<FieldRef>> {
    let (item, size) = vector_item(dimension)?;
    let fields = [
        Field::new("id", id, false),
        Field::new("vector", DataType::FixedSizeList(item, size), false),
        Field::new("text", DataType::Utf8, false),
    ];
    Ok(fields.map(Arc::new).into())
}

/// The items of a vector, with the name and the null flag that every Arrow library uses by default.
fn vector_item(dimension: usize) -> Result<(FieldRef, i32)> {
    let size = i32::try_from(dimension)
        .map_err(|_| ArrowError::InvalidArgumentError(format!("{dimension} dimensions")))?;
    Ok((Arc::new(Field::new("item", DataType::Float32, true)), size))
}

/// The schema of vectors behind the fields of their texts.
///
/// # Errors
/// If no list can be that long.
pub(crate) fn schema_with_vectors(texts: &Schema, dimension: usize) -> Result<SchemaRef> {
    let (item, size) = vector_item(dimension)?;
    let mut fields: Vec<FieldRef> = texts.fields().iter().cloned().collect();
    fields.retain(|field| field.name() != "vector");
    fields.push(Arc::new(Field::new("vector", DataType::FixedSizeList(item, size), false)));
    Ok(Arc::new(Schema::new(fields)))
}

/// A batch of texts with their vectors behind its columns.
///
/// # Errors
/// If there is another number of vectors, or one has another length.
pub(crate) fn with_vectors(
    texts: &RecordBatch,
    vectors: &[Vec<f32>],
    dimension: usize,
) -> Result<RecordBatch> {
    let schema = schema_with_vectors(&texts.schema(), dimension)?;
    let (item, size) = vector_item(dimension)?;
    let values = Arc::new(Float32Array::from(vectors.concat()));
    let names = texts.schema();
    let kept = names.fields().iter().zip(texts.columns());
    let kept = kept.filter(|(field, _)| field.name() != "vector");
    let mut arrays: Vec<ArrayRef> = kept.map(|(_, column)| Arc::clone(column)).collect();
    arrays.push(Arc::new(FixedSizeListArray::try_new(item, size, values, None)?));
    Ok(RecordBatch::try_new(schema, arrays)?)
}

/// The length of the vectors of a schema, if it has any.
pub(crate) fn dimension_of(schema: &Schema) -> Option<usize> {
    match schema.field_with_name("vector").ok()?.data_type() {
        DataType::FixedSizeList(_, size) => usize::try_from(*size).ok(),
        _ => None,
    }
}

/// The vector of a row.
pub(crate) fn vector_at(batch: &RecordBatch, row: usize) -> Option<Vec<f32>> {
    let list = batch.column_by_name("vector")?.as_any().downcast_ref::<FixedSizeListArray>()?;
    let values = list.value(row);
    Some(values.as_any().downcast_ref::<Float32Array>()?.values().to_vec())
}
