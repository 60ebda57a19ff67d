//! bodkin's own Flight server: texts in, vectors out. A descriptor's path names the model, and for
//! DoPut also the result, which is stored in memory until it is fetched or evicted by newer ones.

mod answers;
mod messages;
mod results;
mod texts;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_flight::encode::{DictionaryHandling, FlightDataEncoderBuilder};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightEndpoint, FlightInfo,
    HandshakeRequest, HandshakeResponse, PollInfo, PutResult, SchemaAsIpc, SchemaResult, Ticket,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bodkin_serve::{Admitted, Embedder, Refusal};
use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt, TryStreamExt};
use serde_json::json;
use tonic::body::Body;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Code, Request, Response, Status, Streaming};
use tower::util::MapRequestLayer;

use crate::batch::{schema_with_vectors, with_vectors};
use crate::error::{Error, Result};
use answers::limited;
use messages::{CountedBody, Messages, Unanswered};
use results::{Incoming, Results};
use texts::{text_column, texts_of, with_own_views};

/// The most texts that are computed before their vectors go out.
const BATCH_TEXTS: usize = 1024;
/// The most bytes of a result's name.
const NAME_BYTES: usize = 1024;

/// A server that listens.
pub struct Service {
    address: SocketAddr,
    thread: JoinHandle<()>,
}

impl Service {
    /// Listens on the host of the HTTP server with its keys, TLS and limits, until it stops.
    ///
    /// # Errors
    /// If the port or the certificate cannot be used.
    pub fn start(embedder: Embedder, port: u16) -> Result<Service> {
        let options = embedder.options();
        let address = SocketAddr::new(options.host, port);
        let failed = |error: std::io::Error| Error::Listen { address, reason: error.to_string() };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        // A client whose machine is gone is asked whether it is there.
        let alive = Some(options.write_timeout).filter(|time| !time.is_zero());
        let mut server = Server::builder().http2_keepalive_interval(alive);
        server = server.http2_keepalive_timeout(alive);
        if let Some(tls) = &options.tls {
            let read = |path: &std::path::Path| {
                std::fs::read(path).map_err(|error| Error::File {
                    path: path.display().to_string(),
                    reason: error.to_string(),
                })
            };
            let identity = Identity::from_pem(read(&tls.certificate)?, read(&tls.key)?);
            let config = ServerTlsConfig::new().identity(identity);
            server = server.tls_config(config).map_err(|error| Error::File {
                path: tls.certificate.display().to_string(),
                reason: crate::error::reason_of(&error),
            })?;
        }
        let (drain, limit) = (options.drain, options.body_bytes);
        let results = Arc::new(Results::new(options.bodies_bytes));
        let stopped = [embedder.stopped(), embedder.stopped()];
        let budget = embedder.body_budget();
        let count = MapRequestLayer::new(move |mut request: http::Request<Body>| {
            let unanswered = Unanswered::new(budget.clone());
            request.extensions_mut().insert(unanswered.clone());
            request.map(|body| Body::new(CountedBody { body, unanswered }))
        });
        let mut server = server.layer(count);
        let flight = FlightServiceServer::new(Flight { embedder, results });
        let flight = flight.max_decoding_message_size(limit);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let thread = std::thread::Builder::new().name("flight".to_owned()).spawn(move || {
            let [stop, end] = stopped;
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                let incoming = tonic::transport::server::TcpIncoming::from(listener);
                let incoming = incoming.with_nodelay(Some(true));
                let serve = server.add_service(flight).serve_with_incoming_shutdown(incoming, stop);
                let deadline = async {
                    end.await;
                    tokio::time::sleep(drain).await;
                };
                tokio::select! {
                    // A client that breaks off is no error of the server.
                    result = serve => drop(result),
                    () = deadline => {}
                }
            });
            runtime.shutdown_background();
        });
        Ok(Service { address, thread: thread.map_err(failed)? })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until running streams have ended, for as long as the HTTP server would.
    pub fn join(self) {
        // A panic was printed where it happened.
        let _ = self.thread.join();
    }
}

struct Flight {
    embedder: Embedder,
    results: Arc<Results>,
}

/// A stream of texts.
struct Texts {
    caller: Admitted,
    model: String,
    /// The name under which the result is stored.
    name: Option<String>,
    /// Elements of the model's vectors.
    width: usize,
    /// What its batches have with their vectors.
    schema: SchemaRef,
    batches: BoxStream<'static, std::result::Result<RecordBatch, FlightError>>,
}

type Answer<T> = std::result::Result<Response<T>, Status>;

impl Flight {
    fn admit<T>(&self, request: &Request<T>) -> std::result::Result<Admitted, Status> {
        self.embedder.admit(request.metadata().as_ref()).map_err(status)
    }

    fn write_timeout(&self) -> Duration {
        self.embedder.options().write_timeout
    }

    /// Reads the start of a stream, which says what its batches are about, and their schema.
    async fn texts(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> std::result::Result<Texts, Status> {
        let caller = self.admit(&request)?;
        let budget = || Unanswered::new(self.embedder.body_budget());
        let unanswered = request.extensions().get().cloned().unwrap_or_else(budget);
        let timeout = self.embedder.options().body_timeout;
        let mut messages = Messages::new(request.into_inner(), unanswered, timeout);
        let mut first = messages.next().await?;
        let path = first.as_ref().and_then(|first| first.flight_descriptor.clone());
        // Some clients send the descriptor before they have a schema.
        if first.as_ref().is_some_and(|first| first.data_header.is_empty()) {
            first = messages.next().await?;
        }
        let first = first.ok_or_else(|| Status::invalid_argument("the stream has no schema"))?;
        let mut path = path.unwrap_or_default().path.into_iter();
        let (model, name) = (path.next().unwrap_or_default(), path.next());
        let width = self.embedder.width(&model).await.map_err(status)?;
        let schema = messages::schema_of(&first)?;
        text_column(&schema)?;
        let schema = schema_with_vectors(&schema, width).map_err(|error| invalid(&error))?;
        let batches = messages.batches(first).boxed();
        Ok(Texts { caller, model, name, width, schema, batches })
    }

    /// Batches with vectors, each as soon as it is computed; the next is read when the one before
    /// it has been taken.
    fn vectors(
        &self,
        texts: Texts,
    ) -> impl Stream<Item = std::result::Result<RecordBatch, FlightError>> + Send + use<> {
        let Texts { caller, model, width, batches, .. } = texts;
        let embedder = self.embedder.clone();
        let parts = batches.map_ok(|batch| {
            let starts = (0..batch.num_rows()).step_by(BATCH_TEXTS);
            let part = |start| batch.slice(start, BATCH_TEXTS.min(batch.num_rows() - start));
            stream::iter(starts.map(part).map(Ok).collect::<Vec<_>>())
        });
        parts.try_flatten().and_then(move |batch| {
            let (embedder, model) = (embedder.clone(), model.clone());
            async move {
                let limit = embedder.options().body_bytes;
                let batch = with_own_views(&batch, limit)?;
                let texts = texts_of(&batch, limit)?;
                let vectors = embedder.embed(caller, &model, texts).await.map_err(status)?;
                with_vectors(&batch, &vectors, width).map_err(|error| internal(&error).into())
            }
        })
    }

    /// The path of a descriptor: a model, and the name of a result.
    async fn info(
        &self,
        caller: Admitted,
        descriptor: FlightDescriptor,
    ) -> std::result::Result<FlightInfo, Status> {
        let model = descriptor.path.first().cloned().unwrap_or_default();
        let width = self.embedder.width(&model).await.map_err(status)?;
        let mut info = FlightInfo::new().with_total_records(-1).with_total_bytes(-1);
        let mut schema = schema_with_vectors(&text_schema(), width).map_err(|e| internal(&e))?;
        if let Some(name) = descriptor.path.get(1) {
            let found = self.results.get(caller, name).ok_or_else(|| no_result(name))?;
            let ticket = Ticket::new(name.clone());
            info = info.with_endpoint(FlightEndpoint::new().with_ticket(ticket));
            info = info.with_total_records(found.rows as i64);
            info = info.with_total_bytes(found.bytes as i64);
            schema = found.schema;
        }
        info.app_metadata = Bytes::from(json!({ "dimension": width }).to_string());
        let info = info.try_with_schema(&schema).map_err(|error| internal(&error.into()))?;
        Ok(info.with_descriptor(descriptor))
    }
}

/// The columns that a model needs.
fn text_schema() -> Schema {
    Schema::new(vec![Field::new("text", DataType::Utf8, false)])
}

fn status(refusal: Refusal) -> Status {
    let code = match refusal.status.as_u16() {
        400 | 413 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        429 => Code::ResourceExhausted,
        503 => Code::Unavailable,
        _ => Code::Internal,
    };
    Status::new(code, refusal.message)
}

fn internal(error: &Error) -> Status {
    Status::internal(error.to_string())
}

/// Sends batches as they are: strings of a dictionary take more memory one by one.
fn encoder(schema: SchemaRef) -> FlightDataEncoderBuilder {
    let encoder = FlightDataEncoderBuilder::new().with_schema(schema);
    encoder.with_dictionary_handling(DictionaryHandling::Resend)
}

fn invalid(error: &Error) -> Status {
    Status::invalid_argument(error.to_string())
}

fn no_result(name: &str) -> Status {
    Status::not_found(format!(
        "there is no result `{name}`: it was fetched, or others had its place"
    ))
}

#[tonic::async_trait]
impl FlightService for Flight {
    type HandshakeStream = BoxStream<'static, std::result::Result<HandshakeResponse, Status>>;
    type ListFlightsStream = BoxStream<'static, std::result::Result<FlightInfo, Status>>;
    type DoGetStream = BoxStream<'static, std::result::Result<FlightData, Status>>;
    type DoPutStream = BoxStream<'static, std::result::Result<PutResult, Status>>;
    type DoExchangeStream = BoxStream<'static, std::result::Result<FlightData, Status>>;
    type DoActionStream = BoxStream<'static, std::result::Result<arrow_flight::Result, Status>>;
    type ListActionsStream = BoxStream<'static, std::result::Result<ActionType, Status>>;

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Answer<Self::HandshakeStream> {
        Err(Status::unimplemented("keys are sent with each call: authorization: Bearer KEY"))
    }

    async fn list_flights(&self, request: Request<Criteria>) -> Answer<Self::ListFlightsStream> {
        self.admit(&request)?;
        let models = self.embedder.models().map(|model| {
            let descriptor = FlightDescriptor::new_path(vec![model.to_owned()]);
            Ok(FlightInfo::new().with_descriptor(descriptor))
        });
        Ok(Response::new(stream::iter(models.collect::<Vec<_>>()).boxed()))
    }

    async fn get_flight_info(&self, request: Request<FlightDescriptor>) -> Answer<FlightInfo> {
        let caller = self.admit(&request)?;
        Ok(Response::new(self.info(caller, request.into_inner()).await?))
    }

    async fn poll_flight_info(&self, _: Request<FlightDescriptor>) -> Answer<PollInfo> {
        Err(Status::unimplemented("results are complete when DoPut ends"))
    }

    async fn get_schema(&self, request: Request<FlightDescriptor>) -> Answer<SchemaResult> {
        self.admit(&request)?;
        let model = request.into_inner().path.into_iter().next().unwrap_or_default();
        let width = self.embedder.width(&model).await.map_err(status)?;
        let schema = schema_with_vectors(&text_schema(), width).map_err(|e| internal(&e))?;
        let options = arrow_ipc::writer::IpcWriteOptions::default();
        let result = SchemaAsIpc::new(&schema, &options).try_into();
        Ok(Response::new(
            result.map_err(|error: arrow_schema::ArrowError| internal(&error.into()))?,
        ))
    }

    async fn do_get(&self, request: Request<Ticket>) -> Answer<Self::DoGetStream> {
        let caller = self.admit(&request)?;
        let name = String::from_utf8_lossy(&request.get_ref().ticket).into_owned();
        let result = self.results.remove(caller, &name).ok_or_else(|| no_result(&name))?;
        let batches = stream::iter(result.batches.into_iter().map(Ok));
        let frames = encoder(result.schema).build(batches);
        Ok(Response::new(limited(frames.map_err(Status::from), self.write_timeout())))
    }

    async fn do_put(&self, request: Request<Streaming<FlightData>>) -> Answer<Self::DoPutStream> {
        let texts = self.texts(request).await?;
        let name = texts.name.clone().filter(|name| name.len() <= NAME_BYTES).ok_or_else(|| {
            let expected = "expected a descriptor with the path [model, result]";
            Status::invalid_argument(format!("{expected}, names of at most {NAME_BYTES} bytes"))
        })?;
        let (results, schema) = (Arc::clone(&self.results), Arc::clone(&texts.schema));
        let mut incoming = Incoming::new(results, schema, texts.caller);
        let vectors = self.vectors(texts).map(Some);
        let end = stream::iter([None]);
        // The last answer says that the result is stored.
        let answers = vectors.chain(end).map(move |batch| {
            let told = match batch {
                Some(batch) => {
                    let rows = incoming.push(batch.map_err(Status::from)?).map_err(|limit| {
                        let message = format!("results exceed {limit} bytes: use DoExchange");
                        Status::resource_exhausted(message)
                    })?;
                    json!({ "rows": rows })
                }
                None => json!({ "rows": incoming.store(&name), "result": name }),
            };
            Ok(PutResult { app_metadata: Bytes::from(told.to_string()) })
        });
        Ok(Response::new(limited(answers, self.write_timeout())))
    }

    async fn do_exchange(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Answer<Self::DoExchangeStream> {
        let texts = self.texts(request).await?;
        let frames = encoder(Arc::clone(&texts.schema)).build(self.vectors(texts));
        Ok(Response::new(limited(frames.map_err(Status::from), self.write_timeout())))
    }

    async fn do_action(&self, _: Request<Action>) -> Answer<Self::DoActionStream> {
        Err(Status::unimplemented("there are no actions"))
    }

    async fn list_actions(&self, _: Request<Empty>) -> Answer<Self::ListActionsStream> {
        Ok(Response::new(stream::empty().boxed()))
    }
}
