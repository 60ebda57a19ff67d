//! Messages of clients as they arrive. Their bytes count against the budget of the server's bodies
//! until they are answered; one that does not come in time, or is damaged, ends its stream.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_flight::FlightData;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_ipc::root_as_message;
use arrow_schema::Schema;
use bodkin_serve::BodyBudget;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http_body::{Frame, SizeHint};
use prost::Message;
use tokio::sync::OwnedSemaphorePermit;
use tonic::body::Body;
use tonic::{Status, Streaming};

/// Bytes before each message of gRPC.
const PREFIX_BYTES: usize = 5;

/// The bytes of a request that have arrived and are not answered.
#[derive(Clone)]
pub(super) struct Unanswered {
    budget: BodyBudget,
    held: Arc<Mutex<Option<OwnedSemaphorePermit>>>,
}

impl Unanswered {
    pub(super) fn new(budget: BodyBudget) -> Unanswered {
        Unanswered { budget, held: Arc::default() }
    }

    fn add(&self, bytes: usize) -> Result<(), Status> {
        let full = "the bodies of all requests are too large together";
        let more = self.budget.take(bytes).ok_or_else(|| Status::resource_exhausted(full))?;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match held.as_mut() {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }

    fn remove(&self, bytes: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = held.as_mut() {
            drop(held.split(bytes.min(held.num_permits())));
        }
    }
}

/// A request's body whose bytes are counted.
pub(super) struct CountedBody {
    pub(super) body: Body,
    pub(super) unanswered: Unanswered,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        Poll::Ready(match self.unanswered.add(bytes) {
            Ok(()) => frame,
            Err(status) => Some(Err(status)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The messages of one request, checked.
pub(super) struct Messages {
    stream: Streaming<FlightData>,
    unanswered: Unanswered,
    timeout: Duration,
    /// Bytes of the message before.
    before: usize,
}

impl Messages {
    /// Each has to arrive within `timeout` of the answer to the one before.
    pub(super) fn new(
        stream: Streaming<FlightData>,
        unanswered: Unanswered,
        timeout: Duration,
    ) -> Messages {
        Messages { stream, unanswered, timeout, before: 0 }
    }

    /// The next message; the one before is answered.
    pub(super) async fn next(&mut self) -> Result<Option<FlightData>, Status> {
        self.unanswered.remove(std::mem::take(&mut self.before));
        let late = |_| {
            let seconds = self.timeout.as_secs_f64();
            Status::deadline_exceeded(format!("no message has arrived for {seconds} s"))
        };
        let message = tokio::time::timeout(self.timeout, self.stream.message()).await;
        let message = message.map_err(late)??;
        if let Some(message) = &message {
            check(message)?;
            // The decoder keeps dictionaries until the stream ends.
            if !is_dictionary(message) {
                self.before = message.encoded_len() + PREFIX_BYTES;
            }
        }
        Ok(message)
    }

    /// The batches of this and all following messages.
    pub(super) fn batches(
        self,
        first: FlightData,
    ) -> impl Stream<Item = Result<RecordBatch, FlightError>> + Send {
        let rest = stream::unfold(self, |mut messages| async {
            let message = messages.next().await.map_err(FlightError::from).transpose()?;
            Some((message, messages))
        });
        let all = stream::iter([Ok(first)]).chain(rest);
        let batches = FlightRecordBatchStream::new_from_flight_data(all);
        // The decoder checks most that `check` does not, but panics where a schema is too strange.
        AssertUnwindSafe(batches).catch_unwind().map(|batch| match batch {
            Ok(Err(FlightError::Tonic(status))) => Err(FlightError::Tonic(status)),
            Ok(Err(error)) => Err(Status::invalid_argument(error.to_string()).into()),
            Ok(Ok(batch)) => Ok(batch),
            Err(_) => Err(damaged("its header cannot be read").into()),
        })
    }
}

/// The schema that the first message of a stream has.
pub(super) fn schema_of(first: &FlightData) -> Result<Schema, Status> {
    // It panics where a schema is too strange.
    let schema = catch_unwind(|| Schema::try_from(first));
    let schema = schema.map_err(|_| damaged("its schema cannot be read"))?;
    schema.map_err(|error| Status::invalid_argument(error.to_string()))
}

fn damaged(reason: &str) -> Status {
    let reason = reason.lines().next().unwrap_or_default();
    Status::invalid_argument(format!("the message is damaged: {reason}"))
}

fn is_dictionary(message: &FlightData) -> bool {
    let header = root_as_message(&message.data_header).ok();
    header.is_some_and(|header| header.header_as_dictionary_batch().is_some())
}

/// Refuses a message whose buffers are not within its body, for which the decoder would panic, and
/// one that is compressed.
fn check(message: &FlightData) -> Result<(), Status> {
    if message.data_header.is_empty() {
        return Ok(());
    }
    let header = root_as_message(&message.data_header);
    let header = header.map_err(|error| damaged(&error.to_string()))?;
    let dictionary = header.header_as_dictionary_batch().and_then(|batch| batch.data());
    let Some(batch) = header.header_as_record_batch().or(dictionary) else { return Ok(()) };
    if batch.compression().is_some() {
        return Err(Status::invalid_argument("expected batches that are not compressed"));
    }
    let within = |offset: i64, len: i64| {
        let end = u64::try_from(offset).ok()?.checked_add(u64::try_from(len).ok()?)?;
        (end <= message.data_body.len() as u64).then_some(())
    };
    let mut buffers = batch.buffers().into_iter().flatten();
    if !buffers.all(|buffer| within(buffer.offset(), buffer.length()).is_some()) {
        return Err(damaged("a buffer is not within its body"));
    }
    let mut nodes = batch.nodes().into_iter().flatten();
    if batch.length() < 0 || !nodes.all(|node| node.length() >= 0 && node.null_count() >= 0) {
        return Err(damaged("a length is negative"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::StringArray;
    use arrow_flight::utils::batches_to_flight_data;
    use arrow_schema::{DataType, Field};

    use super::*;

    /// A schema and a batch of texts.
    fn sent() -> [FlightData; 2] {
        let schema = Schema::new(vec![Field::new("text", DataType::Utf8, false)]);
        let texts = Arc::new(StringArray::from(vec!["a hen", "two hens"]));
        let batch = RecordBatch::try_new(Arc::new(schema.clone()), vec![texts]).unwrap();
        batches_to_flight_data(&schema, [&batch]).unwrap().try_into().unwrap()
    }

    #[test]
    fn whole_messages_pass() {
        let [schema, batch] = sent();
        assert_eq!(schema_of(&schema).unwrap().fields().len(), 1);
        for message in [schema, batch, FlightData::default()] {
            check(&message).unwrap();
        }
    }

    #[test]
    fn damaged_messages_are_refused() {
        let [schema, batch] = sent();
        let cut = FlightData { data_body: batch.data_body.slice(..8), ..batch.clone() };
        assert!(check(&cut).unwrap_err().message().ends_with("a buffer is not within its body"));
        let random = FlightData { data_header: vec![255; 64].into(), ..schema.clone() };
        assert!(check(&random).unwrap_err().message().starts_with("the message is damaged"));
        assert!(schema_of(&batch).is_err());
        // No byte of a header makes more than an error.
        for message in [&schema, &batch] {
            for i in 0..message.data_header.len() {
                for byte in [0, 1, 127, 128, 255] {
                    let mut header = message.data_header.to_vec();
                    header[i] = byte;
                    let changed = FlightData { data_header: header.into(), ..message.clone() };
                    let _ = check(&changed);
                    let _ = schema_of(&changed);
                }
            }
        }
    }
}
