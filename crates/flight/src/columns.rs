//! The caller's columns: those of JSON objects, whose types are guessed from the first rows, and
//! those of Parquet files, which keep their types and values.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array, new_null_array};
use arrow_json::reader::{Decoder, infer_json_schema_from_iterator};
use arrow_json::{LineDelimitedWriter, ReaderBuilder};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema};
use arrow_select::concat::concat;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// What to do about a row that does not fit the first ones.
const REMEDY: &str = "the first rows decide on columns and types: let a row with values in all \
                      columns be the first, or use Parquet, which has types of its own";

/// Whether a column of this type has strings.
pub(crate) fn holds_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => holds_text(values),
        _ => false,
    }
}

/// The columns of a row besides its text.
#[derive(Clone, Copy, Debug)]
pub enum Columns<'a> {
    /// There are none.
    None,
    /// Those of an object.
    Json(&'a Map<String, Value>),
    /// Those of a Parquet file.
    Stored(&'a StoredRow),
}

impl Columns<'_> {
    /// The value of the column `id`, if there is such a column.
    pub(crate) fn id(&self) -> Option<&Value> {
        match self {
            Columns::None => None,
            Columns::Json(columns) => columns.get("id"),
            Columns::Stored(row) => row.batch.ids.as_ref()?.get(row.row),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        match self {
            Columns::None => false,
            Columns::Json(columns) => columns.contains_key(name),
            Columns::Stored(row) => row.batch.columns.column_by_name(name).is_some(),
        }
    }
}

/// A row of a Parquet file, without its text.
#[derive(Clone, Debug)]
pub struct StoredRow {
    pub(crate) batch: Arc<StoredBatch>,
    pub(crate) row: usize,
}

/// Rows that were read together.
#[derive(Debug)]
pub(crate) struct StoredBatch {
    /// All but the text.
    pub(crate) columns: RecordBatch,
    /// The value of the column `id` of each row, null where there is none; None without the column.
    pub(crate) ids: Option<Vec<Value>>,
}

impl StoredRow {
    /// The columns as a JSON object. Values that JSON does not have become null, others text.
    ///
    /// # Errors
    /// If a column has no form in JSON.
    pub fn to_json(&self) -> Result<Map<String, Value>> {
        let row = objects(&self.batch.columns.slice(self.row, 1))?.pop();
        Ok(row.unwrap_or_default())
    }

    /// The names of the columns.
    pub fn names(&self) -> Vec<&str> {
        let fields = self.batch.columns.schema_ref().fields();
        fields.iter().map(|field| field.name().as_str()).collect()
    }

    /// Bytes of memory that it takes, nearly.
    pub fn bytes(&self) -> usize {
        self.batch.columns.get_array_memory_size() / self.batch.columns.num_rows().max(1)
    }
}

/// The rows of a batch as JSON objects; null values are absent.
///
/// # Errors
/// If a column has no form in JSON.
pub(crate) fn objects(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>> {
    let mut writer = LineDelimitedWriter::new(Vec::new());
    writer.write(&in_utc(batch)?)?;
    writer.finish()?;
    let text = writer.into_inner();
    let rows = serde_json::Deserializer::from_slice(&text).into_iter();
    let rows: std::result::Result<Vec<_>, _> = rows.collect();
    rows.map_err(|error| Error::Arrow(ArrowError::JsonError(error.to_string())))
}

/// A batch whose times are in UTC where they are in a zone with a name, which the writer of JSON
/// does not know.
fn in_utc(batch: &RecordBatch) -> Result<RecordBatch> {
    let schema = batch.schema();
    let (mut fields, mut arrays) = (Vec::new(), Vec::new());
    for (field, array) in schema.fields().iter().zip(batch.columns()) {
        let (field, array) = match field.data_type() {
            DataType::Timestamp(unit, Some(zone)) if !zone.starts_with(['+', '-']) => {
                let kind = DataType::Timestamp(*unit, Some("+00:00".into()));
                let data = array.to_data().into_builder().data_type(kind.clone()).build()?;
                (Arc::new(field.as_ref().clone().with_data_type(kind)), make_array(data))
            }
            _ => (Arc::clone(field), Arc::clone(array)),
        };
        fields.push(field);
        arrays.push(array);
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), arrays, &options)?)
}

/// The columns of a row that waits for its batch.
pub(crate) enum Waiting {
    Json(Map<String, Value>),
    Stored(StoredRow),
}

impl Waiting {
    /// Without the id, which has an array of its own.
    pub(crate) fn of(columns: Columns<'_>) -> Waiting {
        match columns {
            Columns::None => Waiting::Json(Map::new()),
            Columns::Json(columns) => {
                let mut columns = columns.clone();
                columns.shift_remove("id");
                Waiting::Json(columns)
            }
            Columns::Stored(row) => Waiting::Stored(row.clone()),
        }
    }

    /// The bytes of its values, nearly.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Waiting::Json(columns) => {
                columns.values().filter_map(Value::as_str).map(str::len).sum()
            }
            Waiting::Stored(row) => row.bytes(),
        }
    }

    /// Whether a batch has both rows one after the other, or both are JSON.
    fn goes_on_with(&self, next: &Waiting) -> bool {
        match (self, next) {
            (Waiting::Json(_), Waiting::Json(_)) => true,
            (Waiting::Stored(a), Waiting::Stored(b)) => {
                Arc::ptr_eq(&a.batch, &b.batch) && a.row + 1 == b.row
            }
            _ => false,
        }
    }
}

/// A row's number, and its columns.
pub(crate) type NumberedRow = (u64, Waiting);

/// The fields of the first rows: those of the Parquet file if any of them is of one, or else what
/// the values of all look like.
pub(crate) fn infer(rows: &[NumberedRow]) -> Result<Vec<FieldRef>> {
    let stored = rows.iter().find_map(|(_, columns)| match columns {
        Waiting::Stored(row) => Some(row),
        Waiting::Json(_) => None,
    });
    if let Some(row) = stored {
        let schema = row.batch.columns.schema();
        let fields = schema.fields().iter().filter(|field| field.name() != "id");
        // Rows of another source may have no value.
        return Ok(fields
            .map(|field| Arc::new(field.as_ref().clone().with_nullable(true)))
            .collect());
    }
    let values = rows.iter().map(|(_, columns)| match columns {
        Waiting::Json(columns) => Ok::<_, ArrowError>(Value::Object(columns.clone())),
        Waiting::Stored(_) => Ok(Value::Object(Map::new())),
    });
    let schema = infer_json_schema_from_iterator(values)?;
    let fields = schema.fields().iter().map(|field| match field.data_type() {
        // All values are null.
        DataType::Null => Arc::new(Field::new(field.name(), DataType::Utf8, true)),
        _ => Arc::clone(field),
    });
    Ok(fields.collect())
}

/// Makes arrays of the caller's columns.
#[derive(Default)]
pub(crate) struct ColumnBuilder {
    /// Of JSON; made when it is needed.
    decoder: Option<Decoder>,
}

impl ColumnBuilder {
    /// The arrays of these fields.
    ///
    /// # Errors
    /// If a row has another column, or a value of another type.
    pub(crate) fn arrays(
        &mut self,
        fields: &[FieldRef],
        rows: Vec<NumberedRow>,
    ) -> Result<Vec<ArrayRef>> {
        let mut parts: Vec<Vec<ArrayRef>> = vec![Vec::new(); fields.len()];
        for run in rows.chunk_by(|(_, a), (_, b)| a.goes_on_with(b)) {
            let arrays = match &run[0] {
                (number, Waiting::Stored(row)) => stored(fields, *number, row, run.len())?,
                (_, Waiting::Json(_)) => self.decode(fields, run)?,
            };
            parts.iter_mut().zip(arrays).for_each(|(part, array)| part.push(array));
        }
        let whole = parts.into_iter().map(|mut parts| match parts.len() {
            1 => Ok(parts.remove(0)),
            _ => {
                let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
                Ok(concat(&parts)?)
            }
        });
        whole.collect()
    }

    /// The arrays of objects.
    fn decode(&mut self, fields: &[FieldRef], run: &[NumberedRow]) -> Result<Vec<ArrayRef>> {
        let mut objects = Vec::with_capacity(run.len());
        for (number, columns) in run {
            let Waiting::Json(columns) = columns else { continue };
            check_object(columns, fields).map_err(|reason| Error::Row {
                row: number + 1,
                reason: format!("{reason}: {REMEDY}"),
            })?;
            objects.push(columns);
        }
        // The decoder does not know all types that Parquet files have.
        if objects.iter().all(|columns| columns.is_empty()) {
            let null = |field: &FieldRef| new_null_array(field.data_type(), run.len());
            return Ok(fields.iter().map(null).collect());
        }
        let (first, rows) = (run[0].0 + 1, run.len());
        let of_rows = |error: ArrowError| Error::Row {
            row: first,
            reason: format!("or one of the {rows} from it on: {error}"),
        };
        if self.decoder.is_none() {
            let schema = Arc::new(Schema::new(fields.to_vec()));
            // Without the strict mode an unexpected column would be left out without a word.
            let decoder = ReaderBuilder::new(schema).with_strict_mode(true).build_decoder()?;
            self.decoder = Some(decoder);
        }
        let Some(decoder) = &mut self.decoder else { return Ok(Vec::new()) };
        decoder.serialize(&objects).map_err(of_rows)?;
        let batch = decoder.flush().map_err(of_rows)?;
        Ok(batch.iter().flat_map(|batch| batch.columns().iter().cloned()).collect())
    }
}

/// The arrays of rows of a Parquet file that follow one another.
fn stored(fields: &[FieldRef], number: u64, row: &StoredRow, rows: usize) -> Result<Vec<ArrayRef>> {
    let columns = &row.batch.columns;
    let wrong = |reason: String| Error::Row { row: number + 1, reason };
    let schema = columns.schema();
    let is_new = |field: &&FieldRef| {
        field.name() != "id" && fields.iter().all(|known| known.name() != field.name())
    };
    if let Some(field) = schema.fields().iter().find(is_new) {
        let reason = format!("the column `{}` is not in the rows before: {REMEDY}", field.name());
        return Err(wrong(reason));
    }
    let array = |field: &FieldRef| match columns.column_by_name(field.name()) {
        None => Ok(new_null_array(field.data_type(), rows)),
        Some(array) if array.data_type() == field.data_type() => Ok(array.slice(row.row, rows)),
        Some(array) => Err(wrong(format!(
            "`{}`: expected {}, as in the rows before, found {}",
            field.name(),
            field.data_type(),
            array.data_type()
        ))),
    };
    fields.iter().map(array).collect()
}

/// Whether an object has only these fields, each with a value of its type.
fn check_object(object: &Map<String, Value>, fields: &[FieldRef]) -> Result<(), String> {
    for (name, value) in object {
        let Some(field) = fields.iter().find(|field| field.name() == name) else {
            return Err(format!("the column `{name}` is not in the first rows"));
        };
        check(value, field.data_type()).map_err(|reason| format!("`{name}`: {reason}"))?;
    }
    Ok(())
}

/// Whether a column of this type holds the value as it is: the decoder would cut a number that has
/// a fraction or too many digits.
fn check(value: &Value, kind: &DataType) -> Result<(), String> {
    let expected = |what: &str| {
        let found: String = value.to_string().chars().take(40).collect();
        Err(format!("expected {what}, found {found}"))
    };
    match (kind, value) {
        (_, Value::Null) => Ok(()),
        (DataType::Int64, value) if value.as_i64().is_none() => expected("an integer of 64 bits"),
        (DataType::Float64, Value::Number(number)) => {
            let integer = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
            match integer.is_none_or(|integer| (integer as f64) as i128 == integer) {
                true => Ok(()),
                false => expected("a number that 64 bits of a float hold"),
            }
        }
        (DataType::Float64, _) => expected("a number"),
        (DataType::Boolean, value) if !value.is_boolean() => expected("true or false"),
        (DataType::Utf8, value) if !value.is_string() => expected("a text"),
        (DataType::List(item), Value::Array(values)) => {
            values.iter().try_for_each(|value| check(value, item.data_type()))
        }
        (DataType::List(_), _) => expected("a list"),
        (DataType::Struct(fields), Value::Object(object)) => check_object(object, fields),
        (DataType::Struct(_), _) => expected("an object"),
        // The decoder refuses what is wrong for the others.
        _ => Ok(()),
    }
}
