//! Asking a store for the rows nearest to a vector.

use arrow_array::{Float32Array, UInt64Array};
use arrow_ipc::reader::StreamReader;
use arrow_schema::DataType;
use serde_json::{Map, Value, json};

use super::connection::{Address, Store, runtime, with_id};
use crate::batch::Id;
use crate::columns::objects;
use crate::error::{Error, Result};

/// A row that was found.
#[derive(Clone, Debug)]
pub struct Hit {
    /// Its id as the store's index has it.
    pub id: u64,
    /// Higher is nearer.
    pub score: f32,
    /// Its columns but the vector.
    pub columns: Map<String, Value>,
}

/// The `count` rows of a dataset nearest to a vector, best first.
///
/// # Errors
/// If the store cannot be reached, has no such dataset, or holds vectors of another length or ids
/// that are no integers.
pub fn search(address: &Address, dataset: &str, vector: &[f32], count: usize) -> Result<Vec<Hit>> {
    runtime()?.block_on(async {
        let store = Store::connect(address).await?;
        let wrong = |reason| Error::Store { address: address.data.clone(), reason };
        // For other ids the store returns row numbers, which would name other rows.
        let schema = store.schema(dataset).await?;
        let id = schema.as_ref().and_then(|schema| schema.field_with_name("id").ok());
        if let Some(id) =
            id.filter(|id| !matches!(id.data_type(), DataType::Int64 | DataType::UInt64))
        {
            return Err(wrong(format!(
                "dataset `{dataset}` cannot be searched: expected integers as ids, found {}",
                id.data_type()
            )));
        }
        let question = json!({
            "dataset": dataset, "vector": vector, "k": count, "local_only": true,
        });
        let bytes = store.action(&store.data, "VectorSearch", &question).await?;
        let mut hits = hits(&bytes).map_err(|error| {
            wrong(format!("VectorSearch: expected an Arrow stream of ids and scores: {error}"))
        })?;
        // Stores differ in the order that they return.
        hits.sort_by(|a, b| b.score.total_cmp(&a.score));
        hits.truncate(count);
        for hit in &mut hits {
            let filter = with_id(&Id::Number(hit.id as i64));
            store
                .fetch(dataset, filter, |batch| {
                    let names = batch.schema();
                    let kept = names.fields().iter().enumerate();
                    let kept = kept.filter(|(_, field)| field.name() != "vector");
                    let kept: Vec<usize> = kept.map(|(i, _)| i).collect();
                    // The newest row of an id is the last.
                    hit.columns.extend(objects(&batch.project(&kept)?)?.pop().unwrap_or_default());
                    Ok(())
                })
                .await?;
            if hit.columns.is_empty() {
                return Err(wrong(format!(
                    "VectorSearch found id {} in `{dataset}`, which has no row of it",
                    hit.id
                )));
            }
        }
        Ok(hits)
    })
}

fn hits(bytes: &[u8]) -> Result<Vec<Hit>> {
    let mut hits = Vec::new();
    for batch in StreamReader::try_new(bytes, None)? {
        let batch = batch?;
        let column = |name: &str| batch.column_by_name(name).map(|column| column.as_any());
        let ids = column("id").and_then(|column| column.downcast_ref::<UInt64Array>());
        let scores = column("score").and_then(|column| column.downcast_ref::<Float32Array>());
        let (Some(ids), Some(scores)) = (ids, scores) else {
            let found = arrow_schema::ArrowError::SchemaError(batch.schema().to_string());
            return Err(found.into());
        };
        let rows = ids.values().iter().zip(scores.values());
        hits.extend(rows.map(|(&id, &score)| Hit { id, score, columns: Map::new() }));
    }
    Ok(hits)
}
