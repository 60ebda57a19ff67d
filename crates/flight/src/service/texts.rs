//! The texts of a batch, and the memory that a part of it takes.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use tonic::Status;

use crate::columns::holds_text;
use crate::error::Error;

/// The place of the only column `text`, which holds strings.
pub(super) fn text_column(schema: &Schema) -> Result<usize, Status> {
    let wrong = |message: &str| Status::invalid_argument(message);
    let named = |(_, field): &(usize, &Arc<Field>)| field.name() == "text";
    let mut columns = schema.fields().iter().enumerate().filter(named);
    let (column, field) = columns.next().ok_or_else(|| wrong("expected a column `text`"))?;
    if columns.next().is_some() {
        return Err(wrong("expected one column `text`, found several"));
    }
    match field.data_type() {
        kind if holds_text(kind) => Ok(column),
        kind => Err(wrong(&format!("column `text`: expected strings, found {kind}"))),
    }
}

/// The column `text` of a batch, whose texts have at most `limit` bytes. Rows may share the bytes
/// of one string, so that they have many times those of the message.
pub(super) fn texts_of(batch: &RecordBatch, limit: usize) -> Result<Vec<String>, Status> {
    let column = batch.column(text_column(batch.schema_ref())?);
    let texts = strings(column.as_ref());
    check_bytes(texts.iter().flatten().map(|text| text.len()), limit)?;
    let full = texts.into_iter().enumerate().map(|(i, text)| match text {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => {
            Err(Status::invalid_argument(format!("row {} of the batch: the text is empty", i + 1)))
        }
    });
    full.collect()
}

fn check_bytes(lens: impl Iterator<Item = usize>, limit: usize) -> Result<(), Status> {
    let bytes = lens.fold(0, usize::saturating_add);
    if bytes <= limit {
        return Ok(());
    }
    let message = format!("a column has {bytes} bytes in at most 1024 rows, {limit} are allowed");
    Err(Status::invalid_argument(message))
}

/// The string of each row of a column that holds text.
fn strings(column: &dyn Array) -> Vec<Option<&str>> {
    match column.data_type() {
        DataType::LargeUtf8 => column.as_string::<i64>().iter().collect(),
        DataType::Utf8View => column.as_string_view().iter().collect(),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let values = strings(dictionary.values().as_ref());
            if values.is_empty() {
                return vec![None; dictionary.len()];
            }
            let keys = dictionary.normalized_keys().into_iter().enumerate();
            let is_null = |row: usize| dictionary.keys().is_null(row);
            keys.map(|(row, key)| values[key].filter(|_| !is_null(row))).collect()
        }
        _ => column.as_string::<i32>().iter().collect(),
    }
}

/// The batch with views of its own rows alone: those of a part hold, and are sent with, all bytes
/// of the whole.
///
/// # Errors
/// If the rows of a column have more bytes than `limit`.
pub(super) fn with_own_views(batch: &RecordBatch, limit: usize) -> Result<RecordBatch, Status> {
    let column = |column: &ArrayRef| -> Result<ArrayRef, Status> {
        let own: ArrayRef = match column.data_type() {
            DataType::Utf8View => {
                let views = column.as_string_view();
                check_bytes(views.iter().flatten().map(str::len), limit)?;
                Arc::new(views.gc())
            }
            DataType::BinaryView => {
                let views = column.as_binary_view();
                check_bytes(views.iter().flatten().map(<[u8]>::len), limit)?;
                Arc::new(views.gc())
            }
            _ => Arc::clone(column),
        };
        Ok(own)
    };
    let columns = batch.columns().iter().map(column).collect::<Result<Vec<_>, _>>()?;
    let own = RecordBatch::try_new(batch.schema(), columns);
    own.map_err(|error| Status::invalid_argument(Error::from(error).to_string()))
}

#[cfg(test)]
mod tests {
    use arrow_array::types::Int32Type;
    use arrow_array::{DictionaryArray, StringArray, StringViewArray};

    use super::*;

    fn batch(column: ArrayRef) -> RecordBatch {
        let schema = Schema::new(vec![Field::new("text", column.data_type().clone(), true)]);
        RecordBatch::try_new(Arc::new(schema), vec![column]).unwrap()
    }

    #[test]
    fn strings_of_all_types_are_the_same() {
        let words = ["a hen", "two hens", "a hen"];
        let dictionary: DictionaryArray<Int32Type> = words.into_iter().collect();
        let columns: [ArrayRef; 3] = [
            Arc::new(StringArray::from(words.to_vec())),
            Arc::new(StringViewArray::from(words.to_vec())),
            Arc::new(dictionary),
        ];
        for column in columns {
            assert_eq!(texts_of(&batch(column), 100).unwrap(), words);
        }
        let none: DictionaryArray<Int32Type> = [None::<&str>, None].into_iter().collect();
        let error = texts_of(&batch(Arc::new(none)), 100).unwrap_err();
        assert_eq!(error.message(), "row 1 of the batch: the text is empty");
    }

    #[test]
    fn rows_that_share_a_string_are_bounded() {
        let long = "h".repeat(1000);
        let shared: DictionaryArray<Int32Type> = (0..1024).map(|_| long.as_str()).collect();
        let error = texts_of(&batch(Arc::new(shared)), 100_000).unwrap_err();
        assert!(error.message().contains("1024000 bytes"), "{}", error.message());
        let views = StringViewArray::from(vec![long.as_str(); 300]);
        assert!(with_own_views(&batch(Arc::new(views.clone())), 100_000).is_err());
        let part = batch(Arc::new(views.slice(0, 10)));
        let own = with_own_views(&part, 100_000).unwrap();
        assert_eq!(own, part);
        assert!(own.get_array_memory_size() < 20_000, "{}", own.get_array_memory_size());
    }
}
