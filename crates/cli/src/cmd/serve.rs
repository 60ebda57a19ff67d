//! `bodkin serve`: models over HTTP.

#[cfg(feature = "otlp")]
mod otlp;
mod telemetry;

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use bodkin::Pooling;
use bodkin_serve::{Error, ModelSpec, Server, ServerOptions, Tls};
use serde_json::Value;

use crate::arguments::{Machine, bytes, duration};
use crate::interrupt;
use crate::progress::reporter;
use crate::text;
use telemetry::Telemetry;

/// Arguments of `serve`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Models: paths, known names, Ollama names, hf:owner/repo or pip:package; NAME=MODEL serves
    /// a model under another name
    #[arg(required = true, value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    machine: Machine,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Default value of a request field, such as temperature=0.2, max_tokens=512 or
    /// chat_template_kwargs={"enable_thinking":false}; may be given several times
    #[arg(long, value_name = "FIELD=VALUE", value_parser = default_field)]
    default: Vec<(String, Value)>,
    /// Enable embeddings from decoder models
    #[arg(long, alias = "embeddings")]
    embedding: bool,
    /// As --embedding, with this pooling: mean, cls, last or rank
    #[arg(long, value_name = "KIND")]
    pooling: Option<Pooling>,
    /// Chat template to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Slots: requests that run at once
    #[arg(long, value_name = "N", default_value_t = 16)]
    parallel: usize,
    /// Queue size: requests that wait for a slot
    #[arg(long, value_name = "N", default_value_t = 512)]
    queue: usize,
    /// Tokens in the KV cache, running and cached together [default: PARALLEL full contexts, or
    /// what fits]
    #[arg(long, value_name = "N")]
    cache_tokens: Option<usize>,
    /// Prefix cache on disk: folder for KV pages, used again after a restart
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Size limit of the prefix cache on disk
    #[arg(long, value_name = "BYTES", default_value = "10G", value_parser = bytes)]
    cache_dir_size: u64,
    /// Unload a model that had no request for this long, such as 5m [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    keep_alive: Option<Duration>,
    /// Memory limit of all loaded models, such as 24G
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: Option<u64>,
    /// API key that clients must present; may be given several times
    #[arg(long, value_name = "KEY", env = "BODKIN_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File of API keys, one a line: KEY [requests=N] [tokens=N], limits a minute
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Origin of web pages that may call the server, and its host's name; * for all
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Certificate chain in PEM: HTTPS instead of HTTP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Size limit of a request body
    #[arg(long, value_name = "BYTES", default_value = "32M", value_parser = bytes)]
    max_body: u64,
    /// Size limit of all request bodies not yet answered; at least --max-body
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = bytes)]
    max_bodies: u64,
    /// Time limit of receiving a request body
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    body_timeout: Duration,
    /// Time limit of a client that takes nothing of its answer
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = duration)]
    write_timeout: Duration,
    /// Time limit of waiting for requests of a busy model whose memory another model needs
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    release_timeout: Duration,
    /// Watchdog: /health fails while a step takes longer; at ten times, requests end
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    step_timeout: Duration,
    /// Grace period of running requests after Ctrl-C or SIGTERM
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    drain: Duration,
    /// Port of an Arrow Flight server (texts in, vectors out); 0 for any free one
    #[arg(long, value_name = "PORT")]
    flight_port: Option<u16>,
    /// Print a line for each request: text or json
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    log: Option<String>,
    /// OpenTelemetry collector that gets a trace of each request over OTLP/HTTP, such as
    /// http://localhost:4318
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// Mock model with made-up tokens, to measure the server alone
    #[arg(long)]
    mock: bool,
}

/// Why the server cannot start, and the flag that would help.
fn with_hint(error: Error) -> anyhow::Error {
    match &error {
        Error::Listen { source, .. } if source.kind() == ErrorKind::AddrInUse => {
            anyhow!("{error}; --port takes another")
        }
        _ => error.into(),
    }
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    raise_file_limit();
    let telemetry = Telemetry::start(args.log.as_deref(), args.otlp.as_deref())?;
    let mut load = args.machine.options();
    (load.parallel, load.queue, load.cache_tokens) = (args.parallel, args.queue, args.cache_tokens);
    (load.cache_dir, load.cache_dir_bytes) = (args.cache_dir, args.cache_dir_size);
    let template = args.chat_template_file.as_deref();
    load.chat_template = template.map(|path| text::read(path, "the chat template")).transpose()?;
    load.embedding.pooling = args.pooling;
    if args.mock {
        load.device = "mock".to_owned();
    }
    let models: Vec<ModelSpec> = args.models.iter().map(|model| spec(model)).collect();
    let mut ids: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
    ids.sort_unstable();
    let twice = ids.windows(2).find(|pair| pair[0] == pair[1]);
    ensure!(twice.is_none(), "two models have the name `{}`", twice.map_or("", |pair| pair[0]));
    let server = Server::bind(
        ServerOptions {
            host: args.host,
            port: args.port,
            models,
            load,
            embeds: args.embedding || args.pooling.is_some(),
            defaults: args.default.into_iter().collect(),
            keep_alive: args.keep_alive,
            memory_bytes: args.memory,
            api_keys: args.api_key,
            api_key_file: args.api_key_file,
            cors_origins: args.cors_origin,
            tls: args.tls_cert.zip(args.tls_key).map(|(certificate, key)| Tls { certificate, key }),
            body_bytes: usize::try_from(args.max_body).unwrap_or(usize::MAX),
            bodies_bytes: usize::try_from(args.max_bodies).unwrap_or(usize::MAX),
            body_timeout: args.body_timeout,
            write_timeout: args.write_timeout,
            release_timeout: args.release_timeout,
            step_timeout: args.step_timeout,
            drain: args.drain,
            link_trace: telemetry.link_trace(),
        },
        reporter().clone(),
    )
    .map_err(with_hint)?;
    let scheme = if server.has_tls() { "https" } else { "http" };
    eprintln!("listening on {scheme}://{}", server.address());
    let flight = flight(&server, args.flight_port)?;
    let stopper = server.stopper();
    let drain = args.drain.as_secs();
    let _catch = interrupt::catch(move || {
        eprintln!("stopping: running requests have {drain} s; stop again to end them now");
        stopper.stop();
        // The second time requests end with an error; the third time the process ends at once.
        let stopper = stopper.clone();
        std::mem::forget(interrupt::catch(move || stopper.stop()));
    });
    server.run()?;
    flight.into_iter().for_each(Service::join);
    Ok(())
}

#[cfg(feature = "flight")]
use bodkin_flight::service::Service;

/// Starts the Flight server.
#[cfg(feature = "flight")]
fn flight(server: &Server, port: Option<u16>) -> Result<Option<Service>> {
    let Some(port) = port else { return Ok(None) };
    let service = Service::start(server.embedder(), port)?;
    let scheme = if server.has_tls() { "grpc+tls" } else { "grpc" };
    eprintln!("Flight at {scheme}://{}", service.address());
    Ok(Some(service))
}

/// Stands for a Flight server, which is never there.
#[cfg(not(feature = "flight"))]
enum Service {}

#[cfg(not(feature = "flight"))]
impl Service {
    fn join(self) {
        match self {}
    }
}

#[cfg(not(feature = "flight"))]
fn flight(_: &Server, port: Option<u16>) -> Result<Option<Service>> {
    ensure!(port.is_none(), crate::store::WITHOUT_ARROW);
    Ok(None)
}

/// `FIELD=VALUE`, where the value is JSON.
fn default_field(text: &str) -> Result<(String, Value), String> {
    let wrong = || "expected FIELD=VALUE, such as temperature=0.2".to_owned();
    let (field, value) = text.split_once('=').ok_or_else(wrong)?;
    Ok((field.to_owned(), serde_json::from_str(value).map_err(|_| wrong())?))
}

/// `NAME=MODEL`, or a model whose name follows from its file's.
fn spec(model: &str) -> ModelSpec {
    let named = model.split_once('=').filter(|(name, _)| !name.contains(['/', ':', '\\']));
    let (id, source) = match named {
        Some((name, source)) => (name, source),
        None => {
            let file = model.rsplit(['/', '\\']).next().unwrap_or(model);
            (file.strip_suffix(".gguf").unwrap_or(file), model)
        }
    };
    ModelSpec { id: id.to_owned(), source: source.to_owned() }
}

/// Raises the limit of open files to the highest that the system grants: each connection is a file,
/// and many systems begin with 1024. Beyond the limit, connections wait.
fn raise_file_limit() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        // What macOS grants to a process whose highest limit is infinite.
        const GRANTED: u64 = 10_240;
        let limit = getrlimit(Resource::Nofile);
        let raise = |current| setrlimit(Resource::Nofile, Rlimit { current, ..limit });
        if raise(limit.maximum).is_err() && limit.current.is_some_and(|now| now < GRANTED) {
            // The server also works within the limit that it has.
            let _ = raise(Some(GRANTED));
        }
    }
}
