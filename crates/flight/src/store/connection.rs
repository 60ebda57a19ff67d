//! The calls that a store answers.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use arrow_array::{Array, Int64Array, RecordBatch, StringArray, UInt64Array};
use arrow_flight::decode::DecodedPayload;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, FlightClient, FlightDescriptor, FlightInfo, PutResult, Ticket};
use arrow_schema::SchemaRef;
use futures_util::{StreamExt, TryStreamExt};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::batch::{Id, vector_at};
use crate::error::{Error, Result, reason_of};

/// The largest message that is read; a store may send 131 072 rows at once.
const MESSAGE_BYTES: usize = 1 << 30;

/// The largest message that is sent, less headers; stores glue small ones.
const SENT_BYTES: usize = 16 << 20;

/// How long a connection may take at most, and the acknowledgement of a batch.
const CONNECT_TIME: Duration = Duration::from_secs(10);
const PUT_TIME: Duration = Duration::from_secs(180);

/// Where a store is and who asks.
#[derive(Clone, Debug)]
pub struct Address {
    /// `HOST:PORT` that rows are sent to and fetched from.
    pub data: String,
    /// `HOST:PORT` that answers what there is.
    pub meta: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// How long the answer to a question may take, and how long a store that fails is tried again.
    pub timeout: Duration,
}

/// One port of a store.
pub(crate) struct Port {
    pub(crate) address: String,
    inner: FlightServiceClient<Channel>,
    api_key: Option<String>,
    pub(crate) timeout: Duration,
}

impl Port {
    async fn connect(address: &str, store: &Address) -> Result<Port> {
        let unreachable = |error: &(dyn std::error::Error + 'static)| Error::Unreachable {
            address: address.to_owned(),
            reason: reason_of(error),
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}"));
        let endpoint = endpoint.map_err(|error| unreachable(&error))?;
        let endpoint = endpoint
            .connect_timeout(store.timeout.min(CONNECT_TIME))
            .initial_stream_window_size(Some(16 << 20))
            .initial_connection_window_size(Some(16 << 20));
        let channel: Channel = endpoint.connect().await.map_err(|error| unreachable(&error))?;
        let inner = FlightServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        let (api_key, timeout) = (store.api_key.clone(), store.timeout);
        Ok(Port { address: address.to_owned(), inner, api_key, timeout })
    }

    /// A client for one call.
    fn client(&self) -> Result<FlightClient> {
        let mut client = FlightClient::new_from_inner(self.inner.clone());
        if let Some(key) = &self.api_key {
            let added = client.add_header("authorization", &format!("Bearer {key}"));
            added.map_err(|error| Error::of_call(&self.address, "the API key", error))?;
        }
        Ok(client)
    }

    /// Bounds the time of a call.
    async fn within<T>(
        &self,
        limit: Duration,
        call: &'static str,
        answer: impl Future<Output = std::result::Result<T, FlightError>>,
    ) -> Result<T> {
        match timeout(limit, answer).await {
            Ok(answer) => answer.map_err(|error| Error::of_call(&self.address, call, error)),
            Err(_) => Err(Error::Unreachable {
                address: self.address.clone(),
                reason: format!("no answer to {call} in {} s", limit.as_secs_f64()),
            }),
        }
    }
}

/// A connection to both ports.
pub(crate) struct Store {
    pub(crate) data: Port,
    pub(crate) meta: Port,
}

/// What the meta port says of a dataset.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Readiness {
    /// Nothing that was accepted waits any more.
    pub(crate) is_ready: bool,
    /// Rows that a search can find: the index grows after rows have landed.
    pub(crate) indexed: u64,
}

/// A hash of the text of each row, by id.
pub(crate) type Texts = HashMap<Id, u64>;

impl Store {
    pub(crate) async fn connect(address: &Address) -> Result<Store> {
        let data = Port::connect(&address.data, address).await?;
        let meta = Port::connect(&address.meta, address).await?;
        Ok(Store { data, meta })
    }

    /// Sends batches to a dataset. Whether the store asks to slow down.
    pub(crate) async fn put(
        &self,
        dataset: &str,
        schema: SchemaRef,
        batches: Vec<RecordBatch>,
    ) -> Result<bool> {
        // The end of the frames half-closes the stream, which the store waits for.
        let frames = FlightDataEncoderBuilder::new()
            .with_schema(schema)
            .with_flight_descriptor(Some(FlightDescriptor::new_path(vec![dataset.to_owned()])))
            .with_max_flight_data_size(SENT_BYTES)
            .build(futures_util::stream::iter(batches.into_iter().map(Ok)));
        let mut client = self.data.client()?;
        let answer = async move { client.do_put(frames).await?.try_collect().await };
        let results: Vec<PutResult> = self.data.within(PUT_TIME, "DoPut", answer).await?;
        Ok(results.iter().any(|result| {
            let status: Option<Value> = serde_json::from_slice(&result.app_metadata).ok();
            status.is_some_and(|status| status["status"] == "slow_down")
        }))
    }

    /// Whether what was put has landed. None if there is no such dataset.
    pub(crate) async fn readiness(&self, dataset: &str) -> Result<Option<Readiness>> {
        let call = "check_readiness";
        let body = self.action(&self.meta, call, &json!({ "dataset": dataset })).await?;
        let wrong = || Error::Store {
            address: self.meta.address.clone(),
            reason: format!("{call}: expected {{\"status\", \"index_len\"}}"),
        };
        let answer: Value = serde_json::from_slice(&body).map_err(|_| wrong())?;
        match answer["status"].as_str().ok_or_else(wrong)? {
            "NOT_FOUND" => Ok(None),
            status => Ok(Some(Readiness {
                is_ready: status == "READY",
                indexed: answer["index_len"].as_u64().unwrap_or(0),
            })),
        }
    }

    /// Rows of a dataset that have landed; the store answers only whether there are more than so
    /// many. Zero if there is no such dataset.
    pub(crate) async fn rows(&self, dataset: &str) -> Result<u64> {
        let mut most = 1;
        while self.has_more_than(dataset, most).await? {
            most *= 2;
        }
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.has_more_than(dataset, middle).await? {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(low)
    }

    pub(crate) async fn has_more_than(&self, dataset: &str, rows: u64) -> Result<bool> {
        let filters = json!([
            { "field": "name", "operator": "contains", "value": dataset },
            { "field": "rows", "operator": ">", "value": rows.to_string() },
        ]);
        let criteria = json!({ "filters": filters }).to_string();
        let mut client = self.meta.client()?;
        let answer = async move { client.list_flights(criteria).await?.try_collect().await };
        let found: Vec<FlightInfo> =
            self.meta.within(self.meta.timeout, "ListFlights", answer).await?;
        Ok(found.iter().any(|info| {
            let path = info.flight_descriptor.as_ref().map(|found| found.path.as_slice());
            path.is_some_and(|path| path.first().is_some_and(|name| name == dataset))
        }))
    }

    /// The first result of an action.
    pub(crate) async fn action(
        &self,
        port: &Port,
        call: &'static str,
        body: &Value,
    ) -> Result<Vec<u8>> {
        let action = Action::new(call, body.to_string());
        let mut client = port.client()?;
        let answer = async move {
            let results: Vec<_> = client.do_action(action).await?.try_collect().await?;
            Ok(results.into_iter().next().unwrap_or_default().to_vec())
        };
        port.within(port.timeout, call, answer).await
    }

    /// The schema of a dataset. None if there is no such dataset, or nothing in it.
    pub(crate) async fn schema(&self, dataset: &str) -> Result<Option<SchemaRef>> {
        let mut client = self.data.client()?;
        let ticket = Ticket::new(json!({ "name": dataset }).to_string());
        let answer = async move {
            let mut frames = client.do_get(ticket).await?.into_inner();
            // The first frame; the rows behind it are not fetched.
            while let Some(frame) = frames.next().await.transpose()? {
                if let DecodedPayload::Schema(schema) = frame.payload {
                    return Ok(Some(schema));
                }
            }
            Ok(None)
        };
        none_if_absent(self.data.within(self.data.timeout, "DoGet", answer).await)
            .map(Option::flatten)
    }

    /// Calls `each` with the rows of a dataset that match all filters. Whether it exists.
    pub(crate) async fn fetch(
        &self,
        dataset: &str,
        filters: Value,
        mut each: impl FnMut(RecordBatch) -> Result<()>,
    ) -> Result<bool> {
        let mut client = self.data.client()?;
        let ticket = match filters.as_array().is_some_and(Vec::is_empty) {
            true => json!({ "name": dataset }),
            false => json!({ "name": dataset, "filters": filters }),
        };
        let begin = async move { client.do_get(Ticket::new(ticket.to_string())).await };
        let begun = none_if_absent(self.data.within(self.data.timeout, "DoGet", begin).await)?;
        let Some(mut rows) = begun else { return Ok(false) };
        loop {
            let next = async { rows.next().await.transpose() };
            match none_if_absent(self.data.within(self.data.timeout, "DoGet", next).await)? {
                Some(Some(batch)) => each(batch)?,
                Some(None) => return Ok(true),
                None => return Ok(false),
            }
        }
    }

    /// The ids of the rows that match all filters, with their texts; and the text and the vector of
    /// the last row that has a text.
    pub(crate) async fn texts(
        &self,
        dataset: &str,
        filters: Value,
    ) -> Result<(Texts, Option<(String, Vec<f32>)>)> {
        let (mut texts, mut last) = (Texts::new(), None);
        self.fetch(dataset, filters, |batch| {
            let ids = ids(&batch).ok_or_else(|| Error::Store {
                address: self.data.address.clone(),
                reason: format!("dataset `{dataset}`: expected the columns `id` and `text`"),
            })?;
            texts.extend(ids);
            last = last_with_text(&batch).or(last.take());
            Ok(())
        })
        .await?;
        Ok((texts, last))
    }
}

/// An answer of a store that does not know the dataset is no failure.
fn none_if_absent<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Err(Error::Refused { code: Code::NotFound, .. }) => Ok(None),
        answer => answer.map(Some),
    }
}

/// A hash of a text, to tell rows with the same id apart.
pub(crate) fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The column of texts.
pub(crate) fn texts_of(batch: &RecordBatch) -> Option<&StringArray> {
    batch.column_by_name("text")?.as_any().downcast_ref()
}

/// The text and the vector of the last row that has a text.
fn last_with_text(batch: &RecordBatch) -> Option<(String, Vec<f32>)> {
    let texts = texts_of(batch)?;
    let is_text = |row: &usize| texts.is_valid(*row) && !texts.value(*row).is_empty();
    let row = (0..texts.len()).rev().find(is_text)?;
    Some((texts.value(row).to_owned(), vector_at(batch, row)?))
}

/// The id and the hash of the text of each row.
pub(crate) fn ids(batch: &RecordBatch) -> Option<Vec<(Id, u64)>> {
    let texts = texts_of(batch)?;
    let ids = batch.column_by_name("id")?.as_any();
    let texts = texts.iter().map(|text| hash(text.unwrap_or_default()));
    if let Some(ids) = ids.downcast_ref::<Int64Array>() {
        return Some(ids.values().iter().map(|id| Id::Number(*id)).zip(texts).collect());
    }
    if let Some(ids) = ids.downcast_ref::<UInt64Array>() {
        return Some(ids.values().iter().map(|id| Id::Number(*id as i64)).zip(texts).collect());
    }
    let ids = ids.downcast_ref::<StringArray>()?;
    let ids = ids.iter().map(|id| Id::Text(id.unwrap_or_default().to_owned()));
    Some(ids.zip(texts).collect())
}

/// The filter of rows with this id.
pub(crate) fn with_id(id: &Id) -> Value {
    let value = match id {
        Id::Number(id) => json!(id.to_string()),
        Id::Text(id) => json!(id),
    };
    json!([{ "field": "id", "operator": "=", "value": value }])
}

/// A runtime for one thread, which sleeps between calls.
pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(system)
}

pub(crate) fn system(error: std::io::Error) -> Error {
    Error::Arrow(error.into())
}
